"""Ranges read from a real broker: all of them, nothing else, and a reason when one cannot be read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # as its documentation names it

from anabranch.stack.kafka import KafkaBroker
from anabranch.stack.service import KafkaService
from anabranch_schemas import stamp
from anabranch_schemas.errors import StampError
from anabranch_schemas.marker import Range
from anabranch_sink.errors import RangeExpiredError, TopicMissingError
from anabranch_sink.ranges import MarkedRange
from anabranch_sink.read import RangeReader

PARTITIONS = 3


class Writer:
    """Writes records with a stamp of their own number to one topic."""

    def __init__(self, kafka: KafkaService, topic: str) -> None:
        self.topic = topic
        self.admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
        self.admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result(30)
        self._producer = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": topic})
        self._producer.init_transactions(30)

    def open(self, count: int, *, bare: bool = False) -> None:
        """Write records to every partition in a transaction that stays open."""
        self._producer.begin_transaction()
        for partition in range(PARTITIONS):
            for number in range(count):
                headers: list[tuple[str, str | bytes | None]] = [(stamp.HEADER, b"%d" % number)]
                self._producer.produce(self.topic, b"v%d" % number, b"k", partition, headers=[] if bare else headers)
        self._producer.flush(30)

    def commit(self) -> None:
        """Commit what is open."""
        self._producer.commit_transaction(30)

    def abort(self) -> None:
        """Abort what is open."""
        self._producer.abort_transaction(30)

    def ranges(self, first: int, end: int, rows: int) -> list[MarkedRange]:
        """Return the same range of every partition."""
        return [MarkedRange(Range(self.topic, p, first, end, rows, 0), "eu.t", 1, 1) for p in range(PARTITIONS)]


@pytest.fixture
def writer(kafka: KafkaService, topic_prefix: str) -> Writer:
    return Writer(kafka, topic_prefix)


@pytest.fixture
def reader(kafka: KafkaService, topic_prefix: str) -> Iterator[RangeReader]:
    reader = RangeReader({"bootstrap.servers": kafka.bootstrap}, topic_prefix, batch=100)
    yield reader
    reader.close()


def read(reader: RangeReader, ranges: list[MarkedRange]) -> dict[int, list[tuple[int, bytes | None, bytes]]]:
    """Return (offset, value, stamp) of all records, by partition."""
    found: dict[int, list[tuple[int, bytes | None, bytes]]] = {}
    for records in reader.read(ranges):
        part = zip(records.offsets.tolist(), records.values, records.stamps, strict=True)
        found.setdefault(records.partition, []).extend(part)
    return found


def test_ranges_of_many_partitions_are_read_to_their_last_record_and_not_beyond(
    writer: Writer, reader: RangeReader
) -> None:
    writer.open(500)
    writer.commit()
    # Offsets 0 to 499 are records; 500 is the commit. The second range goes on behind it.
    writer.open(300)
    writer.commit()
    expected = [(n, b"v%d" % n, b"%d" % n) for n in range(10, 450)]
    assert read(reader, writer.ranges(10, 450, 440)) == dict.fromkeys(range(PARTITIONS), expected)
    expected = [(n + 501, b"v%d" % n, b"%d" % n) for n in range(300)]
    assert read(reader, writer.ranges(501, 801, 300)) == dict.fromkeys(range(PARTITIONS), expected)
    # One partition alone, and backwards: the reader is kept for whatever comes next.
    assert read(reader, writer.ranges(0, 1, 1)[1:2]) == {1: [(0, b"v0", b"0")]}


def test_records_of_an_aborted_transaction_between_two_ranges_are_not_seen(writer: Writer, reader: RangeReader) -> None:
    writer.open(2)
    writer.commit()
    writer.open(200)
    writer.abort()
    writer.open(2)
    writer.commit()
    both = [*writer.ranges(0, 2, 2), *writer.ranges(204, 206, 2)]
    offsets = {p: [offset for offset, _, _ in found] for p, found in read(reader, both).items()}
    assert all(part == [0, 1, 204, 205] for part in offsets.values())
    assert len(offsets) == PARTITIONS


def test_a_transaction_that_shows_late_is_waited_for(writer: Writer, reader: RangeReader) -> None:
    writer.open(50)
    # Longer than it takes until the reader begins to doubt.
    commit = threading.Timer(2.0, writer.commit)
    commit.start()
    found = read(reader, writer.ranges(0, 50, 50))
    commit.join()
    assert [len(part) for part in found.values()] == [50] * PARTITIONS


def test_a_range_that_is_gone_is_told_and_the_reader_goes_on(writer: Writer, reader: RangeReader) -> None:
    writer.open(50)
    writer.commit()
    deleted = writer.admin.delete_records([TopicPartition(writer.topic, 1, 20)])
    [done.result(30) for done in deleted.values()]
    with pytest.raises(RangeExpiredError, match="now begins at offset 20"):
        read(reader, writer.ranges(0, 50, 50))
    with pytest.raises(RangeExpiredError, match="ends at offset 51"):
        read(reader, writer.ranges(40, 60, 20))
    assert len(read(reader, writer.ranges(40, 50, 10))[1]) == 10
    writer.admin.delete_topics([writer.topic])[writer.topic].result(30)
    with pytest.raises(TopicMissingError):
        read(reader, writer.ranges(40, 50, 10))


def test_a_record_without_a_stamp_is_told(writer: Writer, reader: RangeReader) -> None:
    writer.open(1, bare=True)
    writer.commit()
    with pytest.raises(StampError, match="something else writes this topic"):
        read(reader, writer.ranges(0, 1, 1))


def test_a_broker_that_comes_back_is_waited_for(server_directory: Path, topic_prefix: str) -> None:
    broker = KafkaBroker(server_directory / topic_prefix)
    broker.start()
    writer = Writer(broker, topic_prefix)
    reader = RangeReader({"bootstrap.servers": broker.bootstrap, "log_level": "0"}, topic_prefix)
    try:
        writer.open(50)
        writer.commit()
        assert len(read(reader, writer.ranges(0, 50, 50))) == PARTITIONS
        broker.stop()
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read, reader, writer.ranges(10, 50, 40))
            with pytest.raises(TimeoutError):
                reading.result(2.5)
            broker.start()
            assert [len(part) for part in reading.result(60).values()] == [40] * PARTITIONS
    finally:
        reader.close()
        broker.stop()
