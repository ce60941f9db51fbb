"""What a sink makes of markers and records: real Kafka, real Spark, real PostgreSQL."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import TopicPartition
from pyspark.sql import SparkSession
from tests.integration.sink_stream import Change, Schemas, SyntheticStream, delete, insert, truncate, update

from anabranch.stack.service import KafkaService
from anabranch_connectors.postgres.target import PostgresTarget
from anabranch_connectors.target_errors import (
    PartialRowMissingError,
    SchemaMismatchError,
    SinkFencedError,
    TableMissingError,
    TargetConstraintError,
)
from anabranch_schemas import failpoints
from anabranch_schemas.envelope.cells import Cell, CellKind
from anabranch_schemas.marker import MarkerKind
from anabranch_schemas.stamp import Op
from anabranch_schemas.table import Column, TableSchema
from anabranch_schemas.types import Decimal as DecimalType
from anabranch_schemas.types import Enumeration, Scalar
from anabranch_sink import session, stage
from anabranch_sink.apply import Applier
from anabranch_sink.config import SinkConfig
from anabranch_sink.errors import (
    MarkerGapError,
    RangeExpiredError,
    RangeMismatchError,
    StreamResetError,
    TopicMissingError,
)
from anabranch_sink.stage import TaskPlan

pytestmark = [
    pytest.mark.timeout(300),
    # PySpark leaves the sockets that answers came over to the garbage collector.
    pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]


def table(name: str, *columns: Column, key: tuple[str, ...] = ("id",)) -> TableSchema:
    return TableSchema(
        "public", name, (Column("id", Scalar.INT64, nullable=False, source_type="bigint"), *columns), key
    )


def text(name: str) -> Column:
    return Column(name, Scalar.TEXT, nullable=True, source_type="text")


ACCOUNT = table("account", text("owner"), Column("balance", DecimalType(12, 2), True, "numeric(12,2)"))
NOTE = table("note", text("body"))


@pytest.fixture(scope="module")
def spark(spark_jars: tuple[Path, ...]) -> SparkSession:
    """Return the one session of the sink's tests; it ends with the process."""
    return session.build(SinkConfig("tests", "us", "", (), {}, Path(), spark="local[2,4]", jars=spark_jars))


@pytest.fixture
def stream(kafka: KafkaService, topic_prefix: str) -> SyntheticStream:
    return SyntheticStream(kafka.bootstrap, "eu.orders", topic_prefix, Schemas())


