"""Closing a snapshot: its order, its numbers, and what is held back meanwhile, with a client that obeys the test."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException

from anabranch_connectors.change import Change, Chunk, LogPosition, Transaction
from anabranch_schemas import marker, stamp
from anabranch_schemas.clock import HybridClock, pack
from anabranch_schemas.marker import CopyState, MarkerKind, TableVersion
from anabranch_schemas.stamp import Flag, Op
from anabranch_source import publish
from anabranch_source.errors import PublishError, SourceFencedError, TopicMissingError
from anabranch_source.publish import SnapshotPublisher
from anabranch_source.settings import SnapshotSettings, StreamSettings

FRAME = b"\0\0\0\0\7"


@dataclass(frozen=True, eq=False)
class Route:
    topic: str
    version: TableVersion


T = Route("p.t", TableVersion("public.t", "p.t", 1, 2))
U = Route("p.u", TableVersion("public.u", "p.u", 3, 4))


class Message:
    """What a delivery report is about."""

    def __init__(self, topic: str, partition: int, offset: int, value: bytes | None) -> None:
        self._facts = topic, partition, offset, value

    def topic(self) -> str:
        return self._facts[0]

    def partition(self) -> int:
        return self._facts[1]

    def offset(self) -> int:
        return self._facts[2]

    def value(self) -> bytes | None:
        return self._facts[3]


@dataclass
class Client:
    """A producer whose broker is in memory. `errors` maps a method's name to what it raises next."""

    config: dict[str, Any]
    partitions: int = 1
    calls: list[str] = field(default_factory=list)
    records: list[tuple[str, int, bytes | None, bytes | None, list[tuple[str, bytes]]]] = field(default_factory=list)
    errors: dict[str, BaseException] = field(default_factory=dict)
    full: int = 0
    """How many calls of `produce` find the queue full."""
    gate: threading.Event = field(default_factory=threading.Event)
    """Commits wait for it."""
    undelivered: int | None = None
    _waiting: list[Callable[[], None]] = field(default_factory=list)
    _offsets: dict[tuple[str, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gate.set()

    def _call(self, name: str) -> None:
        self.calls.append(name)
        error = self.errors.pop(name, None)
        if error is not None:
            raise error

    def init_transactions(self, *_: object) -> None:
        self._call("init")

    def begin_transaction(self) -> None:
        self._call("begin")

    def abort_transaction(self, *_: object) -> None:
        self._call("abort")

    def commit_transaction(self) -> None:
        assert self.gate.wait(30)
        self._call("commit")

    def list_topics(self, topic: str, *_: object) -> Any:
        return SimpleNamespace(topics={topic: SimpleNamespace(partitions=dict.fromkeys(range(self.partitions)))})

    def flush(self, *_: object) -> None:
        self._call("flush")
        self.poll(0)

    def poll(self, _: float) -> None:
        error = self.errors.pop("poll", None)
        if error is not None:
            raise error
        waiting, self._waiting = self._waiting, []
        for report in waiting:
            report()

    def produce(
        self,
        topic: str,
        value: bytes | None = None,
        key: bytes | None = None,
        partition: int = -1,
        report: Any = None,
        _report: Any = None,
        _time: int = 0,
        headers: Any = (),
    ) -> None:
        if self.full:
            self.full -= 1
            raise BufferError
        if topic.endswith(".markers"):
            self._call("marker")
        place = partition if partition >= 0 else zlib.crc32(key or b"") % self.partitions
        offset = self._offsets.get((topic, place), 0)
        self._offsets[topic, place] = offset + 1
        self.records.append((topic, place, key, value, headers))
        report = report or self.config.get("on_delivery")
        error = None if self.undelivered is None else KafkaError(self.undelivered)
        if report is not None:
            self._waiting.append(lambda: report(error, Message(topic, place, offset, value)))

    @property
    def markers(self) -> list[marker.SnapshotMarker]:
        """The markers that were produced."""
        return [marker.decode((value or b"")[5:]) for topic, _, _, value, _ in self.records if topic == "p.markers"]

    @property
    def stamps(self) -> list[stamp.Stamp]:
        """The stamps of the rows that were produced."""
        return [
            stamp.decode(dict(headers)[stamp.HEADER]) for topic, *_, headers in self.records if topic != "p.markers"
        ]


@dataclass
class Harness:
    publisher: SnapshotPublisher
    client: Client
    clock: HybridClock


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Harness]]:
    made: list[Harness] = []
    monkeypatch.setattr(publish, "Producer", Client)

    def make(**snapshot: float) -> Harness:
        settings = StreamSettings(
            name="eu.orders",
            site=3,
            prefix="p",
            kafka={"client.id": "x"},
            snapshot=SnapshotSettings(**snapshot),  # type: ignore[arg-type]
        )
        clock = HybridClock(lambda: 0)
        publisher = SnapshotPublisher(settings, clock=clock, marker_frame=FRAME, now_us=lambda: 77)
        publisher.begin(branch="b", epoch=5, number=10)
        client = cast(Any, publisher._producer)
        made.append(Harness(publisher, client, clock))
        return made[-1]

    yield make
    for harness in made:
        harness.client.gate.set()
        harness.publisher.stop()


