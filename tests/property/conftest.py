"""Every type with its edge values, in a database that shows them as COPY and as the log send them."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psycopg
import pytest
from psycopg import sql

from anabranch.stack.service import PostgresService
from anabranch_connectors.postgres.decode import StagedColumn
from anabranch_connectors.postgres.pgtable import PgColumn, PgTable, PgType

SETUP = """
create type mood as enum ('sad', 'so, so', 'happy ''n'' "glad"', '');
create type pair as (a int, b text);
create domain posint as int check (value > 0);
create domain price as numeric(12,2);
create domain tags as text[];
"""
TEXTS = ("", "a", "x" * 127, "ä漢🐘", "x" * 9000, "tab\t \\ 'quote' \"double\"", "NULL")
NUMERICS = (
    "0",
    "0.00",
    "-0.01",
    "99999999.99",
    "-99999999.99",
    "10000",
    "-10000.10",
    "0.07",
    "-1.28",
    "1.28",
    "327.68",
)
FREE_NUMERICS = (
    *("0", "0.000", "100.00", "1.10", "-12345678901234567890.000001", "1e100", "1e-100", "-1e-16383", "1e4000"),
    *(
        "10000",
        "9999",
        "99999999",
        "100000000",
        "9999999999999999",
        "10000000000000000",
        "0.00010000",
        "-128",
        "-32768",
    ),
)
SPECIAL_NUMERICS = ("NaN", "Infinity", "-Infinity")
TIMES = ("00:00:00", "24:00:00", "23:59:59.999999", "12:34:56.000001")
TIMESTAMPS = (
    *("1970-01-01 00:00:00", "1969-12-31 23:59:59.999999", "2000-01-01 00:00:00", "1582-10-10 10:10:10.5"),
    *("0044-03-15 10:00:00 BC", "4714-11-24 00:00:00 BC", "0001-01-01 00:00:00", "0001-12-31 23:59:59 BC"),
    *("10000-01-01 00:00:00", "294246-12-31 23:59:59.999999", "infinity", "-infinity", "2024-02-29 23:59:59.123456"),
)
LAST_TIMESTAMP = "294276-12-31 23:59:59.999999"
INTERVALS = (
    *("0", "1 year 2 mons 3 days 04:05:06.789012", "-1 mons +1 day -00:00:00.5", "1 year -1 day", "-00:00:01"),
    *("-25 mons -400 days -100:59:59.999999", "00:00:00.000001", "2147483647 days"),
    *("178000000 years", "-178000000 years", "2562047787:59:59.999999", "-2562047787:59:59.999999"),
    *("-00:30:00", "-11 mons"),
)
JSONS = ("null", '{"a": [1, 2, {"b": "ä"}], "c": 1.50}', '"text"', "[]", "1.10")
NETWORKS = ("10.0.0.1", "10.1.2.3/8", "::1", "fe80::1/64", "::ffff:1.2.3.4", "::1.2.3.4", "2001:db8:0:0:1::1", "::")

EDGES: dict[str, tuple[str, ...]] = {
    "boolean": ("t", "f"),
    "smallint": ("0", "1", "-1", "32767", "-32768"),
    "integer": (
        "0",
        "-1",
        "63",
        "64",
        "-64",
        "-65",
        "8191",
        "8192",
        "134217727",
        "134217728",
        "2147483647",
        "-2147483648",
    ),
    "bigint": ("0", "-1", "549755813888", "36028797018963968", "9223372036854775807", "-9223372036854775808"),
    "real": ("0", "-0", "1.5", "3.4028235e38", "1e-45", "NaN", "Infinity", "-Infinity"),
    "double precision": ("0", "-0", "0.1", "1.7976931348623157e308", "5e-324", "NaN", "Infinity", "-Infinity"),
    "numeric(10,2)": NUMERICS,
    "numeric(1000,500)": ("0", "1e499", "-1e-500"),
    "numeric": FREE_NUMERICS,
    "numeric(3,-2)": ("0", "12300", "-99900"),
    "numeric(2,5)": ("0", "0.00099", "-0.00001"),
    "text": TEXTS,
    "character varying(40)": ("", "abc", "ä漢🐘"),
    "character(5)": ("", "a", "ä漢"),
    "name": ("pg_class",),
    "bytea": ("\\x", "\\x00ff80", "\\x" + "61" * 200),
    "date": (
        "1970-01-01",
        "2000-01-01",
        "1582-10-10",
        "0044-03-15 BC",
        "4714-11-24 BC",
        "5874897-12-31",
        "infinity",
        "-infinity",
    ),
    "time without time zone": TIMES,
    "time(3) without time zone": (*TIMES[:2], "23:59:59.999"),
    "time(0) without time zone": TIMES[:2],
    "time with time zone": (
        "00:00:00+00",
        "24:00:00-15:59:59",
        "12:34:56.789012+05:30",
        "01:02:03-00:00:30",
        "01:02:03+15:59",
    ),
    "time(2) with time zone": ("12:34:56.78+05:30",),
    "timestamp without time zone": TIMESTAMPS,
    "timestamp(3) without time zone": (*TIMESTAMPS, LAST_TIMESTAMP[:-3]),
    "timestamp(1) without time zone": ("2024-01-01 00:00:00.1",),
    "timestamp with time zone": tuple(t.replace(" BC", "+00 BC") for t in (*TIMESTAMPS, LAST_TIMESTAMP)),
    "timestamp(3) with time zone": ("2024-01-01 00:00:00.123+02", "infinity", "10000-01-01 00:00:00.001+00"),
    "timestamp(0) with time zone": ("2024-01-01 00:00:00+02",),
    "interval": INTERVALS,
    "uuid": ("00000000-0000-0000-0000-000000000000", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
    "json": (*JSONS, '  {"spaced" :  1}'),
    "jsonb": JSONS,
    "mood": ("sad", "so, so", "happy 'n' \"glad\"", ""),
    "posint": ("1", "2147483647"),
    "price": ("0.00", "1.10"),
    "tags": ("{}", "{a,NULL}"),
    "integer[]": ("{}", "{1,NULL,-3}", "{" + ",".join(map(str, range(300))) + "}"),
    "text[]": ("{}", '{a,NULL,"NULL","with, comma",""}'),
    "numeric(10,2)[]": ("{}", "{1.10,NULL,-0.01}"),
    "numeric[]": ("{0.000,1.1,NULL}",),
    "mood[]": ('{sad,NULL,"so, so",""}',),
    "uuid[]": ("{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11,NULL}",),
    "jsonb[]": ('{"{\\"a\\": 1}",NULL,"null"}',),
    "json[]": ('{"{\\"a\\": 1}",NULL,"null"}',),
    "timestamp with time zone[]": ('{"2024-01-01 00:00:00.5+00",infinity,NULL}',),
    "timestamp without time zone[]": ('{"2024-01-01 00:00:00.5",infinity,NULL}',),
    "timestamp(3) without time zone[]": ('{"2024-01-01 00:00:00.5",NULL}',),
    "time with time zone[]": ("{01:02:03+04,NULL}",),
    "time without time zone[]": ("{01:02:03.5,NULL}",),
    "date[]": ("{2024-01-01,infinity,NULL}",),
    "interval[]": ('{"1 mon -1 days",NULL}',),
    "boolean[]": ("{t,f,NULL}",),
    "smallint[]": ("{1,NULL}",),
    "bigint[]": ("{9223372036854775807,NULL}",),
    "real[]": ("{NaN,1.5,NULL}",),
    "double precision[]": ("{NaN,1.5,NULL}",),
    "bytea[]": ('{"\\\\x00ff",NULL}',),
    "character(3)[]": ("{a,NULL,bcd}",),
    "posint[]": ("{1,NULL}",),
    "inet[]": ("{10.0.0.1,NULL}",),
    "inet": NETWORKS,
    "cidr": ("10.0.0.0/8", "::/0", "10.0.0.1/32"),
    "macaddr": ("08:00:2b:01:02:03",),
    "macaddr8": ("08:00:2b:01:02:03:04:05",),
    "bit(3)": ("101", "000"),
    "bit varying": ("", "1", "101010101"),
    "oid": ("0", "4294967295"),
    "xid": ("4294967295",),
    "pg_lsn": ("0/0", "16/B374D848"),
    "tsvector": ("'a':1A 'b':2",),
    "tsquery": ("'a' & !'b'",),
    "int4range": ("empty", "[1,5)", "(,)"),
    "int4multirange": ("{}", "{[1,3),[5,8)}"),
    "pair": ('(1,"a, b")', "(,)"),
    "money": ("$1.00", "-$1,234.50"),
    "xml": ("<a>ä</a>", '<?xml version="1.0"?><a/>'),
    "point": ("(1.5,-2)",),
    "int2vector": ("1 2 3",),
    '"char"': ("a", ""),
    "regclass": ("pg_class",),
    "jsonpath": ('$."a"[*]',),
}
"""Values that the envelope holds."""
BEYOND: dict[str, tuple[str, ...]] = {
    "numeric(10,2)": ("NaN",),
    "numeric": SPECIAL_NUMERICS,
    "timestamp without time zone": (LAST_TIMESTAMP, "294247-01-10 04:00:25.2"),
    "timestamp(3) without time zone": ("294247-01-10 04:00:25.2",),
    "integer[]": ("{{1,2},{3,NULL}}", "[0:1]={1,2}"),
    "text[]": ('{{a},{"b, c"}}',),
    "numeric[]": ("{1,NaN}",),
    "timestamp without time zone[]": ('{"294276-12-31 23:59:59.999999"}',),
}
"""Values that only a cell holds."""

_TYPES = """
select a.attname, a.atttypid, a.atttypmod, not a.attnotnull
from pg_attribute a where a.attrelid = %s::regclass and a.attnum > 0 and not a.attisdropped order by a.attnum
"""
_TYPE = """
select format_type(t.oid, %s), t.typtype, t.typbasetype, t.typtypmod,
  case when t.typcategory = 'A' then t.typelem else 0 end,
  array(select enumlabel::text from pg_enum where enumtypid = t.oid order by enumsortorder)
