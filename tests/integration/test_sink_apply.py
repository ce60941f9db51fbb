"""What a sink applies of markers and records: real Kafka, real Spark, real PostgreSQL."""

from __future__ import annotations

import os
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from pyspark.sql import SparkSession
from tests.integration.sink_driver import ACCOUNT, NOTE, PYSPARK_SOCKETS, Sink, account, apply_all, rows, table
from tests.integration.sink_stream import Change, SyntheticStream, delete, insert, truncate, update

from anabranch_connectors.target_errors import TargetConstraintError
from anabranch_schemas import failpoints
from anabranch_schemas.envelope.cells import Cell, CellKind
from anabranch_schemas.marker import MarkerKind
from anabranch_schemas.stamp import Op
from anabranch_schemas.table import Column, TableSchema
from anabranch_schemas.types import Decimal as DecimalType
from anabranch_schemas.types import Enumeration, Scalar
from anabranch_sink import stage
from anabranch_sink.stage import TaskPlan

pytestmark = [pytest.mark.timeout(300), *PYSPARK_SOCKETS]


def test_the_newest_row_of_every_key_is_applied(
    sink: Sink, stream: SyntheticStream, target: psycopg.Connection
) -> None:
    stream.transaction(*[account(i) for i in range(20)])
    stream.transaction(
        update(ACCOUNT, id=3, owner="bob", balance=Decimal("7.50")), delete(ACCOUNT, id=4, owner="ann", balance=None)
    )
    stream.close()
    stream.transaction(account(4, "again"), update(ACCOUNT, id=5, owner=None, balance=None))
    stream.close()
    apply_all(sink(), stream)
    assert rows(target, "select count(*) from account") == [(20,)]
    assert rows(target, "select id, owner, balance from account where id in (3, 4, 5) order by id") == [
        (3, "bob", Decimal("7.50")),
        (4, "again", Decimal("1.00")),
        (5, None, None),
    ]
    progress = (
        "select site, marker, seq, epoch, transactions, rows, safe_time is not null, vector from anabranch.progress"
    )
    assert rows(target, progress) == [(1, 2, 30, 1, 3, 24, True, {"1": 30})]


def test_a_replay_applies_nothing_twice(sink: Sink, stream: SyntheticStream, target: psycopg.Connection) -> None:
    target.execute("create table seen (n int)")
    target.execute(
        "create function note_it() returns trigger language plpgsql as "
        "'begin insert into seen values (1); return null; end'"
    )
    target.execute("create trigger t after insert or update on account for each row execute function note_it()")
    target.execute("alter table account enable always trigger t")
    stream.transaction(account(1))
    stream.close()
    apply_all(sink(), stream)
    stream.transaction(account(2))
    stream.close()
    apply_all(sink(), stream)
    assert rows(target, "select count(*) from seen") == [(2,)]
    assert rows(target, "select rows, transactions from anabranch.progress") == [(2, 2)]


def test_a_cut_is_visible_as_a_whole_or_not_at_all(
    sink: Sink, stream: SyntheticStream, target: psycopg.Connection
) -> None:
    """The second table refuses the cut, so nothing of the first may show."""
    target.execute("alter table note add check (body <> 'bad')")
    stream.transaction(account(1), insert(NOTE, id=1, body="bad"))
    stream.close()
    applier = sink()
    with pytest.raises(TargetConstraintError):
        apply_all(applier, stream)
    assert rows(target, "select count(*) from account") == [(0,)]
    assert rows(target, "select count(*) from anabranch.progress") == [(0,)]


def test_idle_markers_move_the_safe_time_without_a_job(
    sink: Sink, stream: SyntheticStream, target: psycopg.Connection, spark: SparkSession
) -> None:
    for _ in range(5):
        last = stream.close()
    applier = sink()
    group = "idle-markers"
    spark.sparkContext.setJobGroup(group, "")
    apply_all(applier, stream)
    assert list(spark.sparkContext.statusTracker().getJobIdsForGroup(group)) == []
    assert rows(target, "select marker, safe_hlc from anabranch.progress") == [(5, last.safe_hlc)]


