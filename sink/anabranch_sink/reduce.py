"""From the records of a task's partitions to the newest one per key, on stamps alone.

All records of a key lie in one partition in order, so the last that arrives wins and nothing is shuffled. Work is
done per run (consecutive records of one partition in a batch) on whole columns; only keys pass through a dict.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np
import numpy.typing as npt

from anabranch_schemas import stamp
from anabranch_schemas.envelope import cells
from anabranch_schemas.errors import StampError
from anabranch_schemas.marker import DIGEST_MASK
from anabranch_schemas.stamp import Flag, Op
from anabranch_sink.ranges import MarkedRange
from anabranch_sink.read import Headers, Records

META_DTYPE = np.dtype([("op", "u1"), ("seq", "u8"), ("ordinal", "u4"), ("partition", "i4"), ("offset", "i8")])
_SEQ = slice(10, 18)  # where a stamp holds its seq
_NO_ROW = (int(Op.TRUNCATE), int(Op.MESSAGE))


@dataclass(slots=True)
class UnitFacts:
    """What a task saw of a source transaction (or of one copied row)."""

    hlc: int
    txid: int
    places: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    """(topic, partition) → (first offset, last offset)."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Records of one partition that belong to markers, columns of equal length."""

    topic: str
    meta: npt.NDArray[np.void]
    keys: list[bytes]
    values: list[bytes | None]
    more: dict[int, Headers]


@dataclass(frozen=True, slots=True)
class Winners:
    """Newest records of one topic, columns of equal length."""

    topic: str
    meta: npt.NDArray[np.void]
    keys: list[bytes]
    values: list[bytes | None]
    cells: dict[int, bytes]
    earlier: dict[int, list[tuple[bytes, bytes]]]


