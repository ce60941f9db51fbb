"""Staging in PostgreSQL: an unlogged table per sink, schema version and buffer, filled by binary COPY from executors.

A row is tagged with the attempt that staged it. Unlogged is enough: a crash of the server empties the table, which
the recount before publishing notices. Data columns are called c0, c1, … so that no name of a user can meet ours.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import psycopg
from psycopg import sql
from psycopg.copy import QueuedLibpqWriter

from anabranch_connectors.api import Buffer, RoutedVersion, StagedRows
from anabranch_connectors.postgres.decode import NULL_FIELD, RowDecoder, compile_decoder
from anabranch_connectors.target_errors import StagingLostError, TargetUnavailableError
from anabranch_schemas.envelope import cells
from anabranch_schemas.envelope.cells import CellKind
from anabranch_schemas.stamp import Op

SCHEMA = "anabranch"
META_COLUMNS = (
    ("_attempt", "bigint"),
    ("_op", '"char"'),
    ("_seq", "bigint"),
    ("_ordinal", "bigint"),
    ("_partition", "integer"),
    ("_offset", "bigint"),
    ("_cells", "jsonb"),
)
_COPY_HEAD = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_COPY_END = b"\xff\xff"
# Rows joined into one write: 4,000 rows of 100 to 500 bytes make 0.4 to 2 MB, where COPY is fastest and memory small.
_BLOCK_ROWS = 4_000
_NO_CELLS = NULL_FIELD


@dataclass(frozen=True, slots=True)
class StagingTable:
    """The staging of one schema version: column i holds source column i in the binary form of `types[i]`."""

    name: str
    columns: tuple[str, ...]
    types: tuple[str, ...]
    key: tuple[int, ...]
    """Indices of the key columns, in key order."""

    @property
    def identifier(self) -> sql.Identifier:
        """The qualified name."""
        return sql.Identifier(SCHEMA, self.name)

    def create(self) -> sql.Composed:
        """Return the statement that makes it."""
        data = ((f"c{at}", name) for at, name in enumerate(self.types))
        columns = sql.SQL(", ").join(
            sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind)) for name, kind in (*META_COLUMNS, *data)
        )
        # Rows never change and the table is emptied as a whole: autovacuum would only be in the way.
        return sql.SQL("CREATE UNLOGGED TABLE IF NOT EXISTS {} ({}) WITH (autovacuum_enabled = off)").format(
            self.identifier, columns
        )


@lru_cache(maxsize=4096)
def staging_table(sink: str, version: RoutedVersion, buffer: Buffer) -> StagingTable:
    """Return the staging table of a version; its name holds the schema id and a digest of its columns and key."""
    decoder = decoder_of(version)
    names = tuple(column.name for column in decoder.columns)
    types = tuple(column.staging_type for column in decoder.columns)
    key = tuple(names.index(column.name) for column in decoder.key_columns)
    # The key, too: its change is a new version although the columns' schema stays.
    digest = zlib.crc32(json.dumps([sink, names, types, key]).encode())
    readable = re.sub(r"[^a-z0-9]+", "_", sink.lower())[:30]
    return StagingTable(
        name=f"stage_{readable}_{version.version.value_schema_id}_{digest:08x}_{buffer}",
        columns=names,
        types=types,
        key=key,
    )


def decoder_of(version: RoutedVersion) -> RowDecoder:
    """Return the decoder of a version; compiled once a process."""
    return _decoder(version.value_schema, version.key_schema)


@lru_cache(maxsize=4096)
def _decoder(value_schema: str, key_schema: str) -> RowDecoder:
    return compile_decoder(json.loads(value_schema), json.loads(key_schema))


class PostgresStaging:
    """`StagingPart` of PostgreSQL."""

    def __init__(self, dsn: str, tables: Sequence[StagingTable], versions: Sequence[RoutedVersion]) -> None:
        self._dsn = dsn
        self._tables = tuple(tables)
        self._versions = tuple(versions)

    def write(self, version: int, parts: Iterable[StagedRows]) -> None:
        """COPY rows into the staging of their version; committed when it returns.

        Raises:
            TargetUnavailableError: if the connection cannot be made or breaks.
            StagingLostError: if the staging table is gone.
        """
        table, decoder = self._tables[version], decoder_of(self._versions[version])
        statement = sql.SQL("COPY {} FROM STDIN (FORMAT binary)").format(table.identifier)
        try:
            cursor = _connection(self._dsn).cursor()
            # A thread sends while we encode. Its queue holds at most what a task holds as rows.
            with cursor.copy(statement, writer=QueuedLibpqWriter(cursor)) as copy:
                copy.write(_COPY_HEAD)
                for part in parts:
                    data = encode_rows(part, table, decoder)
                    for at in range(0, len(data), _BLOCK_ROWS):
                        copy.write(b"".join(data[at : at + _BLOCK_ROWS]))
                copy.write(_COPY_END)
        except psycopg.errors.UndefinedTable as error:
            raise StagingLostError("a staging table is gone", where=table.name) from error
        except psycopg.OperationalError as error:
            _connections.pop(self._dsn, None)
            raise TargetUnavailableError(
                "the target broke off while rows were staged", where=table.name, advice="check the target server"
            ) from error


_connections: dict[str, psycopg.Connection] = {}
"""One a Python worker: Spark keeps workers for the next task."""


def _connection(dsn: str) -> psycopg.Connection:
    found = _connections.get(dsn)
    if found is None or found.closed:
        found = _connections[dsn] = psycopg.connect(dsn, autocommit=True, application_name="anabranch stage")
    return found


def encode_rows(rows: StagedRows, table: StagingTable, decoder: RowDecoder) -> list[bytes]:
    """Return one binary COPY tuple per row."""
    prefixes, width = _prefixes(rows, len(META_COLUMNS) + len(table.columns))
    prefix = [prefixes[at : at + width] for at in range(0, len(prefixes), width)]
    deleted = (rows.meta["op"] == int(Op.DELETE)).tolist()
    after = decoder.after
    if not rows.cells and not any(deleted):
        return [p + _NO_CELLS + after(v) for p, v in zip(prefix, rows.values, strict=True)]  # type: ignore[arg-type]  # not a delete
    out = []
    for at, (p, value) in enumerate(zip(prefix, rows.values, strict=True)):
        if deleted[at]:
            out.append(p + _NO_CELLS + _key_only(decoder.key_fields(rows.keys[at]), table))
        elif at in rows.cells:
            out.append(p + _with_cells(value or b"", rows.cells[at], rows.earlier.get(at, ()), decoder))
        else:
            out.append(p + _NO_CELLS + after(value or b""))
    return out


def _prefixes(rows: StagedRows, fields: int) -> tuple[bytes, int]:
    """Return what comes before `_cells` in every row, packed in bulk: a count, then lengths and values."""
    layout = np.dtype(
        [("n", ">i2")]
        + [
            item
            for name, code in (
                ("attempt", ">i8"),
                ("op", "u1"),
                ("seq", ">i8"),
                ("ordinal", ">i8"),
                ("partition", ">i4"),
                ("offset", ">i8"),
            )
            for item in ((f"{name}_size", ">i4"), (name, code))
        ]
    )
    packed = np.empty(len(rows.meta), dtype=layout)
    packed["n"] = fields
    packed["attempt"] = rows.attempt
    packed["attempt_size"] = 8
    for name in ("op", "seq", "ordinal", "partition", "offset"):
        packed[name] = rows.meta[name]
        packed[f"{name}_size"] = layout[name].itemsize
    return packed.tobytes(), layout.itemsize


def _key_only(key: list[bytes], table: StagingTable) -> bytes:
    fields = [NULL_FIELD] * len(table.columns)
    for at, data in zip(table.key, key, strict=True):
        fields[at] = data
    return b"".join(fields)


def _with_cells(value: bytes, header: bytes, earlier: Sequence[tuple[bytes, bytes]], decoder: RowDecoder) -> bytes:
    """Return `_cells` and the data fields of a row whose envelope does not hold everything.

    A missing column is taken from the newest earlier image that has it; what is still missing then is left to the
    target's row: {"3": null} in `_cells`. {"4": "infinity"} is a value as the source prints it.
    """
    fields = decoder.after_fields(value)
    listed = {cell.column: cell for cell in cells.decode(header)}
    for image, image_header in earlier:
        missing = [at for at, cell in listed.items() if cell.kind is CellKind.MISSING]
        if not missing:
            break
        older = decoder.after_fields(image)
        older_listed = {cell.column: cell for cell in cells.decode(image_header)}
        for at in missing:
            if at in older_listed:
                listed[at] = older_listed[at]
            else:
                fields[at] = older[at]
                del listed[at]
    left: dict[str, str | None] = {}
    for at, cell in listed.items():
        fields[at] = NULL_FIELD
        if cell.kind is not CellKind.NULL:
            left[str(at)] = cell.text if cell.kind is CellKind.TEXT else None
    text = b"\1" + json.dumps(left).encode() if left else b""
    return (struct.pack("!i", len(text)) + text if left else _NO_CELLS) + b"".join(fields)
