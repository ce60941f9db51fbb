"""Which markers to apply next: a causally closed set of prefixes of the pending markers, within a row budget.

A cut is a prefix length for every stream. Closed cuts are closed under union, so growing one greedily by least
closures is enough: a closure that does not fit now never fits later in the same choice, because the total with it
only grows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from anabranch_connectors.api import Applied
from anabranch_schemas.marker import MarkerKind, SnapshotMarker
from anabranch_sink.errors import MarkerGapError, StreamResetError, bootstrap_advice


@dataclass(frozen=True, slots=True)
class PendingMarker:
    """A marker and its offset in the marker topic."""

    marker: SnapshotMarker
    offset: int

    @property
    def records(self) -> int:
        """Records to read for it, tombstones included."""
        return sum(r.rows for r in self.marker.ranges)


@dataclass(frozen=True, slots=True)
class Cut:
    """The markers to apply as one transaction: per stream a non-empty run that follows what is applied."""

    streams: Mapping[str, tuple[PendingMarker, ...]]

    def __bool__(self) -> bool:
        return bool(self.streams)

    def __iter__(self) -> Iterator[PendingMarker]:
        return (pending for markers in self.streams.values() for pending in markers)

    @property
    def records(self) -> int:
        """Records to read for it."""
        return sum(pending.records for pending in self)

    def progress(self, applied: Mapping[str, Applied]) -> dict[str, Applied]:
        """Return what is applied of the cut's streams after it."""
        return {stream: _advance(applied.get(stream, Applied()), run) for stream, run in self.streams.items()}


def _advance(before: Applied, run: Sequence[PendingMarker]) -> Applied:
    last = run[-1].marker
    return Applied(
        site=last.site,
        marker=last.number,
        marker_offset=run[-1].offset,
        seq=last.last_seq,
        branch=last.branch,
        epoch=last.epoch,
        safe_hlc=last.safe_hlc,
        vector=last.vector,
        transactions=before.transactions + sum(pending.marker.transactions for pending in run),
        rows=before.rows + sum(pending.marker.rows for pending in run),
    )


def follow(last: SnapshotMarker | Applied, marker: SnapshotMarker) -> None:
    """Check that a marker continues its stream after `last` (what is applied, or the marker before it).

    Raises:
        StreamResetError: if its number or epoch goes back.
        MarkerGapError: if its number is not the next.
    """
    number = last.marker if isinstance(last, Applied) else last.number
    where = f"{marker.stream} marker {marker.number}"
    if marker.number <= number:
        branch = f", now on branch {marker.branch}" if marker.branch != last.branch else ""
        raise StreamResetError(
            f"the stream began anew: after marker {number} came marker {marker.number}{branch}",
            where=where,
            advice=bootstrap_advice(marker.stream),
        )
    if marker.epoch < last.epoch:
        raise StreamResetError(
            f"after epoch {last.epoch} came a marker of epoch {marker.epoch}: two sources write this stream",
            where=where,
            advice=f"stop the older source, then {bootstrap_advice(marker.stream)}",
        )
    if marker.number != number + 1:
        raise MarkerGapError(
            f"after marker {number} came marker {marker.number}; those between are not on Kafka",
            where=where,
            advice=f"restore the marker topic, or {bootstrap_advice(marker.stream)}",
        )


def choose(
    pending: Mapping[str, Sequence[PendingMarker]],
    applied: Mapping[str, Applied],
    budget: int,
) -> Cut:
    """Return the next cut: causally closed, within `budget` records unless not even one marker fits, and maximal so.

    A marker depends on every other site's seq in its vector, as far as a stream of that site feeds this sink (sites
    that do not are not waited for, once every stream has shown its site; of several streams of one site the furthest
    counts). A stream's part ends with
    its first `ddl` marker. The streams whose next marker is oldest grow first. Empty if nothing can be applied yet.
    """
    growing = _Growing(pending, applied)
    order = [stream for stream, run in pending.items() if run]
    records = 0
    while order:
        stream = min(order, key=growing.age)
        closure = growing.closure(stream)
        cost = growing.cost(closure) if closure else 0
        if closure is None or (records and cost and records + cost > budget):
            order.remove(stream)
            continue
        if not records and cost > budget and (cheaper := growing.cheapest(order)) is not None:
            closure, cost = cheaper
        growing.take(closure)
        records += cost
        order = [stream for stream in order if growing.taken[stream] < growing.limit[stream]]
    taken = {stream: tuple(pending[stream][:count]) for stream, count in growing.taken.items() if count}
    return Cut(taken)