def row(key: bytes, value: bytes | None = b"value", op: int = Op.CREATE, route: Route = T) -> Change:
    return route, op, 0, key, value, None


def transaction(seq: int, *changes: Change, size: int = 100, spilled: bool = False) -> Transaction:
    return Transaction(seq, seq * 1000, seq + 5, list(changes) or [row(b"k")], size, spilled)


def position(seq: int, *, safe_us: int = 0, consistent: bool = True, copy: tuple[CopyState, ...] = ()) -> LogPosition:
    return LogPosition(seq, b"resume", safe_us, behind=False, copy=copy, consistent=consistent)


def close(harness: Harness, seq: int, kind: MarkerKind = MarkerKind.LOG, **facts: Any) -> marker.SnapshotMarker:
    harness.publisher.close(position(seq, **facts), kind)
    harness.publisher.wait()
    (durable,) = harness.publisher.take_durable()
    return durable


def test_closing_has_its_order(make: Callable[..., Harness]) -> None:
    harness = make()
    harness.publisher.transaction(transaction(1))
    closed = close(harness, 1)
    assert harness.client.calls == ["begin", "flush", "marker", "commit"]
    assert harness.client.markers == [closed]
    assert closed.resume == b"resume"


def test_a_marker_counts_what_is_in_its_snapshot(make: Callable[..., Harness]) -> None:
    harness = make()
    rows = row(b"a", b"one"), row(b"b", b"two", route=U), row(b"a", b"gone", Op.DELETE), row(b"a", None, Op.DELETE)
    harness.publisher.transaction(transaction(1, *rows))
    harness.publisher.transaction(transaction(2, row(b"c", b"three")))
    closed = close(harness, 4)
    assert (closed.number, closed.epoch, closed.branch, closed.site) == (11, 5, "b", 3)
    assert (closed.first_seq, closed.last_seq, closed.transactions, closed.rows) == (1, 4, 2, 4)
    assert closed.ranges == (
        marker.Range("p.t", 0, 0, 4, 4, sum(map(zlib.crc32, (b"one", b"gone", b"three")))),
        marker.Range("p.u", 0, 0, 1, 1, zlib.crc32(b"two")),
    )
    assert closed.schemas == (T.version, U.version)
    assert close(harness, 4).number == 12


def test_each_partition_has_its_range(make: Callable[..., Harness]) -> None:
    harness = make()
    harness.client.partitions = 3
    keys = [b"%d" % n for n in range(20)]
    harness.publisher.transaction(transaction(1, *[row(key, key) for key in keys]))
    closed = close(harness, 1)
    for found in closed.ranges:
        own = [key for key in keys if zlib.crc32(key) % 3 == found.partition]
        assert (found.first_offset, found.end_offset, found.rows) == (0, len(own), len(own))
        assert found.digest == sum(map(zlib.crc32, own))
    assert len(closed.ranges) == 3


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 66, 128, 129, 5000])
@pytest.mark.parametrize("ends_in_delete", [False, True])
@pytest.mark.parametrize("as_list", [False, True])
def test_the_last_row_is_marked_wherever_a_transaction_is_cut(
    make: Callable[..., Harness], size: int, *, ends_in_delete: bool, as_list: bool
) -> None:
    harness = make()
    changes = [row(b"%d" % n) for n in range(size - 1)]
    changes += [row(b"k", b"v", Op.DELETE), row(b"k", None, Op.DELETE)] if ends_in_delete else [row(b"k")]

    class Spilled:
        def __iter__(self) -> Iterator[Change]:
            return iter(changes)

        def __len__(self) -> int:
            return len(changes)

    harness.publisher.transaction(Transaction(1, 1, 1, changes if as_list else Spilled(), 1))
    closed = close(harness, 1)
    stamps = harness.client.stamps
    assert closed.rows == size
    assert [s.ordinal for s in stamps[:size]] == list(range(size))
    assert [bool(s.flags & Flag.LAST) for s in stamps[:size]] == [False] * (size - 1) + [True]
    if ends_in_delete:
        assert stamps[size] == stamps[size - 1], "a tombstone has the stamp of its delete"


