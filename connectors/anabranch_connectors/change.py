"""What a source part hands over: changes, committed transactions, copied chunks and how far the log was read.

The hot path makes one `Change` a row, so it is a plain tuple; everything else is a frozen record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from anabranch_schemas.marker import CopyState, TableVersion


class Route(Protocol):
    """Where the rows of one version of a table go."""

    @property
    def topic(self) -> str:
        """Kafka topic."""

    @property
    def version(self) -> TableVersion:
        """Schema ids, as the marker names them."""


Change = tuple[Route, int, int, bytes | None, bytes | None, bytes | None]
"""(route, op letter, flags, framed key, framed value, `ab.cells` header); a tombstone has the value None."""


class ChangeSequence(Protocol):
    """The changes of one transaction in order, in memory or on disk. Read once."""

    def __iter__(self) -> Iterator[Change]: ...
    def __len__(self) -> int: ...


class Transaction(NamedTuple):
    """One committed transaction of the log. A tuple, because there may be 100,000 a second: it is made in 0.2 µs."""

    seq: int
    """Position in the stream; PostgreSQL: the commit record's end LSN."""
    commit_us: int
    """When the source says it committed, microseconds since 1970; not monotone."""
    txid: int
    changes: ChangeSequence
    size: int
    """Bytes of the log it took: what it costs to hold."""
    spilled: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of one table, read in key order in one consistent snapshot of the source."""

    route: Route
    """The table's present version: announced by the marker even if the chunk has no rows."""
    changes: Iterable[Change]
    read_us: int
    """When it was read, microseconds since 1970 by the source's clock."""
    first_ordinal: int
    """Ordinal of the first row: rows copied at one position of the log count on."""
    position: Callable[[], LogPosition]
    """The position with this chunk in it; to be asked when the rows have been consumed."""


@dataclass(frozen=True, slots=True)
class LogPosition:
    """How far the log was read, and what a restart needs."""

    seq: int
    """The last transaction handed over."""
    resume: bytes
    """The connector's resume token for exactly this point."""
    safe_us: int
    """Every transaction up to this time (source's clock, microseconds since 1970) has been handed over; 0: unknown."""
    behind: bool
    """Whether the source is known to have more."""
    copy: tuple[CopyState, ...] = ()
    copying: bool = False
    """Whether a table is not copied whole."""
    consistent: bool = True
    """Whether the rows handed over so far are one state of the source (false while tables are being copied)."""
