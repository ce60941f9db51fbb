from __future__ import annotations

import pickle

from anabranch_schemas.vector import VectorTime


def test_an_absent_entry_is_zero_and_zero_is_absent() -> None:
    vector = VectorTime({1: 5, 2: 0})
    assert (vector[1], vector[2], vector[3]) == (5, 0, 0)
    assert list(vector) == [1]
    assert 2 not in vector
    assert vector == VectorTime({1: 5})
    assert hash(vector) == hash(VectorTime({1: 5}))


def test_entries_come_in_the_order_of_sites() -> None:
    assert list(VectorTime({3: 1, 1: 1, 2: 1}).items()) == [(1, 1), (2, 1), (3, 1)]


def test_it_differs_from_a_plain_map() -> None:
    assert VectorTime({1: 1}) != {1: 1}


def test_order() -> None:
    low, high, beside = VectorTime({1: 1}), VectorTime({1: 2, 2: 1}), VectorTime({3: 1})
    assert low < high
    assert high > low
    assert low <= VectorTime({1: 1})
    assert not low < VectorTime({1: 1})
    assert not high <= low
    assert low.concurrent(beside)
    assert not low.concurrent(high)
    assert VectorTime() <= low


def test_advance_never_goes_back() -> None:
    vector = VectorTime({1: 5})
    assert vector.advance(1, 4) is vector
    assert vector.advance(1, 6) == VectorTime({1: 6})
    assert vector.advance(2, 1) == VectorTime({1: 5, 2: 1})
    assert vector == VectorTime({1: 5})


def test_covers_tells_what_was_applied() -> None:
    vector = VectorTime({1: 5})
    assert vector.covers(1, 5)
    assert not vector.covers(1, 6)
    assert not vector.covers(2, 1)


def test_json_and_pickle_there_and_back() -> None:
    vector = VectorTime({7: (1 << 64) - 1, 1: 5})
    assert vector.as_json() == {"1": 5, "7": (1 << 64) - 1}
    assert VectorTime.from_json(vector.as_json()) == vector
    assert pickle.loads(pickle.dumps(vector)) == vector
