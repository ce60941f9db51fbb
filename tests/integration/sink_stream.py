"""A stream made by hand: records and markers on a real broker, as a source would write them."""

from __future__ import annotations

import io
import json
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import fastavro
from confluent_kafka import Message, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from anabranch_schemas import clock, marker, stamp
from anabranch_schemas.envelope import cells
from anabranch_schemas.envelope.avro import envelope_schema, key_schema
from anabranch_schemas.marker import MarkerKind, Range, SnapshotMarker, TableVersion
from anabranch_schemas.stamp import Flag, Op, Stamp
from anabranch_schemas.table import TableSchema
from anabranch_schemas.vector import VectorTime
from anabranch_sink.config import StreamRef

_SOURCE = {
    "type": "record",
    "name": "Source",
    "namespace": "test",
    "fields": [{"name": "connector", "type": "string"}, {"name": "lsn", "type": "long"}],
}
Row = Mapping[str, Any]


class Schemas:
    """A registry in memory."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def register(self, subject: str, schema: str) -> int:
        """Return the id of a schema."""
        del subject
        if schema not in self.texts:
            self.texts.append(schema)
        return self.texts.index(schema) + 1

    def schema(self, schema_id: int) -> str:
        """Return the text of an id."""
        return self.texts[schema_id - 1]


@dataclass(frozen=True)
class Change:
    """One row change; `cells` as in the `ab.cells` header."""

    table: TableSchema
    op: Op
    row: Row
    key: Row | None = None
    cells: Sequence[cells.Cell] = ()


class _Encoder:
    def __init__(self, table: TableSchema, prefix: str, schemas: Schemas) -> None:
        self.table = table
        self.topic = f"{prefix}.{table.schema}.{table.name}"
        key, value = key_schema(table, prefix), envelope_schema(table, prefix, _SOURCE)
        self.version = TableVersion(
            table.path,
            self.topic,
            schemas.register("", json.dumps(key)),
            schemas.register("", json.dumps(value)),
        )
        self._key, self._value = fastavro.parse_schema(key), fastavro.parse_schema(value)

    def key(self, row: Row) -> bytes:
        return self._framed(self.version.key_schema_id, self._key, {name: row[name] for name in self.table.key})

    def value(self, op: Op, row: Row | None, seq: int) -> bytes:
        image = "before" if op is Op.DELETE else "after"
        record = {
            "before": None,
            "after": None,
            "source": {"connector": "written by hand", "lsn": seq},
            "op": chr(op),
            image: row,
        }
        return self._framed(self.version.value_schema_id, self._value, record)

    @staticmethod
    def _framed(schema_id: int, schema: Any, record: Any) -> bytes:
        out = io.BytesIO(b"\0" + schema_id.to_bytes(4, "big"))
        out.seek(5)
        fastavro.schemaless_writer(out, schema, record)
        return out.getvalue()


@dataclass
class SyntheticStream:
    """Writes transactions and closes them with markers; one topic per table, `partitions` each."""

    bootstrap: str
    name: str
    prefix: str
    schemas: Schemas
    site: int = 1
    partitions: int = 2
    epoch: int = 1
    number: int = 0
    seq: int = 0
    branch: str = "b1"
    _encoders: dict[TableSchema, _Encoder] = field(default_factory=dict)
    _ranges: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    _touched: set[TableVersion] = field(default_factory=set)
    _rows: int = 0
    _transactions: int = 0
    _first_seq: int = 0

    def __post_init__(self) -> None:
        self.admin = AdminClient({"bootstrap.servers": self.bootstrap})
        self.producer = Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "transactional.id": self.prefix,
                "linger.ms": 5,
                "queue.buffering.max.messages": 2_000_000,
                "on_delivery": self._delivered,
            }
        )
        self.producer.init_transactions(30)
        self.create(self.marker_topic, 1)
        self._open = False

    @property
    def marker_topic(self) -> str:
        """Where the markers go."""
        return f"{self.prefix}.markers"

    @property
    def ref(self) -> StreamRef:
        """The stream as a sink is told of it."""
        return StreamRef(self.name, self.marker_topic, self.prefix)

    def create(self, topic: str, partitions: int) -> None:
        """Create a topic."""
        self.admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(30)

    def encoder(self, table: TableSchema) -> _Encoder:
        """Return a table's encoder, making its topic the first time."""
        if table not in self._encoders:
            found = self._encoders[table] = _Encoder(table, self.prefix, self.schemas)
            if found.topic not in {e.topic for t, e in self._encoders.items() if t is not table}:
                self.create(found.topic, self.partitions)
        return self._encoders[table]

    def _delivered(self, error: Any, message: Message) -> None:
        assert error is None, error
        if message.topic() == self.marker_topic:
            return
        value = message.value()
        digest = 0 if value is None else zlib.crc32(value)
        place = (message.topic() or "", message.partition() or 0)
        found = self._ranges.setdefault(place, [message.offset() or 0, 0, 0, 0])
        found[1], found[2], found[3] = (message.offset() or 0) + 1, found[2] + 1, found[3] + digest

    def _begin(self) -> None:
        if not self._open:
            self.producer.begin_transaction()
            self._open = True

    def transaction(self, *changes: Change, copied: bool = False, epoch: int | None = None) -> int:
        """Write one transaction into the open snapshot and return its seq."""
        self._begin()
        if not copied:
            self.seq += 10
            self._transactions += 1
        self._first_seq = self._first_seq or self.seq
        hlc = clock.pack(time.time_ns() // 1000)
        for ordinal, change in enumerate(changes):
            encoder = self.encoder(change.table)
            self._touched.add(encoder.version)
            self._rows += 1
            flags = (Flag.COPIED if copied else Flag(0)) | (
                Flag.PARTIAL if any(c.kind is cells.CellKind.MISSING for c in change.cells) else Flag(0)
            )
            header = stamp.encode(
                Stamp(change.op, self.site, epoch or self.epoch, self.seq, ordinal, hlc, self.seq + 7, flags)
            )
            headers: list[tuple[str, str | bytes | None]] = [(stamp.HEADER, header)]
            if change.cells:
                headers.append((cells.HEADER, cells.encode(change.cells)))
            key = None if change.op is Op.TRUNCATE else encoder.key(change.key or change.row)
            value = encoder.value(change.op, None if change.op is Op.TRUNCATE else change.row, self.seq)
            self.producer.produce(encoder.topic, value, key, headers=headers)
            if change.op is Op.DELETE:
                self.producer.produce(encoder.topic, None, key, headers=headers)
            if ordinal & 1023 == 1023:
                self.producer.poll(0)
        return self.seq

    def close(
        self,
        kind: MarkerKind = MarkerKind.LOG,
        *,
        vector: Mapping[int, int] | None = None,
        spoil: int = 0,
        consistent: bool = True,
    ) -> SnapshotMarker:
        """Close the snapshot with a marker; `spoil` is added to the first range's count of records."""
        self._begin()
        self.producer.flush()
        self.number += 1
        ranges = [
            Range(topic, partition, first, end, rows + (spoil if at == 0 else 0), digest & marker.DIGEST_MASK)
            for at, ((topic, partition), (first, end, rows, digest)) in enumerate(sorted(self._ranges.items()))
        ]
        now_us = time.time_ns() // 1000
        closed = SnapshotMarker(
            stream=self.name,
            site=self.site,
            branch=self.branch,
            epoch=self.epoch,
            number=self.number,
            kind=kind if ranges else MarkerKind.IDLE,
            first_seq=self._first_seq or self.seq,
            last_seq=self.seq,
            safe_hlc=clock.pack(now_us) if consistent else 0,
            vector=VectorTime({**(vector or {}), self.site: self.seq}),
            transactions=self._transactions,
            rows=self._rows,
            ranges=tuple(ranges),
            schemas=tuple(sorted(self._touched, key=lambda v: v.value_schema_id)),
            closed_us=now_us,
        )
        self.producer.produce(self.marker_topic, b"\0\0\0\0\1" + marker.encode(closed), self.name.encode())
        self.producer.commit_transaction(30)
        self._open = False
        self._ranges, self._touched = {}, set()
        self._rows = self._transactions = self._first_seq = 0
        return closed

    def forget(self, change: Change) -> None:
        """Take the last record, which holds this change, out of the snapshot's counts, as if it were not its own."""
        self.producer.flush()
        digest = zlib.crc32(self.encoder(change.table).value(change.op, change.row, self.seq))
        found = max(self._ranges.values(), key=lambda r: r[1] if r[3] >= digest else -1)
        found[2], found[3] = found[2] - 1, found[3] - digest
        self._rows -= 1

    def abort(self) -> None:
        """Give the open snapshot up: its records stay on Kafka as aborted ones."""
        self.producer.flush()
        self.producer.abort_transaction(30)
        self._open = False
        self._ranges, self._touched = {}, set()
        self._rows = self._transactions = self._first_seq = 0


def insert(table: TableSchema, **row: Any) -> Change:
    """Return an insert."""
    return Change(table, Op.CREATE, row)


def update(table: TableSchema, *listed: cells.Cell, **row: Any) -> Change:
    """Return an update."""
    return Change(table, Op.UPDATE, row, cells=listed)


def delete(table: TableSchema, **row: Any) -> Change:
    """Return a delete; `row` is the whole row before it."""
    return Change(table, Op.DELETE, row)


def truncate(table: TableSchema) -> Change:
    """Return a truncate."""
    return Change(table, Op.TRUNCATE, {})