def test_stamps_carry_the_coordinates(make: Callable[..., Harness]) -> None:
    harness = make()
    harness.publisher.transaction(transaction(2, (T, Op.UPDATE, Flag.PARTIAL, b"k", b"v", b"cells"), row(b"l")))
    close(harness, 2)
    first, second = harness.client.stamps
    assert (first.site, first.epoch, first.seq, first.txid, first.hlc) == (3, 5, 2, 7, pack(2000))
    assert (first.flags, second.flags) == (Flag.PARTIAL, Flag.LAST)
    headers = [dict(headers) for *_, headers in harness.client.records[:2]]
    assert headers[0]["ab.cells"] == b"cells"
    assert "ab.cells" not in headers[1]


def test_copied_rows_are_a_snapshot_of_their_own(make: Callable[..., Harness]) -> None:
    harness = make()
    copied = position(9, copy=(CopyState("public.t", b"k", done=False),), consistent=False)
    chunk = Chunk(T, iter([row(b"a", op=Op.READ), row(b"b", op=Op.READ)]), 5000, 40, lambda: copied)
    harness.publisher.copy(chunk, seq=9)
    harness.publisher.close(chunk.position(), MarkerKind.COPY)
    harness.publisher.wait()
    (closed,) = harness.publisher.take_durable()
    assert (closed.kind, closed.first_seq, closed.last_seq, closed.transactions) == (MarkerKind.COPY, 9, 9, 0)
    assert (closed.rows, closed.copying, closed.safe_hlc, closed.last_hlc) == (2, True, 0, pack(5000))
    assert [(s.ordinal, s.seq, s.flags) for s in harness.client.stamps] == [
        (40, 9, Flag.COPIED),
        (41, 9, Flag.COPIED | Flag.LAST),
    ]


def test_an_empty_chunk_still_names_its_table(make: Callable[..., Harness]) -> None:
    harness = make()
    harness.publisher.copy(Chunk(T, iter([]), 5000, 0, lambda: position(9)), seq=9)
    closed = close(harness, 9, MarkerKind.COPY)
    assert (closed.kind, closed.rows, closed.ranges, closed.schemas) == (MarkerKind.COPY, 0, (), (T.version,))


def test_without_rows_a_snapshot_is_idle(make: Callable[..., Harness]) -> None:
    harness = make()
    closed = close(harness, 6, safe_us=9000)
    assert (closed.kind, closed.first_seq, closed.last_seq) == (MarkerKind.IDLE, 6, 6)
    assert closed.safe_hlc == closed.last_hlc == pack(9000)


def test_what_comes_behind_a_safe_time_is_later(make: Callable[..., Harness]) -> None:
    harness = make()
    safe = close(harness, 1, safe_us=9_000_000).safe_hlc
    harness.publisher.transaction(transaction(2))  # committed, by its clock, before
    close(harness, 2)
    assert harness.client.stamps[0].hlc > safe


def test_transactions_are_held_back_while_a_snapshot_is_closed(make: Callable[..., Harness]) -> None:
    harness = make()
    harness.publisher.transaction(transaction(1))
    harness.client.gate.clear()
    harness.publisher.close(position(1), MarkerKind.LOG)
    harness.publisher.transaction(transaction(2))
    assert harness.publisher.closing
    assert harness.publisher.take_durable() == []
    assert {s.seq for s in harness.client.stamps} == {1}
    harness.client.gate.set()
    harness.publisher.wait()
    assert harness.publisher.open_rows == 1
    assert [m.number for m in harness.publisher.take_durable()] == [11]
    closed = close(harness, 2)
    assert (closed.first_seq, closed.rows, closed.ranges[0].first_offset) == (2, 1, 1)


@pytest.mark.parametrize("large", [{"size": 64 << 20}, {"spilled": True}])
def test_what_is_held_back_is_bounded(make: Callable[..., Harness], large: dict[str, Any]) -> None:
    harness = make()
    harness.publisher.transaction(transaction(1))
    harness.client.gate.clear()
    harness.publisher.close(position(1), MarkerKind.LOG)
    opener = threading.Timer(0.05, harness.client.gate.set)
    opener.start()
    harness.publisher.transaction(transaction(2, **large))
    assert not harness.publisher.closing, "it waited"
    assert harness.publisher.open_rows == 1
    opener.join()


def test_a_snapshot_is_due_by_silence_age_or_size(make: Callable[..., Harness]) -> None:
    harness = make(quiet_ms=5, interval_ms=200, max_bytes=1000)
    publisher = harness.publisher
    assert not publisher.due(1e9, 0)
    publisher.transaction(transaction(1))
    assert publisher._open is not None
    now = publisher._open.since
    assert not publisher.due(now + 0.004, now)
    assert publisher.due(now + 0.006, now)
    assert not publisher.due(now + 0.199, now + 0.198)
    assert publisher.due(now + 0.201, now + 0.2)
    publisher.transaction(transaction(2, row(b"k", bytes(1000))))
    assert publisher.due(now, now)


