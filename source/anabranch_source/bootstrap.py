"""Begins a stream anew on Kafka: the decision that repairs a gap, written down as a marker.

The marker carries no rows. Its numbers go on, so that sinks see one dense stream; its resume token says that the
connector has to start over, and no table counts as copied.
"""

from __future__ import annotations

import time

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from anabranch_schemas import marker
from anabranch_schemas.marker import MarkerKind, SnapshotMarker
from anabranch_schemas.registry import SchemaRegistry, frame
from anabranch_schemas.vector import VectorTime
from anabranch_source.progress import newest_marker
from anabranch_source.settings import StreamSettings
from anabranch_source.topics import Topics

_TIMEOUT_S = 60.0
RESUME = b'{"bootstrap":true}'
"""Resume token of such a marker; connectors know it."""


def begin_anew(settings: StreamSettings, registry: SchemaRegistry, *, applied: int) -> tuple[SnapshotMarker, int]:
    """Write the marker and return it with its offset.

    `applied` is the greatest marker number that a target has applied: numbers go on behind it even if the marker
    topic was lost. A worker that still runs is fenced.
    """
    Topics(settings, lambda: AdminClient(dict(settings.kafka))).ensure_markers()
    marker_id = registry.register(f"{settings.marker_topic}-value", marker.AVRO_SCHEMA_TEXT)
    producer = Producer({**settings.kafka, "transactional.id": settings.transactional_id})
    producer.init_transactions(_TIMEOUT_S)
    newest = newest_marker(settings.kafka, settings.marker_topic, exists=True)
    anew = SnapshotMarker(
        stream=settings.name,
        site=settings.site,
        branch=newest.branch if newest else "",
        epoch=(newest.epoch if newest else 0) + 1,
        number=max(newest.number if newest else 0, applied) + 1,
        kind=MarkerKind.IDLE,
        first_seq=newest.last_seq if newest else 0,
        last_seq=newest.last_seq if newest else 0,
        safe_hlc=0,
        vector=newest.vector if newest else VectorTime(),
        transactions=0,
        rows=0,
        resume=RESUME,
        last_hlc=newest.last_hlc if newest else 0,
        closed_us=time.time_ns() // 1000,
    )
    offsets: list[int] = []
    producer.begin_transaction()
    producer.produce(
        settings.marker_topic,
        frame(marker_id) + marker.encode(anew),
        settings.name.encode(),
        0,
        on_delivery=lambda _error, message: offsets.append(message.offset() or 0),
    )
    producer.commit_transaction(_TIMEOUT_S)
    return anew, offsets[0]
