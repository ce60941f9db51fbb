"""The changes of the open transaction: in memory, on disk beyond a limit, until its commit is read."""

from __future__ import annotations

import errno
import struct
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from anabranch_connectors.change import Change, ChangeSequence, Route
from anabranch_schemas import failpoints
from anabranch_schemas.errors import Action, AnabranchError

_HEAD = struct.Struct("!IBHiii")  # route number, op, flags, lengths of key, value and cells (-1: none)


class SpillError(AnabranchError):
    """A large transaction could not be written to disk."""

    code = "source.spill_full"
    action = Action.STOP


class SpilledChanges:
    """Changes in a temporary file, read once in order; the file goes away when they have been read."""

    def __init__(self, file: IO[bytes], count: int, routes: Sequence[Route]) -> None:
        self._file = file
        self._count = count
        self._routes = routes

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Change]:
        self._file.seek(0)
        read = self._file.read
        with self._file:
            for _ in range(self._count):
                number, op, flags, key, value, cells = _HEAD.unpack(read(_HEAD.size))
                yield (
                    self._routes[number],
                    op,
                    flags,
                    read(key) if key >= 0 else None,
                    read(value) if value >= 0 else None,
                    read(cells) if cells >= 0 else None,
                )


class TransactionBuffer:
    """Collects the changes of one transaction at a time.

    Memory is bounded by `limit` plus what one read of the socket brings; `directory` takes the rest.
    """

    def __init__(self, *, limit: int, directory: Path) -> None:
        self._limit = limit
        self._directory = directory
        self._changes: list[Change] = []
        self._file: IO[bytes] | None = None
        self._spilled = 0
        self._routes: dict[Route, int] = {}
        self._measured = 0  # changes whose bytes are in _bytes
        self._bytes = 0
        self.add = self._changes.append

    def relieve(self) -> None:
        """Move what is held to disk if it is more than the limit. Called between reads, not for every row."""
        changes = self._changes
        for _, _, _, key, value, cells in changes[self._measured :]:
            self._bytes += 200 + len(key or b"") + len(value or b"") + len(cells or b"")
        self._measured = len(changes)
        if self._bytes > self._limit:
            self._spill()

    def take(self) -> tuple[ChangeSequence, bool]:
        """Return the transaction's changes, and whether they are on disk; the buffer is empty afterwards."""
        if self._file is None:
            changes = self._changes.copy()
            self._reset()
            return changes, False
        self._spill()
        spilled = SpilledChanges(self._file, self._spilled, list(self._routes))
        self._reset()
        return spilled, True

    def discard(self) -> None:
        """Forget an open transaction: the connection was lost, it will be sent again."""
        if self._file is not None:
            self._file.close()
        self._reset()

    def _reset(self) -> None:
        self._changes.clear()
        self._file, self._spilled, self._routes = None, 0, {}
        self._measured = self._bytes = 0

    def _spill(self) -> None:
        try:
            if self._file is None:
                self._directory.mkdir(parents=True, exist_ok=True)
                self._file = tempfile.TemporaryFile(dir=self._directory, buffering=1 << 20)  # noqa: SIM115 - closed by its reader
            self._file.write(b"".join(map(self._pack, self._changes)))
            self._file.flush()
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise SpillError(
                f"a transaction of more than {self._limit} bytes could not be spilled: {error.strerror}",
                where=str(self._directory),
                advice=("free space there" if full else "make the directory writable")
                + ", or point spill.dir at another disk, and start the source again; nothing was lost",
            ) from error
        self._spilled += len(self._changes)
        self._changes.clear()
        self._measured = self._bytes = 0
        failpoints.hit("source.mid_spill")

    def _pack(self, change: Change) -> bytes:
        route, op, flags, key, value, cells = change
        number = self._routes.setdefault(route, len(self._routes))
        head = _HEAD.pack(
            number,
            op,
            flags,
            -1 if key is None else len(key),
            -1 if value is None else len(value),
            -1 if cells is None else len(cells),
        )
        return head + (key or b"") + (value or b"") + (cells or b"")
