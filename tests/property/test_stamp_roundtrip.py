"""A stamp is what it was, one by one and in bulk."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from anabranch_schemas.errors import StampError
from anabranch_schemas.stamp import FIXED_DTYPE, Flag, Op, Stamp, decode, encode, parse_bulk
from anabranch_schemas.vector import VectorTime

U16, U32, U64 = (st.integers(0, (1 << bits) - 1) for bits in (16, 32, 64))
STAMPS = st.builds(
    Stamp,
    op=st.sampled_from(Op),
    site=U16,
    epoch=U32,
    seq=U64,
    ordinal=U32,
    hlc=U64,
    txid=U64,
    flags=st.integers(0, 15).map(Flag),
    others=st.dictionaries(U16, U64, max_size=5).map(VectorTime),
)


@given(STAMPS)
def test_one_by_one(stamp: Stamp) -> None:
    assert decode(encode(stamp)) == stamp


@given(st.lists(STAMPS))
def test_in_bulk(stamps: list[Stamp]) -> None:
    table = parse_bulk([encode(stamp) for stamp in stamps])
    for name in set(FIXED_DTYPE.names or ()) - {"version", "count"}:
        assert table[name].tolist() == [int(getattr(stamp, name)) for stamp in stamps]
    assert table["count"].tolist() == [len(stamp.others) for stamp in stamps]


@given(st.binary(max_size=80))
def test_foreign_bytes_are_a_stamp_or_refused(data: bytes) -> None:
    try:
        found = decode(data)
    except StampError:
        return
    assert decode(encode(found)) == found
