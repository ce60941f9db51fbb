"""The snapshot marker: which Kafka offsets hold one closed snapshot of a stream, and what it depends on.

The newest marker of a stream is also the source's stored position, so it carries the connector's resume token. A
marker travels on `P.markers` as Confluent-framed Avro of `AVRO_SCHEMA`, in the same Kafka transaction as its rows.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import fastavro

from anabranch_schemas.errors import MarkerError
from anabranch_schemas.vector import VectorTime

DIGEST_MASK = (1 << 64) - 1


class MarkerKind(StrEnum):
    """Why a snapshot was closed."""

    COPY = "copy"
    """A chunk of the copy phase; its rows are not one transaction of the source."""
    LOG = "log"
    """One or more whole transactions of the log."""
    IDLE = "idle"
    """Nothing happened: only the safe time moves."""
    DDL = "ddl"
    """The last snapshot before a change of schema."""


@dataclass(frozen=True, slots=True)
class Range:
    """Offsets of one partition that belong to a marker: first_offset ≤ offset < end_offset.

    The range may hold more than the marker's records (Kafka's control records, aborted data); `rows` counts the
    records that are the marker's, tombstones included, and `digest` is the sum of the CRC-32 of their values
    (a tombstone's is 0) modulo 2^64.
    """

    topic: str
    partition: int
    first_offset: int
    end_offset: int
    rows: int
    digest: int


@dataclass(frozen=True, slots=True)
class CopyState:
    """How far the copy phase has come: one entry for every table that is in it or was."""

    table: str
    """`schema.table`."""
    last_key: bytes | None
    """Connector's own encoding of the last copied key; None before the first chunk."""
    done: bool


@dataclass(frozen=True, slots=True)
class TableVersion:
    """A schema that the marker's rows are encoded with."""

    table: str
    """`schema.table` at the source."""
    topic: str
    key_schema_id: int
    value_schema_id: int


@dataclass(frozen=True, slots=True)
class SnapshotMarker:
    """One closed snapshot of a stream.

    `number` is dense: each marker of a stream is one greater than the one before, over all epochs. `safe_hlc` is the
    hybrid time up to which the stream is complete; 0 while the copy phase has not reached a consistent state.
    `first_seq` and `last_seq` are the first and last transaction in it (equal to the stream's position if none is).
    """

    stream: str
    site: int
    branch: str
    epoch: int
    number: int
    kind: MarkerKind
    first_seq: int
    last_seq: int
    safe_hlc: int
    vector: VectorTime
    transactions: int
    rows: int
    """Row changes, without tombstones."""
    ranges: tuple[Range, ...] = ()
    copy: tuple[CopyState, ...] = ()
    schemas: tuple[TableVersion, ...] = ()
    resume: bytes = b""
    """Opaque to all but the connector that wrote it."""
    last_hlc: int = 0
    """The greatest hybrid time given out so far: it never goes back. (`safe_hlc` is 0 while tables are copied.)"""
    closed_us: int = 0
    """When the snapshot was closed, microseconds since 1970 by the source worker's clock."""
    facts: dict[str, str] = field(default_factory=dict)
    """Free for connectors: facts about the stream that tools show (slot, publication)."""

    @property
    def copying(self) -> bool:
        """Tell whether a table of the stream is not yet copied whole."""
        return any(not state.done for state in self.copy)


def _record(name: str, fields: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": fields}


def _array(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


AVRO_SCHEMA: dict[str, Any] = {
    **_record(
        "SnapshotMarker",
        [
            {"name": "stream", "type": "string"},
            {"name": "site", "type": "int"},
            {"name": "branch", "type": "string"},
            {"name": "epoch", "type": "long"},
            {"name": "number", "type": "long"},
            {
                "name": "kind",
                "type": {"type": "enum", "name": "MarkerKind", "symbols": [kind.value for kind in MarkerKind]},
            },
            {"name": "first_seq", "type": "long"},
            {"name": "last_seq", "type": "long"},
            {"name": "safe_hlc", "type": "long"},
            {"name": "vector", "type": {"type": "map", "values": "long"}},
            {"name": "transactions", "type": "long"},
            {"name": "rows", "type": "long"},
            {
                "name": "ranges",
                "type": _array(
                    _record(
                        "Range",
                        [
                            {"name": "topic", "type": "string"},
                            {"name": "partition", "type": "int"},
                            {"name": "first_offset", "type": "long"},
                            {"name": "end_offset", "type": "long"},
                            {"name": "rows", "type": "long"},
                            {"name": "digest", "type": "long"},
                        ],
                    )
                ),
            },
            {
                "name": "copy",
                "type": _array(
                    _record(
                        "CopyState",
                        [
                            {"name": "table", "type": "string"},
                            {"name": "last_key", "type": ["null", "bytes"]},
                            {"name": "done", "type": "boolean"},
                        ],
                    )
                ),
            },
            {
                "name": "schemas",
                "type": _array(
                    _record(
                        "TableVersion",
                        [
                            {"name": "table", "type": "string"},
                            {"name": "topic", "type": "string"},
                            {"name": "key_schema_id", "type": "int"},
                            {"name": "value_schema_id", "type": "int"},
                        ],
                    )
                ),
            },
            {"name": "resume", "type": "bytes"},
            {"name": "last_hlc", "type": "long"},
            {"name": "closed_us", "type": "long"},
            {"name": "facts", "type": {"type": "map", "values": "string"}},
        ],
    ),
    "namespace": "dev.anabranch",
}
AVRO_SCHEMA_TEXT = json.dumps(AVRO_SCHEMA, separators=(",", ":"))
_PARSED = fastavro.parse_schema(AVRO_SCHEMA)


def _signed(value: int) -> int:
    """Return a u64 as Avro's signed long."""
    return value - (1 << 64) if value >= 1 << 63 else value


def encode(marker: SnapshotMarker) -> bytes:
    """Return the Avro body of a marker, without Confluent's frame."""
    out = io.BytesIO()
    fastavro.schemaless_writer(
        out,
        _PARSED,
        {
            **{name: getattr(marker, name) for name in _PLAIN},
            "kind": marker.kind.value,
            "vector": marker.vector.as_json(),
            "safe_hlc": _signed(marker.safe_hlc),
            "last_hlc": _signed(marker.last_hlc),
            "ranges": [{**_fields(r), "digest": _signed(r.digest)} for r in marker.ranges],
            "copy": [_fields(state) for state in marker.copy],
            "schemas": [_fields(version) for version in marker.schemas],
        },
    )
    return out.getvalue()


def decode(body: bytes) -> SnapshotMarker:
    """Read an Avro body that `encode` wrote.

    Raises:
        MarkerError: if the bytes are not a marker.
    """
    try:
        value: Any = fastavro.schemaless_reader(io.BytesIO(body), _PARSED, None)
        return SnapshotMarker(
            **{name: value[name] for name in _PLAIN},
            kind=MarkerKind(value["kind"]),
            vector=VectorTime.from_json(value["vector"]),
            safe_hlc=value["safe_hlc"] & DIGEST_MASK,
            last_hlc=value["last_hlc"] & DIGEST_MASK,
            ranges=tuple(Range(**{**r, "digest": r["digest"] & DIGEST_MASK}) for r in value["ranges"]),
            copy=tuple(CopyState(**state) for state in value["copy"]),
            schemas=tuple(TableVersion(**version) for version in value["schemas"]),
        )
    except (ValueError, KeyError, IndexError, TypeError, EOFError, OverflowError, UnicodeDecodeError) as error:
        raise MarkerError(f"not a snapshot marker: {type(error).__name__}") from error


_PLAIN = (
    "stream",
    "site",
    "branch",
    "epoch",
    "number",
    "first_seq",
    "last_seq",
    "transactions",
    "rows",
    "resume",
    "closed_us",
    "facts",
)


def _fields(record: Range | CopyState | TableVersion) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}
