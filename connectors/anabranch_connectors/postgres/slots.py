"""Replication slots: found, made, dropped, and compared with the stored position before anything is read."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anabranch_connectors.postgres.control import Connection, fetch
from anabranch_connectors.postgres.errors import (
    BOOTSTRAP,
    BranchChangedError,
    ServerError,
    SlotAheadError,
    SlotForeignError,
    SlotInUseError,
    SlotLostError,
    SlotMissingError,
)
from anabranch_connectors.postgres.lsn import lsn_int, lsn_text
from anabranch_connectors.postgres.replication import SystemIdentity

PLUGIN = "pgoutput"
_OBJECT_IN_USE = "55006"
_UNDEFINED_OBJECT = "42704"
_FAILOVER_SINCE = 170000
_RELEASE_S = 5.0


@dataclass(frozen=True, slots=True)
class Slot:
    """One row of `pg_replication_slots`; LSNs are 0 where the server has none."""

    name: str
    plugin: str
    database: str
    confirmed_flush: int
    restart_lsn: int
    active: bool
    active_pid: int | None
    wal_status: str
    """reserved, extended, unreserved (may be lost at the next checkpoint), lost."""
    invalidation: str
    """Why the server invalidated it (from PostgreSQL 16), empty if it did not."""
    failover: bool
    """Whether it is kept on standbys too (from PostgreSQL 17)."""

    @property
    def is_lost(self) -> bool:
        """Whether log that the slot stands for has been removed."""
        return self.wal_status == "lost" or bool(self.invalidation)


@dataclass(frozen=True, slots=True)
class StoredPosition:
    """Where the stream resumes, and on which branch of the server's history."""

    lsn: int
    system_id: str
    timeline: int


def find_slot(conn: Connection, name: str) -> Slot | None:
    """Return the slot of that name, None if the server has none."""
    # The view's columns differ from version to version; as JSON it can be read alike in all.
    rows = fetch(conn, "SELECT to_jsonb(s) FROM pg_replication_slots s WHERE slot_name = %s", (name,), where=name)
    return _slot(rows[0][0]) if rows else None


def create_slot(conn: Connection, name: str, *, failover: bool = False, temporary: bool = False) -> Slot:
    """Create a logical slot for pgoutput. The publication must exist before: the slot reads the catalog as of then.

    Returns once every transaction that was running has ended, because the server needs that to decode.
    `failover` is ignored before PostgreSQL 17, which has no such slots.

    Raises:
        ServerError: if the name is taken (42710), slots are used up (53400) or `wal_level` is not logical (55000).
    """
    failover_argument = f", failover => {failover}" if failover and conn.info.server_version >= _FAILOVER_SINCE else ""
    fetch(
        conn,
        f"SELECT lsn FROM pg_create_logical_replication_slot(%s, %s, temporary => {temporary}{failover_argument})",
        (name, PLUGIN),
        where=name,
    )
    slot = find_slot(conn, name)
    if slot is None:
        raise SlotMissingError("the slot was dropped as soon as it was made", where=name, advice=BOOTSTRAP)
    return slot


def drop_slot(conn: Connection, name: str) -> bool:
    """Drop a slot; return False if there was none.

    Raises:
        SlotInUseError: if somebody reads it.
    """
    try:
        fetch(conn, "SELECT pg_drop_replication_slot(%s)", (name,), where=name)
    except ServerError as error:
        if error.sqlstate == _UNDEFINED_OBJECT:
            return False
        if error.sqlstate == _OBJECT_IN_USE:
            raise SlotInUseError(error.message, where=name, advice="stop the source that reads it first") from error
        raise
    return True


