"""A real server: catalog, chunks that cover each row once, bounds, texts, and snapshots that see what they must."""

from __future__ import annotations

import random
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from anabranch_connectors.postgres.catalog import find_tables, is_standby, load_table_by_oid, load_tables
from anabranch_connectors.postgres.chunks import ChunkReader, KeyBound, KeyPosition, key_position
from anabranch_connectors.postgres.control import Connection, connect
from anabranch_connectors.postgres.errors import ConnectError, ServerError, TableKeyError, TableMissingError
from anabranch_connectors.postgres.pgtable import PgTable
from anabranch_connectors.postgres.printer import TextPrinter
from anabranch_connectors.postgres.snapshot import StreamedTransactions

Row = tuple[bytes | None, ...]


@pytest.fixture
def control(eu_database: str) -> Iterator[Connection]:
    with connect(eu_database) as conn:
        yield conn


@pytest.fixture
def reader(eu_database: str) -> Iterator[ChunkReader]:
    with ChunkReader(eu_database) as chunks:
        yield chunks


@pytest.fixture
def printer(eu_database: str) -> Iterator[TextPrinter]:
    printed = TextPrinter(eu_database)
    yield printed
    printed.close()


def run(conn: Connection, text: str) -> Any:
    return conn.execute(text)


def only(conn: Connection, name: str) -> PgTable:
    (table,) = load_tables(conn, [f"public.{name}"])
    return table


def tuples(block: bytes) -> Iterator[Row]:
    """Take a block of whole tuples apart; fails if it is cut anywhere."""
    at = 0
    while at < len(block):
        (count,) = struct.unpack_from("!h", block, at)
        at += 2
        row: list[bytes | None] = []
        for _ in range(count):
            (length,) = struct.unpack_from("!i", block, at)
            at += 4
            row.append(None if length < 0 else block[at : at + length])
            at += max(length, 0)
        assert at <= len(block)
        yield tuple(row)


def key_fields(table: PgTable, row: Row) -> list[bytes]:
    names = [column.name for column in table.published_columns]
    values = [row[names.index(name)] or b"" for name in table.key]
    return [struct.pack("!i", len(value)) + value for value in values]


def paged(reader: ChunkReader, table: PgTable, rows: int, as_text: Callable[[int, bytes], str]) -> list[list[Row]]:
    """Read the whole table in chunks."""
    chunks: list[list[Row]] = []
    after: KeyPosition | None = None
    while True:
        reader.open()
        chunk = [row for block in reader.read(table, after, rows) for row in tuples(block)]
        chunks.append(chunk)
        if len(chunk) < rows:
            return chunks
        # Through its encoding, as after a restart.
        after = KeyPosition.decode(key_position(table, key_fields(table, chunk[-1]), as_text).encode())


NOT_C = ("en-x-icu", "en_US.utf8", "C.utf8", "pg_unicode_fast")


def other_collation(conn: Connection) -> str:
    """Return a collation that the connector does not take for byte order."""
    rows = conn.execute(
        "SELECT collname FROM pg_collation WHERE collname = ANY(%s) AND collprovider <> 'b'", (list(NOT_C),)
    )
    there = {name for (name,) in rows}
    return next(name for name in NOT_C if name in there)


KEYS = {
    "integer": ("id int", "id", "SELECT g * 3 - 900 FROM generate_series(1, 700) g"),
    "uuid": ("id uuid", "id", "SELECT md5(g::text)::uuid FROM generate_series(1, 700) g"),
    "numeric": ("id numeric", "id", "SELECT (g * 1.1)::numeric FROM generate_series(1, 700) g"),
    "timestamptz": (
        "id timestamptz",
        "id",
        (
            "SELECT now() + g * interval '1 us' FROM generate_series(1, 698) g "
            "UNION ALL SELECT 'infinity' UNION ALL SELECT '-infinity'"
        ),
    ),
    "enum": (
        "id public.mood, n int",
        "id, n",
        "SELECT (ARRAY['z', 'a', 'M'])[g % 3 + 1]::public.mood, g FROM generate_series(1, 700) g",
    ),
    "domain": ("id public.positive", "id", "SELECT g FROM generate_series(1, 700) g"),
    "blank padded": (
        "id character(4)",
        "id",
        "SELECT chr(65 + g % 26) || chr(97 + g / 26) FROM generate_series(0, 675) g",
    ),
    "text and integer": (
        'name text COLLATE "{collation}", n int',
        "name, n",
        (
            "SELECT (ARRAY['a', 'A', 'b', 'B', 'é', 'Z', '''quoted'' \\ back', 'ß', ''])[g % 9 + 1], g "
            "FROM generate_series(1, 700) g"
        ),
    ),
    "reversed order": ("a int, b int", "b, a", "SELECT g, g % 5 FROM generate_series(1, 700) g"),
}


