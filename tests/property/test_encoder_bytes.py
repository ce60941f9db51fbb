"""The generated encoders write the bytes that fastavro writes of the same values, whatever the table's shape."""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import fastavro
from hypothesis import given
from hypothesis import strategies as st

from anabranch_connectors.postgres.decode import compile_decoder
from anabranch_connectors.postgres.encode import compile_encoder
from anabranch_connectors.postgres.envelope import SOURCE_SCHEMA, EnvelopeTail
from anabranch_connectors.postgres.mapping import table_schema
from anabranch_connectors.postgres.pgtable import PgColumn, PgTable, PgType
from anabranch_schemas.envelope.avro import envelope_schema, key_schema

EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
PADDING = bytes(4096)


@dataclass(frozen=True)
class Kind:
    """A PostgreSQL type, and values as (binary form, what fastavro takes, binary form that comes back)."""

    pg: PgType
    cells: st.SearchStrategy[tuple[bytes, Any]]


def integers(code: str) -> st.SearchStrategy[tuple[bytes, Any]]:
    limit = 1 << struct.calcsize("!" + code) * 8 - 1
    near = st.integers(0, limit.bit_length() - 1).flatmap(
        lambda bits: st.integers(max(-limit, -(1 << bits) - 1), min(limit - 1, (1 << bits) + 1))
    )
    return near.map(lambda n: (struct.pack("!" + code, n), n))


