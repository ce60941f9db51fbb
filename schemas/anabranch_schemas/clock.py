"""Hybrid logical clock: physical microseconds and a logical counter in one u64.

Layout of YugabyteDB's HybridTime: microseconds since 1970 in the high 52 bits, counter in the low 12. 52 bits of
microseconds last until the year 2112; 4,096 events fit into one microsecond before the counter carries into it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from anabranch_schemas.errors import Action, AnabranchError

LOGICAL_BITS = 12
_LOGICAL_MASK = (1 << LOGICAL_BITS) - 1
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class ClockDriftError(AnabranchError):
    """A peer's time lies further ahead than `max_clock_drift`; the clock was not moved."""

    code = "clock.drift"
    action = Action.STOP


def pack(micros: int, logical: int = 0) -> int:
    """Return the hybrid time of `micros` (microseconds since 1970) and `logical` (0 to 4095)."""
    return (micros << LOGICAL_BITS) | logical


def unpack(hlc: int) -> tuple[int, int]:
    """Return (microseconds since 1970, logical counter) of a hybrid time."""
    return hlc >> LOGICAL_BITS, hlc & _LOGICAL_MASK


def to_datetime(hlc: int) -> datetime:
    """Return the physical part of a hybrid time as an aware datetime in UTC."""
    return _EPOCH + timedelta(microseconds=hlc >> LOGICAL_BITS)


class HybridClock:
    """A clock that never goes back, whatever the physical clock does.

    `now` gives physical time in microseconds since 1970; it comes in as an argument so that a simulation can drive it.
    """

    __slots__ = ("_max_drift_us", "_now", "last")

    def __init__(self, now: Callable[[], int], *, last: int = 0, max_drift_s: float = 60.0) -> None:
        self._now = now
        self._max_drift_us = int(max_drift_s * 1_000_000)
        self.last = last

    def tick(self, micros: int | None = None) -> int:
        """Return a hybrid time for a local event at `micros` (default: now), greater than every one before."""
        physical = (self._now() if micros is None else micros) << LOGICAL_BITS
        self.last = physical if physical > self.last else self.last + 1
        return self.last

    def observe(self, hlc: int) -> int:
        """Move past a hybrid time received from a peer and return the new time.

        Raises:
            ClockDriftError: if it lies more than the allowed drift ahead of the physical clock. The clock stays as
                it was: one wrong peer must not poison the others (Couchbase and plain HLC take any value over).
        """
        ahead_us = (hlc >> LOGICAL_BITS) - self._now()
        if ahead_us > self._max_drift_us:
            raise ClockDriftError(
                f"a received time is {ahead_us / 1e6:.1f} s ahead of the local clock",
                advice="correct the peer's clock, or raise max_clock_drift if the difference is meant",
            )
        return self.tick() if hlc < self.last else self._advance_past(hlc)

    def _advance_past(self, hlc: int) -> int:
        physical = self._now() << LOGICAL_BITS
        self.last = max(physical, hlc + 1)
        return self.last
