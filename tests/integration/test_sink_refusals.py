"""What a sink refuses, loudly, and what it parks: real Kafka, real Spark, real PostgreSQL."""

from __future__ import annotations

from decimal import Decimal

import psycopg
import pytest
from confluent_kafka import TopicPartition
from tests.integration.sink_driver import ACCOUNT, NOTE, PYSPARK_SOCKETS, Sink, account, apply_all, rows
from tests.integration.sink_stream import SyntheticStream, insert, update

from anabranch_connectors.target_errors import (
    PartialRowMissingError,
    SchemaMismatchError,
    SinkFencedError,
    TableMissingError,
    TargetConstraintError,
)
from anabranch_schemas.envelope.cells import Cell, CellKind
from anabranch_sink.errors import (
    MarkerGapError,
    RangeExpiredError,
    RangeMismatchError,
    StreamResetError,
    TopicMissingError,
)

pytestmark = [pytest.mark.timeout(300), *PYSPARK_SOCKETS]


def test_records_that_a_marker_did_not_count_stop_the_sink(
    sink: Sink, stream: SyntheticStream, target: psycopg.Connection
) -> None:
    stream.transaction(account(1), account(2))
    stream.close(spoil=1)
    with pytest.raises(RangeMismatchError) as caught:
        apply_all(sink(), stream)
    assert "eu.orders marker 1" in caught.value.where
    assert "anabranch bootstrap FILE --source orders" in caught.value.advice
    assert rows(target, "select count(*) from account") == [(0,)]


def test_a_partial_row_without_a_row_to_complete_it_stops_the_sink(sink: Sink, stream: SyntheticStream) -> None:
    stream.transaction(update(ACCOUNT, Cell(1, CellKind.MISSING), id=1, owner="", balance=None))
    stream.close()
    with pytest.raises(PartialRowMissingError):
        apply_all(sink(), stream)


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
        apply_all(sink(), stream)
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
    apply_all(applier, stream)
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
        apply_all(sink(), stream)
    target.execute("drop table note")
    with pytest.raises(TableMissingError, match=r"create: true"):
        apply_all(sink(), stream)


def test_a_zombie_driver_is_fenced(sink: Sink, stream: SyntheticStream, target: psycopg.Connection) -> None:
    zombie = sink()
    stream.transaction(account(1))
    stream.close()
    fresh = sink()
    with pytest.raises(SinkFencedError):
        apply_all(zombie, stream)
    assert rows(target, "select count(*) from account") == [(0,)]
    apply_all(fresh, stream)
    assert rows(target, "select id from account") == [(1,)]


def test_a_gap_between_markers_is_loud(sink: Sink, stream: SyntheticStream) -> None:
    stream.close()
    applier = sink()
    apply_all(applier, stream)
    stream.number += 1
    stream.close()
    with pytest.raises(MarkerGapError, match="after marker 1 came marker 3"):
        apply_all(applier, stream)


def test_a_stream_that_begins_anew_is_loud(sink: Sink, stream: SyntheticStream) -> None:
    stream.close()
    apply_all(sink(), stream)
    stream.number = 0
    stream.branch = "b2"
    stream.close()
    with pytest.raises(StreamResetError, match="branch b2"):
        apply_all(sink(), stream)


def test_a_deleted_topic_is_told_apart_from_a_failed_job(
    sink: Sink, stream: SyntheticStream, target: psycopg.Connection
) -> None:
    stream.transaction(account(1))
    stream.close()
    topic = stream.encoder(ACCOUNT).topic
    stream.admin.delete_topics([topic])[topic].result(30)
    with pytest.raises(TopicMissingError) as caught:
        apply_all(sink(), stream)
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
        apply_all(sink(), stream)
    assert rows(target, "select count(*) from anabranch.progress") == [(0,)]
