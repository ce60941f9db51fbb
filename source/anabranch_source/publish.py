"""Snapshots to Kafka: rows, marker and position in one Kafka transaction.

Closing a snapshot has an order, and the numbers are repeated in `close` and `_close`:

1. the last rows are produced,
2. flushed, so that their offsets are known from the delivery reports,
3. the marker that names the offsets is produced,
4. the Kafka transaction is committed,
5. and only then may the source forget what was published (`take_durable`).

Steps 2 to 4 wait for the broker, so they run on a thread of their own while the log is decoded on; what is decoded
meanwhile is held back, bounded in bytes, for the next snapshot.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from confluent_kafka import KafkaError, KafkaException, Producer

from anabranch_connectors.change import Chunk, LogPosition, Transaction
from anabranch_schemas import failpoints, marker, stamp
from anabranch_schemas.clock import HybridClock, pack
from anabranch_schemas.errors import AnabranchError
from anabranch_schemas.marker import MarkerKind, SnapshotMarker
from anabranch_schemas.vector import VectorTime
from anabranch_source.errors import PublishError, RecordTooLargeError, SourceFencedError, TopicMissingError
from anabranch_source.produce import OpenSnapshot, Produced, RowProducer
from anabranch_source.settings import MAX_RECORD_BYTES, StreamSettings

_FENCED = {KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH}  # noqa: SLF001 - public by documentation
_GONE = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}  # noqa: SLF001
_FENCE_TIMEOUT_S = 60.0  # an older worker's open transaction is aborted first
_COPIED = int(stamp.Flag.COPIED)
_GIVE_UP_TIMEOUT_S = 5.0
_STILL_HERE_S = 10.0  # PostgreSQL ends a connection that was silent for wal_sender_timeout, 60 s by default
_HELD_BACK_MAX = 32 << 20  # bytes decoded while a snapshot is being closed; some 100 ms at full speed


class SnapshotPublisher:
    """Publishes one stream under one epoch.

    Driven from one thread: `transaction` and `copy` put rows in, `close` ends the snapshot, `take_durable` gives the
    position of a snapshot that Kafka has committed, once.
    """

    def __init__(
        self,
        settings: StreamSettings,
        *,
        clock: HybridClock,
        marker_frame: bytes,
        now_us: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._producer = Producer(
            {
                "compression.type": "lz4",
                "linger.ms": 5,
                "batch.size": 1 << 20,
                # Above the topics' limit: that one decides, and names the topic.
                "message.max.bytes": MAX_RECORD_BYTES + (1 << 20),
                "queue.buffering.max.kbytes": 256 << 10,
                "queue.buffering.max.messages": 1_000_000,
                "partitioner": "murmur2_random",  # as Java's producers, so that keys meet theirs
                **settings.kafka,
                "transactional.id": settings.transactional_id,
                "transaction.timeout.ms": settings.transaction_timeout_ms,
            }
        )
        self._clock = clock
        self._marker_frame = marker_frame
        self._now_us = now_us
        self._epoch = 0
        self._branch = ""
        self._number = 0
        self._open: OpenSnapshot | None = None
        self._held_back: list[Transaction] = []
        self._held_back_bytes = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="close-snapshot")
        self._closing: Future[SnapshotMarker] | None = None
        self._durable: list[SnapshotMarker] = []
        self._rows = RowProducer(self._producer, site=settings.site, room=self._produce_when_free, poll=self._poll)
        self._said_at = self.last_marker_at = time.monotonic()
        self.still_here: Callable[[], object] = lambda: None
        """Called now and then while a large transaction is published, which can take longer than a source waits."""

    def fence(self) -> None:
        """Make sure that no older worker can commit to this stream any more."""
        self._transactional(lambda: self._producer.init_transactions(_FENCE_TIMEOUT_S))

    def begin(self, *, branch: str, epoch: int, number: int) -> None:
        """Take up the stream: `number` is the last marker's, `epoch` this worker's."""
        self._branch, self._epoch, self._number = branch, epoch, number
        self._rows.epoch = epoch

    @property
    def closing(self) -> bool:
        """Tell whether a snapshot is on its way to Kafka."""
        return self._closing is not None

    @property
    def open_rows(self) -> int:
        """Rows of the open snapshot."""
        return self._open.rows if self._open else 0

    def due(self, now: float, last_read: float) -> bool:
        """Tell whether the open snapshot has to be closed. Times are `time.monotonic` seconds."""
        snapshot = self._open
        if snapshot is None or self._closing is not None:
            return False
        limits = self._settings.snapshot
        return (
            snapshot.bytes >= limits.max_bytes
            or (now - snapshot.since) * 1e3 >= limits.interval_ms
            or (now - last_read) * 1e3 >= limits.quiet_ms
        )

    def idle_due(self, now: float) -> bool:
        """Tell whether an idle stream has to say so."""
        return (
            self._open is None
            and self._closing is None
            and (now - self.last_marker_at) * 1e3 >= self._settings.snapshot.idle_ms
        )

    def transaction(self, transaction: Transaction) -> None:
        """Put one committed transaction into the open snapshot, or hold it back while one is being closed."""
        if self._closing is not None:
            self._held_back.append(transaction)
            self._held_back_bytes += transaction.size
            if transaction.spilled or self._held_back_bytes > _HELD_BACK_MAX:
                self.wait()
            return
        self._publish(transaction)

    def copy(self, chunk: Chunk, *, seq: int) -> None:
        """Put the rows of a copied chunk into a snapshot of its own; they carry the position they were read at."""
        assert self._open is None
        assert self._closing is None
        snapshot = self._opened()
        snapshot.first_seq = snapshot.last_seq = seq
        self._transactional(lambda: self._rows.announce(snapshot, chunk.route))
        hlc = self._clock.tick(chunk.read_us)
        self._transactional(
            lambda: self._rows.rows(snapshot, chunk.changes, seq, hlc, 0, ordinal=chunk.first_ordinal, flags=_COPIED)
        )

    def close(self, position: LogPosition, kind: MarkerKind) -> None:
        """Begin to close the snapshot at `position`; without rows it becomes an idle marker."""
        assert self._closing is None
        assert not self._held_back
        snapshot = self._opened()
        self._open = None
        # 1.
        self._transactional(lambda: self._rows.finish(snapshot))
        if snapshot.transactions == 0 and kind is not MarkerKind.COPY:
            kind = MarkerKind.IDLE
        if position.safe_us:
            self._clock.last = max(self._clock.last, pack(position.safe_us))
        self._number += 1
        closed = SnapshotMarker(
            stream=self._settings.name,
            site=self._settings.site,
            branch=self._branch,
            epoch=self._epoch,
            number=self._number,
            kind=kind,
            first_seq=snapshot.first_seq or position.seq,
            last_seq=position.seq,
            safe_hlc=self._clock.last if position.consistent else 0,
            vector=VectorTime({self._settings.site: position.seq}),
            transactions=snapshot.transactions,
            rows=snapshot.rows,
            copy=position.copy,
            schemas=tuple(sorted((r.version for r in snapshot.routes), key=lambda v: (v.topic, v.value_schema_id))),
            resume=position.resume,
            last_hlc=self._clock.last,
            closed_us=self._now_us(),
        )
        self._closing = self._thread.submit(self._close, closed, snapshot)

    def take_durable(self) -> list[SnapshotMarker]:
        """Return the markers that Kafka has committed since the last call, and go on with what was held back."""
        if self._closing is None:
            self._transactional(lambda: self._producer.poll(0))
            self._check()
        elif self._closing.done():
            self._finish()
        durable, self._durable = self._durable, []
        return durable

    def wait(self) -> None:
        """Wait until no snapshot is being closed."""
        if self._closing is not None:
            self._finish()

    def stop(self) -> None:
        """End the closing thread. What is not committed is lost here; the next worker reads it again."""
        self._thread.shutdown(wait=True)

    def give_up(self) -> None:
        """Abort the open snapshot after a failure, so that it does not hold readers back until its timeout.

        Raises:
            SourceFencedError: if another worker has taken the stream over. That may be why this one failed (the
                successor ends its connection to the source), and then it must not come back. Only the broker knows,
                so something is sent; it is never committed.
        """
        self.stop()
        steps: tuple[Callable[[], object], ...] = (
            self._producer.begin_transaction,  # refused if one is open
            lambda: self._producer.produce(self._settings.marker_topic, b"", b"", 0),
            lambda: self._producer.flush(_GIVE_UP_TIMEOUT_S),
            lambda: self._producer.abort_transaction(_GIVE_UP_TIMEOUT_S),
        )
        for step in steps:
            try:
                self._transactional(step)
            except SourceFencedError:
                raise
            except AnabranchError:
                continue

    def _finish(self) -> None:
        assert self._closing is not None
        try:
            self._durable.append(self._closing.result())
        finally:
            self._closing = None
        self.last_marker_at = time.monotonic()
        held, self._held_back, self._held_back_bytes = self._held_back, [], 0
        for transaction in held:
            self._publish(transaction)

    def _opened(self) -> OpenSnapshot:
        if self._open is None:
            self._transactional(self._producer.begin_transaction)
            self._open = OpenSnapshot(since=time.monotonic())
        return self._open

    def _publish(self, transaction: Transaction) -> None:
        snapshot = self._opened()
        snapshot.first_seq = snapshot.first_seq or transaction.seq
        snapshot.last_seq = transaction.seq
        snapshot.transactions += 1
        hlc = self._clock.tick(transaction.commit_us)
        try:
            self._rows.rows(snapshot, transaction.changes, transaction.seq, hlc, transaction.txid)
        except KafkaException as error:
            raise self._failed(error.args[0]) from error

    def _poll(self, wait_s: float = 0.0) -> None:
        self._transactional(lambda: self._producer.poll(wait_s))
        now = time.monotonic()
        if now - self._said_at > _STILL_HERE_S:
            self._said_at = now
            self.still_here()

    def _produce_when_free(self, row: Produced) -> None:
        """Wait for room in the client's queue: this is where a slow broker holds the source back."""
        while True:
            self._poll(0.05)
            self._check()
            try:
                self._transactional(lambda: self._producer.produce(*row))
            except BufferError:
                continue
            return

    def _close(self, closed: SnapshotMarker, snapshot: OpenSnapshot) -> SnapshotMarker:
        """Run steps 2 to 4 (the first is done); runs on the closing thread."""
        # 2.
        self._transactional(self._producer.flush)
        self._check()
        # 3.
        closed = dataclasses.replace(closed, ranges=snapshot.ranges())
        self._producer.produce(
            self._settings.marker_topic, self._marker_frame + marker.encode(closed), closed.stream.encode(), 0
        )
        failpoints.hit("source.before_commit")
        # 4.
        self._transactional(self._producer.commit_transaction)
        self._check()
        failpoints.hit("source.after_commit")
        return closed

    def _transactional(self, call: Callable[[], object]) -> None:
        try:
            call()
        except (KafkaException, SystemError) as error:
            # The client raises a fatal error from within its callbacks, and Python makes a SystemError of it then.
            cause = error if isinstance(error, KafkaException) else error.__cause__
            if not isinstance(cause, KafkaException):
                raise
            raise self._failed(cause.args[0]) from error

    def _check(self) -> None:
        if self._rows.failures:
            raise self._failed(*self._rows.failures[0])

    def _failed(self, error: KafkaError, topic: str = "") -> AnabranchError:
        if error.code() in _FENCED:
            return SourceFencedError(
                "another worker has taken the stream over; this one ends without having published the open snapshot",
                where=self._settings.name,
                advice="nothing to repair: let the other worker run, or stop it before starting this one again",
            )
        if error.code() in _GONE:
            return TopicMissingError(
                f"a topic of the stream is gone: {error.str()}",
                where=self._settings.prefix,
                advice="the deleted rows cannot be published again from the log: "
                "run `anabranch bootstrap FILE --source NAME` to copy the tables anew",
            )
        if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            return RecordTooLargeError(
                "a row is greater than a record may be",
                where=topic or self._settings.name,
                advice="let it through: raise max.message.bytes of the topic (kafka-configs.sh --alter "
                "--entity-type topics), and message.max.bytes under `kafka` if it is set there",
            )
        return PublishError(
            f"Kafka did not take the snapshot: {error.str()}",
            where=self._settings.name,
            advice="check the brokers; the worker starts again by itself and reads the snapshot again",
        )
