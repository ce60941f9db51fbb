from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from anabranch_connectors.postgres.copying import CopiedChunk, CopyProgress, TableCopy
from anabranch_connectors.postgres.snapshot import Snapshot
from anabranch_schemas.marker import CopyState

SNAPSHOT = Snapshot.parse("10:20:12,15")
SEEN, UNSEEN = 11, 12


@dataclass
class Bound:
    last: int
    asked: list[int]

    def covers(self, fields: Sequence[bytes]) -> bool:
        self.asked.append(self.last)
        return int(fields[0]) <= self.last


@pytest.fixture
def asked() -> list[int]:
    """Return the bounds that were asked."""
    return []


def wants(progress: CopyProgress, key: int, xid: int, asked: list[int] | None = None) -> bool:
    log = asked if asked is not None else []
    return progress.wants("t", [b"%d" % key], xid, lambda _, last: Bound(int(last), log))


def chunk(after: int | None, bound: int | None, high_mark: int = 100, snapshot: Snapshot = SNAPSHOT) -> CopiedChunk:
    return CopiedChunk(
        "t", None if after is None else b"%d" % after, None if bound is None else b"%d" % bound, snapshot, high_mark
    )


def test_nothing_is_wanted_of_a_table_that_has_not_begun() -> None:
    progress = CopyProgress({"t": TableCopy()})
    assert not wants(progress, 1, UNSEEN)
    assert not progress.wants_truncate("t", UNSEEN)


def test_everything_is_wanted_of_a_table_that_is_done_or_unknown() -> None:
    progress = CopyProgress({"t": TableCopy(b"5", done=True)})
    assert wants(progress, 9, SEEN)
    assert progress.wants_truncate("t", SEEN)
    assert progress.wants_truncate("other", SEEN)
    assert progress.wants("other", [b"1"], SEEN, lambda *_: pytest.fail("no bound is needed"))


def test_up_to_the_last_key_everything_is_wanted_when_the_log_has_passed_the_chunks() -> None:
    progress = CopyProgress({"t": TableCopy(b"5")})
    assert wants(progress, 5, SEEN)
    assert not wants(progress, 6, UNSEEN)


def test_in_an_outstanding_chunk_only_what_it_has_not_seen_is_wanted() -> None:
    progress = CopyProgress({"t": TableCopy(b"3")})
    progress.copied(chunk(3, 6))
    assert [wants(progress, key, SEEN) for key in (3, 4, 6, 7)] == [True, False, False, False]
    assert [wants(progress, key, UNSEEN) for key in (3, 4, 6, 7)] == [True, True, True, False]


def test_each_key_is_judged_by_its_own_chunk() -> None:
    early, late = Snapshot.parse("10:10:"), Snapshot.parse("20:20:")
    progress = CopyProgress({"t": TableCopy()})
    progress.copied(chunk(None, 3, 100, early))
    progress.copied(chunk(3, None, 200, late))
    assert progress.tables["t"].done
    assert [wants(progress, key, 15) for key in (3, 4, 1000)] == [True, False, False]
    progress.passed(100)
    assert [wants(progress, key, 15) for key in (3, 4, 1000)] == [True, False, False]
    progress.passed(200)
    assert progress.settled
    assert wants(progress, 4, 15)


def test_a_key_is_compared_with_few_of_many_bounds(asked: list[int]) -> None:
    progress = CopyProgress({"t": TableCopy()})
    for at in range(64):
        progress.copied(chunk(at - 1 if at else None, at))
    for key in (0, 31, 63):
        asked.clear()
        assert wants(progress, key, UNSEEN, asked)
        assert len(asked) <= 7, "6 for 64 chunks, and the first one's beginning"


def test_chunks_are_forgotten_at_their_high_mark() -> None:
    progress = CopyProgress({"t": TableCopy()})
    progress.copied(chunk(None, None, 100))
    progress.passed(99)
    assert not progress.settled
    progress.passed(100)
    assert progress.settled


def test_a_truncate_that_no_chunk_has_seen_is_wanted() -> None:
    progress = CopyProgress({"t": TableCopy()})
    progress.copied(chunk(None, 3))
    assert progress.wants_truncate("t", UNSEEN)
    assert progress.tables["t"].last_key == b"3"


def test_a_truncate_that_all_chunks_have_seen_is_not_wanted() -> None:
    progress = CopyProgress({"t": TableCopy()})
    progress.copied(chunk(None, 3))
    progress.copied(chunk(3, 6))
    assert not progress.wants_truncate("t", SEEN)
    assert progress.tables["t"].last_key == b"6"


@pytest.mark.parametrize("last", [6, None])
def test_a_truncate_between_two_chunks_is_wanted_and_begins_the_copy_again(last: int | None) -> None:
    progress = CopyProgress({"t": TableCopy(), "u": TableCopy()})
    progress.copied(chunk(None, 3, snapshot=Snapshot.parse("10:10:")))
    progress.copied(chunk(3, last))
    progress.outstanding.append(CopiedChunk("u", None, b"1", SNAPSHOT, 100))
    assert progress.wants_truncate("t", SEEN)
    assert progress.tables["t"] == TableCopy()
    assert [c.table for c in progress.outstanding] == ["u"]
    assert not wants(progress, 1, UNSEEN)


def test_a_table_that_has_begun_is_copied_to_its_end_before_the_next() -> None:
    progress = CopyProgress()
    for name in ("a", "b", "c"):
        progress.add(name)
    assert progress.next_table() == "a"
    progress.take_up(CopyState("b", b"1", done=False))
    assert progress.next_table() == "b"
    progress.copied(CopiedChunk("b", b"1", None, SNAPSHOT, 1))
    assert progress.next_table() == "a"
    progress.take_up(CopyState("a", None, done=True))
    progress.take_up(CopyState("c", None, done=True))
    assert progress.next_table() is None
    assert not progress.copying


def test_states_are_what_is_taken_up_again() -> None:
    progress = CopyProgress()
    for state in (CopyState("b", b"7", done=False), CopyState("a", b"9", done=True)):
        progress.take_up(state)
    progress.add("b")
    assert progress.states() == (CopyState("a", b"9", done=True), CopyState("b", b"7", done=False))