def numeric(value: Decimal) -> bytes:
    """Return PostgreSQL's binary form of a decimal."""
    sign, digits, exponent = value.as_tuple()
    scale = max(-int(exponent), 0)
    text = "".join(map(str, digits)) + "0" * max(int(exponent), 0)
    text = text.rjust(scale + 1, "0")
    whole, fraction = text[: len(text) - scale], text[len(text) - scale :]
    whole = whole.rjust(-(-len(whole) // 4) * 4, "0")
    fraction = fraction.ljust(-(-len(fraction) // 4) * 4, "0")
    groups = [int((whole + fraction)[at : at + 4]) for at in range(0, len(whole + fraction), 4)]
    weight = len(whole) // 4 - 1
    while groups and not groups[0]:
        groups.pop(0)
        weight -= 1
    while groups and not groups[-1]:
        groups.pop()
    if not groups:
        weight = sign = 0
    return struct.pack(f"!HhHH{len(groups)}H", len(groups), weight, 0x4000 * sign, scale, *groups)


def java_bytes(n: int) -> bytes:
    """Return what Java's BigInteger.toByteArray returns."""
    return n.to_bytes((n if n >= 0 else ~n).bit_length() // 8 + 1, "big", signed=True)


unscaled = st.integers(1, 60).flatmap(lambda digits: st.integers(-(10**digits), 10**digits))
decimals = unscaled.map(lambda n: (numeric(Decimal(n).scaleb(-2)), java_bytes(n)))
free_decimals = (
    st.tuples(unscaled, st.integers(0, 30))
    .map(lambda pair: (numeric(Decimal((pair[0] < 0, tuple(map(int, str(abs(pair[0])))), -pair[1]))), pair))
    .map(lambda cell: (cell[0], {"scale": cell[1][1], "value": java_bytes(cell[1][0])}))
)
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=200)
moments = st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30))  # noqa: DTZ001 - made aware below


def micros(moment: datetime) -> int:
    return (moment.replace(tzinfo=UTC) - EPOCH) // timedelta(microseconds=1)


KINDS = (
    Kind(PgType(16, "boolean"), st.booleans().map(lambda b: (bytes((b,)), b))),
    Kind(PgType(21, "smallint"), integers("h")),
    Kind(PgType(23, "integer"), integers("i")),
    Kind(PgType(20, "bigint"), integers("q")),
    Kind(PgType(700, "real"), st.floats(width=32, allow_nan=False).map(lambda f: (struct.pack("!f", f), f))),
    Kind(PgType(701, "double precision"), st.floats(allow_nan=False).map(lambda f: (struct.pack("!d", f), f))),
    Kind(PgType(1700, "numeric(62,2)", (62 << 16 | 2) + 4), decimals),
    Kind(PgType(1700, "numeric"), free_decimals),
    Kind(PgType(25, "text"), texts.map(lambda t: (t.encode(), t))),
    Kind(PgType(25, "text"), st.integers(8000, 9000).map(lambda n: (b"x" * n, "x" * n))),
    Kind(PgType(17, "bytea"), st.binary(max_size=300).map(lambda b: (b, b))),
    Kind(PgType(3802, "jsonb"), texts.map(lambda t: (b"\x01" + t.encode(), t))),
    Kind(
        PgType(99, "mood", kind="e", labels=("a", "b, c")),
        st.sampled_from(("a", "b, c")).map(lambda t: (t.encode(), t)),
    ),
    Kind(PgType(2950, "uuid"), st.uuids().map(lambda u: (u.bytes, str(u)))),
    Kind(
        PgType(1082, "date"),
        st.dates().map(lambda d: (struct.pack("!i", (d - date(2000, 1, 1)).days), (d - date(1970, 1, 1)).days)),
    ),
    Kind(PgType(1083, "time"), st.integers(0, 86_400_000_000).map(lambda n: (struct.pack("!q", n), n))),
    Kind(PgType(1083, "time(3)", 3), st.integers(0, 86_400_000).map(lambda n: (struct.pack("!q", n * 1000), n))),
    Kind(
        PgType(1114, "timestamp"),
        moments.map(lambda m: (struct.pack("!q", micros(m)), micros(m) + 946_684_800_000_000)),
    ),
    Kind(
        PgType(1184, "timestamptz"),
        moments.map(lambda m: (struct.pack("!q", micros(m)), f"{m.isoformat(timespec='microseconds')}Z")),
    ),
    Kind(
        PgType(1007, "integer[]", element=PgType(23, "integer")),
        st.lists(st.none() | st.integers(-(1 << 31), (1 << 31) - 1), min_size=1, max_size=9).map(
            lambda items: (
                struct.pack("!iiIii", 1, None in items, 23, len(items), 1)
                + b"".join(struct.pack("!i", -1) if n is None else struct.pack("!ii", 4, n) for n in items),
                items,
            )
        ),
    ),
)


@dataclass(frozen=True)
class Row:
    """A table of a random shape and one row of it; `cells` are (binary form, Avro value), None for NULL."""

    table: PgTable
    cells: list[tuple[bytes, Any] | None]

    @property
    def record(self) -> dict[str, Any]:
        columns = self.table.columns
        return {column.name: cell and cell[1] for column, cell in zip(columns, self.cells, strict=True)}

    def logged(self) -> bytes:
        cells = (b"n" if cell is None else b"b" + _sized(cell[0]) for cell in self.cells)
        return struct.pack("!h", len(self.cells)) + b"".join(cells)

    def copied(self) -> bytes:
        cells = (b"\xff\xff\xff\xff" if cell is None else _sized(cell[0]) for cell in self.cells)
        return struct.pack("!h", len(self.cells)) + b"".join(cells)


def _sized(data: bytes) -> bytes:
    return struct.pack("!i", len(data)) + data


@st.composite
def rows(draw: st.DrawFn) -> Row:
    kinds = draw(st.lists(st.tuples(st.sampled_from(KINDS), st.booleans()), min_size=1, max_size=12))
    columns = [PgColumn(f"c{at}", kind.pg, nullable) for at, (kind, nullable) in enumerate(kinds)]
    cells = [draw(st.none() | kind.cells if nullable else kind.cells) for kind, nullable in kinds]
    required = [column.name for column in columns if not column.nullable]
    key = draw(st.permutations(required))[: draw(st.integers(0, 3))]
    return Row(PgTable(1, "s", "t", tuple(columns), tuple(key)), cells)


def written(schema: dict[str, Any], record: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), record)
    return out.getvalue()


def never(_oid: int, _data: bytes) -> str:
    raise AssertionError("no value needs the server")


@given(rows())
def test_value_and_key_are_fastavros(row: Row) -> None:
    schema = table_schema(row.table)
    envelope = envelope_schema(schema, "p", SOURCE_SCHEMA)
    value = {**envelope["fields"][0]["type"][1], "namespace": envelope["namespace"]}
    encoder = compile_encoder(row.table, key_frame=b"K", value_frame=b"V", as_text=never)
    body = written(value, row.record)
    key = b"K" + written(key_schema(schema, "p"), row.record) if row.table.key else b""
    logged, copied = row.logged(), row.copied()
    assert encoder.row(logged + PADDING, 0, b"<", b">") == (b"<" + body + b">", key, len(logged))
    assert encoder.copy_row(copied + PADDING, 0, b"<", b">") == (b"<" + body + b">", key, len(copied))
    assert encoder.row_with_cells(b"?" + logged, 1, b"<", b">")[:3] == (b"<" + body + b">", key, 1 + len(logged))


@given(rows())
def test_the_decoder_gives_the_row_back(row: Row) -> None:
    schema = table_schema(row.table)
    envelope, key = envelope_schema(schema, "p", SOURCE_SCHEMA), key_schema(schema, "p")
    encoder = compile_encoder(row.table, key_frame=bytes(5), value_frame=bytes(5), as_text=never)
    tails = EnvelopeTail("1", "p", "d")
    tails.begin(1, 2, 3, 4)
    tail = tails.tail(tails.table("s", "t"), ord("u"), 1 << 40)
    value, framed_key, _ = encoder.row(row.logged() + PADDING, 0, encoder.insert_head, tail)
    decoder = compile_decoder(envelope, key)
    fields = decoder.after_fields(value)
    assert b"".join(fields) == decoder.after(value)
    for column, field, cell in zip(row.table.columns, fields, row.cells, strict=True):
        # The server drops the zero groups that the decoder leaves in a numeric.
        if cell is None or column.type.oid != 1700:
            assert field == (b"\xff\xff\xff\xff" if cell is None else _sized(cell[0]))
    if row.table.key:
        by_name = dict(zip((column.name for column in row.table.columns), fields, strict=True))
        assert decoder.key_fields(framed_key) == [by_name[name] for name in row.table.key]


@given(
    st.integers(0, 4_000_000_000_000_000),
    st.integers(1, (1 << 40)),
    st.integers(0, 1 << 60),
    st.lists(st.integers(1 << 24, (1 << 62) - 1) | st.integers(9_999_990_000, 10_000_010_000), min_size=1, max_size=6),
    st.sampled_from(("orders", "100%", "%d%b", "x" * 70)),
)
def test_the_tail_is_fastavros(commit_us: int, txid: int, last: int, lsns: list[int], name: str) -> None:
    table = table_schema(PgTable(1, name, name, (PgColumn("id", PgType(23, "integer"), nullable=False),), ("id",)))
    schema = envelope_schema(table, "p", SOURCE_SCHEMA)
    tails = EnvelopeTail("1.0", name, name)
    tails.begin(commit_us, txid, commit_us + 1, last)
    for lsn in lsns:
        source = {
            "version": "1.0",
            "connector": "postgresql",
            "name": name,
            "ts_ms": commit_us // 1000,
            "snapshot": "false",
            "db": name,
            "sequence": f'["{last}","{lsn}"]' if last else f'[null,"{lsn}"]',
            "ts_us": commit_us,
            "ts_ns": commit_us * 1000,
            "schema": name,
            "table": name,
            "txId": txid,
            "lsn": lsn,
        }
        times = {"ts_ms": (commit_us + 1) // 1000, "ts_us": commit_us + 1, "ts_ns": (commit_us + 1) * 1000}
        whole = written(schema, {"before": None, "after": {"id": 1}, "source": source, "op": "c", **times})
        assert b"\x00\x02\x02" + tails.tail(tails.table(name, name), ord("c"), lsn) == whole
