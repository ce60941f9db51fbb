"""What a source worker is told: the stream's identity, Kafka, and when snapshots close."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# A row is one record. Kafka's own limit of 1 MiB is less than one picture in a bytea column.
MAX_RECORD_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class SnapshotSettings:
    """When an open snapshot is closed, always at a transaction boundary."""

    quiet_ms: float = 5.0
    """The stream has been silent this long. Shorter than a human notices, longer than a busy stream's gaps."""
    interval_ms: float = 200.0
    """The snapshot has been open this long."""
    max_bytes: int = 16 << 20
    """It holds this many bytes of keys and values."""
    idle_ms: float = 1000.0
    """An idle stream says so this often, so that the safe time moves."""


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """How topics are created. Topics that exist are taken as they are."""

    partitions: int = 1
    """Of each table's topic. Rows of a key stay in order; more partitions let the sink stage in parallel."""
    replication_factor: int = -1
    """-1: the broker's default."""
    config: Mapping[str, str] = field(default_factory=dict)
    """Topic configuration, on top of `max.message.bytes` = `MAX_RECORD_BYTES`."""


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """One stream and where it is published."""

    name: str
    """`site.source`"""
    site: int
    prefix: str
    """Topic prefix."""
    kafka: Mapping[str, str]
    """librdkafka properties."""
    snapshot: SnapshotSettings = SnapshotSettings()
    topics: TopicSettings = TopicSettings()
    copy_chunk_rows: int = 50_000
    """Rows of one copied chunk: what a restart reads again at most."""
    transaction_timeout_ms: int = 600_000
    """Kafka aborts a snapshot that took longer, or whose worker has gone; a successor does so at once. At 100,000
    rows/s the largest source transaction is 60 million rows. Brokers allow 900,000 unless told otherwise."""

    @property
    def marker_topic(self) -> str:
        """The stream's marker topic."""
        return f"{self.prefix}.markers"

    @property
    def transactional_id(self) -> str:
        """One a stream: a new worker fences the one before it."""
        return f"anabranch-{self.prefix}-{self.name}"
