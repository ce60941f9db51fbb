"""The exact Kafka ranges of a cut: what is read, what must be found in it, and what was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anabranch_schemas.marker import DIGEST_MASK, Range
from anabranch_sink.cut import Cut
from anabranch_sink.errors import RangeMismatchError


@dataclass(frozen=True, slots=True)
class MarkedRange:
    """A range of a marker, and the epoch that its records must carry."""

    range: Range
    stream: str
    marker: int
    epoch: int

    @property
    def where(self) -> str:
        """Coordinates as they are shown to people."""
        r = self.range
        return (
            f"{self.stream} marker {self.marker}: {r.topic}[{r.partition}] offsets {r.first_offset}..{r.end_offset - 1}"
        )


def of_cut(cut: Cut) -> tuple[MarkedRange, ...]:
    """Return the ranges of all markers of a cut, sorted by topic, partition and offset."""
    ranges = (
        MarkedRange(found, p.marker.stream, p.marker.number, p.marker.epoch) for p in cut for found in p.marker.ranges
    )
    return tuple(sorted(ranges, key=lambda m: (m.range.topic, m.range.partition, m.range.first_offset)))


def extents(ranges: Sequence[MarkedRange]) -> dict[str, dict[int, tuple[int, int]]]:
    """Return topic → partition → (first offset, end offset), from the first range of a partition to its last."""
    found: dict[str, dict[int, tuple[int, int]]] = {}
    for marked in ranges:
        r = marked.range
        first, end = found.setdefault(r.topic, {}).get(r.partition, (r.first_offset, r.end_offset))
        found[r.topic][r.partition] = (min(first, r.first_offset), max(end, r.end_offset))
    return found


def check(ranges: Sequence[MarkedRange], found: Mapping[int, tuple[int, int]]) -> None:
    """Compare what tasks counted per range index, as (records, digest), with what the markers say.

    Raises:
        RangeMismatchError: for the first range that differs.
    """
    for index, marked in enumerate(ranges):
        rows, digest = found.get(index, (0, 0))
        expected = marked.range
        if rows != expected.rows:
            raise _mismatch(marked, f"{rows} records where the marker counted {expected.rows}")
        if digest & DIGEST_MASK != expected.digest:
            raise _mismatch(marked, f"the digest of {rows} records differs from the marker's")


def _mismatch(marked: MarkedRange, what: str) -> RangeMismatchError:
    source = marked.stream.rpartition(".")[2]
    return RangeMismatchError(
        what,
        where=marked.where,
        advice="nothing of the cut was applied; the records were altered, compacted or written by somebody else. "
        f"Run `anabranch bootstrap FILE --source {source}` to copy the tables anew",
    )