def test_safe_time_is_null_while_the_stream_is_copying(
    sink: Sink, stream: SyntheticStream, target: psycopg.Connection
) -> None:
    stream.transaction(Change(ACCOUNT, Op.READ, {"id": 1, "owner": "a", "balance": None}), copied=True)
    stream.close(MarkerKind.COPY, consistent=False)
    apply_all(sink(), stream)
    assert rows(target, "select safe_time from anabranch.progress") == [(None,)]
    assert rows(target, "select id from account") == [(1,)]


def test_records_of_another_epoch_and_aborted_ones_are_not_applied(
    sink: Sink, stream: SyntheticStream, target: psycopg.Connection
) -> None:
    stream.transaction(account(1))
    stream.transaction(account(100))
    stream.abort()
    stream.transaction(account(2))
    stream.close()
    stream.epoch = 2
    stream.transaction(account(3))
    stream.transaction(account(101), epoch=1)
    stream.forget(account(101))
    stream.close()
    apply_all(sink(), stream)
    assert rows(target, "select id from account order by id") == [(2,), (3,)]


def test_a_truncate_empties_the_table_and_keeps_what_came_after(
    sink: Sink, stream: SyntheticStream, target: psycopg.Connection
) -> None:
    stream.transaction(*[account(i) for i in range(10)])
    stream.close()
    applier = sink()
    apply_all(applier, stream)
    stream.transaction(*[account(i) for i in range(10, 20)])
    stream.transaction(truncate(ACCOUNT), *[account(i) for i in range(20, 25)])
    stream.close()
    apply_all(applier, stream)
    assert rows(target, "select min(id), max(id), count(*) from account") == [(20, 24, 5)]


def test_unique_values_change_hands_within_a_cut(
    sink: Sink, stream: SyntheticStream, target: psycopg.Connection
) -> None:
    target.execute("create unique index on account (owner)")
    stream.transaction(account(1, "ann"), account(2, "bob"))
    stream.close()
    applier = sink()
    apply_all(applier, stream)
    stream.transaction(
        update(ACCOUNT, id=1, owner="bob", balance=None), update(ACCOUNT, id=2, owner="ann", balance=None)
    )
    stream.close()
    apply_all(applier, stream)
    assert rows(target, "select id, owner from account order by id") == [(1, "bob"), (2, "ann")]


def test_keys_change_hands_within_a_cut(sink: Sink, stream: SyntheticStream, target: psycopg.Connection) -> None:
    stream.transaction(account(1, "one"), account(2, "two"))
    stream.close()
    stream.transaction(
        delete(ACCOUNT, id=1, owner="one", balance=None),
        account(3, "one"),
        delete(ACCOUNT, id=2, owner="two", balance=None),
        account(1, "two"),
        delete(ACCOUNT, id=3, owner="one", balance=None),
        account(2, "one"),
    )
    stream.close()
    apply_all(sink(), stream)
    assert rows(target, "select id, owner from account order by id") == [(1, "two"), (2, "one")]


def test_a_partial_row_is_completed_from_the_cut_and_from_the_target(
    sink: Sink, stream: SyntheticStream, target: psycopg.Connection
) -> None:
    missing = Cell(1, CellKind.MISSING)
    stream.transaction(account(1, "large one"))
    stream.close()
    applier = sink()
    apply_all(applier, stream)
    stream.transaction(account(2, "large two"))
    stream.transaction(
        update(ACCOUNT, missing, id=1, owner="__debezium_unavailable_value", balance=Decimal("5.00")),
        update(ACCOUNT, missing, id=2, owner="__debezium_unavailable_value", balance=Decimal("6.00")),
        update(ACCOUNT, Cell(2, CellKind.TEXT, "NaN"), id=3, owner="x", balance=None),
    )
    stream.close()
    apply_all(applier, stream)
    assert rows(target, "select id, owner, balance::text from account order by id") == [
        (1, "large one", "5.00"),
        (2, "large two", "6.00"),
        (3, "x", "NaN"),
    ]