@pytest.fixture(params=KEYS)
def keyed(request: pytest.FixtureRequest, control: Connection) -> PgTable:
    columns, key, rows = KEYS[request.param]
    run(control, "CREATE TYPE public.mood AS ENUM ('z', 'a', 'M')")
    run(control, "CREATE DOMAIN public.positive AS bigint CHECK (VALUE > 0)")
    columns = columns.format(collation=other_collation(control))
    run(control, f"CREATE TABLE public.t ({columns}, PRIMARY KEY ({key}))")
    run(control, f"INSERT INTO public.t {rows}")
    return only(control, "t")


def test_chunks_cover_each_row_once_in_key_order(
    control: Connection, reader: ChunkReader, printer: TextPrinter, keyed: PgTable
) -> None:
    chunks = paged(reader, keyed, 97, printer)
    assert len(chunks) > 5
    read = [row for chunk in chunks for row in chunk]
    names = ", ".join(f'"{column.name}"' for column in keyed.columns)
    order = ", ".join(keyed.key)
    cursor = control.cursor(binary=True)
    cursor.execute(f"SELECT {names} FROM public.t ORDER BY {order}")
    assert cursor.pgresult is not None
    result = cursor.pgresult
    wanted = [tuple(result.get_value(r, c) for c in range(result.nfields)) for r in range(result.ntuples)]
    assert read == wanted


def test_a_bound_covers_what_comes_before_it_in_postgresqls_order(
    control: Connection, reader: ChunkReader, printer: TextPrinter, keyed: PgTable
) -> None:
    rows = [row for chunk in paged(reader, keyed, 10_000, printer) for row in chunk]
    fields = [key_fields(keyed, row) for row in rows]
    place = 333
    bound = KeyBound(keyed, key_position(keyed, fields[place], printer), control)
    order = random.Random(5).sample(range(len(rows)), len(rows))
    assert bound.covers_many([fields[at] for at in order]) == [at <= place for at in order]
    assert bound.covers_many([]) == []
    assert bound.covers(fields[place])
    assert not bound.covers(fields[place + 1])


@pytest.mark.parametrize(
    ("kind", "local"),
    [("int", True), ("uuid", True), ('text COLLATE "C"', True), ("numeric", False), ("character(3)", False)],
)
def test_simple_keys_are_compared_without_the_server(control: Connection, kind: str, *, local: bool) -> None:
    run(control, f"CREATE TABLE public.t (id {kind} PRIMARY KEY)")
    text = {"uuid": "00000000-0000-0000-0000-000000000001"}.get(kind, "1")
    assert KeyBound(only(control, "t"), KeyPosition((text,)), control).is_local is local


def test_text_in_another_collation_is_compared_by_the_server(control: Connection) -> None:
    run(control, f'CREATE TABLE public.t (id text COLLATE "{other_collation(control)}" PRIMARY KEY)')
    assert not KeyBound(only(control, "t"), KeyPosition(("a",)), control).is_local


def test_a_chunk_of_no_rows_is_empty(control: Connection, reader: ChunkReader) -> None:
    run(control, "CREATE TABLE public.t (id int PRIMARY KEY)")
    reader.open()
    assert list(reader.read(only(control, "t"), None, 10)) == []


def test_large_tables_come_in_large_blocks(control: Connection, reader: ChunkReader) -> None:
    run(control, "CREATE TABLE public.t (id int PRIMARY KEY, note text)")
    run(control, "INSERT INTO public.t SELECT g, repeat('x', 100) FROM generate_series(1, 20000) g")
    reader.open()
    blocks = list(reader.read(only(control, "t"), None, 20_000))
    assert sum(len(list(tuples(block))) for block in blocks) == 20_000
    assert min(len(block) for block in blocks[:-1]) >= 256 << 10


def test_a_chunk_is_one_state_of_the_database(control: Connection, reader: ChunkReader) -> None:
    run(control, "CREATE TABLE public.t (id int PRIMARY KEY)")
    run(control, "INSERT INTO public.t SELECT g FROM generate_series(1, 10) g")
    reader.open()
    run(control, "INSERT INTO public.t VALUES (11)")
    assert len(list(tuples(b"".join(reader.read(only(control, "t"), None, 100))))) == 10
    reader.open()
    assert len(list(tuples(b"".join(reader.read(only(control, "t"), None, 100))))) == 11


