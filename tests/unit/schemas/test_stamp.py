from __future__ import annotations

import pytest

from anabranch_schemas.errors import StampError
from anabranch_schemas.stamp import FIXED_DTYPE, FIXED_SIZE, Flag, Op, Stamp, decode, encode, parse_bulk
from anabranch_schemas.vector import VectorTime

STAMP = Stamp(
    Op.UPDATE,
    site=2,
    epoch=3,
    seq=4,
    ordinal=5,
    hlc=6,
    txid=7,
    flags=Flag.LAST | Flag.PARTIAL,
    others=VectorTime({9: 8}),
)


def test_the_layout_is_fixed() -> None:
    fields = "01 75 0005 0002 00000003 0000000000000004 00000005 0000000000000006 0000000000000007 01"
    assert encode(STAMP) == bytes.fromhex(fields + "0009 0000000000000008")
    assert FIXED_SIZE == FIXED_DTYPE.itemsize == 39


def test_a_version_and_a_vector_come_from_the_coordinates() -> None:
    assert STAMP.version == (6, 2, 4)
    assert STAMP.vector == VectorTime({2: 4, 9: 8})


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        encode(STAMP)[:38],
        encode(STAMP)[:-1],
        encode(STAMP) + b"\0",
        b"\2" + encode(STAMP)[1:],
        b"\1x" + encode(STAMP)[2:],
    ],
    ids=["empty", "short", "a pair cut off", "too long", "another version", "an unknown op"],
)
def test_foreign_bytes_are_refused(damaged: bytes) -> None:
    with pytest.raises(StampError) as caught:
        decode(damaged)
    assert caught.value.where == "ab.stamp"


def test_flags_of_a_later_version_are_kept() -> None:
    data = bytearray(encode(STAMP))
    data[2] = 0x80
    assert encode(decode(bytes(data))) == bytes(data)


def test_many_are_read_at_once() -> None:
    table = parse_bulk([encode(STAMP), encode(Stamp(Op.CREATE, 1, 1, 1 << 63, 0, (1 << 64) - 1))])
    assert table["seq"].tolist() == [4, 1 << 63]
    assert table["hlc"].tolist() == [6, (1 << 64) - 1]
    assert table["count"].tolist() == [1, 0]
    assert len(parse_bulk([])) == 0


@pytest.mark.parametrize("damaged", [encode(STAMP)[:38], b"\2" + encode(STAMP)[1:]], ids=["short", "another version"])
def test_one_bad_stamp_among_many_is_refused(damaged: bytes) -> None:
    with pytest.raises(StampError):
        parse_bulk([encode(STAMP), damaged])
