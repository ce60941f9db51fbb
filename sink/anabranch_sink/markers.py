"""Reads markers straight from their topics, from where the target says it is.

Spark's micro-batch says *that* there are new markers; which ones, this reader knows already: librdkafka fetches them
in the background, so a cut needs no Spark job to learn its markers, and Spark's checkpoint decides nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from anabranch_connectors.api import Applied
from anabranch_schemas import marker
from anabranch_schemas.errors import MarkerError
from anabranch_sink.config import StreamRef
from anabranch_sink.cut import PendingMarker, follow
from anabranch_sink.errors import KafkaReadError, StreamResetError, TopicMissingError, bootstrap_advice

_TIMEOUT_S = 15.0
_FRAME = 5  # Confluent's prefix: a zero byte and the schema id
# Pending markers of one stream that are kept in memory: at one a second for idle streams half an hour, some 2 MB.
_PENDING_MAX = 2_000
_GONE = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}  # noqa: SLF001 - public by documentation


class MarkerReader:
    """Follows the marker topics of some streams and keeps what is not applied yet, checked to be gapless."""

    def __init__(self, kafka: Mapping[str, str], streams: Sequence[StreamRef], applied: Mapping[str, Applied]) -> None:
        self._streams = {ref.marker_topic: ref for ref in streams}
        self._last: dict[str, marker.SnapshotMarker | Applied] = {
            ref.name: applied.get(ref.name, Applied()) for ref in streams
        }
        self.pending: dict[str, deque[PendingMarker]] = {ref.name: deque() for ref in streams}
        self._paused: set[str] = set()
        self._reached: dict[str, int] = {}
        self._consumer = Consumer(
            {
                **kafka,
                "group.id": "anabranch-markers",  # asked for by the client; nothing is committed to it
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "auto.offset.reset": "error",
                "enable.partition.eof": True,
                # The end of a partition behind a control record is only told by an empty answer: keep that quick.
                "fetch.wait.max.ms": 50,
                "fetch.queue.backoff.ms": 10,
            }
        )
        self._consumer.assign([self._start(ref, applied.get(ref.name)) for ref in streams])

    def _start(self, ref: StreamRef, applied: Applied | None) -> TopicPartition:
        low, high = self._watermarks(ref.marker_topic)
        first = low if applied is None else applied.marker_offset + 1
        if not low <= first <= high and applied is not None:
            raise StreamResetError(
                f"marker {applied.marker} was applied from offset {applied.marker_offset}, "
                f"but the topic now holds offsets {low} to {high}",
                where=ref.marker_topic,
                advice=f"restore the marker topic, or {bootstrap_advice(ref.name)}",
            )
        return TopicPartition(ref.marker_topic, 0, first)

    def _watermarks(self, topic: str) -> tuple[int, int]:
        try:
            found = self._consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=_TIMEOUT_S)
        except KafkaException as error:
            raise _failed(error.args[0], topic) from error
        if found is None:
            raise KafkaReadError("the marker topic did not answer", where=topic, advice="check the brokers")
        return found

    def ends(self) -> dict[str, int]:
        """Return the present end offsets of the marker topics."""
        return {topic: self._watermarks(topic)[1] for topic in self._streams}

    def reached(self, ends: Mapping[str, int]) -> bool:
        """Tell whether everything before these end offsets has been read or waits behind a full stream."""
        return all(self._reached.get(topic, 0) >= end or topic in self._paused for topic, end in ends.items())

    def poll(self, timeout_s: float) -> bool:
        """Take in what has arrived, waiting at most `timeout_s` for the first; tell whether a marker came.

        Raises:
            StreamResetError, MarkerGapError: if the markers do not continue what is applied.
            MarkerError: if a record is not a marker of its topic's stream.
        """
        self._resume()
        messages = self._consumer.consume(500, timeout=0) or self._first(timeout_s)
        return sum(self._take(message) for message in messages) > 0

    def _first(self, timeout_s: float) -> list[Message]:
        # consume(n, timeout) waits for all n; poll returns with the first.
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            message = self._consumer.poll(left)
            if message is not None:
                return [message, *self._consumer.consume(500, timeout=0)]
        return []

    def _take(self, message: Message) -> bool:
        topic = message.topic() or ""
        error = message.error()
        if error is not None:
            if error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001 - public by documentation
                raise _failed(error, topic)
            self._reached[topic] = max(self._reached.get(topic, 0), message.offset() or 0)
            return False
        offset = message.offset() or 0
        self._reached[topic] = offset + 1
        stream = self._streams[topic].name
        found = marker.decode((message.value() or b"")[_FRAME:])
        if found.stream != stream:
            raise MarkerError(
                f"a marker of stream {found.stream} lies in the topic of stream {stream}",
                where=f"{topic} offset {offset}",
                advice="give each stream a prefix of its own",
            )
        follow(self._last[stream], found)
        self._last[stream] = found
        run = self.pending[stream]
        run.append(PendingMarker(found, offset))
        if len(run) >= _PENDING_MAX and topic not in self._paused:
            self._consumer.pause([TopicPartition(topic, 0)])
            self._paused.add(topic)
        return True

    def _resume(self) -> None:
        for topic in [t for t in self._paused if len(self.pending[self._streams[t].name]) < _PENDING_MAX // 2]:
            self._consumer.resume([TopicPartition(topic, 0)])
            self._paused.discard(topic)

    def applied(self, counts: Mapping[str, int]) -> None:
        """Drop the first `counts` pending markers of each stream."""
        for stream, count in counts.items():
            for _ in range(count):
                self.pending[stream].popleft()

    def close(self) -> None:
        """Let go of the connections."""
        self._consumer.close()


def _failed(error: KafkaError, topic: str) -> Exception:
    if error.code() in _GONE:
        return TopicMissingError(
            "the marker topic does not exist",
            where=topic,
            advice="start the source once, or correct the sink's `from`",
        )
    if error.code() in {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE}:  # noqa: SLF001 - as above
        return StreamResetError(
            f"the marker topic was cut or made anew while it was read: {error.str()}",
            where=topic,
            advice="restore the marker topic, or run `anabranch bootstrap FILE --source NAME`",
        )
    return KafkaReadError(f"the markers could not be read: {error.str()}", where=topic, advice="check the brokers")
