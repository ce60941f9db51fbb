"""Runs one stream: from a connector's source part to Kafka, until it is told to stop."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import structlog
from confluent_kafka.admin import AdminClient

from anabranch_connectors.change import LogPosition
from anabranch_connectors.source_part import SourcePart
from anabranch_schemas import failpoints, marker
from anabranch_schemas.clock import HybridClock
from anabranch_schemas.errors import AnabranchError
from anabranch_schemas.marker import MarkerKind, TableVersion
from anabranch_schemas.registry import SchemaRegistry, frame
from anabranch_schemas.table import TableSchema
from anabranch_source.errors import SourceFencedError
from anabranch_source.phases import phase_of
from anabranch_source.progress import newest_marker
from anabranch_source.publish import SnapshotPublisher
from anabranch_source.settings import StreamSettings
from anabranch_source.topics import Topics, table_topic

log = structlog.get_logger("anabranch.source")

# Waits between looks at the socket: while a snapshot is on its way to Kafka nobody tells us that it has arrived.
_CLOSING_WAIT_S = 0.002
_IDLE_WAIT_S = 0.1
_SUMMARY_S = 10.0


class KafkaRouter:
    """Implements `Router`: topics are created, schemas registered, both once."""

    def __init__(self, settings: StreamSettings, topics: Topics, registry: SchemaRegistry) -> None:
        self._settings = settings
        self._topics = topics
        self._registry = registry
        self.begun: frozenset[str] = frozenset()
        """Tables with rows on Kafka: their topics must exist."""

    def __call__(
        self, table: TableSchema, key_schema: Mapping[str, Any], value_schema: Mapping[str, Any]
    ) -> TableVersion:
        """Return the topic and schema ids of a table's rows (subjects by TopicNameStrategy)."""
        topic = table_topic(self._settings.prefix, table.schema, table.name)
        self._topics.ensure_table(topic, begun=table.path in self.begun)
        return TableVersion(
            table=table.path,
            topic=topic,
            key_schema_id=self._registry.register(f"{topic}-key", _text(key_schema)),
            value_schema_id=self._registry.register(f"{topic}-value", _text(value_schema)),
        )


class SourceWorker:
    """One run of one stream.

    The order of taking a stream up is what makes the stored position final:

    1. fence: no older worker can commit to Kafka from here on,
    2. read the newest marker, which is the position,
    3. start the connector there, under the next epoch.
    """

    def __init__(self, settings: StreamSettings, registry: SchemaRegistry) -> None:
        self._settings = settings
        self._registry = registry
        self.topics = Topics(settings, lambda: AdminClient(dict(settings.kafka)))
        self.router = KafkaRouter(settings, self.topics, registry)

    def run(self, part: SourcePart, stop: threading.Event) -> None:
        """Publish until `stop` is set, then close the open snapshot and return.

        Raises:
            AnabranchError: what the part, Kafka or the registry could not do; its action says whether to try again.
        """
        settings = self._settings
        self.topics.ensure_markers()
        marker_id = self._registry.register(f"{settings.marker_topic}-value", marker.AVRO_SCHEMA_TEXT)
        clock = HybridClock(_now_us)
        publisher = SnapshotPublisher(settings, clock=clock, marker_frame=frame(marker_id), now_us=_now_us)
        try:
            # 1.
            publisher.fence()
            # 2.
            stored = newest_marker(settings.kafka, settings.marker_topic, exists=True)
            if stored is not None:
                clock.last = stored.last_hlc
                self.router.begun = frozenset(
                    state.table for state in stored.copy if state.done or state.last_key is not None
                )
            # 3.
            start = part.start(stored, publisher.transaction)
            epoch = stored.epoch + 1 if stored else 1
            publisher.begin(branch=start.branch, epoch=epoch, number=stored.number if stored else 0)
            log.info("stream taken up", stream=settings.name, epoch=epoch, branch=start.branch, seq=start.position.seq)
            self._publish(part, publisher, start.position, stop)
        except SourceFencedError:
            raise
        except AnabranchError:
            publisher.give_up()
            raise
        finally:
            publisher.stop()

    def _publish(
        self, part: SourcePart, publisher: SnapshotPublisher, position: LogPosition, stop: threading.Event
    ) -> None:
        summary = _Summary(self._settings.name)
        last_seq = position.seq
        last_read = chunk_at = time.monotonic()
        chunk_took = 0.0
        while not stop.is_set():
            position = part.read(self._wait_s(publisher))
            now = time.monotonic()
            if position.seq != last_seq:
                last_seq, last_read = position.seq, now
            for durable in publisher.take_durable():
                part.acknowledge(durable)
                publisher.still_here = partial(part.acknowledge, durable)
                summary.add(durable, position, now)
            if publisher.due(now, last_read):
                publisher.close(position, MarkerKind.LOG)
            elif position.copying and not publisher.closing:
                # The log has its turn between chunks: until it is read up, but no longer than two chunks took, or a
                # busy source would never be copied.
                if not position.behind or now - chunk_at > 2 * chunk_took:
                    began = time.monotonic()
                    self._copy(part, publisher, position)
                    chunk_at = time.monotonic()
                    chunk_took = chunk_at - began
            elif publisher.idle_due(now) and not position.behind:
                publisher.close(position, MarkerKind.IDLE)
        self._drain(part, publisher, position)

    def _copy(self, part: SourcePart, publisher: SnapshotPublisher, position: LogPosition) -> None:
        """Publish one chunk as a snapshot of its own."""
        if publisher.open_rows:
            publisher.close(position, MarkerKind.LOG)
            publisher.wait()
        chunk = part.copy_chunk(self._settings.copy_chunk_rows)
        if chunk is None:
            return
        publisher.copy(chunk, seq=position.seq)
        failpoints.hit("source.mid_chunk")
        publisher.close(chunk.position(), MarkerKind.COPY)
        publisher.wait()

    def _drain(self, part: SourcePart, publisher: SnapshotPublisher, position: LogPosition) -> None:
        """End in order: what was read is published and acknowledged."""
        publisher.wait()
        if publisher.open_rows:
            publisher.close(position, MarkerKind.LOG)
            publisher.wait()
        for durable in publisher.take_durable():
            part.acknowledge(durable)
        log.info("stream put down", stream=self._settings.name, seq=position.seq)

    def _wait_s(self, publisher: SnapshotPublisher) -> float:
        if publisher.closing:
            return _CLOSING_WAIT_S
        if publisher.open_rows:
            return self._settings.snapshot.quiet_ms / 1e3
        return min(_IDLE_WAIT_S, self._settings.snapshot.idle_ms / 2e3)


class _Summary:
    """One log line now and then, not one a snapshot."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._since = time.monotonic()
        self._rows = self._transactions = self._snapshots = 0

    def add(self, durable: marker.SnapshotMarker, position: LogPosition, now: float) -> None:
        """Count one published snapshot."""
        self._rows += durable.rows
        self._transactions += durable.transactions
        self._snapshots += 1
        if now - self._since >= _SUMMARY_S:
            log.info(
                "published",
                stream=self._stream,
                phase=phase_of(position.copy, consistent=position.consistent).value,
                snapshots=self._snapshots,
                transactions=self._transactions,
                rows=self._rows,
                seconds=round(now - self._since, 1),
                marker=durable.number,
                behind=position.behind,
            )
            self._since = now
            self._rows = self._transactions = self._snapshots = 0


def _text(schema: Mapping[str, Any]) -> str:
    return json.dumps(schema, separators=(",", ":"), ensure_ascii=False)


def _now_us() -> int:
    return time.time_ns() // 1000
