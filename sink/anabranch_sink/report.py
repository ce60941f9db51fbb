"""Tells the world how far the sink is: a log line, and a consumer group's offsets for lag tools.

Spark commits no offsets to Kafka, so lag tools would see nothing. The group `anabranch-<sink>` mirrors what is applied
and is never read.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import structlog
from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient

from anabranch_connectors.api import Applied
from anabranch_schemas import clock
from anabranch_sink.cut import Cut

_log = structlog.get_logger("anabranch.sink")
_INFO_EVERY_S = 10.0
_GROUP_EVERY_S = 1.0


class Reporter:
    """Reports after every cut; both outlets are held to their pace."""

    def __init__(self, sink: str, kafka: Mapping[str, str], marker_topics: Mapping[str, str]) -> None:
        self._sink = sink
        self._marker_topics = marker_topics
        self._admin = AdminClient(dict(kafka))
        self._offsets: dict[tuple[str, int], int] = {}
        self._records = 0
        self._cuts = 0
        self._parked = 0
        self._said_at = self._mirrored_at = time.monotonic()

    def applied(self, cut: Cut, applied: Mapping[str, Applied], *, seconds: float, parked: int) -> None:
        """Report a published cut; `seconds` is how long it took from choice to commit."""
        self._records += cut.records
        self._cuts += 1
        self._parked += parked
        for pending in cut:
            self._offsets[self._marker_topics[pending.marker.stream], 0] = pending.offset + 1
            for found in pending.marker.ranges:
                self._offsets[found.topic, found.partition] = found.end_offset
        _log.debug("cut applied", sink=self._sink, records=cut.records, ms=round(seconds * 1e3), parked=parked)
        now = time.monotonic()
        if now - self._mirrored_at >= _GROUP_EVERY_S:
            self._mirrored_at = now
            self.mirror()
        if now - self._said_at >= _INFO_EVERY_S:
            self._say(applied, now - self._said_at)
            self._said_at = now

    def _say(self, applied: Mapping[str, Applied], seconds: float) -> None:
        streams = {
            stream: {
                "marker": found.marker,
                "seq": found.seq,
                "safe_time": clock.to_datetime(found.safe_hlc).isoformat() if found.safe_hlc else None,
                "lag_s": round(time.time() - (found.safe_hlc >> clock.LOGICAL_BITS) / 1e6, 3)
                if found.safe_hlc
                else None,
            }
            for stream, found in applied.items()
        }
        _log.info(
            "sink status",
            sink=self._sink,
            cuts=self._cuts,
            records=self._records,
            records_per_s=round(self._records / seconds),
            parked=self._parked,
            streams=streams,
        )
        self._records = self._cuts = self._parked = 0

    def mirror(self) -> None:
        """Send the applied offsets to the report-only group; nobody waits for the answer."""
        if not self._offsets:
            return
        places = [TopicPartition(topic, partition, offset) for (topic, partition), offset in self._offsets.items()]
        self._offsets = {}
        group = ConsumerGroupTopicPartitions(f"anabranch-{self._sink}", places)
        self._admin.alter_consumer_group_offsets([group])