from pg_type t where t.oid = %s
"""


def read_type(connection: psycopg.Connection, oid: int, typmod: int) -> PgType:
    """Return a type from the catalog."""
    row = connection.execute(_TYPE, (typmod, oid)).fetchone()
    assert row
    name, kind, base, base_typmod, element, labels = row
    return PgType(
        oid,
        name,
        typmod,
        kind,
        read_type(connection, base, base_typmod) if base else None,
        read_type(connection, element, typmod) if element else None,
        tuple(labels),
    )


def read_table(connection: psycopg.Connection, name: str, key: tuple[str, ...] = ("id",)) -> PgTable:
    """Return a table of schema public from the catalog."""
    columns = [
        PgColumn(column, read_type(connection, oid, typmod), nullable)
        for column, oid, typmod, nullable in connection.execute(_TYPES, (name,)).fetchall()
    ]
    return PgTable(1, "public", name, tuple(columns), key)


class Printer:
    """Asks the server to print values, as the source does."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection

    def __call__(self, oid: int, data: bytes) -> str:
        result = self._connection.pgconn.exec_params(
            b"select format('%s', $1)", [data], param_types=[oid], param_formats=[1]
        )
        value = result.get_value(0, 0)
        assert value is not None, result.error_message
        return value.decode()


PADDING = bytes(4096)


