"""What a snapshot sees, and when a chunk may be read in it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch_connectors.postgres.snapshot import Snapshot, StreamedTransactions, widen_xid


def test_a_snapshot_is_read_as_postgresql_writes_it() -> None:
    snapshot = Snapshot.parse("10:20:10,14")
    assert snapshot == Snapshot(10, 20, frozenset({10, 14}))
    assert str(snapshot) == "10:20:10,14"
    assert Snapshot.parse("10:10:") == Snapshot(10, 10, frozenset())


@pytest.mark.parametrize("text", ["", "10:20", "a:b:", "1:2:3:4"])
def test_what_is_no_snapshot_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Snapshot.parse(text)


@pytest.mark.parametrize(
    ("xid", "seen"), [(9, True), (10, False), (13, True), (14, False), (19, True), (20, False), (21, False)]
)
def test_a_snapshot_sees_what_had_committed(xid: int, *, seen: bool) -> None:
    assert Snapshot.parse("10:20:10,14").sees(xid) is seen


@given(st.integers(2**32, 2**62), st.integers(-(2**31), 2**31 - 1))
def test_a_xid_is_widened_to_the_nearest(near: int, away: int) -> None:
    assert widen_xid((near + away) % 2**32, near) == near + away


def test_a_snapshot_that_misses_a_streamed_transaction_is_not_usable() -> None:
    streamed = StreamedTransactions()
    streamed.add(15)
    assert streamed.usable(Snapshot.parse("10:20:10,14"))
    streamed.add(14)
    assert not streamed.usable(Snapshot.parse("10:20:10,14"))
    assert streamed.usable(Snapshot.parse("10:20:10"))
    streamed.add(20)
    assert not streamed.usable(Snapshot.parse("10:20:10"))


def test_pruning_keeps_exactly_what_is_not_seen_yet() -> None:
    streamed = StreamedTransactions([5, 14, 15, 25])
    streamed.prune(Snapshot.parse("10:20:14"))
    assert streamed.dump() == [14, 25]
    assert len(streamed) == 2


def test_what_is_dumped_is_loaded() -> None:
    streamed = StreamedTransactions([30, 3])
    assert StreamedTransactions.load(streamed.dump()).dump() == [3, 30]


SNAPSHOTS = st.builds(
    lambda xmin, length, running: Snapshot(xmin, xmin + length, frozenset(xmin + r for r in running if r < length)),
    st.integers(1, 50),
    st.integers(0, 30),
    st.frozensets(st.integers(0, 29)),
)


@given(st.sets(st.integers(1, 90)), SNAPSHOTS)
def test_usable_is_seeing_all_of_them(xids: set[int], snapshot: Snapshot) -> None:
    assert StreamedTransactions(xids).usable(snapshot) == all(snapshot.sees(xid) for xid in xids)


@given(st.sets(st.integers(1, 90)), SNAPSHOTS)
def test_pruned_with_a_usable_snapshot_nothing_is_left(xids: set[int], snapshot: Snapshot) -> None:
    streamed = StreamedTransactions(xids)
    usable = streamed.usable(snapshot)
    streamed.prune(snapshot)
    assert (len(streamed) == 0) == usable
