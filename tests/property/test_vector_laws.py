"""The laws of vector time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from anabranch_schemas.vector import VectorTime

# Few sites and small numbers, so that vectors often meet.
VECTORS = st.dictionaries(st.integers(0, 4), st.integers(0, 3)).map(VectorTime)


@given(VECTORS, VECTORS, VECTORS)
def test_merge_is_commutative_associative_and_idempotent(a: VectorTime, b: VectorTime, c: VectorTime) -> None:
    assert a.merge(b) == b.merge(a)
    assert a.merge(b).merge(c) == a.merge(b.merge(c))
    assert a.merge(a) == a
    assert a.merge(VectorTime()) == a


@given(VECTORS, VECTORS, VECTORS)
def test_merge_is_the_least_upper_bound(a: VectorTime, b: VectorTime, upper: VectorTime) -> None:
    merged = a.merge(b)
    assert a <= merged
    assert b <= merged
    assert (merged <= upper) == (a <= upper and b <= upper)


@given(VECTORS, VECTORS, VECTORS)
def test_the_order_is_partial(a: VectorTime, b: VectorTime, c: VectorTime) -> None:
    assert a <= VectorTime(a)
    below, above, further = a <= b, b <= a, b <= c
    assert (below and above) == (a == b)
    assert not (below and further) or a <= c
    assert (a < b) == (a <= b and a != b)
    assert (a >= b) == (b <= a)
    assert (a > b) == (b < a)


@given(VECTORS, VECTORS)
def test_two_vectors_are_ordered_equal_or_concurrent(a: VectorTime, b: VectorTime) -> None:
    assert a.concurrent(b) == b.concurrent(a)
    assert [a < b, b < a, a == b, a.concurrent(b)].count(True) == 1
    assert a != b or hash(a) == hash(b)


@given(VECTORS, st.integers(0, 4), st.integers(0, 3))
def test_advance_is_a_merge_with_one_entry(a: VectorTime, site: int, seq: int) -> None:
    assert a.advance(site, seq) == a.merge(VectorTime({site: seq}))
    assert a.advance(site, seq).covers(site, seq)
    assert a.covers(site, seq) == (VectorTime({site: seq}) <= a)
