"""A source end to end on real servers: what each change of a table looks like on Kafka, and what markers say of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psycopg
import pytest
from tests.integration.source_reader import StreamReader, check_markers, check_same, fold, log_end, resume_of
from tests.source_process import SourceRun, SourceThread

from anabranch_connectors.postgres.lsn import lsn_int
from anabranch_connectors.postgres.spill import TransactionBuffer
from anabranch_schemas import clock
from anabranch_schemas.envelope.cells import UNAVAILABLE
from anabranch_schemas.errors import Action
from anabranch_schemas.marker import MarkerKind
from anabranch_schemas.stamp import Flag, Op


def test_copied_rows_come_first_and_then_each_change_once(
    run: SourceRun, reader: StreamReader, db: psycopg.Connection
) -> None:
    db.execute("create table t (id int primary key, v text)")
    db.execute("insert into t select i, 'copied ' || i from generate_series(1, 100) i")
    with SourceThread(run):
        reader.wait_for(log_end(run.dsn))
        db.execute("insert into t values (101, 'new')")
        db.execute("update t set v = 'changed' where id <= 3")
        db.execute("delete from t where id = 4")
        reader.wait_for(log_end(run.dsn))
    records = reader.records()
    check_markers(reader.markers, records)
    assert [r.stamp.op for r in records] == [Op.READ] * 100 + [Op.CREATE, *[Op.UPDATE] * 3, Op.DELETE, Op.DELETE]
    assert [r.value is None for r in records[-2:]] == [False, True]
    tables = fold(records)
    assert len(tables["public.t"]) == 100
    check_same(run.dsn, tables, "public.t")


def test_rows_of_several_partitions_keep_their_order_within_one_marker(
    run: SourceRun, reader: StreamReader, db: psycopg.Connection
) -> None:
    db.execute("create table t (id int primary key, v int)")
    run = replace(run, partitions=3)
    with SourceThread(run):
        reader.wait_for(log_end(run.dsn))
        db.execute("insert into t select i, 0 from generate_series(1, 300) i")
        for round_ in range(1, 6):
            db.execute("update t set v = %s", (round_,))
        reader.wait_for(log_end(run.dsn))
    records = reader.records()
    check_markers(reader.markers, records)
    assert {r.partition for r in records} == {0, 1, 2}
    assert any(len(m.ranges) == 3 for m in reader.markers)
    check_same(run.dsn, fold(records), "public.t")


def test_a_source_without_tombstones_sends_deletes_alone(
    run: SourceRun, reader: StreamReader, db: psycopg.Connection
) -> None:
    db.execute("create table t (id int primary key)")
    db.execute("insert into t select generate_series(1, 3)")
    with SourceThread(replace(run, tombstones=False)):
        reader.wait_for(log_end(run.dsn))
        db.execute("delete from t")
        reader.wait_for(log_end(run.dsn))
    records = reader.records()
    check_markers(reader.markers, records)
    deletes = [r for r in records if r.stamp.op is Op.DELETE]
    assert [r.value is None for r in deletes] == [False] * 3
    assert [bool(r.stamp.flags & Flag.LAST) for r in deletes] == [False, False, True]


@pytest.mark.parametrize("identity", ["default", "full"])
def test_a_changed_key_is_a_delete_and_a_create(
    run: SourceRun, reader: StreamReader, db: psycopg.Connection, identity: str
) -> None:
    db.execute("create table t (a int, b text, v int, primary key (b, a))")
    db.execute(f"alter table t replica identity {identity}")
    db.execute("insert into t values (1, 'x', 10), (2, 'y', 20)")
    with SourceThread(run):
        reader.wait_for(log_end(run.dsn))
        db.execute("update t set a = 7, v = 70 where a = 1")
        db.execute("update t set v = 71 where a = 7")
        reader.wait_for(log_end(run.dsn))
    records = reader.records()
    check_markers(reader.markers, records)
    logged = [r for r in records if not r.stamp.flags & Flag.COPIED]
    assert [r.stamp.op for r in logged] == [Op.DELETE, Op.DELETE, Op.CREATE, Op.UPDATE]
    assert [r.key for r in logged] == [{"b": "x", "a": 1}] * 2 + [{"b": "x", "a": 7}] * 2
    assert logged[2].value is not None
    assert logged[2].value["after"] == {"a": 7, "b": "x", "v": 70}
    check_same(run.dsn, fold(records), "public.t")


def test_a_truncate_is_one_record_a_table(run: SourceRun, reader: StreamReader, db: psycopg.Connection) -> None:
    db.execute("create table t (id int primary key)")
    db.execute("create table u (id int primary key)")
    db.execute("insert into t select generate_series(1, 10)")
    db.execute("insert into u select generate_series(1, 10)")
    with SourceThread(run):
        reader.wait_for(log_end(run.dsn))
        with db.transaction():
            db.execute("insert into t values (11)")
            db.execute("truncate t, u")
            db.execute("insert into t values (12)")
        reader.wait_for(log_end(run.dsn))
    records = reader.records()
    check_markers(reader.markers, records)
    truncates = [r for r in records if r.stamp.op is Op.TRUNCATE]
    assert {r.topic for r in truncates} == {f"{run.prefix}.public.t", f"{run.prefix}.public.u"}
    assert [r.key for r in truncates] == [None, None]
    tables = fold(records)
    assert [list(tables[name]) for name in ("public.t", "public.u")] == [[(12,)], []]


def test_unchanged_toast_is_named_as_missing(run: SourceRun, reader: StreamReader, db: psycopg.Connection) -> None:
    db.execute("create table t (id int primary key, big text, v int)")
    db.execute("alter table t alter big set storage external")
    db.execute("insert into t values (1, repeat('x', 10000), 1)")
    with SourceThread(run):
        reader.wait_for(log_end(run.dsn))
        db.execute("update t set v = 2")
        db.execute("update t set id = 5")
        reader.wait_for(log_end(run.dsn))
    records = reader.records()
    check_markers(reader.markers, records)
    update = next(r for r in records if r.stamp.op is Op.UPDATE)
    assert update.stamp.flags == Flag.PARTIAL | Flag.LAST
    assert update.missing == ("big",)
    assert update.value is not None
    assert update.value["after"] == {"id": 1, "big": UNAVAILABLE.decode(), "v": 2}
    create = next(r for r in records if r.stamp.op is Op.CREATE)
    assert create.key == {"id": 5}
    assert create.missing == ("big",)


def test_replica_identity_full_fills_unchanged_toast_in(
    run: SourceRun, reader: StreamReader, db: psycopg.Connection
) -> None:
    db.execute("create table t (id int primary key, big text, v int)")
    db.execute("alter table t alter big set storage external, replica identity full")
    db.execute("insert into t values (1, repeat('x', 10000), 1)")
    with SourceThread(run):
        reader.wait_for(log_end(run.dsn))
        db.execute("update t set v = 2")
        db.execute("update t set id = 5")
        db.execute("delete from t")
        db.execute("insert into t values (6, repeat('y', 9000), 1)")
        reader.wait_for(log_end(run.dsn))
    records = reader.records()
    check_markers(reader.markers, records)
    assert not any(r.stamp.flags & Flag.PARTIAL for r in records)
    update = next(r for r in records if r.stamp.op is Op.UPDATE)
    assert update.value is not None
    assert update.value["before"] == {"id": 1, "big": "x" * 10000, "v": 1}
    check_same(run.dsn, fold(records), "public.t")


def test_a_partitioned_table_is_one_topic_through_its_root(
    run: SourceRun, reader: StreamReader, db: psycopg.Connection
) -> None:
    db.execute("create table t (id int primary key, v int) partition by range (id)")
    db.execute("create table t_low partition of t for values from (0) to (100)")
    db.execute("create table t_high partition of t for values from (100) to (200)")
    db.execute("insert into t select i, 0 from generate_series(1, 199) i")
    with SourceThread(replace(run, chunk_rows=50)):
        reader.wait_for(log_end(run.dsn))
        db.execute("update t set v = 1 where id % 50 = 0")
        db.execute("update t set id = 0 where id = 150")  # moves to the other partition
        reader.wait_for(log_end(run.dsn))
    records = reader.records()
    check_markers(reader.markers, records)
    assert {r.topic for r in records} == {f"{run.prefix}.public.t"}
    check_same(run.dsn, fold(records), "public.t")


def test_generated_columns_are_left_out(run: SourceRun, reader: StreamReader, db: psycopg.Connection) -> None:
    db.execute("create table t (id int primary key, v int, twice int generated always as (v * 2) stored)")
    db.execute("insert into t values (1, 1)")
    with SourceThread(run):
        reader.wait_for(log_end(run.dsn))
        db.execute("insert into t values (2, 2)")
        reader.wait_for(log_end(run.dsn))
    records = reader.records()
    assert [r.value and r.value["after"] for r in records] == [{"id": 1, "v": 1}, {"id": 2, "v": 2}]


def test_a_column_that_is_added_travels_from_then_on(
    run: SourceRun, reader: StreamReader, db: psycopg.Connection
) -> None:
    db.execute("create table t (id int primary key)")
    db.execute("insert into t values (1)")
    with SourceThread(run):
        reader.wait_for(log_end(run.dsn))
        db.execute("insert into t values (2)")
        db.execute("alter table t add v text")
        db.execute("insert into t values (3, 'x')")
        reader.wait_for(log_end(run.dsn))
    records = reader.records()
    check_markers(reader.markers, records)
    assert [r.value and r.value["after"] for r in records] == [{"id": 1}, {"id": 2}, {"id": 3, "v": "x"}]


def test_a_table_that_is_not_meant_stays_away(run: SourceRun, reader: StreamReader, db: psycopg.Connection) -> None:
    db.execute("create table t (id int primary key)")
    db.execute("create table other (id int primary key)")
    with SourceThread(replace(run, tables=("public.t",))):
        reader.wait_for(log_end(run.dsn))
        with db.transaction():
            db.execute("insert into other values (1)")
            db.execute("insert into t values (1)")
        db.execute("insert into other values (2)")
        reader.wait_for(log_end(run.dsn))
    records = reader.records()
    check_markers(reader.markers, records)
    assert {r.topic for r in records} == {f"{run.prefix}.public.t"}


def test_a_large_transaction_is_spilled_and_arrives_whole_in_one_marker(
    run: SourceRun, reader: StreamReader, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    spilled: list[int] = []
    spill = TransactionBuffer._spill

    def noting(self: TransactionBuffer) -> None:
        spilled.append(len(self._changes))
        spill(self)

    monkeypatch.setattr(TransactionBuffer, "_spill", noting)
    db.execute("create table t (id int primary key, v text)")
    with SourceThread(replace(run, spill_bytes=200_000, partitions=2)):
        reader.wait_for(log_end(run.dsn))
        with db.transaction():
            db.execute("insert into t select i, repeat('x', 100) from generate_series(1, 20000) i")
            db.execute("delete from t where id % 2 = 0")
        reader.wait_for(log_end(run.dsn))
    assert len(spilled) > 3
    assert list(Path(run.spill_dir).iterdir()) == []
    records = reader.records()
    check_markers(reader.markers, records)
    (large,) = [m for m in reader.markers if m.rows]
    assert (large.transactions, large.rows) == (1, 30_000)
    check_same(run.dsn, fold(records), "public.t")


def test_an_idle_stream_says_so_and_its_safe_time_moves(
    run: SourceRun, reader: StreamReader, db: psycopg.Connection
) -> None:
    db.execute("create table t (id int primary key)")
    with SourceThread(replace(run, idle_ms=1000)):
        first = reader.wait(lambda m: m.safe_hlc != 0 and m.kind is MarkerKind.IDLE)
        reader.wait(lambda m: m.number >= first.number + 4)
    idle = [m for m in reader.markers if m.number >= first.number]
    assert {m.kind for m in idle} == {MarkerKind.IDLE}
    assert {(m.rows, m.transactions, m.ranges) for m in idle} == {(0, 0, ())}
    gaps = [(b.closed_us - a.closed_us) / 1e6 for a, b in pairwise(idle)]
    assert all(gap > 0.9 for gap in gaps[:-1]), gaps  # the last may be the end of the stream
    assert clock.unpack(idle[-2].safe_hlc)[0] - clock.unpack(idle[0].safe_hlc)[0] > 1_000_000
    assert all(0 <= m.closed_us - clock.unpack(m.safe_hlc)[0] < 5_000_000 for m in idle[2:])
    check_markers(reader.markers, reader.records())


def test_a_heartbeat_moves_the_slot_of_an_idle_database(
    run: SourceRun, reader: StreamReader, db: psycopg.Connection
) -> None:
    db.execute("create table t (id int primary key)")

    def confirmed() -> int:
        row = db.execute(
            "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s", (run.prefix,)
        ).fetchone()
        assert row
        return lsn_int(row[0])

    with SourceThread(replace(run, heartbeat_s=0.2)):
        reader.wait_for(0)
        before = confirmed()
        # Another database of the server writes log that the stream has nothing of.
        with psycopg.connect(run.dsn, dbname="postgres", autocommit=True) as other:
            other.execute("create temp table w as select generate_series(1, 10000)")
            row = other.execute("select pg_current_wal_insert_lsn()::text").fetchone()
            assert row
        reader.wait(lambda m: resume_of(m).lsn >= lsn_int(row[0]))
        goal = resume_of(reader.markers[-1]).lsn
        reader.wait(lambda _: confirmed() >= goal)
    assert before < confirmed()


def test_a_table_without_a_key_is_refused(run: SourceRun, db: psycopg.Connection) -> None:
    db.execute("create table t (id int)")
    with SourceThread(run) as source:
        error = source.failure()
    assert (error.code, error.action) == ("source.table_without_key", Action.STOP)
    assert error.where == "public.t"


def test_no_table_is_refused(run: SourceRun) -> None:
    with SourceThread(replace(run, tables=("publik.*",))) as source:
        error = source.failure()
    assert error.code == "source.table_missing"