def test_an_iterator_closed_early_leaves_a_reader_that_opens_again(control: Connection, reader: ChunkReader) -> None:
    run(control, "CREATE TABLE public.t (id int PRIMARY KEY, note text)")
    run(control, "INSERT INTO public.t SELECT g, repeat('x', 500) FROM generate_series(1, 20000) g")
    table = only(control, "t")
    reader.open()
    blocks = reader.read(table, None, 20_000)
    next(blocks)
    blocks.close()  # type: ignore[attr-defined]  # it is a generator
    with pytest.raises(ConnectError):
        next(reader.read(table, None, 1))
    reader.open()
    assert len(list(tuples(b"".join(reader.read(table, None, 7))))) == 7


def test_a_table_that_is_gone_is_an_error_of_the_server(control: Connection, reader: ChunkReader) -> None:
    run(control, "CREATE TABLE public.t (id int PRIMARY KEY)")
    table = only(control, "t")
    run(control, "DROP TABLE public.t")
    reader.open()
    with pytest.raises(ServerError) as caught:
        list(reader.read(table, None, 1))
    assert caught.value.sqlstate == "42P01"
    assert caught.value.where == "public.t"
    reader.open()


def test_a_row_security_policy_fails_a_copy_instead_of_thinning_it(eu_database: str, control: Connection) -> None:
    run(control, "CREATE TABLE public.t (id int PRIMARY KEY)")
    run(control, "ALTER TABLE public.t ENABLE ROW LEVEL SECURITY")
    run(control, "DROP ROLE IF EXISTS ab_reader")
    run(control, "CREATE ROLE ab_reader LOGIN")
    try:
        run(control, "GRANT SELECT ON public.t TO ab_reader")
        table = only(control, "t")
        with ChunkReader(eu_database.replace("postgres@", "ab_reader@")) as chunks:
            chunks.open()
            with pytest.raises(ServerError, match="42501"):
                list(chunks.read(table, None, 1))
    finally:
        run(control, "DROP OWNED BY ab_reader")
        run(control, "DROP ROLE ab_reader")