def test_foreign_keys_hold_for_a_role_that_may_not_suspend_them(
    sink: Sink, stream: SyntheticStream, target: psycopg.Connection, us_database: str
) -> None:
    """Without replica role, parents come first and children go first."""
    role = f"r_{os.urandom(4).hex()}"
    database = psycopg.conninfo.conninfo_to_dict(us_database)["dbname"]
    target.execute("drop table note")
    target.execute("create table note (id bigint primary key references account, body text)")
    target.execute(f"create role {role} login")
    target.execute(f"grant create on database {database} to {role}; grant all on account, note to {role}")
    try:
        stream.transaction(account(1), account(2), insert(NOTE, id=1, body="of 1"), insert(NOTE, id=2, body="of 2"))
        stream.close()
        applier = sink(target=psycopg.conninfo.make_conninfo(us_database, user=role))
        apply_all(applier, stream)
        with (
            psycopg.connect(us_database, user=role) as unprivileged,
            pytest.raises(psycopg.errors.InsufficientPrivilege),
        ):
            unprivileged.execute("set session_replication_role = replica")
        stream.transaction(delete(NOTE, id=2, body="of 2"), delete(ACCOUNT, id=2, owner="ann", balance=None))
        stream.transaction(account(3), insert(NOTE, id=3, body="of 3"))
        stream.close()
        apply_all(applier, stream)
        assert rows(target, "select n.id from note n join account a using (id) order by 1") == [(1,), (3,)]
    finally:
        target.execute(f"reassign owned by {role} to current_user; drop owned by {role}; drop role {role}")


def test_generated_and_identity_columns(sink: Sink, stream: SyntheticStream, target: psycopg.Connection) -> None:
    thing = table(
        "thing", Column("serial", Scalar.INT64, False, "bigint"), Column("twice", Scalar.INT64, True, "bigint")
    )
    target.execute(
        "create table thing (id bigint generated always as identity primary key, "
        "serial bigint generated always as identity, twice bigint generated always as (serial * 2) stored)"
    )
    stream.transaction(insert(thing, id=7, serial=70, twice=-1))
    stream.close()
    stream.transaction(update(thing, id=7, serial=71, twice=-1), insert(thing, id=8, serial=80, twice=-1))
    stream.close()
    apply_all(sink(row_budget=1), stream)
    assert rows(target, "select * from thing order by id") == [(7, 71, 142), (8, 80, 160)]


def test_a_partitioned_target_with_a_wider_key(sink: Sink, stream: SyntheticStream, target: psycopg.Connection) -> None:
    """ON CONFLICT cannot name the source's key there; rows that move between partitions must not stay in both."""
    target.execute("drop table note")
    target.execute("create table note (id bigint, body text, primary key (id, body)) partition by list (body)")
    target.execute(
        "create table note_a partition of note for values in ('a'); "
        "create table note_b partition of note for values in ('b')"
    )
    stream.transaction(insert(NOTE, id=1, body="a"), insert(NOTE, id=2, body="a"))
    stream.close()
    applier = sink()
    apply_all(applier, stream)
    stream.transaction(update(NOTE, id=1, body="b"))
    stream.close()
    apply_all(applier, stream)
    assert rows(target, "select tableoid::regclass::text, id from note order by id") == [("note_b", 1), ("note_a", 2)]