class Reducer:
    """Takes the records of one task, checks them against the ranges and keeps the newest record per key.

    With `per_unit` the newest record per key *and* transaction is kept, and facts of the transactions are collected.
    """

    def __init__(self, ranges: Sequence[MarkedRange], *, per_unit: bool = False) -> None:
        self._places: dict[tuple[str, int], _Place] = {}
        for index, marked in enumerate(ranges):
            self._places.setdefault((marked.range.topic, marked.range.partition), _Place()).add(index, marked)
        self._ranges = ranges
        self._per_unit = per_unit
        self._runs: list[_Run] = []
        self._starts: list[int] = []
        self._latest: dict[str, dict[bytes, int]] = {}
        self._chains: dict[tuple[str, bytes], list[int]] = {}
        self.held = 0
        """Records that are held in memory since the last `take`."""
        self.held_bytes = 0
        """What they take: keys and values."""
        self.found: dict[int, tuple[int, int]] = {}
        """Range index → (records, digest)."""
        self.truncations: list[tuple[str, bytes, int, int]] = []
        """(topic, first 5 bytes of the value, seq, ordinal)."""
        self.units: dict[tuple[str, int, int, int | None], UnitFacts] = {}
        """(stream, marker, seq, ordinal of a copied row) → facts."""

    def add(self, records: Records) -> None:
        """Take records of one partition."""
        place = self._places.get((records.topic, records.partition))
        if place is None:
            return
        at, inside = place.find(records.offsets)
        if not inside.all():
            kept = np.flatnonzero(inside)
            records, at = records.only(kept), at[kept]
        fixed = stamp.parse_bulk(records.stamps)
        keep = (fixed["epoch"] == place.epochs[at]) & _first_arrivals(fixed, at, records)
        if not keep.all():
            kept = np.flatnonzero(keep)
            records, fixed, at = records.only(kept), fixed[kept], at[kept]
        if records.keys:
            indices = place.indices[at]
            self._count(indices, records.values)
            self._keep(records, fixed, indices)

    def _count(self, indices: npt.NDArray[np.int64], values: Sequence[bytes | None]) -> None:
        """Add records and digests to their ranges; `indices` rises, as offsets do."""
        edges = np.flatnonzero(np.diff(indices)) + 1
        starts = np.concatenate(([0], edges))
        crc = np.array([0 if value is None else crc32(value) for value in values], dtype=np.uint64)
        digests = np.add.reduceat(crc, starts)
        counts = np.diff(np.concatenate((starts, [len(indices)])))
        for index, count, digest in zip(indices[starts].tolist(), counts.tolist(), digests.tolist(), strict=True):
            rows, before = self.found.get(index, (0, 0))
            self.found[index] = rows + count, (before + digest) & DIGEST_MASK

    def _keep(self, records: Records, fixed: npt.NDArray[np.void], indices: npt.NDArray[np.int64]) -> None:
        meta = np.empty(len(fixed), dtype=META_DTYPE)
        for name in ("op", "seq", "ordinal"):
            meta[name] = fixed[name]
        meta["partition"], meta["offset"] = records.partition, records.offsets
        if self._per_unit:
            self._note_units(records, fixed, indices)
        base = self.held
        partial = fixed["flags"] & int(Flag.PARTIAL) != 0
        rows, identities = self._rows(records, fixed, base)
        latest = self._latest.setdefault(records.topic, {})
        self._runs.append(_Run(records.topic, meta, [key or b"" for key in records.keys], records.values, records.more))
        self._starts.append(base)
        self.held += len(meta)
        self.held_bytes += sum(map(len, filter(None, records.values))) + sum(map(len, filter(None, records.keys)))
        if not partial.any() and not self._chains:
            latest.update(zip(identities, rows, strict=True))
            return
        # What `update` does, and for partial rows what came before them.
        for row, identity in zip(rows, identities, strict=True):
            if not partial[row - base]:
                self._chains.pop((records.topic, identity), None)
            elif (before := latest.get(identity)) is not None:
                self._chains.setdefault((records.topic, identity), []).append(before)
            latest[identity] = row

    def _rows(self, records: Records, fixed: npt.NDArray[np.void], base: int) -> tuple[Sequence[int], list[bytes]]:
        """Return the numbers of the records that are rows, and what makes two of them the same; note truncates."""
        keys = records.keys
        identities = [key for key in keys if key is not None]
        no_row = np.isin(fixed["op"], _NO_ROW)
        rows: Sequence[int] = range(base, base + len(keys))
        if no_row.any():
            rows = (np.flatnonzero(~no_row) + base).tolist()
            identities = [key for row in rows if (key := keys[row - base]) is not None]
            for at in np.flatnonzero(fixed["op"] == int(Op.TRUNCATE)).tolist():
                seq, ordinal = int(fixed["seq"][at]), int(fixed["ordinal"][at])
                self.truncations.append((records.topic, (records.values[at] or b"")[:5], seq, ordinal))
        if len(identities) != len(rows):
            raise StampError("a row has no key", where=f"{records.topic}[{records.partition}]")
        if self._per_unit:
            identities = [key + records.stamps[row - base][_SEQ] for key, row in zip(identities, rows, strict=True)]
        return rows, identities

    def _note_units(self, records: Records, fixed: npt.NDArray[np.void], indices: npt.NDArray[np.int64]) -> None:
        place = records.topic, records.partition
        facts_of = [fixed[name].tolist() for name in ("seq", "ordinal", "flags", "hlc", "txid")]
        for index, offset, seq, ordinal, flags, hlc, txid in zip(
            indices.tolist(), records.offsets.tolist(), *facts_of, strict=True
        ):
            marked = self._ranges[index]
            unit = (marked.stream, marked.marker, seq, ordinal if flags & Flag.COPIED else None)
            facts = self.units.setdefault(unit, UnitFacts(hlc, txid))
            first, last = facts.places.get(place, (offset, offset))
            facts.places[place] = min(first, offset), max(last, offset)

    def take(self) -> Iterator[Winners]:
        """Return what is held, by run in order of arrival, and let go of it."""
        for topic, latest in self._latest.items():
            rows = np.fromiter(latest.values(), dtype=np.int64, count=len(latest))
            rows.sort()
            identities = {latest[key]: key for (t, key) in self._chains if t == topic}
            for number, run in enumerate(self._runs):
                if run.topic != topic:
                    continue
                start = self._starts[number]
                low, high = np.searchsorted(rows, (start, start + len(run.keys)))
                if low < high:
                    yield self._winners(run, rows[low:high], start, identities)
        self._runs, self._starts, self._latest, self._chains, self.held = [], [], {}, {}, 0
        self.held_bytes = 0

    def _winners(self, run: _Run, rows: npt.NDArray[np.int64], start: int, identities: dict[int, bytes]) -> Winners:
        local = (rows - start).tolist()
        whole = len(local) == len(run.keys)
        found_cells: dict[int, bytes] = {}
        if run.more:
            found_cells = {n: c for n, i in enumerate(local) if (c := _cells(run, i))}
        earlier: dict[int, list[tuple[bytes, bytes]]] = {}
        if identities:
            for n, row in enumerate(rows.tolist()):
                if row in identities:
                    earlier[n] = self._images(run.topic, identities[row])
        return Winners(
            run.topic,
            run.meta if whole else run.meta[local],
            run.keys if whole else [run.keys[i] for i in local],
            run.values if whole else [run.values[i] for i in local],
            found_cells,
            earlier,
        )

    def _images(self, topic: str, identity: bytes) -> list[tuple[bytes, bytes]]:
        """Return the images that came before a partial row, newest first, back to a delete."""
        images = []
        for row in reversed(self._chains[topic, identity]):
            at = bisect_right(self._starts, row) - 1
            run, local = self._runs[at], row - self._starts[at]
            value = run.values[local]
            if value is None or run.meta["op"][local] == int(Op.DELETE):
                break
            images.append((value, _cells(run, local)))
        return images


