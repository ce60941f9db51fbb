"""Follows and rewinds a stream by its markers, as they lie on Kafka."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Self

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from anabranch_schemas import marker, registry
from anabranch_schemas.marker import SnapshotMarker
from anabranch_source.settings import StreamSettings
from anabranch_source.topics import Topics, table_topic
from bench.figure import BenchError

_FRAME = 5  # Confluent's prefix
_TIMEOUT_S = 300.0


class MarkerFollower:
    """Reads the committed markers of a stream from the topic's present end on."""

    def __init__(self, kafka: str, topic: str) -> None:
        self._topic = topic
        self._consumer = Consumer(
            {
                "bootstrap.servers": kafka,
                "group.id": "bench",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "fetch.wait.max.ms": 100,  # a marker is answered with at once; few requests disturb the broker less
                "topic.metadata.refresh.interval.ms": 200,  # the worker creates the topic
                "allow.auto.create.topics": False,
            }
        )
        self._consumer.assign([TopicPartition(topic, 0, self._end())])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    def until(
        self, wanted: Callable[[SnapshotMarker], bool], alive: Callable[[], None]
    ) -> tuple[SnapshotMarker, float]:
        """Return the first marker that `wanted` says yes to, and when it could be read (`time.time`)."""
        deadline = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline:
            message = self._consumer.poll(0.5)
            now = time.time()
            value = None if message is None or message.error() is not None else message.value()
            if value is None:
                alive()
                continue
            found = marker.decode(value[_FRAME:])
            if wanted(found):
                return found, now
        raise BenchError(f"no marker as awaited on {self._topic} within {_TIMEOUT_S:.0f} s")

    def _end(self) -> int:
        try:
            return self._consumer.get_watermark_offsets(TopicPartition(self._topic, 0), timeout=10)[1]
        except (KafkaException, TypeError):
            return 0  # the topic is still to come


def write_marker(settings: StreamSettings, found: SnapshotMarker) -> None:
    """Make `found` the newest marker of a stream that nobody writes now: a worker takes the stream up there.

    The topics of the tables that it names as copied are made too: they could not be missing behind such a marker.
    """
    topics = Topics(settings, lambda: AdminClient(dict(settings.kafka)))
    topics.ensure_markers()
    for state in found.copy:
        schema, _, table = state.table.partition(".")
        topics.ensure_table(table_topic(settings.prefix, schema, table), begun=False)
    schema_id = registry.connect(settings.kafka).register(f"{settings.marker_topic}-value", marker.AVRO_SCHEMA_TEXT)
    producer = Producer(dict(settings.kafka))
    producer.produce(settings.marker_topic, registry.frame(schema_id) + marker.encode(found), found.stream.encode(), 0)
    if producer.flush(30):
        raise BenchError("Kafka did not take a marker")


def rewound(newest: SnapshotMarker, base: SnapshotMarker) -> SnapshotMarker:
    """Return `base` as the successor of `newest`."""
    return dataclasses.replace(base, number=newest.number + 1, epoch=newest.epoch)
