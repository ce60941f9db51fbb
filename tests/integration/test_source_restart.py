"""A source that is stopped, killed or overtaken: readers of committed data see every change once, whatever happened."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition
from tests.integration.source_reader import StreamReader, check_stream, log_end
from tests.source_process import SourceProcess, SourceRun, SourceThread
from tests.waiting import wait_until

from anabranch_schemas.clock import HybridClock
from anabranch_schemas.errors import AnabranchError
from anabranch_schemas.marker import MarkerKind, SnapshotMarker
from anabranch_source.publish import SnapshotPublisher


@pytest.fixture
def run(run: SourceRun) -> SourceRun:
    return replace(run, chunk_rows=100, partitions=2)


@pytest.fixture
def db(db: psycopg.Connection) -> psycopg.Connection:
    db.execute("create table t (id int primary key, v text)")
    db.execute("insert into t select i, 'copied' from generate_series(1, 450) i")
    return db


def change(db: psycopg.Connection) -> None:
    """Touch rows in every way, in several transactions."""
    db.execute("insert into t select max(id) + 1, 'new' from t")
    db.execute("update t set v = v || '.' where id % 100 = 0")
    db.execute("delete from t where id in (select min(id) from t)")
    db.execute("update t set id = id + 100000 where id in (select min(id) from t)")


def test_a_restart_goes_on_behind_the_last_marker(run: SourceRun, reader: StreamReader, db: psycopg.Connection) -> None:
    with SourceThread(run):
        reader.wait_for(log_end(run.dsn))
        change(db)
        reader.wait_for(log_end(run.dsn))
    last = _last(reader)
    change(db)
    with SourceThread(run):
        first = reader.wait(lambda m: m.epoch > last.epoch)
        change(db)
        reader.wait_for(log_end(run.dsn))
    assert (first.epoch, first.number, first.branch) == (last.epoch + 1, last.number + 1, last.branch)
    check_stream(reader, run.dsn, "public.t")


def test_a_stop_publishes_what_was_read(run: SourceRun, reader: StreamReader, db: psycopg.Connection) -> None:
    run = replace(run, interval_ms=60_000, idle_ms=60_000)
    with SourceThread(run) as source:
        reader.wait(lambda m: m.kind is MarkerKind.COPY and not m.copying)
        change(db)
        del source
    number = len(reader.markers)
    with SourceThread(run):
        change(db)
    with SourceThread(replace(run, idle_ms=100)):
        reader.wait_for(log_end(run.dsn))
    assert len(reader.markers) > number
    check_stream(reader, run.dsn, "public.t")


@pytest.mark.parametrize(
    "place",
    [
        "source.before_commit:1",
        "source.before_commit:3",
        "source.after_commit:1",
        "source.after_commit:4",
        "source.mid_chunk:1",
        "source.mid_chunk:3",
    ],
)
def test_a_kill_while_copying_loses_and_repeats_nothing(
    run: SourceRun, reader: StreamReader, db: psycopg.Connection, place: str
) -> None:
    with SourceProcess(run, place) as source:
        assert source.killed()
    change(db)
    with SourceThread(run):
        reader.wait_for(log_end(run.dsn))
    check_stream(reader, run.dsn, "public.t")


@pytest.mark.parametrize("place", ["source.before_commit", "source.after_commit"])
def test_a_kill_while_streaming_loses_and_repeats_nothing(
    run: SourceRun, reader: StreamReader, db: psycopg.Connection, place: str
) -> None:
    with SourceThread(run):
        reader.wait_for(log_end(run.dsn))
    change(db)
    with SourceProcess(run, place) as source:
        assert source.killed()
    change(db)
    with SourceThread(run):
        reader.wait_for(log_end(run.dsn))
    check_stream(reader, run.dsn, "public.t")


def test_a_kill_while_spilling_loses_and_repeats_nothing(
    run: SourceRun, reader: StreamReader, db: psycopg.Connection
) -> None:
    run = replace(run, spill_bytes=100_000)
    with SourceThread(run):
        reader.wait_for(log_end(run.dsn))
    db.execute("insert into t select i, repeat('x', 100) from generate_series(1000, 9000) i")
    with SourceProcess(run, "source.mid_spill:2") as source:
        assert source.killed()
    assert list(Path(run.spill_dir).iterdir()) == []
    with SourceThread(run):
        reader.wait_for(log_end(run.dsn))
    check_stream(reader, run.dsn, "public.t")


@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
def test_a_worker_that_comes_back_from_the_dead_ends_as_fenced(
    run: SourceRun, reader: StreamReader, db: psycopg.Connection, *, busy: bool
) -> None:
    # An idle one has nothing to commit: all it notices is that its connection was ended.
    with SourceProcess(run if busy else replace(run, idle_ms=60_000)) as zombie:
        reader.wait(lambda m: not m.copying)
        os.kill(zombie.process.pid, signal.SIGSTOP)
        if busy:
            change(db)
        with SourceThread(run):
            reader.wait_for(log_end(run.dsn))
            os.kill(zombie.process.pid, signal.SIGCONT)
            if busy:
                change(db)
            outcome = zombie.outcome()
            change(db)
            reader.wait_for(log_end(run.dsn))
    assert (outcome["code"], outcome["action"]) == ("source.fenced", "stop")
    assert {m.epoch for m in reader.markers} == {1, 2}
    check_stream(reader, run.dsn, "public.t")


def test_a_worker_that_is_overtaken_in_a_snapshot_ends_as_fenced(
    run: SourceRun, reader: StreamReader, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SourceThread(run) as first:
        reader.wait_for(log_end(run.dsn))
        # A successor fences this one when rows are produced and before they are committed.
        produced = SnapshotPublisher._publish

        def overtaken(self: SnapshotPublisher, transaction: object) -> None:
            produced(self, transaction)  # type: ignore[arg-type]
            monkeypatch.undo()
            run_settings = run.settings()
            successor = SnapshotPublisher(run_settings, clock=self._clock, marker_frame=b"", now_us=self._now_us)
            successor.fence()
            successor.stop()

        monkeypatch.setattr(SnapshotPublisher, "_publish", overtaken)
        change(db)
        assert first.failure().code == "source.fenced"
    with SourceThread(run):
        reader.wait_for(log_end(run.dsn))
    check_stream(reader, run.dsn, "public.t")


def test_hybrid_time_goes_on_where_it_was_when_the_servers_clock_is_set_back(
    run: SourceRun, reader: StreamReader, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ClockAhead(HybridClock):
        def tick(self, micros: int | None = None) -> int:
            return super().tick((micros or self._now()) + 3_600_000_000)

    monkeypatch.setattr("anabranch_source.worker.HybridClock", ClockAhead)
    with SourceThread(run):
        reader.wait_for(log_end(run.dsn))
        change(db)
        reader.wait_for(log_end(run.dsn))
    monkeypatch.undo()
    with SourceThread(run):
        change(db)
        reader.wait_for(log_end(run.dsn))
    check_stream(reader, run.dsn, "public.t")


def test_a_failed_worker_does_not_hold_readers_back(
    run: SourceRun, reader: StreamReader, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BrokenError(AnabranchError):
        pass

    with SourceThread(run) as source:
        reader.wait_for(log_end(run.dsn))

        def broken(*_: object) -> None:
            raise BrokenError("in the middle of a snapshot")

        monkeypatch.setattr(SnapshotPublisher, "close", broken)
        change(db)
        assert isinstance(source.failure(), BrokenError)
    monkeypatch.undo()
    # A reader of committed data stops at an open transaction; at an aborted one it goes on to the end.
    # The coordinator answers an abort before it has written it to every partition.
    wait_until(lambda: all(_committed_end(run, partition) == _written_end(run, partition) for partition in range(2)))
    with SourceThread(run):
        reader.wait_for(log_end(run.dsn))
    check_stream(reader, run.dsn, "public.t")


def _last(reader: StreamReader) -> SnapshotMarker:
    """Return the newest marker, read to the end."""
    consumer = Consumer({"bootstrap.servers": reader._kafka["bootstrap.servers"], "group.id": "test"})
    try:
        _, end = consumer.get_watermark_offsets(TopicPartition(f"{reader.prefix}.markers", 0), timeout=30)
    finally:
        consumer.close()
    place = reader._consumer.position([TopicPartition(f"{reader.prefix}.markers", 0)])[0].offset
    while place < end:
        message = reader._consumer.poll(30)
        assert message is not None
        error = message.error()
        if error is not None:
            assert error.code() == KafkaError._PARTITION_EOF
            break
        from anabranch_schemas import marker

        value = message.value()
        assert isinstance(value, bytes)
        reader.markers.append(marker.decode(value[5:]))
    return reader.markers[-1]


def _end(run: SourceRun, partition: int, isolation: str) -> int:
    consumer = Consumer({**run.consumer_kafka, "group.id": "test", "isolation.level": isolation})
    try:
        _, end = consumer.get_watermark_offsets(TopicPartition(f"{run.prefix}.public.t", partition), timeout=30)
    finally:
        consumer.close()
    return int(end)


def _committed_end(run: SourceRun, partition: int) -> int:
    return _end(run, partition, "read_committed")


def _written_end(run: SourceRun, partition: int) -> int:
    return _end(run, partition, "read_uncommitted")
