"""How far a server's log goes: what tells a silent stream from a stuck one, and keeps its safe time moving."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from anabranch_connectors.postgres.control import Connection, fetch
from anabranch_connectors.postgres.lsn import lsn_int

HEARTBEAT_PREFIX = "anabranch.heartbeat"
_EVERY_S = 0.5
# Behind the last record there may be padding up to the next page and its header, which no record ever ends at.
_PAGE_BYTES = 8192
_STANDBY = "pg_last_wal_replay_lsn()"
_PRIMARY = "pg_current_wal_flush_lsn()"


@dataclass(frozen=True, slots=True)
class _Look:
    """Everything that had committed at `us` (server's clock) lies before `lsn`."""

    lsn: int = 0
    us: int = 0
    at: float = float("-inf")


class LogEnd:
    """Asks a server now and then how far its log goes, and derives the time up to which a stream is complete.

    A heartbeat is a non-transactional logical message: it needs no table, and makes the slot's restart position
    move on a database that nobody writes.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        standby: bool,
        heartbeat_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = connection
        self._standby = standby
        self._heartbeat_s = heartbeat_s
        self._monotonic = monotonic
        self._look = _Look()
        self._position = 0
        self._beat_at = monotonic()
        self.safe_us = 0
        """Everything that committed before has been read; microseconds since 1970 by the server's clock."""
        self.next_xid = 0
        """The first xid (64 bit) that had not been given out at the last look."""

    def look(self, position: int, *, wanted: bool = False) -> bool:
        """Note that the log was read up to `position`; ask the server if it is time, and tell whether it was asked."""
        last = self._look
        if last.lsn and position >= last.lsn:
            self.safe_us = max(self.safe_us, last.us)
        now = self._monotonic()
        if now - last.at < _EVERY_S and not wanted:
            return False
        lsn, us, xid = self._ask()
        silent = lsn == last.lsn and position == self._position
        if silent and 0 <= lsn - position <= _PAGE_BYTES:
            # Nothing was written or read between two looks, and what is left is less than a page: only padding.
            self.safe_us = max(self.safe_us, last.us)
        self._look, self._position, self.next_xid = _Look(lsn, us, now), position, xid
        self._beat(now)
        return True

    def _ask(self) -> tuple[int, int, int]:
        # The clock first: what committed before it was read has been flushed by the time the position is read.
        clock = "(extract(epoch FROM clock_timestamp()) * 1000000)::int8"
        end = _STANDBY if self._standby else _PRIMARY
        us, lsn, xid = fetch(
            self._connection, f"SELECT {clock}, {end}::text, pg_snapshot_xmax(pg_current_snapshot())::text::int8"
        )[0]
        return lsn_int(lsn), us, xid

    def push(self, position: int) -> None:
        """Make a log grow that was read to its end, `position`, if it ends before something that is waited for.

        What background processes write stays unflushed on a silent server, for 10 s and longer; a message, written
        behind it, is flushed within 200 ms (`wal_writer_delay`).
        """
        if position >= self._look.lsn and not self._standby:
            self._emit()

    def _beat(self, now: float) -> None:
        if self._standby or not self._heartbeat_s or now - self._beat_at < self._heartbeat_s:
            return
        self._emit()
        self._beat_at = now

    def _emit(self) -> None:
        fetch(self._connection, "SELECT pg_logical_emit_message(false, %s, '')::text", (HEARTBEAT_PREFIX,))
