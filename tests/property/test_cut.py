"""Laws of the choice of a cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from anabranch_connectors.api import Applied
from anabranch_schemas.marker import MarkerKind, Range, SnapshotMarker
from anabranch_schemas.vector import VectorTime
from anabranch_sink.cut import Cut, PendingMarker, choose

Pending = dict[str, tuple[PendingMarker, ...]]


@st.composite
def histories(draw: st.DrawFn) -> tuple[Pending, dict[str, Applied]]:
    """Draw markers of up to three sites that saw one another, some applied, some pending, some not yet arrived."""
    sites = draw(st.integers(1, 3))
    runs: dict[int, list[PendingMarker]] = {site: [] for site in range(1, sites + 1)}
    seen: dict[int, dict[int, int]] = {site: {} for site in runs}
    for step in range(draw(st.integers(0, 25))):
        site = draw(st.integers(1, sites))
        other = draw(st.integers(1, sites))
        if other != site and runs[other] and draw(st.booleans()):
            known = draw(st.sampled_from(runs[other])).marker
            for name, seq in known.vector.items():
                if name != site:
                    seen[site][name] = max(seen[site].get(name, 0), seq)
        number = len(runs[site]) + 1
        records = draw(st.integers(0, 5))
        kind = draw(st.sampled_from([MarkerKind.LOG] * 9 + [MarkerKind.DDL]))
        marker = SnapshotMarker(
            stream=f"s{site}",
            site=site,
            branch="b",
            epoch=1,
            number=number,
            kind=kind,
            first_seq=number * 10,
            last_seq=number * 10,
            safe_hlc=step,
            vector=VectorTime({**seen[site], site: number * 10}),
            transactions=1,
            rows=records,
            ranges=(Range("t", 0, 0, records, records, 0),) if records else (),
            closed_us=step,
        )
        runs[site].append(PendingMarker(marker, number))
    arrived = {site: draw(st.integers(0, len(run))) for site, run in runs.items()}
    applied = _closed_prefix(runs, {site: draw(st.integers(0, arrived[site])) for site in runs})
    pending = {f"s{site}": tuple(run[applied[site] : arrived[site]]) for site, run in runs.items()}
    progress = {
        f"s{site}": Applied(site=site, marker=count, seq=count * 10) for site, count in applied.items() if count
    }
    return pending, progress


def _closed_prefix(runs: dict[int, list[PendingMarker]], counts: dict[int, int]) -> dict[int, int]:
    """Shorten prefixes until they are causally closed: what a sink could have applied."""
    counts = dict(counts)
    while True:
        before = dict(counts)
        for site, run in runs.items():
            while counts[site] and any(
                seq > counts[other] * 10 for other, seq in run[counts[site] - 1].marker.vector.items() if other != site
            ):
                counts[site] -= 1
        if counts == before:
            return counts


def _unmet(cut: dict[str, int], pending: Pending, applied: dict[str, Applied]) -> bool:
    """Tell whether taking these counts leaves a dependency open."""
    reach = {stream: found.seq for stream, found in applied.items()}
    reach |= {stream: pending[stream][count - 1].marker.last_seq for stream, count in cut.items() if count}
    known = all(stream in applied or run for stream, run in pending.items())
    for stream, count in cut.items():
        for found in pending[stream][:count]:
            for site, seq in found.marker.vector.items():
                if site == found.marker.site:
                    continue
                follows = f"s{site}" in pending and (f"s{site}" in applied or bool(pending[f"s{site}"]))
                if follows and reach.get(f"s{site}", 0) < seq:
                    return True
                if not follows and not known:
                    return True
    return False


def _counts(cut: Cut, pending: Pending) -> dict[str, int]:
    return {stream: len(cut.streams.get(stream, ())) for stream in pending}


@given(histories(), st.integers(0, 20))
def test_a_cut_is_causally_closed_dense_and_never_passes_a_barrier(
    history: tuple[Pending, dict[str, Applied]], budget: int
) -> None:
    pending, applied = history
    cut = choose(pending, applied, budget)
    assert not _unmet(_counts(cut, pending), pending, applied)
    for stream, run in cut.streams.items():
        assert run == pending[stream][: len(run)], "whole markers, from the next one on"
        assert all(right.marker.number == left.marker.number + 1 for left, right in pairwise(run))
        assert all(found.marker.kind is not MarkerKind.DDL for found in run[:-1])


@given(histories(), st.integers(0, 20))
def test_a_cut_is_maximal_under_its_budget(history: tuple[Pending, dict[str, Applied]], budget: int) -> None:
    """No marker more of any stream, with the least it needs, would fit; only a first marker may exceed the budget."""
    pending, applied = history
    cut = choose(pending, applied, budget)
    taken = _counts(cut, pending)
    limits = {stream: _limit(run) for stream, run in pending.items()}
    if cut.records > budget:
        smaller = [c for c in _closures(taken, dict.fromkeys(pending, 0), limits, pending, applied) if any(c.values())]
        assert all(_records(c, pending) >= cut.records or _records(c, pending) == 0 for c in smaller)
        return
    for bigger in _closures(limits, taken, limits, pending, applied):
        if bigger != taken:
            assert cut.records
            assert _records(bigger, pending) > budget


def _closures(
    upto: dict[str, int], least: dict[str, int], limits: dict[str, int], pending: Pending, applied: dict[str, Applied]
) -> list[dict[str, int]]:
    """Return all closed counts between two, by brute force over at most a few thousand."""
    grids: list[dict[str, int]] = [{}]
    for stream in pending:
        top = min(upto[stream], limits[stream], least[stream] + 6)
        grids = [{**grid, stream: count} for grid in grids for count in range(least[stream], top + 1)]
    return [grid for grid in grids if not _unmet(grid, pending, applied)]


def _limit(run: tuple[PendingMarker, ...]) -> int:
    return next((at + 1 for at, found in enumerate(run) if found.marker.kind is MarkerKind.DDL), len(run))


def _records(counts: dict[str, int], pending: Pending) -> int:
    return sum(found.records for stream, count in counts.items() for found in pending[stream][:count])


@given(histories(), st.integers(0, 20))
def test_cuts_follow_one_another_until_nothing_closed_is_left(
    history: tuple[Pending, dict[str, Applied]], budget: int
) -> None:
    """Progress is monotone, and small cuts reach as far as one without a budget."""
    pending, applied = history
    reached = _drain(pending, applied, budget)
    assert reached == _drain(pending, applied, 10**9)
    assert all(reached[stream].seq >= found.seq for stream, found in applied.items())


def _drain(pending: Pending, applied: dict[str, Applied], budget: int) -> dict[str, Applied]:
    while cut := choose(pending, applied, budget):
        progress = cut.progress(applied)
        assert all(found.marker > applied.get(stream, Applied()).marker for stream, found in progress.items())
        applied = {**applied, **progress}
        pending = {stream: run[len(cut.streams.get(stream, ())) :] for stream, run in pending.items()}
    return applied