def test_missing_tables_are_created(sink: Sink, stream: SyntheticStream, target: psycopg.Connection) -> None:
    mood = Column("mood", Enumeration(("sad", "so 'so'")), nullable=True, source_type="app.mood")
    diary = table("diary", mood, Column("amount", DecimalType(10, 3), False, "numeric(10,3)"))
    stream.transaction(insert(diary, id=1, mood="so 'so'", amount=Decimal("1.250")))
    stream.close()
    apply_all(sink(create=True, table_map={"public.diary": "copy.diary"}), stream)
    assert rows(target, "select id, mood::text, pg_typeof(mood)::text, amount from copy.diary") == [
        (1, "so 'so'", "app.mood", Decimal("1.250"))
    ]
    with pytest.raises(psycopg.errors.UniqueViolation):
        target.execute("insert into copy.diary values (1, null, 0)")


def _small_plan(*, group: str, **facts: Any) -> stage.TaskPlan:
    return TaskPlan(group=f"{group}-small", held_max=2, batch=2, **facts)


def test_a_transaction_greater_than_memory_is_staged_in_several_goes(
    sink: Sink, stream: SyntheticStream, target: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Readers are kept by group: a group of its own gets one with its batch size.
    monkeypatch.setattr(stage, "TaskPlan", _small_plan)
    missing = Cell(1, CellKind.MISSING)
    applier = sink()
    stream.transaction(
        *[account(i % 5, f"v{i}") for i in range(40)],
        update(ACCOUNT, missing, id=4, owner="", balance=Decimal("3.00")),
        delete(ACCOUNT, id=0, owner="x", balance=None),
    )
    stream.close()
    apply_all(applier, stream)
    assert rows(target, "select id, owner, balance from account order by id") == [
        *[(i, f"v{35 + i}", Decimal("1.00")) for i in (1, 2, 3)],
        (4, "v39", Decimal("3.00")),
    ]


def test_staged_rows_that_vanish_are_staged_again(
    sink: Sink, stream: SyntheticStream, target: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the target crashes between staging and publishing: unlogged tables come back empty."""
    emptied: list[str] = []

    def crash(name: str) -> None:
        if name == "sink.after_stage" and not emptied:
            for (found,) in rows(target, "select relname from pg_class where relname like 'stage_%'"):
                target.execute(f"truncate anabranch.{found}")
                emptied.append(found)

    monkeypatch.setattr(failpoints, "hit", crash)
    stream.transaction(account(1))
    stream.close()
    apply_all(sink(), stream)
    assert emptied
    assert rows(target, "select id from account") == [(1,)]


def test_cuts_wait_for_what_they_depend_on(sink: Sink, stream: SyntheticStream, target: psycopg.Connection) -> None:
    other = SyntheticStream(stream.bootstrap, "ap.orders", f"{stream.prefix}ap", stream.schemas, site=3)
    other.transaction(account(1, "cause"))
    other.close()
    stream.transaction(account(2, "effect"))
    stream.close(vector={3: 20})
    applier = sink(streams=(stream.ref, other.ref))
    apply_all(applier, other)
    assert rows(target, "select id from account") == [(1,)]
    other.transaction(account(3))
    other.close()
    apply_all(applier, stream)
    assert rows(target, "select id from account order by id") == [(1,), (2,), (3,)]


def test_a_delete_goes_by_the_key_that_its_table_had_then(
    sink: Sink, stream: SyntheticStream, target: psycopg.Connection
) -> None:
    columns = tuple(Column(name, Scalar.INT64, nullable=False, source_type="bigint") for name in ("id", "n"))
    by_id, by_n = (TableSchema("public", "pair", columns, (key,)) for key in ("id", "n"))
    target.execute("create table pair (id bigint primary key, n bigint not null unique)")
    applier = sink()
    stream.transaction(*[insert(by_id, id=i, n=10 * i) for i in (1, 2, 3)])
    stream.close()
    apply_all(applier, stream)
    for deleted, known, left in ((1, by_n, [2, 3]), (2, by_id, [3]), (3, by_n, [])):
        stream.transaction(delete(known, id=deleted, n=10 * deleted))
        stream.close()
        apply_all(applier, stream)
        assert rows(target, "select id from pair order by id") == [(i,) for i in left]