class _Growing:
    """A closed cut that grows: how many markers of each stream are taken."""

    def __init__(self, pending: Mapping[str, Sequence[PendingMarker]], applied: Mapping[str, Applied]) -> None:
        self._pending = pending
        self._applied = applied
        self._seqs = {stream: [p.marker.last_seq for p in run] for stream, run in pending.items()}
        self._streams_of: dict[int, list[str]] = {}
        # A stream without any marker yet may be of any site.
        self._silent = False
        for stream in sorted({*pending, *applied}):
            if stream in applied:
                self._streams_of.setdefault(applied[stream].site, []).append(stream)
            elif pending[stream]:
                self._streams_of.setdefault(pending[stream][0].marker.site, []).append(stream)
            else:
                self._silent = True
        self.taken = dict.fromkeys(pending, 0)
        self.limit = {stream: _barrier(run) for stream, run in pending.items()}

    def age(self, stream: str) -> tuple[int, str]:
        """Order streams by when their next marker was closed."""
        return self._pending[stream][self.taken[stream]].marker.closed_us, stream

    def closure(self, stream: str) -> dict[str, int] | None:
        """Return the least counts that take one more marker of a stream and are closed; None if there are none."""
        counts = dict(self.taken)
        todo = [(stream, counts[stream] + 1)]
        while todo:
            name, wanted = todo.pop()
            if wanted > self.limit[name]:
                return None
            for at in range(counts[name], wanted):
                marker = self._pending[name][at].marker
                for site, seq in marker.vector.items():
                    if site != marker.site:
                        needed = self._reach(site, seq, counts)
                        if needed is None:
                            return None
                        todo += needed
            counts[name] = max(counts[name], wanted)
        return counts

    def _reach(self, site: int, seq: int, counts: Mapping[str, int]) -> list[tuple[str, int]] | None:
        """Return what to take to cover a site's seq: nothing, or one stream's count; None if it is not there."""
        streams = self._streams_of.get(site)
        if not streams:
            return None if self._silent else []
        if any(self._seq(stream, counts) >= seq for stream in streams):
            return []
        for stream in streams:
            count = bisect_left(self._seqs.get(stream, []), seq) + 1
            if stream in self._pending and count <= self.limit[stream]:
                return [(stream, count)]
        return None

    def _seq(self, stream: str, counts: Mapping[str, int]) -> int:
        count = counts.get(stream, 0)
        return self._seqs[stream][count - 1] if count else self._applied.get(stream, Applied()).seq

    def cost(self, closure: Mapping[str, int]) -> int:
        """Return the records that a closure adds."""
        return sum(
            pending.records
            for stream, count in closure.items()
            for pending in self._pending[stream][self.taken[stream] : count]
        )

    def cheapest(self, streams: Sequence[str]) -> tuple[dict[str, int], int] | None:
        """Return the closure with the fewest records among those of these streams."""
        closures = [closure for stream in streams if (closure := self.closure(stream))]
        if not closures:
            return None
        best = min(closures, key=self.cost)
        return best, self.cost(best)

    def take(self, closure: dict[str, int]) -> None:
        """Grow to these counts."""
        self.taken = closure


def _barrier(run: Sequence[PendingMarker]) -> int:
    """Return how many markers there are up to and with the first `ddl` marker."""
    for at, pending in enumerate(run):
        if pending.marker.kind is MarkerKind.DDL:
            return at + 1
    return len(run)
