"""The stored position of a stream: its newest marker on Kafka."""

from __future__ import annotations

import time
from collections.abc import Mapping

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from anabranch_schemas import marker
from anabranch_schemas.marker import SnapshotMarker
from anabranch_source.errors import PublishError

_TIMEOUT_S = 15.0
_FRAME = 5  # Confluent's prefix
_SETTLING = {KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE}
_SETTLING_WAIT_S = 0.05
_MISSING = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}  # noqa: SLF001 - public by documentation


def newest_marker(kafka: Mapping[str, str], topic: str, *, exists: bool = False) -> SnapshotMarker | None:
    """Return the newest committed marker of a stream, or None if its topic has none.

    `exists` says that the topic is known to be there; otherwise one that is not has no markers. To be called when no
    worker can write any more (after `init_transactions`): then the answer is final.
    """
    consumer = Consumer(
        {
            **kafka,
            "group.id": "anabranch-progress",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,
        }
    )
    try:
        low, end = _bounds(consumer, topic, exists=exists)
        # Offsets also count Kafka's own control records and aborted markers, so the last offset may hold none:
        # look at a few from the end, then at ever more.
        reach = 16
        while low < end:
            start = max(low, end - reach)
            newest = _last_of(consumer, topic, start)
            if newest is not None or start == low:
                return newest
            reach *= 16
        return None
    finally:
        consumer.close()


def _bounds(consumer: Consumer, topic: str, *, exists: bool) -> tuple[int, int]:
    """Return the topic's first and end offset; nothing lies between them if there is no such topic."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            low, end = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=_TIMEOUT_S)
        except KafkaException as error:
            code = error.args[0].code()
            if code in _MISSING and not exists:
                return 0, 0
            # One that was just created settles; to take it for empty would begin its stream a second time.
            if code not in _MISSING | _SETTLING or time.monotonic() > deadline:
                raise _unreadable(topic, error.args[0].str()) from error
            time.sleep(_SETTLING_WAIT_S)
        else:
            return low, end


def _last_of(consumer: Consumer, topic: str, start: int) -> SnapshotMarker | None:
    consumer.assign([TopicPartition(topic, 0, start)])
    newest = None
    while True:
        message = consumer.poll(_TIMEOUT_S)
        if message is None:
            raise _unreadable(topic, "no answer in time")
        error = message.error()
        if error is None:
            newest = message.value()
        elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - public by documentation
            return None if newest is None else marker.decode(newest[_FRAME:])
        else:
            raise _unreadable(topic, error.str())


def _unreadable(topic: str, why: str) -> PublishError:
    return PublishError(f"the marker topic could not be read: {why}", where=topic, advice="check the brokers")
