from __future__ import annotations

import pytest

from anabranch_schemas.marker import CopyState, MarkerKind, SnapshotMarker
from anabranch_schemas.vector import VectorTime
from anabranch_source.phases import Phase, phase_at, phase_of

DONE, BEGUN = CopyState("t", None, done=True), CopyState("u", b"k", done=False)


@pytest.mark.parametrize(
    ("copy", "consistent", "phase"),
    [
        ((), True, Phase.REPLICATE),
        ((DONE,), True, Phase.REPLICATE),
        ((DONE,), False, Phase.CATCH_UP),
        ((DONE, BEGUN), False, Phase.COPY),
    ],
)
def test_the_phase_follows_from_stored_facts(copy: tuple[CopyState, ...], *, consistent: bool, phase: Phase) -> None:
    assert phase_of(copy, consistent=consistent) is phase
    marker = SnapshotMarker(
        stream="s",
        site=1,
        branch="",
        epoch=1,
        number=1,
        kind=MarkerKind.IDLE,
        first_seq=1,
        last_seq=1,
        safe_hlc=5 if consistent else 0,
        vector=VectorTime(),
        transactions=0,
        rows=0,
        copy=copy,
    )
    assert phase_at(marker) is phase