def test_partitions_are_read_by_their_root_and_children_are_not(control: Connection, reader: ChunkReader) -> None:
    run(control, "CREATE TABLE public.parts (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    run(control, "CREATE TABLE public.part_1 PARTITION OF public.parts FOR VALUES FROM (0) TO (10)")
    run(control, "CREATE TABLE public.part_2 PARTITION OF public.parts FOR VALUES FROM (10) TO (20)")
    run(control, "INSERT INTO public.parts SELECT g FROM generate_series(5, 14) g")
    run(control, "CREATE TABLE public.parent (id int PRIMARY KEY)")
    run(control, "CREATE TABLE public.child () INHERITS (public.parent)")
    run(control, "INSERT INTO public.child VALUES (1)")
    reader.open()
    assert len(list(tuples(b"".join(reader.read(only(control, "parts"), None, 100))))) == 10
    assert list(reader.read(only(control, "parent"), None, 100)) == []


def test_types_without_a_binary_form_come_as_text(
    control: Connection, reader: ChunkReader, printer: TextPrinter
) -> None:
    run(control, "CREATE TABLE public.t (id int PRIMARY KEY, pattern gtsvector)")
    rows = run(control, "SELECT oid FROM pg_type WHERE typname = 'gtsvector' AND typsend = 0").fetchall()
    assert rows, "the type used here has no send function"
    run(control, "INSERT INTO public.t VALUES (1, NULL)")
    reader.open()
    assert list(tuples(b"".join(reader.read(only(control, "t"), None, 1)))) == [(b"\0\0\0\1", None)]
    assert printer(rows[0][0], b"as it is") == "as it is"


# Snapshots


def test_the_snapshot_and_the_high_mark_bound_what_is_committed(control: Connection, reader: ChunkReader) -> None:
    run(control, "CREATE TABLE public.t (id int PRIMARY KEY)")
    xid = run(control, "INSERT INTO public.t VALUES (1) RETURNING pg_current_xact_id()::text").fetchone()[0]
    end = run(control, "SELECT pg_current_wal_insert_lsn() - '0/0'").fetchone()[0]
    opened = reader.open()
    assert opened.snapshot.sees(int(xid))
    assert opened.high_mark >= end
    clock = run(control, "SELECT extract(epoch FROM clock_timestamp()) * 1000000").fetchone()[0]
    assert 0 <= clock - opened.snapshot_us < 60_000_000


def test_a_streamed_transaction_that_is_not_visible_yet_makes_the_snapshot_unusable(
    eu_database: str, control: Connection, reader: ChunkReader
) -> None:
    run(control, "CREATE TABLE public.t (id int PRIMARY KEY)")
    with connect(eu_database) as other, other.transaction():
        xid = int(run(other, "INSERT INTO public.t VALUES (1) RETURNING pg_current_xact_id()::text").fetchone()[0])
        streamed = StreamedTransactions([xid])
        assert not streamed.usable(reader.open().snapshot)
    assert streamed.usable(reader.open().snapshot)


# The catalog


def test_tables_are_found_by_pattern_without_the_systems_and_our_own(control: Connection) -> None:
    run(control, "CREATE SCHEMA anabranch")
    run(control, "CREATE SCHEMA app")
    for name in ("anabranch.progress", "app.a", "public.b", "public.c"):
        run(control, f"CREATE TABLE {name} (id int PRIMARY KEY)")
    run(control, "CREATE UNLOGGED TABLE public.u (id int PRIMARY KEY)")
    run(control, "CREATE VIEW public.v AS SELECT 1")
    assert [table.path for table in load_tables(control, ["*"])] == ["app.a", "public.b", "public.c"]
    assert [path for _, path in find_tables(control, ["public.[bx]", "app.*"])] == ["app.a", "public.b"]
    assert not is_standby(control)


def test_columns_carry_resolved_types(control: Connection) -> None:
    run(control, "CREATE SCHEMA app")
    run(control, "CREATE TYPE app.mood AS ENUM ('sad', 'ok')")
    run(control, "CREATE DOMAIN app.moods AS app.mood[]")
    run(control, "CREATE DOMAIN app.price AS numeric(10,2)")
    run(
        control,
        "CREATE TABLE public.t (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, dropped int, moods app.moods, "
        "price app.price NOT NULL, codes character varying(7)[], twice int GENERATED ALWAYS AS (id * 2) STORED, "
        'p point, byte text COLLATE "C")',
    )
    run(control, "ALTER TABLE public.t DROP COLUMN dropped")
    table = only(control, "t")
    columns = {column.name: column for column in table.columns}
    assert list(columns) == ["id", "moods", "price", "codes", "twice", "p", "byte"]
    assert [column.name for column in table.published_columns] == ["id", "moods", "price", "codes", "p", "byte"]
    assert columns["id"].identity == "a"
    assert not columns["price"].nullable
    moods = columns["moods"].type
    assert (moods.name, moods.kind) == ("app.moods", "d")
    assert moods.base is not None
    assert moods.base.name == "app.mood[]"
    assert moods.base.element is not None
    assert moods.base.element.labels == ("sad", "ok")
    price = columns["price"].type
    assert price.base is not None
    assert price.base.name == "numeric(10,2)"
    codes = columns["codes"].type
    assert codes.name == "character varying(7)[]"
    assert codes.element is not None
    assert codes.element.name == "character varying(7)"
    assert columns["p"].type.element is None
    assert columns["byte"].collation_is_c


def test_keys_come_from_the_key_the_identity_or_the_option(control: Connection) -> None:
    run(control, "CREATE TABLE public.pk (a int, b int, PRIMARY KEY (b, a))")
    run(control, "CREATE TABLE public.idx (a int NOT NULL, b int)")
    run(control, "CREATE UNIQUE INDEX idx_a ON public.idx (a) INCLUDE (b)")
    run(control, "ALTER TABLE public.idx REPLICA IDENTITY USING INDEX idx_a")
    run(control, "CREATE TABLE public.opt (a int NOT NULL, b int)")
    run(control, "ALTER TABLE public.opt REPLICA IDENTITY FULL")
    keys = {table.name: table.key for table in load_tables(control, ["public.*"], {"public.opt": ("a",)})}
    assert keys == {"pk": ("b", "a"), "idx": ("a",), "opt": ("a",)}
    with pytest.raises(TableKeyError):
        load_tables(control, ["public.opt"])


def test_a_deferrable_key_is_no_key(control: Connection) -> None:
    run(control, "CREATE TABLE public.t (a int PRIMARY KEY DEFERRABLE)")
    with pytest.raises(TableKeyError):
        load_tables(control, ["public.t"])


def test_a_table_is_found_by_oid_until_it_is_dropped(control: Connection) -> None:
    run(control, "CREATE TABLE public.t (id int PRIMARY KEY)")
    table = only(control, "t")
    assert load_table_by_oid(control, table.oid) == table
    run(control, "DROP TABLE public.t")
    with pytest.raises(TableMissingError):
        load_table_by_oid(control, table.oid)


# Texts

TEXTS = [
    ("inet", "10.1.2.3"),
    ("character(5)", "ab   "),
    ("interval", "1 mon 2 days 03:04:05.000006"),
    ("timestamptz", "2026-11-21 10:00:00.5+00"),
    ("point", "(1.5,-2)"),
    ("int4range", "[1,5)"),
    ("tsvector", "'cat':1 'dog':2"),
    ("boolean", "t"),
    ("public.mood", "sad"),
    ("public.pair", '(1,"a b")'),
    ("public.pair[]", '{"(1,\\"a b\\")",NULL}'),
    ("bytea", "\\x00ff"),
    ("float8", "0.1"),
]


def encoded(conn: Connection, kind: str, text: str) -> tuple[int, bytes]:
    result = conn.pgconn.exec_params(
        f"SELECT '{text.replace(chr(39), chr(39) * 2)}'::{kind}".encode(), None, result_format=1
    )
    value = result.get_value(0, 0)
    assert value is not None
    return result.ftype(0), value


def test_values_are_printed_as_their_own_output_function_does(control: Connection, printer: TextPrinter) -> None:
    run(control, "CREATE TYPE public.mood AS ENUM ('sad')")
    run(control, "CREATE TYPE public.pair AS (a int, b text)")
    for kind, text in TEXTS:
        assert printer(*encoded(control, kind, text)) == text


def test_a_text_is_asked_for_once(control: Connection, printer: TextPrinter, monkeypatch: pytest.MonkeyPatch) -> None:
    oid, value = encoded(control, "point", "(1,2)")
    assert printer(oid, value) == "(1,2)"
    asked: list[int] = []
    printer.close()
    monkeypatch.setattr(printer, "_ask", lambda *_: asked.append(1))
    assert printer(oid, value) == "(1,2)"
    assert not asked


def test_the_cache_of_texts_is_bounded(printer: TextPrinter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch_connectors.postgres.printer._CACHE_BYTES", 2000)
    for number in range(50):
        printer(17, struct.pack("!i", number) * 10)
    assert printer._held <= 2000
    assert 1 <= len(printer._cache) < 10


def test_a_value_that_the_server_refuses_is_an_error(printer: TextPrinter) -> None:
    with pytest.raises(ServerError):
        printer(600, b"xyz")
    assert printer(23, b"\0\0\0\5") == "5"


def test_a_printer_whose_server_side_was_ended_connects_again(control: Connection, printer: TextPrinter) -> None:
    assert printer(23, b"\0\0\0\5") == "5"
    rows = control.execute(
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
        "WHERE application_name = 'anabranch printer' AND datname = current_database()"
    ).fetchall()
    assert rows == [(True,)]
    with pytest.raises((ConnectError, ServerError)):
        printer(23, b"\0\0\0\6")
    assert printer(23, b"\0\0\0\6") == "6"


def test_readers_see_every_row_that_was_committed_before_under_load(
    eu_database: str, control: Connection, reader: ChunkReader
) -> None:
    """The rule of the snapshot, against writers: no row whose transaction S sees lies beyond the high mark."""
    run(control, "CREATE TABLE public.t (id bigserial PRIMARY KEY, xid text)")
    table = only(control, "t")
    ended = threading.Event()

    def write() -> None:
        with connect(eu_database) as conn:
            while not ended.is_set():
                run(conn, "INSERT INTO public.t (xid) SELECT pg_current_xact_id()::text FROM generate_series(1, 3)")

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        marks = []
        for _ in range(30):
            opened = reader.open()
            rows: Sequence[Row] = [row for block in reader.read(table, None, 1_000_000) for row in tuples(block)]
            marks.append(opened.high_mark)
            assert all(opened.snapshot.sees(int(row[1] or b"0")) for row in rows)
            counts: dict[bytes | None, int] = {}
            for row in rows:
                counts[row[1]] = counts.get(row[1], 0) + 1
            assert set(counts.values()) <= {3}, "a transaction was seen in part"
        assert marks == sorted(marks)
    finally:
        ended.set()
        for writer in writers:
            writer.join()
