"""Where a stream goes on, and where it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch_connectors.api import Applied
from anabranch_schemas.marker import MarkerKind, Range, SnapshotMarker
from anabranch_schemas.vector import VectorTime
from anabranch_sink.cut import PendingMarker, choose, follow
from anabranch_sink.errors import MarkerGapError, StreamResetError


def marker(
    number: int, records: int = 1, *, stream: str = "eu.orders", site: int = 1, epoch: int = 3
) -> SnapshotMarker:
    return SnapshotMarker(
        stream=stream,
        site=site,
        branch="b1",
        epoch=epoch,
        number=number,
        kind=MarkerKind.LOG,
        first_seq=number * 10,
        last_seq=number * 10,
        safe_hlc=number,
        vector=VectorTime({site: number * 10}),
        transactions=1,
        rows=records,
        ranges=(Range("t", 0, 0, records, records, 0),),
        closed_us=number,
    )


def pending(*markers: SnapshotMarker) -> tuple[PendingMarker, ...]:
    return tuple(PendingMarker(found, found.number) for found in markers)


def test_the_next_number_follows() -> None:
    follow(Applied(marker=4, epoch=3), marker(5))
    follow(marker(5), marker(6, epoch=4))


def test_a_missing_number_is_a_gap() -> None:
    with pytest.raises(MarkerGapError, match="after marker 4 came marker 6") as caught:
        follow(Applied(marker=4, epoch=3), marker(6))
    assert "anabranch bootstrap FILE --source orders" in caught.value.advice


def test_a_number_that_goes_back_is_a_reset() -> None:
    with pytest.raises(StreamResetError, match="now on branch b2"):
        follow(Applied(marker=4, epoch=3, branch="b1"), replace(marker(1), branch="b2"))


def test_an_epoch_that_goes_back_is_a_reset() -> None:
    with pytest.raises(StreamResetError, match="two sources"):
        follow(Applied(marker=4, epoch=3), marker(5, epoch=2))


def test_a_marker_greater_than_the_budget_is_taken_alone() -> None:
    cut = choose({"eu.orders": pending(marker(1, 500), marker(2))}, {}, budget=100)
    assert [found.marker.number for found in cut] == [1]


def test_many_idle_markers_are_one_cut() -> None:
    cut = choose({"eu.orders": pending(*[marker(n, 0) for n in range(1, 1000)])}, {}, budget=0)
    assert len(cut.streams["eu.orders"]) == 999


def test_a_ddl_marker_ends_its_stream_s_part() -> None:
    ddl = replace(marker(2), kind=MarkerKind.DDL)
    cut = choose({"eu.orders": pending(marker(1), ddl, marker(3))}, {}, budget=100)
    assert [found.marker.number for found in cut] == [1, 2]


def test_a_stream_that_has_shown_no_marker_may_be_the_site_depended_on() -> None:
    effect = replace(marker(1), vector=VectorTime({1: 10, 2: 20}))
    assert not choose({"eu.orders": pending(effect), "us.orders": ()}, {}, budget=100)
    assert choose({"eu.orders": pending(effect)}, {}, budget=100)


def test_progress_carries_the_last_marker_and_the_totals() -> None:
    cut = choose({"eu.orders": pending(marker(5, 2), marker(6, 3))}, {}, budget=100)
    before = {"eu.orders": Applied(marker=4, transactions=7, rows=70)}
    assert cut.progress(before)["eu.orders"] == Applied(
        site=1,
        marker=6,
        marker_offset=6,
        seq=60,
        branch="b1",
        epoch=3,
        safe_hlc=6,
        vector=VectorTime({1: 60}),
        transactions=9,
        rows=75,
    )
