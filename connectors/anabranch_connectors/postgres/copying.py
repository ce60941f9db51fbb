"""Which log events belong to rows that were copied: DESIGN's copy rule as values and one pure decision.

A table is copied in chunks of ascending keys. Each chunk was read in a snapshot S, whose transactions all have commit
LSNs up to the chunk's high mark L. So an event is handed on iff

* its key is not above the last copied key of its table, or the table is done, and
* while the log has not passed L: S had not already seen its transaction.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from anabranch_connectors.postgres.snapshot import Snapshot
from anabranch_schemas.marker import CopyState


class Bound(Protocol):
    """A key as PostgreSQL orders keys of its table."""

    def covers(self, fields: Sequence[bytes]) -> bool:
        """Tell whether the key with these binary fields is not above this one."""


BoundOf = Callable[[str, bytes], Bound]
"""(table, stored key) → its bound"""


@dataclass(frozen=True, slots=True)
class CopiedChunk:
    """One chunk whose high mark the log has not passed yet."""

    table: str
    after: bytes | None
    """The last key of the chunk before; None: the chunk began at the table's start."""
    bound: bytes | None
    """The chunk's last key; None: it reached the end of the table."""
    snapshot: Snapshot
    high_mark: int


@dataclass(slots=True)
class TableCopy:
    """How far one table's copy has come."""

    last_key: bytes | None = None
    done: bool = False


@dataclass(slots=True)
class CopyProgress:
    """The copy phase of a stream: its tables and the chunks that the log has still to pass."""

    tables: dict[str, TableCopy] = field(default_factory=dict)
    outstanding: list[CopiedChunk] = field(default_factory=list)

    @property
    def copying(self) -> bool:
        """Tell whether a table is not done."""
        return any(not table.done for table in self.tables.values())

    @property
    def settled(self) -> bool:
        """Tell whether every event is to be handed on: the phase is over and its traces are passed."""
        return not self.outstanding and not self.copying

    def take_up(self, state: CopyState) -> None:
        """Take a table over from a marker."""
        self.tables[state.table] = TableCopy(state.last_key, state.done)

    def add(self, table: str) -> None:
        """Add a table that is to be copied, unless it is known."""
        self.tables.setdefault(table, TableCopy())

    def next_table(self) -> str | None:
        """Return the table that the next chunk is of: one that has begun, else the first in order."""
        waiting = [name for name, table in self.tables.items() if not table.done]
        begun = [name for name in waiting if self.tables[name].last_key is not None]
        return next(iter(begun or waiting), None)

    def copied(self, chunk: CopiedChunk) -> None:
        """Take a chunk over when its rows have been handed on."""
        table = self.tables[chunk.table]
        table.done = chunk.bound is None
        table.last_key = chunk.bound if chunk.bound is not None else table.last_key
        self.outstanding.append(chunk)

    def passed(self, lsn: int) -> None:
        """Forget the chunks whose high mark the log has reached: it was read, and handed on, up to `lsn`."""
        self.outstanding = [chunk for chunk in self.outstanding if chunk.high_mark > lsn]

    def wants(self, table: str, key: Sequence[bytes], xid: int, bound: BoundOf) -> bool:
        """Decide about one event of transaction `xid` (64 bit)."""
        progress = self.tables.get(table)
        if progress is None:
            return True

        def reaches(last_key: bytes | None) -> bool:
            return last_key is None or bound(table, last_key).covers(key)

        # Chunks of a table are copied and passed in ascending order, so each begins where the one before it ended.
        # A comparison may ask the server: look for the key's chunk by halves.
        chunks = [chunk for chunk in self.outstanding if chunk.table == table]
        if not chunks:
            return progress.done or (progress.last_key is not None and reaches(progress.last_key))
        at = bisect_left(chunks, True, key=lambda chunk: reaches(chunk.bound))
        if at == len(chunks):
            return False
        chunk = chunks[at]
        copied_before = at == 0 and chunk.after is not None and reaches(chunk.after)
        return copied_before or not chunk.snapshot.sees(xid)

    def wants_truncate(self, table: str, xid: int) -> bool:
        """Decide about a truncate, which concerns all copied rows at once.

        If one chunk was read before it and a later one after it, neither handing it on nor leaving it out is right for
        both: it is handed on, and the table is copied from its start again.
        """
        progress = self.tables.get(table)
        if progress is None:
            return True
        seen_by = [chunk for chunk in self.outstanding if chunk.table == table and chunk.snapshot.sees(xid)]
        if any(chunk.after is None for chunk in seen_by):
            return False  # later chunks see what the first one saw
        begun = progress.done or progress.last_key is not None
        if seen_by:
            self.tables[table] = TableCopy()
            self.outstanding = [chunk for chunk in self.outstanding if chunk.table != table]
        return begun

    def states(self) -> tuple[CopyState, ...]:
        """Return the tables' states as the marker carries them."""
        return tuple(CopyState(name, table.last_key, table.done) for name, table in sorted(self.tables.items()))
