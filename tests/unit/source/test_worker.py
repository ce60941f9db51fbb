"""What a worker does in which order, with a source part and a publisher that only take notes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from anabranch_connectors.change import Chunk, LogPosition
from anabranch_connectors.source_part import HandOver, StreamStart
from anabranch_schemas.clock import HybridClock
from anabranch_schemas.errors import AnabranchError
from anabranch_schemas.marker import CopyState, MarkerKind, SnapshotMarker
from anabranch_schemas.table import TableSchema
from anabranch_schemas.vector import VectorTime
from anabranch_source import worker
from anabranch_source.errors import SourceFencedError
from anabranch_source.settings import StreamSettings
from anabranch_source.topics import Topics
from anabranch_source.worker import SourceWorker

STORED = SnapshotMarker(
    stream="eu.orders",
    site=1,
    branch="b",
    epoch=4,
    number=9,
    kind=MarkerKind.COPY,
    first_seq=1,
    last_seq=1,
    safe_hlc=0,
    last_hlc=123,
    vector=VectorTime(),
    transactions=0,
    rows=0,
    copy=(
        CopyState("public.done", None, done=True),
        CopyState("public.begun", b"k", done=False),
        CopyState("public.new", None, done=False),
    ),
)
POSITION = LogPosition(seq=1, resume=b"", safe_us=0, behind=False)


class Registry:
    def register(self, subject: str, schema: str) -> int:
        del subject, schema
        return 7

    def schema(self, schema_id: int) -> str:
        return str(schema_id)


@dataclass
class Publisher:
    """Takes notes; snapshots close at once."""

    notes: list[str]
    clock: HybridClock
    fenced: bool = False
    closing: bool = False
    open_rows: int = 0
    durable: list[SnapshotMarker] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def fence(self) -> None:
        self.note("fence")

    def begin(self, *, branch: str, epoch: int, number: int) -> None:
        self.note(f"begin {branch} {epoch} {number} {self.clock.last}")

    def transaction(self, _: object) -> None:
        self.open_rows += 1

    def due(self, *_: object) -> bool:
        return self.open_rows > 2

    def idle_due(self, _: float) -> bool:
        return False

    def copy(self, chunk: Chunk, *, seq: int) -> None:
        self.note(f"copy {len(list(chunk.changes))} at {seq}")

    def close(self, _: LogPosition, kind: MarkerKind) -> None:
        self.note(f"close {kind.value} {self.open_rows}")
        self.durable.append(replace(STORED, rows=self.open_rows))
        self.open_rows = 0

    def wait(self) -> None:
        pass

    def take_durable(self) -> list[SnapshotMarker]:
        durable, self.durable = self.durable, []
        return durable

    def give_up(self) -> None:
        self.note("give up")
        if self.fenced:
            raise SourceFencedError("overtaken")

    def stop(self) -> None:
        self.note("stop")


@dataclass
class Part:
    """Reads what the test says: each step is (transactions, position) or an error."""

    notes: list[str]
    steps: list[tuple[int, LogPosition] | BaseException]
    stop: threading.Event
    chunks: int = 0

    def start(self, stored: SnapshotMarker | None, hand_over: HandOver) -> StreamStart:
        self.notes.append(f"start {stored.number if stored else None}")
        self.hand_over = hand_over
        return StreamStart("branch", POSITION)

    def read(self, _: float) -> LogPosition:
        if not self.steps:
            self.stop.set()
            return POSITION
        step = self.steps.pop(0)
        if isinstance(step, BaseException):
            raise step
        for _ in range(step[0]):
            self.hand_over(object())  # type: ignore[arg-type]
        return step[1]

    def copy_chunk(self, rows: int) -> Chunk | None:
        if not self.chunks:
            return None
        self.chunks -= 1
        return Chunk(None, iter([None] * rows), 0, 0, lambda: POSITION)  # type: ignore[arg-type]

    def acknowledge(self, durable: SnapshotMarker) -> None:
        self.notes.append(f"acknowledge {durable.rows}")


@dataclass
class Harness:
    notes: list[str]
    run: Callable[..., None]
    settings: StreamSettings
    publishers: list[Publisher]


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Harness:
    notes: list[str] = []
    publishers: list[Publisher] = []
    stored: list[SnapshotMarker | None] = [None]
    settings = StreamSettings(name="eu.orders", site=1, prefix="p", kafka={}, copy_chunk_rows=3)

    def newest(*_: object, exists: bool) -> SnapshotMarker | None:
        assert exists
        notes.append("newest marker")
        return stored[0]

    def make(_: StreamSettings, *, clock: HybridClock, **__: Any) -> Publisher:
        publishers.append(Publisher(notes, clock))
        publishers[-1].fenced = fenced[0]
        return publishers[-1]

    fenced = [False]
    monkeypatch.setattr(worker, "SnapshotPublisher", make)
    monkeypatch.setattr(worker, "newest_marker", newest)
    monkeypatch.setattr(Topics, "ensure_markers", lambda _: notes.append("marker topic"))

    def run(
        *steps: tuple[int, LogPosition] | BaseException,
        chunks: int = 0,
        marker: SnapshotMarker | None = None,
        overtaken: bool = False,
    ) -> None:
        stored[0], fenced[0] = marker, overtaken
        stop = threading.Event()
        SourceWorker(settings, Registry()).run(Part(notes, list(steps), stop, chunks), stop)

    return Harness(notes, run, settings, publishers)


def test_a_stream_is_taken_up_in_an_order_that_makes_the_stored_position_final(harness: Harness) -> None:
    harness.run()
    assert harness.notes == [
        "marker topic",
        "fence",
        "newest marker",
        "start None",
        "begin branch 1 0 0",
        "stop",
    ]


def test_a_restart_goes_on_with_the_next_epoch_behind_all_times_given_out(harness: Harness) -> None:
    harness.run(marker=STORED)
    assert "start 9" in harness.notes
    assert "begin branch 5 9 123" in harness.notes


def test_what_is_durable_is_acknowledged_and_what_is_read_is_published_at_the_end(harness: Harness) -> None:
    harness.run((3, POSITION), (0, POSITION), (2, POSITION))
    assert harness.notes[5:] == ["close log 3", "acknowledge 3", "close log 2", "acknowledge 2", "stop"]


def test_a_chunk_is_a_snapshot_of_its_own(harness: Harness) -> None:
    copying = replace(POSITION, copying=True)
    harness.run((1, copying), (0, copying), (0, POSITION), chunks=2)
    assert harness.notes[5:] == [
        "close log 1",
        "copy 3 at 1",
        "close copy 0",
        "acknowledge 1",
        "acknowledge 0",
        "copy 3 at 1",
        "close copy 0",
        "acknowledge 0",
        "stop",
    ]


def test_a_busy_log_has_its_turn_but_not_for_ever(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1, 10_000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(ticks)))
    busy = replace(POSITION, copying=True, behind=True)
    harness.run(*[(0, busy)] * 40, chunks=100)
    copies = [note for note in harness.notes if note.startswith("copy")]
    assert 5 < len(copies) < 35


def test_a_failure_gives_the_snapshot_up(harness: Harness) -> None:
    with pytest.raises(AnabranchError, match="the server went away"):
        harness.run((1, POSITION), AnabranchError("the server went away"))
    assert harness.notes[-2:] == ["give up", "stop"]


def test_a_failure_that_a_successor_caused_is_a_fence(harness: Harness) -> None:
    with pytest.raises(SourceFencedError) as caught:
        harness.run(AnabranchError("the server went away"), overtaken=True)
    assert "went away" in str(caught.value.__context__)


def test_a_fenced_worker_has_nothing_to_give_up(harness: Harness) -> None:
    with pytest.raises(SourceFencedError):
        harness.run(SourceFencedError("overtaken"))
    assert "give up" not in harness.notes


def test_topics_of_tables_with_rows_must_exist(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, bool] = {}

    class Routing(Part):
        def start(self, stored: SnapshotMarker | None, hand_over: HandOver) -> StreamStart:
            for name in ("done", "begun", "new"):
                source.router(TableSchema("public", name, (), ()), {}, {})
            return super().start(stored, hand_over)

    monkeypatch.setattr(Topics, "ensure_table", lambda _, topic, *, begun: asked.update({topic: begun}))
    monkeypatch.setattr(worker, "newest_marker", lambda *_, **__: STORED)
    stop = threading.Event()
    source = SourceWorker(harness.settings, Registry())
    source.run(Routing([], [], stop), stop)
    assert asked == {"p.public.done": True, "p.public.begun": True, "p.public.new": False}
