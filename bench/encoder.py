"""The generated encoder against fastavro's compiled writer: the same rows, the same bytes.

Ours goes from pgoutput's binary tuples to the framed value (and the framed key, which the peer does not make). The
peer starts from dicts that are ready, of which nothing has to be converted. Every pair of values is compared.
"""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import fastavro

from anabranch_connectors.postgres import catalog
from anabranch_connectors.postgres.encode import RowEncoder, compile_encoder
from anabranch_connectors.postgres.envelope import SOURCE_SCHEMA, EnvelopeTail
from anabranch_connectors.postgres.mapping import table_schema
from anabranch_connectors.postgres.pgtable import PgTable
from anabranch_connectors.postgres.stream import PADDING
from anabranch_schemas.envelope.avro import envelope_schema
from anabranch_schemas.registry import frame
from bench.figure import BenchError, Figure, Group, Round, Size
from bench.ground import Ground, connect, new_database
from bench.workloads import NARROW, NARROW_ROW, WIDE, WIDE_ROW

_ROWS = 20_000
_TRANSACTION_ROWS = 10
_TUPLE_AT = 6  # 'I', relation (4), 'N'
_CREATE = ord("c")
_FRAME = 5
_LSN = 1 << 32
_LSN_STEP = 200  # about what a narrow row takes in the log


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows as pgoutput sends them, back to back."""

    data: bytes
    tuples: Sequence[int]


def _rounds(name: str, ddl: str, row: str, ground: Ground, _size: Size) -> Generator[Mapping[str, Round], None, None]:
    table, rows = _logged(ground, name.replace("-", "_"), ddl, row)
    encoder = compile_encoder(table, key_frame=frame(1), value_frame=frame(2), as_text=_no_text)
    schema = _parsed(envelope_schema(table_schema(table), "bench", SOURCE_SCHEMA))
    values = _ours(encoder, rows)
    dicts = [fastavro.schemaless_reader(io.BytesIO(value[_FRAME:]), schema) for value in values]
    if [value[_FRAME:] for value in values] != _peers(schema, dicts):
        raise BenchError(f"{name}: the encoders' bytes differ")
    for _ in count():
        began = time.perf_counter()
        _peers(schema, dicts)
        between = time.perf_counter()
        _ours(encoder, rows)
        ended = time.perf_counter()
        ours, peer = _ROWS / (ended - between), _ROWS / (between - began)
        yield {name: Round.of_rates(ours, peer, us_per_row=1e6 / ours, peer_us_per_row=1e6 / peer)}


def _ours(encoder: RowEncoder, rows: _Rows) -> list[bytes]:
    tail = EnvelopeTail("0", "bench", "bench")
    piece = tail.table("public", "t")
    row, head, data = encoder.row, encoder.insert_head, rows.data
    values = []
    lsn = _LSN
    for first in range(0, _ROWS, _TRANSACTION_ROWS):
        tail.begin(1_700_000_000_000_000 + first, 1000 + first, 1_700_000_000_100_000 + first, lsn)
        for at in rows.tuples[first : first + _TRANSACTION_ROWS]:
            lsn += _LSN_STEP
            value, _key, _end = row(data, at, head, tail.tail(piece, _CREATE, lsn))
            values.append(value)
    return values


def _peers(schema: Any, dicts: Sequence[Any]) -> list[bytes]:
    write = fastavro.schemaless_writer
    values = []
    for record in dicts:
        out = io.BytesIO()
        write(out, schema, record)
        values.append(out.getvalue())
    return values


def _parsed(schema: dict[str, Any]) -> Any:
    """Return the schema for fastavro without logical types: its records then hold Avro's own values, ready to write."""
    return fastavro.parse_schema(_without_logical_types(copy.deepcopy(schema)))


def _without_logical_types(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {key: _without_logical_types(value) for key, value in schema.items() if key != "logicalType"}
    if isinstance(schema, list):
        return [_without_logical_types(value) for value in schema]
    return schema


def _logged(ground: Ground, database: str, ddl: str, row: str) -> tuple[PgTable, _Rows]:
    """Return a table, and its rows from the log."""
    dsn = new_database(ground.eu, database)
    with connect(dsn) as conn:
        conn.execute(ddl.encode())
        conn.execute("CREATE PUBLICATION bench FOR TABLE t")
        conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (database,))
        conn.execute(f"INSERT INTO t SELECT {row} FROM generate_series(1::int8, {_ROWS:d}) g".encode())
        cursor = conn.cursor(binary=True)
        cursor.execute(
            "SELECT data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL, "
            "'proto_version', '1', 'publication_names', 'bench', 'binary', 'true')",
            (database,),
        )
        inserts = [data for (data,) in cursor if data[:1] == b"I"]
        conn.execute("SELECT pg_drop_replication_slot(%s)", (database,))
        (table,) = catalog.load_tables(conn, ["public.t"], {})
    starts = []
    at = 0
    for data in inserts:
        starts.append(at + _TUPLE_AT)
        at += len(data)
    return table, _Rows(b"".join(inserts) + PADDING, starts)


def _no_text(oid: int, _data: bytes) -> str:
    raise BenchError(f"a value of type {oid} is not encoded directly")


def _group(name: str, ddl: str, row: str, what: str) -> Group:
    return Group(
        (Figure(name, 2.5, "rows/s", f"generated encoder / fastavro: {what}"),), partial(_rounds, name, ddl, row)
    )


GROUPS = (
    _group("encoder-narrow", NARROW, NARROW_ROW, "5 columns"),
    _group("encoder-wide", WIDE, WIDE_ROW, "30 columns"),
)
