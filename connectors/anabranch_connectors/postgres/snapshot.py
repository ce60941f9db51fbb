"""What a snapshot of PostgreSQL sees, and when one is fit for a copied chunk.

A commit can reach the log reader before it becomes visible to snapshots (the record is flushed and streamed before the
transaction leaves the array of running ones). A chunk that was read in such a snapshot would lack rows whose events
have already been handed over or dropped. So a snapshot is usable only if it sees every transaction already streamed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_XID32 = 1 << 32


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`pg_current_snapshot()`: all xids are 64 bit. Sub-transactions never occur here, nor in the log's BEGIN."""

    xmin: int
    """Every transaction below has ended."""
    xmax: int
    """No transaction from here on had ended."""
    in_progress: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """Return the snapshot that PostgreSQL writes as `xmin:xmax:xid,xid`.

        Raises:
            ValueError: if the text is no snapshot.
        """
        xmin, xmax, running = text.split(":")
        return cls(int(xmin), int(xmax), frozenset(int(xid) for xid in running.split(",") if xid))

    def sees(self, xid8: int) -> bool:
        """Return whether the snapshot sees what the (committed) transaction wrote."""
        return xid8 < self.xmin or (xid8 < self.xmax and xid8 not in self.in_progress)

    def __str__(self) -> str:
        return f"{self.xmin}:{self.xmax}:{','.join(map(str, sorted(self.in_progress)))}"


def widen_xid(xid32: int, near_xid8: int) -> int:
    """Return the 64-bit xid whose low 32 bits are `xid32` and that lies nearest to `near_xid8`.

    The log carries 32 bits; transactions that can be live at once lie within 2^31 of each other.
    """
    ahead = (xid32 - near_xid8) % _XID32
    return near_xid8 + ahead - (_XID32 if ahead >= _XID32 // 2 else 0)


class StreamedTransactions:
    """The transactions handed over that some snapshot may not see yet."""

    __slots__ = ("_xids",)

    def __init__(self, xids: Iterable[int] = ()) -> None:
        self._xids = set(xids)

    def add(self, xid8: int) -> None:
        """Remember that a transaction has been streamed."""
        self._xids.add(xid8)

    def usable(self, snapshot: Snapshot) -> bool:
        """Return whether the snapshot sees every transaction already streamed; if not, take it again."""
        sees = snapshot.sees
        return all(sees(xid) for xid in self._xids)

    def prune(self, snapshot: Snapshot) -> None:
        """Forget what `snapshot` sees: every later snapshot of the same server sees it too.

        Call it with a fresh snapshot now and then (`len` says how many are held); few are left each time.
        """
        self._xids = {xid for xid in self._xids if not snapshot.sees(xid)}

    def __len__(self) -> int:
        return len(self._xids)

    def dump(self) -> list[int]:
        """Return the xids in order, for the resume token."""
        return sorted(self._xids)

    @classmethod
    def load(cls, xids: Iterable[int]) -> StreamedTransactions:
        """Return what `dump` wrote."""
        return cls(xids)