class _Place:
    """The ranges of one partition, in order of their offsets."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._ends: list[int] = []
        self._epochs: list[int] = []
        self._indices: list[int] = []

    def add(self, index: int, marked: MarkedRange) -> None:
        self._firsts.append(marked.range.first_offset)
        self._ends.append(marked.range.end_offset)
        self._epochs.append(marked.epoch)
        self._indices.append(index)

    @property
    def epochs(self) -> npt.NDArray[np.int64]:
        return np.array(self._epochs, dtype=np.int64)

    @property
    def indices(self) -> npt.NDArray[np.int64]:
        return np.array(self._indices, dtype=np.int64)

    def find(self, offsets: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return for each offset the position of its range here, and whether it lies in it."""
        at = np.searchsorted(np.array(self._firsts), offsets, side="right") - 1
        inside = (at >= 0) & (offsets < np.array(self._ends)[np.maximum(at, 0)])
        return at, inside


def _first_arrivals(fixed: npt.NDArray[np.void], at: npt.NDArray[np.int64], records: Records) -> npt.NDArray[np.bool_]:
    """Return which records are not repetitions: the same change (or tombstone) of a key in one range.

    Looks within one batch; a repetition that lies further off makes the range's count differ, which is loud.
    """
    tombstone = np.array([value is None for value in records.values], dtype=np.bool_)
    seq, ordinal = fixed["seq"].astype(np.uint64), fixed["ordinal"].astype(np.int64)
    rising = (seq[1:] > seq[:-1]) | (
        (seq[1:] == seq[:-1]) & (ordinal[1:] * 2 + tombstone[1:] > ordinal[:-1] * 2 + tombstone[:-1])
    )
    first = np.ones(len(fixed), dtype=np.bool_)
    if rising.all():
        return first
    seen: set[tuple[int, int, int, bool, bytes | None]] = set()
    identities = zip(at.tolist(), seq.tolist(), ordinal.tolist(), tombstone.tolist(), records.keys, strict=True)
    for row, identity in enumerate(identities):
        if identity in seen:
            first[row] = False
        seen.add(identity)
    return first


def _cells(run: _Run, row: int) -> bytes:
    return dict(run.more[row]).get(cells.HEADER, b"") if row in run.more else b""