@dataclass(frozen=True, slots=True)
class Edge:
    """One table `(id, v T, w T not null)` with every edge value of a type in v and w, and a last row with v NULL."""

    type: str
    table: PgTable
    printer: Printer
    logged: tuple[bytes, ...]
    """TupleData of each row, padded."""
    copied: tuple[bytes, ...]
    """COPY tuple of each row, padded."""
    texts: tuple[tuple[bool, str, str], ...]
    """(v is null, v, w) as the server prints them."""
    held: int
    """How many of the rows the envelope holds whole; then come those beyond it, then the NULL."""

    def beyond(self, row: int) -> bool:
        """Tell whether a row needs cells."""
        return self.held <= row < len(self.logged) - 1


class EdgeDatabase:
    """A database with an `Edge` for every type that its server has."""

    def __init__(self, dsn: str) -> None:
        self.connection = psycopg.connect(dsn, autocommit=True)
        self.printer = Printer(self.connection)
        self.missing: dict[str, str] = {}
        self.connection.execute(SETUP)
        self.connection.execute("create publication edges for all tables")
        self.connection.execute("select pg_create_logical_replication_slot('edges', 'pgoutput')")
        for at, type_ in enumerate(EDGES):
            self._fill(f"t{at}", type_)
        self._logged = self._by_table()

    def _fill(self, name: str, type_: str) -> None:
        self.connection.execute(f"create table {name} (id int primary key, v {type_}, w {type_} not null)")
        values = [*EDGES[type_], *BEYOND.get(type_, ())]
        try:
            with self.connection.transaction():
                for at, value in enumerate(values):
                    literal = sql.Literal(value).as_string()
                    self.connection.execute(f"insert into {name} values ({at}, {literal}, {literal})")
                literal = sql.Literal(values[0]).as_string()
                self.connection.execute(f"insert into {name} values ({len(values)}, null, {literal})")
        except psycopg.errors.FeatureNotSupported as error:
            self.missing[type_] = str(error.diag.message_primary)

    def _by_table(self) -> dict[str, list[bytes]]:
        names: dict[bytes, str] = {}
        rows: dict[str, list[bytes]] = {}
        for (message,) in self.connection.execute(
            "select data from pg_logical_slot_get_binary_changes('edges', null, null, "
            "'proto_version', '1', 'publication_names', 'edges', 'binary', 'true')"
        ):
            if message[:1] == b"R":
                names[message[1:5]] = message[5:].split(b"\0")[1].decode()
            elif message[:1] == b"I":
                rows.setdefault(names[message[1:5]], []).append(message[6:] + PADDING)
        return rows

    def edge(self, type_: str) -> Edge:
        """Return what the database shows of a type."""
        name = f"t{list(EDGES).index(type_)}"
        return Edge(
            type_,
            read_table(self.connection, name),
            self.printer,
            tuple(self._logged[name]),
            tuple(self._copied(name)),
            tuple(
                self.connection.execute(
                    f"select v is not distinct from null, format('%s', v), format('%s', w) from {name} order by id"
                )
            ),
            len(EDGES[type_]),
        )

    def _copied(self, name: str) -> Iterator[bytes]:
        with self.connection.cursor().copy(
            f"copy (select * from {name} order by id) to stdout (format binary)"
        ) as copy:
            data = b"".join(bytes(chunk) for chunk in copy)
        at = 19  # signature 11, flags 4, length of the extension 4
        while (count := struct.unpack_from("!h", data, at)[0]) >= 0:
            start = at
            at += 2
            for _ in range(count):
                at += 4 + max(struct.unpack_from("!i", data, at)[0], 0)
            yield data[start:at] + PADDING

    def staged(self, edge: Edge, columns: Sequence[StagedColumn], rows: Sequence[bytes]) -> list[tuple[bool, str, str]]:
        """Return (v is null, v, w), cast back to the edge's type, of decoded rows after a COPY into a staging table."""
        shape = ", ".join(f"{column.name} {column.staging_type}" for column in columns)
        self.connection.execute(f"create temp table staging ({shape})")
        try:
            count = struct.pack("!h", len(columns))
            with self.connection.cursor().copy("copy staging from stdin (format binary)") as copy:
                copy.write(b"PGCOPY\n\xff\r\n\0" + bytes(8) + b"".join(count + row for row in rows) + b"\xff\xff")
            return self.connection.execute(
                f"select v is not distinct from null, format('%s', v::{edge.type}), format('%s', w::{edge.type}) "
                "from staging order by id"
            ).fetchall()
        finally:
            self.connection.execute("drop table staging")

    def close(self) -> None:
        """Drop the slot, so that the database can be dropped."""
        self.connection.execute("select pg_drop_replication_slot('edges')")
        self.connection.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for `edge_type` once for every type."""
    if "edge_type" in metafunc.fixturenames:
        metafunc.parametrize("edge_type", list(EDGES), ids=[type_.replace(" ", "_") for type_ in EDGES])


@pytest.fixture(scope="session")
def edge_database(postgres_eu: PostgresService) -> Iterator[EdgeDatabase]:
    """Return a database filled with every edge value."""
    name = f"edges_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgres_eu.dsn(), autocommit=True) as admin:
        admin.execute(f"create database {name}")
        database = EdgeDatabase(postgres_eu.dsn(name))
        yield database
        database.close()
        admin.execute(f"drop database {name} with (force)")


@pytest.fixture
def edge(edge_database: EdgeDatabase, edge_type: str) -> Edge:
    """Return the rows of one type."""
    if edge_type in edge_database.missing:
        pytest.skip(f"this server lacks {edge_type}: {edge_database.missing[edge_type]}")
    return edge_database.edge(edge_type)
