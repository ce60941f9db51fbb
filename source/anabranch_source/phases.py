"""The phase of a stream, computed from stored facts and never kept as a flag (VReplication's rule)."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from anabranch_schemas.marker import CopyState, SnapshotMarker


class Phase(Enum):
    """Where a stream is in its life."""

    COPY = "copy"
    """A table is not copied whole."""
    CATCH_UP = "catch_up"
    """All tables are copied; the log has not yet passed the newest chunk's high mark, so rows are not one state."""
    REPLICATE = "replicate"
    """Every snapshot ends in one state of the source."""


def phase_of(copy: Iterable[CopyState], *, consistent: bool) -> Phase:
    """Return the phase for the tables' copy states; `consistent` as in `LogPosition`."""
    if any(not state.done for state in copy):
        return Phase.COPY
    return Phase.REPLICATE if consistent else Phase.CATCH_UP


def phase_at(marker: SnapshotMarker) -> Phase:
    """Return the phase that a stream was in at a marker."""
    return phase_of(marker.copy, consistent=marker.safe_hlc != 0)