@pytest.fixture
def target(us_database: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(us_database, autocommit=True) as connection:
        connection.execute("create table account (id bigint primary key, owner text, balance numeric(12,2))")
        connection.execute("create table note (id bigint primary key, body text)")
        yield connection


@pytest.fixture
def config(stream: SyntheticStream, us_database: str, tmp_path: Path) -> SinkConfig:
    return SinkConfig(
        "orders-us",
        "us",
        us_database,
        (stream.ref,),
        {"bootstrap.servers": stream.bootstrap},
        tmp_path / "checkpoint",
        spark="local[2,4]",
    )


Sink = Callable[..., Applier]


@pytest.fixture
def sink(
    spark: SparkSession, config: SinkConfig, stream: SyntheticStream, target: psycopg.Connection
) -> Iterator[Sink]:
    """Return a function that starts a driver of the sink; settings by keyword."""
    del target  # its tables come first
    started: list[tuple[Applier, PostgresTarget]] = []

    def start(**settings: Any) -> Applier:
        chosen = replace(config, **settings)
        part = PostgresTarget(chosen.target, chosen.name, create=chosen.create)
        started.append((Applier(spark, chosen, stream.schemas, part), part))
        return started[-1][0]

    yield start
    for applier, part in started:
        applier.close()
        part.release(None)


def run(applier: Applier, stream: SyntheticStream) -> None:
    """Apply until the stream's newest marker is applied; a marker is visible a moment after its commit."""
    for _ in range(200):
        applier.run(lambda: False)
        if stream.name in applier.applied and applier.applied[stream.name].marker == stream.number:
            return
        applier.markers.poll(0.05)
    raise AssertionError(f"marker {stream.number} was not applied: {applier.applied}")


def account(number: int, owner: str = "ann", balance: str = "1.00") -> Change:
    return insert(ACCOUNT, id=number, owner=owner, balance=Decimal(balance))


def rows(target: psycopg.Connection, query: str) -> list[tuple[Any, ...]]:
    return target.execute(query).fetchall()


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
    run(sink(), stream)
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
    run(sink(), stream)
    stream.transaction(account(2))
    stream.close()
    run(sink(), stream)
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
        run(applier, stream)
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
    run(applier, stream)
    assert list(spark.sparkContext.statusTracker().getJobIdsForGroup(group)) == []
    assert rows(target, "select marker, safe_hlc from anabranch.progress") == [(5, last.safe_hlc)]


def test_safe_time_is_null_while_the_stream_is_copying(
    sink: Sink, stream: SyntheticStream, target: psycopg.Connection
) -> None:
    stream.transaction(Change(ACCOUNT, Op.READ, {"id": 1, "owner": "a", "balance": None}), copied=True)
    stream.close(MarkerKind.COPY, consistent=False)
    run(sink(), stream)
    assert rows(target, "select safe_time from anabranch.progress") == [(None,)]
    assert rows(target, "select id from account") == [(1,)]


def test_records_that_a_marker_did_not_count_stop_the_sink(
    sink: Sink, stream: SyntheticStream, target: psycopg.Connection
) -> None:
    stream.transaction(account(1), account(2))
    stream.close(spoil=1)
    with pytest.raises(RangeMismatchError) as caught:
        run(sink(), stream)
    assert "eu.orders marker 1" in caught.value.where
    assert "anabranch bootstrap FILE --source orders" in caught.value.advice
    assert rows(target, "select count(*) from account") == [(0,)]


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
    run(sink(), stream)
    assert rows(target, "select id from account order by id") == [(2,), (3,)]


def test_a_truncate_empties_the_table_and_keeps_what_came_after(
    sink: Sink, stream: SyntheticStream, target: psycopg.Connection
) -> None:
    stream.transaction(*[account(i) for i in range(10)])
    stream.close()
    applier = sink()
    run(applier, stream)
    stream.transaction(*[account(i) for i in range(10, 20)])
    stream.transaction(truncate(ACCOUNT), *[account(i) for i in range(20, 25)])
    stream.close()
    run(applier, stream)
    assert rows(target, "select min(id), max(id), count(*) from account") == [(20, 24, 5)]


def test_unique_values_change_hands_within_a_cut(
    sink: Sink, stream: SyntheticStream, target: psycopg.Connection
) -> None:
    target.execute("create unique index on account (owner)")
    stream.transaction(account(1, "ann"), account(2, "bob"))
    stream.close()
    applier = sink()
    run(applier, stream)
    stream.transaction(
        update(ACCOUNT, id=1, owner="bob", balance=None), update(ACCOUNT, id=2, owner="ann", balance=None)
    )
    stream.close()
    run(applier, stream)
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
    run(sink(), stream)
    assert rows(target, "select id, owner from account order by id") == [(1, "two"), (2, "one")]


def test_a_partial_row_is_completed_from_the_cut_and_from_the_target(
    sink: Sink, stream: SyntheticStream, target: psycopg.Connection
) -> None:
    missing = Cell(1, CellKind.MISSING)
    stream.transaction(account(1, "large one"))
    stream.close()
    applier = sink()
    run(applier, stream)
    stream.transaction(account(2, "large two"))
    stream.transaction(
        update(ACCOUNT, missing, id=1, owner="__debezium_unavailable_value", balance=Decimal("5.00")),
        update(ACCOUNT, missing, id=2, owner="__debezium_unavailable_value", balance=Decimal("6.00")),
        update(ACCOUNT, Cell(2, CellKind.TEXT, "NaN"), id=3, owner="x", balance=None),
    )
    stream.close()
    run(applier, stream)
    assert rows(target, "select id, owner, balance::text from account order by id") == [
        (1, "large one", "5.00"),
        (2, "large two", "6.00"),
        (3, "x", "NaN"),
    ]


def test_a_partial_row_without_a_row_to_complete_it_stops_the_sink(sink: Sink, stream: SyntheticStream) -> None:
    stream.transaction(update(ACCOUNT, Cell(1, CellKind.MISSING), id=1, owner="", balance=None))
    stream.close()
    with pytest.raises(PartialRowMissingError):
        run(sink(), stream)


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
        run(applier, stream)
        with (
            psycopg.connect(us_database, user=role) as unprivileged,
            pytest.raises(psycopg.errors.InsufficientPrivilege),
        ):
            unprivileged.execute("set session_replication_role = replica")
        stream.transaction(delete(NOTE, id=2, body="of 2"), delete(ACCOUNT, id=2, owner="ann", balance=None))
        stream.transaction(account(3), insert(NOTE, id=3, body="of 3"))
        stream.close()
        run(applier, stream)
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
    run(sink(row_budget=1), stream)
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
    run(applier, stream)
    stream.transaction(update(NOTE, id=1, body="b"))
    stream.close()
    run(applier, stream)
    assert rows(target, "select tableoid::regclass::text, id from note order by id") == [("note_b", 1), ("note_a", 2)]


def test_a_refused_row_stops_the_sink_and_is_named(
    sink: Sink, stream: SyntheticStream, target: psycopg.Connection
) -> None:
    target.execute("alter table account add constraint positive check (balance > 0)")
    stream.transaction(account(1))
    stream.close()
    stream.transaction(account(2))
    seq = stream.transaction(account(3, "secret", "-9.00"))
    stream.close()
    with pytest.raises(TargetConstraintError) as caught:
        run(sink(), stream)
    shown = str(caught.value)
    assert caught.value.constraint == "positive"
    assert caught.value.where == "public.account"
    assert f"seq {seq} (txid {seq + 7}) of eu.orders marker 2: {stream.encoder(ACCOUNT).topic}[" in shown
    assert "secret" not in shown
    assert "9.00" not in shown
    assert rows(target, "select id from account") == [(1,)], "what came before the refused marker is applied"
    assert rows(target, "select marker from anabranch.progress") == [(1,)]


def test_a_refused_transaction_is_parked_whole_and_alone(
    sink: Sink, stream: SyntheticStream, target: psycopg.Connection
) -> None:
    target.execute("alter table account add constraint positive check (balance > 0)")
    stream.transaction(account(1))
    stream.close()
    stream.transaction(account(2))
    seq = stream.transaction(account(3), insert(NOTE, id=3, body="of the same transaction"), account(4, "x", "-9.00"))
    stream.transaction(account(5), update(ACCOUNT, id=2, owner="later", balance=Decimal("2.00")))
    stream.close()
    stream.transaction(account(6))
    stream.close()
    applier = sink(on_constraint="park")
    run(applier, stream)
    assert rows(target, "select id, owner from account order by id") == [
        (1, "ann"),
        (2, "later"),
        (5, "ann"),
        (6, "ann"),
    ]
    assert rows(target, "select count(*) from note") == [(0,)]
    parked = "select stream, marker, seq, txid, code, sqlstate, constraint_name, "
    parked += "jsonb_array_length(places) > 0 from anabranch.quarantine"
    assert rows(target, parked) == [("eu.orders", 2, seq, seq + 7, "sink.constraint", "23514", "positive", True)]
    assert rows(target, "select quarantined from anabranch.sink") == [(1,)]


def test_missing_tables_and_columns_are_told(sink: Sink, stream: SyntheticStream, target: psycopg.Connection) -> None:
    target.execute("drop table note; create table note (id bigint primary key)")
    stream.transaction(insert(NOTE, id=1, body="a"))
    stream.close()
    with pytest.raises(SchemaMismatchError, match="no column body"):
        run(sink(), stream)
    target.execute("drop table note")
    with pytest.raises(TableMissingError, match=r"create: true"):
        run(sink(), stream)


def test_missing_tables_are_created(sink: Sink, stream: SyntheticStream, target: psycopg.Connection) -> None:
    mood = Column("mood", Enumeration(("sad", "so 'so'")), nullable=True, source_type="app.mood")
    diary = table("diary", mood, Column("amount", DecimalType(10, 3), False, "numeric(10,3)"))
    stream.transaction(insert(diary, id=1, mood="so 'so'", amount=Decimal("1.250")))
    stream.close()
    run(sink(create=True, table_map={"public.diary": "copy.diary"}), stream)
    assert rows(target, "select id, mood::text, pg_typeof(mood)::text, amount from copy.diary") == [
        (1, "so 'so'", "app.mood", Decimal("1.250"))
    ]
    with pytest.raises(psycopg.errors.UniqueViolation):
        target.execute("insert into copy.diary values (1, null, 0)")


def test_a_zombie_driver_is_fenced(sink: Sink, stream: SyntheticStream, target: psycopg.Connection) -> None:
    zombie = sink()
    stream.transaction(account(1))
    stream.close()
    fresh = sink()
    with pytest.raises(SinkFencedError):
        run(zombie, stream)
    assert rows(target, "select count(*) from account") == [(0,)]
    run(fresh, stream)
    assert rows(target, "select id from account") == [(1,)]


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
    run(applier, stream)
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
    run(sink(), stream)
    assert emptied
    assert rows(target, "select id from account") == [(1,)]


def test_cuts_wait_for_what_they_depend_on(
    spark: SparkSession, config: SinkConfig, stream: SyntheticStream, target: psycopg.Connection
) -> None:
    other = SyntheticStream(stream.bootstrap, "ap.orders", f"{stream.prefix}ap", stream.schemas, site=3)
    other.transaction(account(1, "cause"))
    other.close()
    stream.transaction(account(2, "effect"))
    stream.close(vector={3: 20})
    part = PostgresTarget(config.target, config.name)
    applier = Applier(spark, replace(config, streams=(stream.ref, other.ref)), stream.schemas, part)
    try:
        run(applier, other)
        assert rows(target, "select id from account") == [(1,)]
        other.transaction(account(3))
        other.close()
        run(applier, stream)
        assert rows(target, "select id from account order by id") == [(1,), (2,), (3,)]
    finally:
        applier.close()
        part.release(None)


def test_a_gap_between_markers_is_loud(sink: Sink, stream: SyntheticStream) -> None:
    stream.close()
    applier = sink()
    run(applier, stream)
    stream.number += 1
    stream.close()
    with pytest.raises(MarkerGapError, match="after marker 1 came marker 3"):
        run(applier, stream)


def test_a_stream_that_begins_anew_is_loud(sink: Sink, stream: SyntheticStream) -> None:
    stream.close()
    run(sink(), stream)
    stream.number = 0
    stream.branch = "b2"
    stream.close()
    with pytest.raises(StreamResetError, match="branch b2"):
        run(sink(), stream)


def test_a_deleted_topic_is_told_apart_from_a_failed_job(
    sink: Sink, stream: SyntheticStream, target: psycopg.Connection
) -> None:
    stream.transaction(account(1))
    stream.close()
    topic = stream.encoder(ACCOUNT).topic
    stream.admin.delete_topics([topic])[topic].result(30)
    with pytest.raises(TopicMissingError) as caught:
        run(sink(), stream)
    assert topic in caught.value.where
    assert rows(target, "select count(*) from anabranch.progress") == [(0,)]


def test_expired_records_are_told_apart_from_a_failed_job(
    sink: Sink, stream: SyntheticStream, target: psycopg.Connection
) -> None:
    stream.transaction(*[account(i) for i in range(10)])
    stream.close()
    topic = stream.encoder(ACCOUNT).topic
    places = [TopicPartition(topic, partition, -1) for partition in range(stream.partitions)]
    for deleted in stream.admin.delete_records(places).values():
        deleted.result(30)
    with pytest.raises(RangeExpiredError, match="retention"):
        run(sink(), stream)
    assert rows(target, "select count(*) from anabranch.progress") == [(0,)]
