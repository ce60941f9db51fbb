"""From the records of a task's partitions to the newest one per key, on stamps alone.

All records of a key lie in one partition in order, so the last that arrives wins and nothing is shuffled. Work is
done per run (consecutive records of one partition in a batch) on whole columns; only keys pass through a dict.
"""

from __future__ import annotations

from base64 import b64decode
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from anabranch_schemas import stamp
from anabranch_schemas.envelope import cells
from anabranch_schemas.errors import StampError
from anabranch_schemas.marker import DIGEST_MASK
from anabranch_schemas.stamp import Flag, Op
from anabranch_sink.ranges import MarkedRange

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
    values: npt.NDArray[np.object_]
    more: dict[int, list[tuple[str, bytes]]]
    """All headers of the records that have more than the stamp."""


@dataclass(frozen=True, slots=True)
class _Arrived:
    """Records of one partition that lie in ranges, columns of equal length."""

    topic: str
    partition: int
    indices: npt.NDArray[np.int64]
    """Of their ranges."""
    fixed: npt.NDArray[np.void]
    """Their stamps."""
    offsets: npt.NDArray[np.int64]
    keys: list[bytes | None]
    values: npt.NDArray[np.object_]
    stamps: list[bytes]
    more: dict[int, list[tuple[str, bytes]]]

    def only(self, kept: npt.NDArray[np.int64]) -> _Arrived:
        """Return the records at these places."""
        return _Arrived(
            self.topic,
            self.partition,
            self.indices[kept],
            self.fixed[kept],
            self.offsets[kept],
            [self.keys[i] for i in kept],
            self.values[kept],
            [self.stamps[i] for i in kept],
            {new: self.more[old] for new, old in enumerate(kept.tolist()) if old in self.more},
        )


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
    """Takes the record batches of one task, checks them against the ranges and keeps the newest record per key.

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
        self.found: dict[int, tuple[int, int]] = {}
        """Range index → (records, digest)."""
        self.truncations: list[tuple[str, bytes, int, int]] = []
        """(topic, first 5 bytes of the value, seq, ordinal)."""
        self.units: dict[tuple[str, int, int, int | None], UnitFacts] = {}
        """(stream, marker, seq, ordinal of a copied row) → facts."""

    def add(self, batch: pa.RecordBatch) -> None:
        """Take a batch with the columns of `read.COLUMNS`."""
        if batch.num_rows == 0:
            return
        topics = batch.column("topic").dictionary_encode()
        codes = topics.indices.to_numpy()
        partitions = batch.column("partition").to_numpy()
        borders = np.flatnonzero((codes[1:] != codes[:-1]) | (partitions[1:] != partitions[:-1])) + 1
        names = topics.dictionary.to_pylist()
        edges = [0, *borders.tolist(), batch.num_rows]
        for start, end in pairwise(edges):
            place = self._places.get((names[codes[start]], int(partitions[start])))
            if place is not None:
                self._add_run(names[codes[start]], int(partitions[start]), place, batch.slice(start, end - start))

    def _add_run(self, topic: str, partition: int, place: _Place, batch: pa.RecordBatch) -> None:
        offsets = batch.column("offset").to_numpy()
        at, inside = place.find(offsets)
        if not inside.all():
            batch, offsets, at = batch.filter(pa.array(inside)), offsets[inside], at[inside]
        stamps = batch.column("stamp")
        more = _headers(batch.column("more"))
        stamp_list = stamps.to_numpy(zero_copy_only=False).tolist()
        if stamps.null_count:
            _fill(stamp_list, more, f"{topic}[{partition}]")
        fixed = stamp.parse_bulk(stamp_list)
        values = batch.column("value").to_numpy(zero_copy_only=False)
        tombstone = batch.column("value").is_null().to_numpy(zero_copy_only=False)
        keys: list[bytes | None] = batch.column("key").to_numpy(zero_copy_only=False).tolist()
        keep = (fixed["epoch"] == place.epochs[at]) & _first_arrivals(fixed, at, keys, tombstone)
        crc = batch.column("crc").to_numpy(zero_copy_only=False)
        arrived = _Arrived(topic, partition, place.indices[at], fixed, offsets, keys, values, stamp_list, more)
        if not keep.all():
            kept = np.flatnonzero(keep)
            arrived, crc = arrived.only(kept), crc[kept]
        if arrived.keys:
            self._count(arrived.indices, crc)
            self._keep(arrived)

    def _count(self, indices: npt.NDArray[np.int64], crc: npt.NDArray[np.int64]) -> None:
        """Add records and digests to their ranges; `indices` rises, as offsets do."""
        edges = np.flatnonzero(np.diff(indices)) + 1
        starts = np.concatenate(([0], edges))
        digests = np.add.reduceat(crc.astype(np.uint64), starts)
        counts = np.diff(np.concatenate((starts, [len(indices)])))
        for index, count, digest in zip(indices[starts].tolist(), counts.tolist(), digests.tolist(), strict=True):
            rows, before = self.found.get(index, (0, 0))
            self.found[index] = rows + count, (before + digest) & DIGEST_MASK

    def _keep(self, arrived: _Arrived) -> None:
        fixed = arrived.fixed
        meta = np.empty(len(fixed), dtype=META_DTYPE)
        for name in ("op", "seq", "ordinal"):
            meta[name] = fixed[name]
        meta["partition"], meta["offset"] = arrived.partition, arrived.offsets
        if self._per_unit:
            self._note_units(arrived)
        base = self.held
        partial = fixed["flags"] & int(Flag.PARTIAL) != 0
        rows, identities = self._rows(arrived, base)
        latest = self._latest.setdefault(arrived.topic, {})
        self._runs.append(_Run(arrived.topic, meta, [key or b"" for key in arrived.keys], arrived.values, arrived.more))
        self._starts.append(base)
        self.held += len(meta)
        if not partial.any() and not self._chains:
            latest.update(zip(identities, rows, strict=True))
            return
        # What `update` does, and for partial rows what came before them.
        for row, identity in zip(rows, identities, strict=True):
            if not partial[row - base]:
                self._chains.pop((arrived.topic, identity), None)
            elif (before := latest.get(identity)) is not None:
                self._chains.setdefault((arrived.topic, identity), []).append(before)
            latest[identity] = row

    def _rows(self, arrived: _Arrived, base: int) -> tuple[Sequence[int], list[bytes]]:
        """Return the numbers of the records that are rows, and what makes two of them the same; note truncates."""
        keys = arrived.keys
        identities = [key for key in keys if key is not None]
        no_row = np.isin(arrived.fixed["op"], _NO_ROW)
        rows: Sequence[int] = range(base, base + len(keys))
        if no_row.any():
            rows = (np.flatnonzero(~no_row) + base).tolist()
            identities = [key for row in rows if (key := keys[row - base]) is not None]
            for at in np.flatnonzero(arrived.fixed["op"] == int(Op.TRUNCATE)).tolist():
                seq, ordinal = int(arrived.fixed["seq"][at]), int(arrived.fixed["ordinal"][at])
                self.truncations.append((arrived.topic, arrived.values[at][:5], seq, ordinal))
        if len(identities) != len(rows):
            raise StampError("a row has no key", where=f"{arrived.topic}[{arrived.partition}]")
        if self._per_unit:
            identities = [key + arrived.stamps[row - base][_SEQ] for key, row in zip(identities, rows, strict=True)]
        return rows, identities

    def _note_units(self, arrived: _Arrived) -> None:
        place = arrived.topic, arrived.partition
        facts_of = [arrived.fixed[name].tolist() for name in ("seq", "ordinal", "flags", "hlc", "txid")]
        for index, offset, seq, ordinal, flags, hlc, txid in zip(
            arrived.indices.tolist(), arrived.offsets.tolist(), *facts_of, strict=True
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
            run.values.tolist() if whole else run.values[local].tolist(),
            found_cells,
            earlier,
        )

    def _images(self, topic: str, identity: bytes) -> list[tuple[bytes, bytes]]:
        """Return the images that came before a partial row, newest first, back to a delete."""
        images = []
        for row in reversed(self._chains[topic, identity]):
            at = bisect_right(self._starts, row) - 1
            run, local = self._runs[at], row - self._starts[at]
            if run.values[local] is None or run.meta["op"][local] == int(Op.DELETE):
                break
            images.append((run.values[local], _cells(run, local)))
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


def _first_arrivals(
    fixed: npt.NDArray[np.void],
    at: npt.NDArray[np.int64],
    keys: list[bytes | None],
    tombstone: npt.NDArray[np.bool_],
) -> npt.NDArray[np.bool_]:
    """Return which records are not repetitions: the same change (or tombstone) of a key in one range.

    Looks within one batch; a repetition that lies further off makes the range's count differ, which is loud.
    """
    seq, ordinal = fixed["seq"].astype(np.uint64), fixed["ordinal"].astype(np.int64)
    rising = (seq[1:] > seq[:-1]) | (
        (seq[1:] == seq[:-1]) & (ordinal[1:] * 2 + tombstone[1:] > ordinal[:-1] * 2 + tombstone[:-1])
    )
    first = np.ones(len(fixed), dtype=np.bool_)
    if rising.all():
        return first
    seen: set[tuple[int, int, int, bool, bytes | None]] = set()
    identities = zip(at.tolist(), seq.tolist(), ordinal.tolist(), tombstone.tolist(), keys, strict=True)
    for row, identity in enumerate(identities):
        if identity in seen:
            first[row] = False
        seen.add(identity)
    return first


def _headers(column: pa.Array) -> dict[int, list[tuple[str, bytes]]]:
    """Return all headers of the records that have others than the stamp; nearly always there are none."""
    if column.null_count == len(column):
        return {}
    rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False)).tolist()
    return {
        row: [(header["key"], b64decode(header.get("value", ""))) for header in orjson.loads(column[row].as_py())]
        for row in rows
    }


def _fill(stamps: list[bytes | None], more: dict[int, list[tuple[str, bytes]]], where: str) -> None:
    """Find the stamps that are not the first header of their record."""
    for row, data in enumerate(stamps):
        if data is None:
            found = dict(more.get(row, ())).get(stamp.HEADER)
            if found is None:
                raise StampError("a record has no stamp: something else writes this topic", where=where)
            stamps[row] = found


def _cells(run: _Run, row: int) -> bytes:
    return dict(run.more[row]).get(cells.HEADER, b"") if row in run.more else b""