def test_an_idle_stream_is_due_after_its_interval(make: Callable[..., Harness]) -> None:
    harness = make(idle_ms=1000)
    at = harness.publisher.last_marker_at
    assert not harness.publisher.idle_due(at + 0.9)
    assert harness.publisher.idle_due(at + 1.1)
    harness.publisher.transaction(transaction(1))
    assert not harness.publisher.idle_due(at + 1.1)


def test_a_full_queue_holds_the_source_back_and_loses_nothing(make: Callable[..., Harness]) -> None:
    harness = make()
    harness.client.full = 3
    harness.publisher.transaction(transaction(1, row(b"a", b"1"), row(b"b", b"2"), row(b"c", b"3")))
    harness.client.full = 2
    assert close(harness, 1).rows == 3
    assert [key for _, _, key, _, _ in harness.client.records[:3]] == [b"a", b"b", b"c"]


FENCED = KafkaException(KafkaError(KafkaError._FENCED))


def wrapped(cause: BaseException) -> SystemError:
    """Return what Python makes of an exception that was raised in a callback of the client."""
    error = SystemError("returned a result with an exception set")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("place", ["flush", "commit", "poll", "init", "begin"])
@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (FENCED, SourceFencedError),
        (wrapped(FENCED), SourceFencedError),
        (KafkaException(KafkaError(KafkaError.PRODUCER_FENCED)), SourceFencedError),
        (KafkaException(KafkaError(KafkaError.INVALID_PRODUCER_EPOCH)), SourceFencedError),
        (KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)), TopicMissingError),
        (KafkaException(KafkaError(KafkaError._TIMED_OUT)), PublishError),
    ],
)
def test_each_refusal_becomes_its_error(
    make: Callable[..., Harness], place: str, raised: BaseException, expected: type[Exception]
) -> None:
    harness = make()
    harness.client.errors[place] = raised

    def run() -> None:
        harness.publisher.fence()
        harness.publisher.take_durable()
        harness.publisher.transaction(transaction(1))
        close(harness, 1)

    with pytest.raises(expected) as caught:
        run()
    assert type(caught.value) is expected
    assert harness.publisher.take_durable() == []


def test_an_error_of_our_own_is_not_dressed_up(make: Callable[..., Harness]) -> None:
    harness = make()
    harness.client.errors["flush"] = SystemError("of another origin")
    harness.publisher.transaction(transaction(1))
    with pytest.raises(SystemError, match="another origin"):
        close(harness, 1)


@pytest.mark.parametrize(
    ("code", "expected"), [(KafkaError._UNKNOWN_TOPIC, TopicMissingError), (KafkaError._MSG_TIMED_OUT, PublishError)]
)
def test_a_row_that_kafka_does_not_take_fails_the_snapshot(
    make: Callable[..., Harness], code: int, expected: type[Exception]
) -> None:
    harness = make()
    harness.client.undelivered = code
    harness.publisher.transaction(transaction(1))
    with pytest.raises(expected):
        close(harness, 1)
    assert "commit" not in harness.client.calls


def test_giving_up_aborts_what_is_open(make: Callable[..., Harness]) -> None:
    harness = make()
    harness.publisher.transaction(transaction(1))
    harness.client.errors["begin"] = KafkaException(KafkaError(KafkaError._STATE))
    harness.publisher.give_up()
    assert harness.client.calls[-3:] == ["marker", "flush", "abort"]
    assert "commit" not in harness.client.calls


@pytest.mark.parametrize("place", ["begin", "flush", "abort"])
def test_giving_up_tells_that_another_worker_has_taken_over(make: Callable[..., Harness], place: str) -> None:
    harness = make()
    harness.client.errors[place] = FENCED
    with pytest.raises(SourceFencedError):
        harness.publisher.give_up()


def test_giving_up_outlives_a_broker_that_is_gone(make: Callable[..., Harness]) -> None:
    harness = make()
    for place in ("begin", "flush", "abort"):
        harness.client.errors[place] = KafkaException(KafkaError(KafkaError._TIMED_OUT))
    harness.publisher.give_up()


def test_the_users_properties_do_not_weaken_the_guarantees(make: Callable[..., Harness]) -> None:
    config = make().client.config
    assert config["transactional.id"] == "anabranch-p-eu.orders"
    assert config["partitioner"] == "murmur2_random"
    assert config["client.id"] == "x"
