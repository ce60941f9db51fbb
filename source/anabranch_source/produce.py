"""Rows to Kafka: what one open snapshot gets, topic by topic. The hot loop of publishing.

A delivery report for each row costs 0.5 µs, nearly as much as producing it. What a marker says of a topic's only
partition needs two of them: digest and count are taken on the way in, the first row's report tells where the range
begins, the last row's where it ends; to know the last row, one is always held back. Rows without a report are not
unchecked: a Kafka transaction of which a record failed cannot be committed. Where the client chooses between several
partitions, only the reports say what went where, and every row gets one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from zlib import crc32

from confluent_kafka import KafkaError, Message, Producer

from anabranch_connectors.change import Change, Route
from anabranch_schemas import marker, stamp
from anabranch_schemas.envelope.cells import HEADER as CELLS_HEADER
from anabranch_source.errors import PublishError

Headers = list[tuple[str, str | bytes | None]]
Failure = tuple[KafkaError, str]
"""What Kafka said of a record, and the record's topic."""
Report = Callable[[KafkaError | None, Message], None]
Produced = tuple[str, bytes | None, bytes | None, int, Report | None, None, int, Headers]
"""Arguments of `Producer.produce` by position, as keywords cost more; the sixth is a second name of the fifth."""

_COORDINATES = struct.Struct(">HIQ").pack  # site, epoch, seq: the same for all rows of a transaction
_TIMES = struct.Struct(">QQB").pack  # hlc, txid, number of other sites
_HEAD = struct.Struct(">BBH").pack  # version, op, flags
# Ordinals of nearly all rows, packed once: a transaction rarely has more.
_ORDINALS = [i.to_bytes(4, "big") for i in range(4096)]
_LAST = int(stamp.Flag.LAST)  # as a plain int: arithmetic on flags costs 0.8 µs
# Of changes that are on disk or being copied: rows that are in memory twice over, whatever their size.
_BATCH = 64
_METADATA_S = 30.0
_ANY = -1  # the client chooses the partition by the key


@dataclass(slots=True, eq=False)
class Lane:
    """One topic in one snapshot."""

    topic: str
    partition: int
    """0 for a topic's only partition, -1 if the client chooses."""
    failures: list[Failure]
    held: Produced | None = None
    """The last row so far: not produced yet."""
    records: int = 0
    digest: int = 0
    reported: dict[int, list[int]] = field(default_factory=dict)
    """partition → [first offset, last offset, records, digest], of the rows that got a report"""

    def delivered(self, error: KafkaError | None, message: Message) -> None:
        """Take a delivery report."""
        if error is not None:
            self.failures.append((error, self.topic))
            return
        partition, offset = message.partition(), message.offset()
        assert partition is not None
        assert offset is not None
        digest = 0
        if self.partition == _ANY and (value := message.value()) is not None:
            digest = crc32(value)
        found = self.reported.get(partition)
        if found is None:
            self.reported[partition] = [offset, offset, 1, digest]
        else:
            found[1] = offset
            found[2] += 1
            found[3] += digest

    def ranges(self) -> Iterator[marker.Range]:
        """Yield what the marker says of the topic; to be asked when all reports have come.

        Raises:
            PublishError: if a report has not come, so that the marker would leave rows out.
        """
        reported = sum(
            records if self.partition == _ANY else last - first + 1
            for first, last, records, _ in self.reported.values()
        )
        if reported < self.records:
            raise PublishError(f"of {self.records} records, {reported} were reported as written", where=self.topic)
        for partition, (first, last, records, digest) in sorted(self.reported.items()):
            if self.partition != _ANY:
                records, digest = self.records, self.digest  # noqa: PLW2901 - what the producing side has counted
            yield marker.Range(self.topic, partition, first, last + 1, records, digest & marker.DIGEST_MASK)


_NO_LANE = Lane("", _ANY, [])


@dataclass(slots=True)
class OpenSnapshot:
    """The snapshot that is being filled."""

    since: float
    first_seq: int = 0
    last_seq: int = 0
    transactions: int = 0
    rows: int = 0
    bytes: int = 0
    routes: dict[Route, Lane] = field(default_factory=dict)
    lanes: dict[str, Lane] = field(default_factory=dict)
    """By topic; versions of a table share one."""

    def ranges(self) -> tuple[marker.Range, ...]:
        """Return what the marker says of all topics; to be asked when all reports have come."""
        return tuple(found for topic in sorted(self.lanes) for found in self.lanes[topic].ranges())


