"""Tables copied in small chunks while writers run: what arrives folds into exactly the table."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from confluent_kafka.admin import AdminClient
from tests.integration.source_reader import (
    StreamReader,
    check_markers,
    check_same,
    check_stream,
    fold,
    in_database,
    log_end,
)
from tests.source_process import SourceRun, SourceThread

from anabranch_connectors.postgres import control
from anabranch_connectors.postgres.chunks import ChunkReader, ChunkSnapshot
from anabranch_connectors.postgres.preconditions import forget
from anabranch_connectors.postgres.source import PostgresSource
from anabranch_schemas.marker import MarkerKind
from anabranch_schemas.stamp import Flag, Op
from anabranch_source.bootstrap import begin_anew

Write = Callable[[psycopg.Connection, random.Random], None]


@pytest.fixture
def run(run: SourceRun) -> SourceRun:
    return replace(run, chunk_rows=50)


@contextmanager
def writers(dsn: str, write: Write, most: int) -> Iterator[None]:
    """Run `write` on two connections, in transactions of one to four, `most` transactions on each."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def main(seed: int) -> None:
        rng = random.Random(seed)
        try:
            with psycopg.connect(dsn, autocommit=True) as conn:
                for _ in range(most):
                    if stop.is_set():
                        return
                    try:
                        with conn.transaction():
                            for _ in range(rng.randint(1, 4)):
                                write(conn, rng)
                    except (psycopg.errors.DeadlockDetected, psycopg.errors.UniqueViolation):
                        continue
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failures.append(error)

    threads = [threading.Thread(target=main, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures, failures


def write_anything(conn: psycopg.Connection, rng: random.Random) -> None:
    """Insert, update, delete or move a row somewhere in the table."""
    key, other = rng.randrange(4000), rng.randrange(4000)
    match rng.randrange(4):
        case 0:
            conn.execute("insert into t values (%s, %s) on conflict (id) do update set v = excluded.v", (key, other))
        case 1:
            conn.execute("update t set v = v + 1 where id between %s and %s", (key, key + 3))
        case 2:
            conn.execute("delete from t where id = %s", (key,))
        case _:
            conn.execute(
                "update t set id = %s where id = %s and not exists (select from t where id = %s)", (other, key, other)
            )


def test_writers_do_not_disturb_a_copy_in_tiny_chunks(
    run: SourceRun, reader: StreamReader, db: psycopg.Connection
) -> None:
    db.execute("create table t (id int primary key, v int)")
    db.execute("insert into t select i, 0 from generate_series(0, 4000, 2) i")
    with writers(run.dsn, write_anything, 3000), SourceThread(replace(run, partitions=2)):
        copied = reader.wait(lambda m: m.safe_hlc != 0)
        reader.wait_for(log_end(run.dsn))
        after = reader.markers[-1]
    with SourceThread(run):
        reader.wait_for(log_end(run.dsn))
    records = reader.records()
    check_markers(reader.markers, records)
    chunks = [m for m in reader.markers if m.kind is MarkerKind.COPY]
    assert len(chunks) >= 30
    assert copied.number <= after.number
    # Chunks and the log take turns, else this test shows nothing.
    assert any(a.kind is MarkerKind.LOG for a in reader.markers[chunks[0].number : chunks[-1].number])
    check_same(run.dsn, fold(records), "public.t")


def test_keys_that_only_the_server_can_order_are_copied_in_its_order(
    run: SourceRun, reader: StreamReader, db: psycopg.Connection
) -> None:
    collation = some_collation(db)
    words = ["a", "B", "c", "D", "ä", "Z", "zz", "-a", "a-b", "ab", "aB", "Ab"]
    db.execute(f'create table t (name text collate "{collation}", n numeric(36,4), v int, primary key (name, n))')
    with db.cursor() as cursor:
        rows = [(word, n) for word in words for n in (*range(-20, 20), "1e20", "-0.0001")]
        cursor.executemany("insert into t values (%s, %s::text::numeric, 0)", rows)

    def write(conn: psycopg.Connection, rng: random.Random) -> None:
        key = (rng.choice(words), str(rng.choice([rng.randrange(-30, 30), rng.randrange(10) / 4, "1e20"])))
        if rng.random() < 0.4:
            conn.execute("delete from t where name = %s and n = %s::numeric", key)
        else:
            conn.execute(
                "insert into t values (%s, %s::numeric, 0) on conflict (name, n) do update set v = t.v + 1", key
            )

    with SourceThread(replace(run, chunk_rows=23)):
        with writers(run.dsn, write, 500):
            reader.wait(lambda m: m.safe_hlc != 0)
        reader.wait_for(log_end(run.dsn))
    records = reader.records()
    check_markers(reader.markers, records)
    images = sorted((str(key[0]), int(row["v"])) for key, row in fold(records)["public.t"].items())
    assert images == sorted((row["name"], row["v"]) for row in in_database(run.dsn, "t"))


def some_collation(db: psycopg.Connection) -> str:
    """Return a collation that this server can use and whose order it alone knows, if there is one."""
    for name in ("und-x-icu", "unicode", "en_US.utf8", "C.utf8"):
        try:
            db.execute(f"select 'a' < 'B' collate \"{name}\"")
        except (psycopg.errors.UndefinedObject, psycopg.errors.FeatureNotSupported):
            continue
        return name
    return "C"


def test_a_truncate_between_two_chunks_leaves_no_row_behind(
    run: SourceRun, reader: StreamReader, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    db.execute("create table t (id int primary key, v text)")
    db.execute("insert into t select i, 'old' from generate_series(1, 200) i")
    chunks: list[str] = []
    copy_chunk = PostgresSource.copy_chunk

    def truncating(self: PostgresSource, rows: int) -> object:
        chunks.append("")
        if len(chunks) == 2:
            # Read by the second chunk, and by the log only after it.
            with db.transaction():
                db.execute("truncate t")
                db.execute("insert into t select i, 'new' from generate_series(1, 300, 3) i")
        return copy_chunk(self, rows)

    def reading(self: PostgresSource, wait_s: float) -> object:
        held = self._replication
        if len(chunks) == 1:  # the log stands still between the first two chunks
            return self._position()
        assert held is not None
        return read(self, wait_s)

    read = PostgresSource.read
    monkeypatch.setattr(PostgresSource, "copy_chunk", truncating)
    monkeypatch.setattr(PostgresSource, "read", reading)
    monkeypatch.setattr(PostgresSource, "_behind", False, raising=False)
    with SourceThread(run):
        reader.wait_for(log_end(run.dsn))
    records = reader.records()
    check_markers(reader.markers, records)
    assert Op.TRUNCATE in {r.stamp.op for r in records}
    check_same(run.dsn, fold(records), "public.t")


def test_empty_and_exactly_filled_chunks_end_a_table(
    run: SourceRun, reader: StreamReader, db: psycopg.Connection
) -> None:
    for name, rows in (("a_one", 1), ("b_none", 0), ("c_two_chunks", 100), ("d_two_and_one", 101)):
        db.execute(f"create table {name} (id int primary key)")
        db.execute(f"insert into {name} select generate_series(1, {rows})")
    with SourceThread(run):
        reader.wait_for(log_end(run.dsn))
    tables = ("public.a_one", "public.b_none", "public.c_two_chunks", "public.d_two_and_one")
    records = check_stream(reader, run.dsn, *tables)
    assert {state.table for state in reader.markers[-1].copy if state.done} == {
        "public.a_one",
        "public.b_none",
        "public.c_two_chunks",
        "public.d_two_and_one",
    }
    placed = [r.value["source"]["snapshot"] for r in records if r.value is not None]
    assert (placed[0], placed[-1]) == ("first", "last")
    assert placed.count("first_in_data_collection") == 2


def test_the_copy_of_a_silent_database_ends_soon(
    run: SourceRun, reader: StreamReader, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    db.execute("create table t (id int primary key)")
    db.execute("insert into t select generate_series(1, 200)")
    opened = ChunkReader.open

    def unflushed(self: ChunkReader) -> ChunkSnapshot:
        # As if a background process had written a little that nobody flushes.
        snapshot = opened(self)
        return replace(snapshot, high_mark=snapshot.high_mark + 64)

    monkeypatch.setattr(ChunkReader, "open", unflushed)
    with SourceThread(replace(run, heartbeat_s=0)):
        copied = reader.wait(lambda m: m.kind is MarkerKind.COPY and not m.copying)
        settled = reader.wait(lambda m: m.safe_hlc != 0)
    assert (settled.closed_us - copied.closed_us) / 1e6 < 5


def test_a_large_transaction_during_the_copy_is_filtered_on_disk(
    run: SourceRun, reader: StreamReader, db: psycopg.Connection
) -> None:
    db.execute("create table t (id int primary key, v text)")
    db.execute("insert into t select i, repeat('x', 100) from generate_series(1, 1000) i")
    with SourceThread(replace(run, spill_bytes=50_000, chunk_rows=100)):
        reader.wait(lambda m: m.kind is MarkerKind.COPY)
        db.execute("update t set v = 'y'")
        db.execute("update t set id = id + 500 where id > 500")
        reader.wait_for(log_end(run.dsn))
    check_stream(reader, run.dsn, "public.t")
    assert list(Path(run.spill_dir).iterdir()) == []


def test_a_table_that_is_added_later_is_copied_beside_the_log(
    run: SourceRun, reader: StreamReader, db: psycopg.Connection
) -> None:
    db.execute("create table t (id int primary key, v int)")
    db.execute("create table u (id int primary key, v int)")
    db.execute("insert into u select i, 0 from generate_series(1, 200) i")
    with SourceThread(replace(run, tables=("public.t",))):
        reader.wait_for(log_end(run.dsn))
        db.execute("insert into t select i, 0 from generate_series(1, 20) i")
        db.execute("update u set v = 1 where id < 10")
        reader.wait_for(log_end(run.dsn))
    with SourceThread(run):
        db.execute("update u set v = 2 where id < 5")
        reader.wait_for(log_end(run.dsn))
    records = reader.records()
    check_markers_without_safe_time_order = [replace(m, safe_hlc=0) for m in reader.markers]
    check_markers(check_markers_without_safe_time_order, records)
    check_same(run.dsn, fold(records), "public.t", "public.u")


def test_a_table_that_left_and_came_back_is_copied_again(
    run: SourceRun, reader: StreamReader, db: psycopg.Connection
) -> None:
    db.execute("create table t (id int primary key)")
    db.execute("create table u (id int primary key)")
    db.execute("insert into u values (1)")
    with SourceThread(run):
        reader.wait_for(log_end(run.dsn))
    with SourceThread(replace(run, tables=("public.t",))):
        reader.wait_for(log_end(run.dsn))
        db.execute("insert into u values (2)")
        reader.wait_for(log_end(run.dsn))
    with SourceThread(run):
        reader.wait_for(log_end(run.dsn))
    read = [r.key for r in reader.records() if r.topic.endswith(".u")]
    assert read == [{"id": 1}, {"id": 1}, {"id": 2}]


def test_a_stream_begun_anew_empties_and_copies_its_tables_again(
    run: SourceRun, reader: StreamReader, db: psycopg.Connection
) -> None:
    db.execute("create table t (id int primary key, v int)")
    db.execute("insert into t select i, 0 from generate_series(1, 120) i")
    with SourceThread(run):
        reader.wait_for(log_end(run.dsn))
    db.execute("delete from t where id <= 10")
    with control.connect(run.dsn) as conn:
        forget(conn, run.options())
    db.execute("delete from t where id <= 20")
    anew, _ = begin_anew(run.settings(), run.registry(), applied=0)
    assert anew.number > reader.markers[-1].number
    with SourceThread(run):
        found = reader.wait(lambda m: m.number == anew.number)
        assert found == anew
        db.execute("update t set v = 1 where id > 100")
        reader.wait(lambda m: m.safe_hlc != 0)
        reader.wait_for(log_end(run.dsn))
    records = reader.records()
    check_markers([replace(m, safe_hlc=0) for m in reader.markers], records)
    check_same(run.dsn, fold(records), "public.t")
    (emptied,) = [r for r in records if r.stamp.op is Op.TRUNCATE]
    assert emptied.stamp.flags & Flag.COPIED


def test_topics_are_made_as_the_settings_say(run: SourceRun, reader: StreamReader, db: psycopg.Connection) -> None:
    db.execute('create table "Odd Näme" (id int primary key)')
    with SourceThread(replace(run, partitions=3)):
        reader.wait_for(log_end(run.dsn))
    topics = AdminClient(run.consumer_kafka).list_topics(timeout=30).topics
    assert len(topics[f"{run.prefix}.public.Odd_N_me"].partitions) == 3
    assert len(topics[f"{run.prefix}.markers"].partitions) == 1