def verify_position(
    slot: Slot | None, stored: StoredPosition | None, identity: SystemIdentity, *, database: str, name: str
) -> None:
    """Refuse to stream where it would skip changes or read another history.

    The order is from the cause to its effects: (1) another history explains a missing slot too, (2) missing,
    (3) foreign, (4) lost, (5) ahead, (6) in use. Without a stored position (a new stream) only 3, 4 and 6 apply, and a
    missing slot is in order.

    Raises:
        BranchChangedError, SlotMissingError, SlotForeignError, SlotLostError, SlotAheadError, SlotInUseError
    """
    if stored is not None:
        _verify_branch(stored, identity, name)
    if slot is None:
        if stored is not None:
            raise SlotMissingError(
                f"the stream is stored up to {lsn_text(stored.lsn)}, but the slot is gone", where=name, advice=BOOTSTRAP
            )
        return
    if slot.plugin != PLUGIN or slot.database != database:
        raise SlotForeignError(
            f"the slot belongs to plugin {slot.plugin!r} and database {slot.database!r}",
            where=name,
            advice=f"choose another slot name for this source, or drop that slot; then {BOOTSTRAP}",
        )
    if slot.is_lost:
        raise SlotLostError(
            f"the server has invalidated the slot ({slot.invalidation or slot.wal_status})",
            where=name,
            advice=f"raise max_slot_wal_keep_size, then {BOOTSTRAP}",
        )
    if stored is not None and slot.confirmed_flush > stored.lsn:
        # From PostgreSQL 15 the server starts at the confirmed position without a word; before, with a log line.
        raise SlotAheadError(
            f"the slot is confirmed up to {lsn_text(slot.confirmed_flush)}, the stream is stored up to "
            f"{lsn_text(stored.lsn)}: what is between would be skipped",
            where=name,
            advice=BOOTSTRAP,
        )
    if slot.active:
        raise SlotInUseError(
            f"another connection (pid {slot.active_pid}) reads the slot",
            where=name,
            advice="stop the other source; if it is dead, the server frees the slot after wal_sender_timeout",
        )


def _verify_branch(stored: StoredPosition, identity: SystemIdentity, name: str) -> None:
    if stored.system_id != identity.system_id:
        reason = f"the server is another one (system identifier {identity.system_id}, stored {stored.system_id})"
    elif stored.timeline != identity.timeline:
        reason = f"the server was promoted or restored (timeline {identity.timeline}, stored {stored.timeline})"
    elif stored.lsn > identity.wal_end:
        reason = f"the server's log ends at {lsn_text(identity.wal_end)}, before the stored {lsn_text(stored.lsn)}"
    else:
        return
    raise BranchChangedError(reason, where=name, advice=BOOTSTRAP)


def _slot(row: Mapping[str, Any]) -> Slot:
    # Before PostgreSQL 17 there is no reason; in 16 `conflicting` says that recovery invalidated it.
    reason = row.get("invalidation_reason") or ("conflicting" if row.get("conflicting") else "")
    return Slot(
        name=row["slot_name"],
        plugin=row["plugin"] or "",
        database=row["database"] or "",
        confirmed_flush=lsn_int(row["confirmed_flush_lsn"] or "0/0"),
        restart_lsn=lsn_int(row["restart_lsn"] or "0/0"),
        active=row["active"],
        active_pid=row["active_pid"],
        wal_status=row["wal_status"] or "",
        invalidation=reason,
        failover=bool(row.get("failover")),
    )


def release(conn: Connection, name: str, *, application_name: str) -> None:
    """End the connection of an older worker of ours that still holds the slot.

    To be called when that worker cannot publish any more. Waits at most 5 s for the server to free the slot.
    """
    ended = fetch(
        conn,
        "SELECT pg_terminate_backend(a.pid) FROM pg_replication_slots s "
        "JOIN pg_stat_activity a ON a.pid = s.active_pid WHERE s.slot_name = %s AND a.application_name = %s",
        (name, application_name),
        where=name,
    )
    deadline = time.monotonic() + _RELEASE_S
    while ended and time.monotonic() < deadline:
        slot = find_slot(conn, name)
        if slot is None or not slot.active:
            return
        time.sleep(0.02)
