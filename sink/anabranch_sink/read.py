"""Reads exactly the ranges of a cut in a task, and says what is wrong when that fails.

Tasks read with librdkafka and not with Spark's Kafka source: 2.5 µs of CPU a record instead of 8, and no plan for every
cut (decision 14).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from anabranch_schemas import stamp
from anabranch_schemas.errors import AnabranchError, StampError
from anabranch_sink.errors import KafkaReadError, RangeExpiredError, TopicMissingError, bootstrap_advice
from anabranch_sink.ranges import MarkedRange, extents

_TIMEOUT_S = 5.0
# Records of one call: a call has a fixed price, and what it returns is held twice for a moment.
BATCH = 8192
# And in bytes, by the mean size of what came last; before anything has come, as if records were large.
_BATCH_BYTES = 16 << 20
_MEAN_BYTES = 16 << 10
# Without a record for so long we ask Kafka whether the range is still there. A committed transaction shows in one
# partition a little earlier than in another, so a range that is not readable yet is nothing to complain about.
_DOUBT_S = 1.0
_STALLED_S = 30.0
_SETTINGS = {
    "enable.auto.commit": False,
    "isolation.level": "read_committed",
    "auto.offset.reset": "error",
    # What is fetched beyond a range is thrown away: 16 MB hide a broker's answer time and waste little.
    "queued.max.messages.kbytes": 16 << 10,
    # 1 s by default: how long a full queue is left alone. 160k records/s with it, 480k with 5 ms.
    "fetch.queue.backoff.ms": 5,
    "fetch.wait.max.ms": 50,
}

Headers = list[tuple[str, bytes]]


@dataclass(frozen=True, slots=True)
class Records:
    """Records of one partition in order of their offsets, columns of equal length."""

    topic: str
    partition: int
    offsets: npt.NDArray[np.int64]
    keys: list[bytes | None]
    values: list[bytes | None]
    stamps: list[bytes]
    more: dict[int, Headers]
    """All headers of the records that have more than the stamp."""

    def only(self, kept: npt.NDArray[np.int64]) -> Records:
        """Return the records at these places."""
        rows = kept.tolist()
        return Records(
            self.topic,
            self.partition,
            self.offsets[kept],
            [self.keys[row] for row in rows],
            [self.values[row] for row in rows],
            [self.stamps[row] for row in rows],
            {new: self.more[old] for new, old in enumerate(rows) if old in self.more} if self.more else {},
        )


class RangeReader:
    """One consumer for the tasks that run in this process, one after another."""

    def __init__(self, kafka: Mapping[str, str], group: str, batch: int = BATCH) -> None:
        """`group` is asked for by the client and shows in the broker's logs; nothing is committed to it."""
        self._kafka = dict(kafka)
        self._batch = batch
        self._mean = _MEAN_BYTES
        self._consumer = Consumer({**kafka, **_SETTINGS, "group.id": group})

    def read(self, ranges: Sequence[MarkedRange]) -> Iterator[Records]:
        """Yield the records of the ranges, and what lies between a partition's ranges.

        Raises:
            RangeExpiredError, TopicMissingError: if a range is no longer there.
            KafkaReadError: if Kafka does not give it.
            StampError: if a record has no stamp.
        """
        ends: dict[tuple[str, int], int] = {}
        places = []
        for topic, partitions in extents(ranges).items():
            for partition, (first, end) in partitions.items():
                ends[topic, partition] = end
                places.append(TopicPartition(topic, partition, first))
        left = sum(marked.range.rows for marked in ranges)
        alone = len(ends) == 1
        self._consumer.assign(places)
        try:
            while ends:
                messages = self._next(left, ranges)
                parts = {next(iter(ends)): messages} if alone else _by_place(messages)
                for place in parts.keys() & ends.keys():
                    part, end = parts[place], ends[place]
                    if (part[-1].offset() or 0) >= end - 1:
                        # An extent ends behind a record, never behind a gap.
                        del ends[place]
                        if ends:
                            self._consumer.incremental_unassign([TopicPartition(*place)])
                        part = [message for message in part if (message.offset() or 0) < end]
                    left -= len(part)
                    if part:
                        yield _records(*place, part)
        finally:
            self._consumer.unassign()

    def close(self) -> None:
        """Let go of the connections."""
        self._consumer.close()

    def _next(self, left: int, ranges: Sequence[MarkedRange]) -> list[Message]:
        """Return the next records, at least one."""
        began = doubted = time.monotonic()
        said = ""
        while True:
            # A call waits until it has as many as it was asked for: never ask for more than there must be.
            wanted = max(1, min(left, self._batch, _BATCH_BYTES // self._mean))
            messages = self._consumer.consume(wanted, timeout=_DOUBT_S)
            good = [message for message in messages if message.error() is None]
            if good:
                self._mean = 1 + sum(map(len, good)) // len(good)
                return good
            error = next((error for message in messages if (error := message.error()) is not None), None)
            said = error.str() if error is not None else said
            now = time.monotonic()
            if error is not None or now - doubted >= _DOUBT_S:
                try:
                    found = diagnose(self._kafka, ranges)
                except KafkaException as failure:
                    said = failure.args[0].str()  # brokers come back; until then nothing is known of the range
                else:
                    if found is not None:
                        raise found
                doubted = time.monotonic()
            if now - began >= _STALLED_S:
                raise KafkaReadError(
                    f"no record came for {now - began:.0f} s{f': {said}' if said else ''}",
                    where=ranges[0].where,
                    advice="check the brokers, and whether a transaction hangs (kafka-transactions.sh find-hanging)",
                )


def _by_place(messages: list[Message]) -> dict[tuple[str, int], list[Message]]:
    found: dict[tuple[str, int], list[Message]] = {}
    for message in messages:
        found.setdefault((message.topic() or "", message.partition() or 0), []).append(message)
    return found


def _records(topic: str, partition: int, messages: list[Message]) -> Records:
    # The client's type hints also allow what only producers give it: dicts and text.
    headers = cast("list[Headers | None]", [message.headers() for message in messages])
    stamps, more = stamps_of(headers, f"{topic}[{partition}]")
    return Records(
        topic,
        partition,
        np.array([message.offset() for message in messages], dtype=np.int64),
        [message.key() for message in messages],
        [message.value() for message in messages],
        stamps,
        more,
    )


def stamps_of(headers: Sequence[Headers | None], where: str) -> tuple[list[bytes], dict[int, Headers]]:
    """Return the stamps, and all headers of records that have others too; nearly always there are none."""
    stamps = []
    more: dict[int, Headers] = {}
    for row, found in enumerate(headers):
        if found is None:
            raise StampError("a record has no stamp: something else writes this topic", where=where)
        if len(found) == 1 and found[0][0] == stamp.HEADER:
            stamps.append(found[0][1])
            continue
        data = dict(found).get(stamp.HEADER)
        if data is None:
            raise StampError("a record has no stamp: something else writes this topic", where=where)
        stamps.append(data)
        more[row] = found
    return stamps, more


def diagnose(kafka: Mapping[str, str], ranges: Sequence[MarkedRange]) -> AnabranchError | None:
    """Ask Kafka whether the ranges are still there; return what is wrong, or None if nothing is.

    Raises:
        KafkaException: if Kafka does not answer.
    """
    # Uncommitted: what a transaction still holds back is there all the same.
    settings = {"group.id": "anabranch-diagnosis", "enable.auto.commit": False, "isolation.level": "read_uncommitted"}
    consumer = Consumer({**kafka, **settings})
    try:
        return next((found for marked in ranges if (found := _diagnose_one(consumer, marked)) is not None), None)
    finally:
        consumer.close()


def _diagnose_one(consumer: Consumer, marked: MarkedRange) -> AnabranchError | None:
    r = marked.range
    listed = consumer.list_topics(r.topic, timeout=_TIMEOUT_S).topics[r.topic]
    if listed.error is not None and listed.error.code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
        raise KafkaException(listed.error)
    if r.partition not in listed.partitions:
        return TopicMissingError(
            "the topic or partition that the marker names does not exist",
            where=marked.where,
            advice=bootstrap_advice(marked.stream),
        )
    low, high = consumer.get_watermark_offsets(TopicPartition(r.topic, r.partition), timeout=_TIMEOUT_S)
    if low > r.first_offset:
        return RangeExpiredError(
            f"the partition now begins at offset {low}: retention has deleted records that were not applied",
            where=marked.where,
            advice=f"give the topic a longer retention, then {bootstrap_advice(marked.stream)}",
        )
    if high < r.end_offset:
        return RangeExpiredError(
            f"the partition ends at offset {high}: the topic was made anew or has lost records",
            where=marked.where,
            advice=bootstrap_advice(marked.stream),
        )
    return None
