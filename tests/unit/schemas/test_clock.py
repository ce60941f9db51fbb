from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch_schemas.clock import LOGICAL_BITS, ClockDriftError, HybridClock, pack, to_datetime, unpack
from anabranch_schemas.errors import Action

MICROS = st.integers(0, (1 << 52) - 1)


@given(MICROS, st.integers(0, 4095))
def test_a_time_goes_there_and_back_and_sorts_as_a_number(micros: int, logical: int) -> None:
    assert unpack(pack(micros, logical)) == (micros, logical)
    assert pack(micros, logical) < 1 << 64
    assert pack(micros, 4095) < pack(micros + 1)


def test_the_physical_part_is_a_date() -> None:
    assert to_datetime(pack(1_700_000_000_123_456, 77)) == datetime(2023, 11, 14, 22, 13, 20, 123456, UTC)
    assert pack((1 << 52) - 1) >> LOGICAL_BITS == (1 << 52) - 1
    assert to_datetime(pack((1 << 52) - 1)).year == 2112


@given(st.lists(MICROS, min_size=2))
def test_local_times_rise_whatever_the_physical_clock_does(physical: list[int]) -> None:
    readings = iter(physical)
    clock = HybridClock(lambda: next(readings))
    given_out = [clock.tick() for _ in physical]
    assert given_out == sorted(set(given_out))
    assert all(hlc >= pack(micros) for hlc, micros in zip(given_out, physical, strict=True))


@given(st.lists(st.tuples(MICROS, st.one_of(st.none(), st.integers(-50_000_000, 60_000_000))), min_size=1))
def test_local_and_received_times_never_go_back(steps: list[tuple[int, int | None]]) -> None:
    now = 0
    clock = HybridClock(lambda: now, max_drift_s=60)
    last = clock.last
    for physical, ahead in steps:
        now = physical
        if ahead is None:
            got = clock.tick()
        else:
            received = pack(max(0, physical + ahead))
            got = clock.observe(received)
            assert got > received
        assert got > last
        last = got


def test_a_time_too_far_ahead_is_refused_and_leaves_the_clock_as_it_was() -> None:
    clock = HybridClock(lambda: 1_000_000, last=pack(900_000), max_drift_s=60)
    with pytest.raises(ClockDriftError, match=r"60\.0 s ahead") as caught:
        clock.observe(pack(61_000_001))
    assert caught.value.action is Action.STOP
    assert clock.last == pack(900_000)
    assert clock.observe(pack(61_000_000)) == pack(61_000_000) + 1


def test_an_event_has_its_own_time_not_the_clocks() -> None:
    clock = HybridClock(lambda: pytest.fail("the clock was asked"))
    assert clock.tick(5) == pack(5)
    assert clock.tick(5) == pack(5, 1)
    assert clock.tick(4) == pack(5, 2)


def test_a_full_counter_carries_into_the_microseconds() -> None:
    clock = HybridClock(lambda: 5, last=pack(5, 4095))
    assert clock.tick() == pack(6)
