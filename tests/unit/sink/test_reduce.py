"""What a task keeps of the records it reads."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from anabranch_schemas import stamp
from anabranch_schemas.envelope import cells
from anabranch_schemas.errors import StampError
from anabranch_schemas.marker import Range
from anabranch_schemas.stamp import Flag, Op, Stamp
from anabranch_sink.errors import RangeMismatchError
from anabranch_sink.ranges import MarkedRange, check, extents
from anabranch_sink.read import Records, stamps_of
from anabranch_sink.reduce import Reducer, Winners


@dataclass(frozen=True)
class Record:
    offset: int
    key: bytes | None
    value: bytes | None
    seq: int
    ordinal: int = 0
    op: Op = Op.UPDATE
    epoch: int = 1
    flags: Flag = Flag(0)
    cells: bytes = b""
    partition: int = 0
    topic: str = "t"


def batch(records: Sequence[Record]) -> Records:
    stamps = [stamp.encode(Stamp(r.op, 1, r.epoch, r.seq, r.ordinal, r.seq, 0, r.flags)) for r in records]
    return Records(
        records[0].topic,
        records[0].partition,
        np.array([r.offset for r in records]),
        [r.key for r in records],
        [r.value for r in records],
        stamps,
        {row: [(stamp.HEADER, stamps[row]), (cells.HEADER, r.cells)] for row, r in enumerate(records) if r.cells},
    )


def marked(first: int, end: int, *, marker: int = 1, epoch: int = 1, partition: int = 0, rows: int = 0) -> MarkedRange:
    return MarkedRange(Range("t", partition, first, end, rows, 0), "eu.orders", marker, epoch)


def values(winners: Sequence[Winners]) -> list[bytes | None]:
    return [value for found in winners for value in found.values]


def test_the_last_record_of_a_key_wins_over_batches() -> None:
    reducer = Reducer([marked(0, 10)])
    reducer.add(batch([Record(0, b"a", b"a1", 10), Record(1, b"b", b"b1", 10, 1)]))
    reducer.add(batch([Record(2, b"a", b"a2", 20), Record(3, b"c", b"c1", 20, 1)]))
    assert values(list(reducer.take())) == [b"b1", b"a2", b"c1"]
    assert reducer.held == 0
    assert list(reducer.take()) == []


def test_records_outside_the_ranges_and_of_other_epochs_do_not_count() -> None:
    reducer = Reducer([marked(2, 4), marked(6, 8, marker=2, epoch=2)])
    epochs = {2: 1, 3: 2, 6: 2, 7: 1}
    reducer.add(batch([Record(i, b"%d" % i, b"v%d" % i, i, epoch=epochs.get(i, 1)) for i in range(10)]))
    assert values(list(reducer.take())) == [b"v2", b"v6"]
    assert reducer.found == {0: (1, zlib.crc32(b"v2")), 1: (1, zlib.crc32(b"v6"))}


def test_a_repeated_record_counts_once_and_its_tombstone_is_another() -> None:
    reducer = Reducer([marked(0, 10)])
    deleted = [Record(0, b"a", b"d", 10, op=Op.DELETE), Record(1, b"a", None, 10, op=Op.DELETE)]
    reducer.add(batch([*deleted, Record(2, b"a", b"d", 10, op=Op.DELETE), Record(3, b"b", b"b", 10)]))
    (winners,) = reducer.take()
    assert reducer.found == {0: (3, zlib.crc32(b"d") + zlib.crc32(b"b"))}
    assert winners.meta["op"].tolist() == [int(Op.DELETE), int(Op.UPDATE)]


def test_two_partitions_and_markers_are_told_apart() -> None:
    reducer = Reducer([marked(0, 2), marked(2, 3, marker=2), marked(0, 5, partition=1)])
    first = [Record(0, b"a", b"1", 1), Record(2, b"b", b"2", 2)]
    second = [Record(4, b"c", b"3", 1, partition=1)]
    for records in (first, second):
        reducer.add(batch(records))
    assert reducer.found == {i: (1, zlib.crc32(v)) for i, v in enumerate((b"1", b"2", b"3"))}


def test_a_partial_row_comes_with_the_images_before_it_back_to_a_delete() -> None:
    partial = cells.encode([cells.Cell(1, cells.CellKind.MISSING)])
    reducer = Reducer([marked(0, 20)])
    reducer.add(
        batch(
            [
                Record(0, b"a", b"old", 1),
                Record(1, b"a", None, 2, op=Op.DELETE),
                Record(2, b"a", b"full", 3, op=Op.CREATE),
                Record(3, b"a", b"part", 4, flags=Flag.PARTIAL, cells=partial),
                Record(4, b"b", b"only", 5, flags=Flag.PARTIAL, cells=partial),
            ]
        )
    )
    reducer.add(batch([Record(5, b"a", b"last", 6, flags=Flag.PARTIAL, cells=partial)]))
    found = {
        winners.values[row]: (winners.cells.get(row), winners.earlier.get(row, []))
        for winners in reducer.take()
        for row in range(len(winners.keys))
    }
    assert found == {
        b"only": (partial, []),
        b"last": (partial, [(b"part", partial), (b"full", b"")]),
    }


def test_a_truncate_is_reported_and_is_no_row() -> None:
    reducer = Reducer([marked(0, 10)])
    reducer.add(batch([Record(0, b"a", b"\0\0\0\0\7x", 1), Record(1, None, b"\0\0\0\0\7t", 2, 3, op=Op.TRUNCATE)]))
    assert reducer.truncations == [("t", b"\0\0\0\0\7", 2, 3)]
    assert values(list(reducer.take())) == [b"\0\0\0\0\7x"]
    assert reducer.found[0][0] == 2


def test_per_unit_the_newest_row_of_each_transaction_is_kept() -> None:
    reducer = Reducer([marked(0, 10)], per_unit=True)
    reducer.add(batch([Record(0, b"a", b"1", 10), Record(1, b"a", b"2", 10, 1), Record(2, b"a", b"3", 20)]))
    assert values(list(reducer.take())) == [b"2", b"3"]
    assert {unit[2]: facts.places for unit, facts in reducer.units.items()} == {
        10: {("t", 0): (0, 1)},
        20: {("t", 0): (2, 2)},
    }


def test_a_stamp_behind_other_headers_is_found_and_a_missing_one_is_told() -> None:
    other = [("trace", b"1"), (stamp.HEADER, b"s")]
    assert stamps_of([[(stamp.HEADER, b"r")], other], "t[0]") == ([b"r", b"s"], {1: other})
    for bare in (None, [("trace", b"1")]):
        with pytest.raises(StampError, match="something else writes this topic"):
            stamps_of([bare], "t[0]")


def test_a_range_that_was_not_read_at_all_is_a_mismatch() -> None:
    with pytest.raises(RangeMismatchError, match="0 records where the marker counted 2"):
        check([marked(0, 10, rows=2)], {})


def test_a_digest_that_differs_is_a_mismatch() -> None:
    with pytest.raises(RangeMismatchError, match="digest"):
        check([marked(0, 10, rows=2)], {0: (2, 1)})


def test_the_ranges_of_a_partition_are_read_in_one_go() -> None:
    assert extents([marked(2, 4), marked(6, 8, marker=2), marked(1, 2, partition=1)]) == {"t": {0: (2, 8), 1: (1, 2)}}