class RowProducer:
    """Produces changes of one stream, from one thread. Implements what publishing does for every row."""

    def __init__(
        self, producer: Producer, *, site: int, room: Callable[[Produced], None], poll: Callable[[], None]
    ) -> None:
        """Take the client; `room` produces one row when the client's queue was full, `poll` serves its reports."""
        self._client = producer
        self._site = site
        self._room = room
        self._poll = poll
        self._heads: dict[int, bytes] = {}
        self._single: dict[str, bool] = {}
        self.epoch = 0
        self.failures: list[Failure] = []
        """Of rows that Kafka did not take, in the order they became known."""

    def rows(
        self,
        snapshot: OpenSnapshot,
        changes: Iterable[Change],
        seq: int,
        hlc: int,
        txid: int,
        *,
        ordinal: int = 0,
        flags: int = 0,
    ) -> None:
        """Put changes that share a position into a snapshot; the last one is marked as such.

        Raises:
            KafkaException: if the client refuses a row for another reason than a full queue.
        """
        produce, heads = self._client.produce, self._heads
        middle = _COORDINATES(self._site, self.epoch, seq)
        times = _TIMES(hlc, txid, 0)
        size, first = 0, ordinal
        present: Route | None = None
        lane = _NO_LANE
        topic, partition, single, report, held, records, digest = "", _ANY, False, None, None, 0, 0
        known = -1  # op and flags that `lead` is for
        lead = header = b""
        batches = ((changes, _last_row(changes)),) if isinstance(changes, list) and changes else _batches(changes)
        for batch, last in batches:
            for at, (route, op, own_flags, key, value, cells) in enumerate(batch):
                if route is not present:
                    lane.held, lane.records, lane.digest = held, records, digest
                    present, lane = route, snapshot.routes.get(route) or self._lane(snapshot, route)
                    topic, partition, held, records, digest = (
                        lane.topic,
                        lane.partition,
                        lane.held,
                        lane.records,
                        lane.digest,
                    )
                    single = partition != _ANY
                    report = None if single and records else lane.delivered
                # A tombstone belongs to the delete before it: same stamp. Its value is None and it is not a row.
                if value is not None:
                    all_flags = own_flags | flags | _LAST if at == last else own_flags | flags
                    if all_flags << 8 | op != known:
                        known = all_flags << 8 | op
                        lead = (heads.get(known) or self._head(known)) + middle
                    header = lead + (_ORDINALS[ordinal] if ordinal < 4096 else ordinal.to_bytes(4, "big")) + times
                    ordinal += 1
                    size += len(value)
                    if single:
                        digest += crc32(value)
                    if not ordinal & 1023:
                        self._poll()
                if held is not None:
                    try:
                        produce(*held)
                    except BufferError:
                        self._room(held)
                headers: Headers = (
                    [(stamp.HEADER, header)] if cells is None else [(stamp.HEADER, header), (CELLS_HEADER, cells)]
                )
                held = (topic, value, key, partition, report, None, 0, headers)
                records += 1
                if single:
                    report = None
        lane.held, lane.records, lane.digest = held, records, digest
        snapshot.rows += ordinal - first
        snapshot.bytes += size

    def announce(self, snapshot: OpenSnapshot, route: Route) -> None:
        """Have the marker name a table's version even if no row of it comes."""
        self._lane(snapshot, route)

    def finish(self, snapshot: OpenSnapshot) -> None:
        """Produce the rows that are held back."""
        for lane in snapshot.lanes.values():
            if lane.held is not None:
                topic, value, key, partition, _, _, time, headers = lane.held
                lane.held = None
                last: Produced = (topic, value, key, partition, lane.delivered, None, time, headers)
                try:
                    self._client.produce(*last)
                except BufferError:
                    self._room(last)

    def _lane(self, snapshot: OpenSnapshot, route: Route) -> Lane:
        lane = snapshot.lanes.get(route.topic)
        if lane is None:
            partition = 0 if self._is_single(route.topic) else _ANY
            lane = snapshot.lanes[route.topic] = Lane(route.topic, partition, self.failures)
        snapshot.routes[route] = lane
        return lane

    def _is_single(self, topic: str) -> bool:
        known = self._single.get(topic)
        if known is None:
            # Partitions that are added later are used from the next start on; no row's order depends on it.
            known = self._single[topic] = (
                len(self._client.list_topics(topic, _METADATA_S).topics[topic].partitions) == 1
            )
        return known

    def _head(self, known: int) -> bytes:
        head = self._heads[known] = _HEAD(stamp.VERSION, known & 255, known >> 8)
        return head


def _batches(changes: Iterable[Change]) -> Iterator[tuple[list[Change], int]]:
    """Yield lists of changes, each with the index of the row that ends the transaction (-1: it is not in there)."""
    iterator = iter(changes)
    batch = list(islice(iterator, _BATCH))
    while batch:
        following = list(islice(iterator, _BATCH))
        if len(following) == 1:
            # It may be the tombstone of a delete in the batch before, which then is the last row.
            batch += following
            following = list(islice(iterator, _BATCH))
        yield batch, -1 if following else _last_row(batch)
        batch = following


def _last_row(changes: list[Change]) -> int:
    """Return the index of the last change that is not a tombstone."""
    return len(changes) - (1 if changes[-1][4] is not None else 2)
