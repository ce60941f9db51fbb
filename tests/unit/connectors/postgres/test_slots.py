"""Which combinations of slot, stored position and server may stream, and why the others may not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch_connectors.postgres.errors import (
    BranchChangedError,
    SlotAheadError,
    SlotError,
    SlotForeignError,
    SlotInUseError,
    SlotLostError,
    SlotMissingError,
)
from anabranch_connectors.postgres.replication import SystemIdentity
from anabranch_connectors.postgres.slots import Slot, StoredPosition, verify_position
from anabranch_schemas.errors import Action

IDENTITY = SystemIdentity("7000", 1, 5000)
STORED = StoredPosition(1000, "7000", 1)
SLOT = Slot(
    name="ab",
    plugin="pgoutput",
    database="shop",
    confirmed_flush=1000,
    restart_lsn=900,
    active=False,
    active_pid=None,
    wal_status="reserved",
    invalidation="",
    failover=False,
)


def verify(slot: Slot | None, stored: StoredPosition | None, identity: SystemIdentity = IDENTITY) -> None:
    verify_position(slot, stored, identity, database="shop", name="ab")


@pytest.mark.parametrize("confirmed", [0, 999, 1000])
def test_a_slot_at_or_behind_the_stored_position_streams(confirmed: int) -> None:
    verify(replace(SLOT, confirmed_flush=confirmed), STORED)


def test_a_new_stream_needs_no_slot_and_takes_one_as_it_stands() -> None:
    verify(None, None)
    verify(replace(SLOT, confirmed_flush=4000), None)


@pytest.mark.parametrize(
    ("slot", "stored", "identity", "error"),
    [
        (None, STORED, IDENTITY, SlotMissingError),
        (replace(SLOT, confirmed_flush=1001), STORED, IDENTITY, SlotAheadError),
        (replace(SLOT, wal_status="lost"), STORED, IDENTITY, SlotLostError),
        (replace(SLOT, invalidation="idle_timeout"), None, IDENTITY, SlotLostError),
        (replace(SLOT, plugin="test_decoding"), None, IDENTITY, SlotForeignError),
        (replace(SLOT, database="other"), STORED, IDENTITY, SlotForeignError),
        (replace(SLOT, active=True, active_pid=7), STORED, IDENTITY, SlotInUseError),
        (SLOT, STORED, replace(IDENTITY, system_id="7001"), BranchChangedError),
        (SLOT, STORED, replace(IDENTITY, timeline=2), BranchChangedError),
        (SLOT, STORED, replace(IDENTITY, wal_end=999), BranchChangedError),
        # The cause before its effect: after a fail-over the slot is usually missing too.
        (None, STORED, replace(IDENTITY, timeline=2), BranchChangedError),
    ],
)
def test_what_would_leave_a_gap_is_refused(
    slot: Slot | None, stored: StoredPosition | None, identity: SystemIdentity, error: type[SlotError]
) -> None:
    with pytest.raises(error) as caught:
        verify(slot, stored, identity)
    assert caught.value.where == "ab"
    assert caught.value.advice


def test_only_a_slot_in_use_is_tried_again() -> None:
    kinds = [SlotMissingError, SlotAheadError, SlotLostError, SlotForeignError, BranchChangedError]
    assert SlotInUseError.action is Action.RETRY
    assert {kind.action for kind in kinds} == {Action.STOP}


@pytest.mark.parametrize(
    ("slot", "identity"),
    [(None, IDENTITY), (replace(SLOT, confirmed_flush=2000), IDENTITY), (SLOT, replace(IDENTITY, timeline=3))],
)
def test_a_lost_history_names_the_command_that_repairs_it(slot: Slot | None, identity: SystemIdentity) -> None:
    with pytest.raises(SlotError) as caught:
        verify(slot, STORED, identity)
    assert "anabranch bootstrap FILE --source NAME" in caught.value.advice
