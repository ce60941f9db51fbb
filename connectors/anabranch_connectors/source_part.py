"""What a connector offers to the source room: the four calls that every log has in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from anabranch_connectors.change import Chunk, LogPosition, Transaction
from anabranch_schemas.marker import SnapshotMarker, TableVersion
from anabranch_schemas.table import TableSchema

HandOver = Callable[[Transaction], None]
"""Takes one committed transaction; called from within `SourcePart.read`, in commit order."""


class Router(Protocol):
    """Gives the rows of a table a topic and schema ids, creating both when they are new."""

    def __call__(self, table: TableSchema, key_schema: dict[str, Any], value_schema: dict[str, Any]) -> TableVersion:
        """Return where rows encoded with these schemas go."""


@dataclass(frozen=True, slots=True)
class StreamStart:
    """Where a stream was taken up."""

    branch: str
    position: LogPosition


class SourcePart(Protocol):
    """Reads one database's log and copies its tables.

    All calls come from one thread. A part is opened for one run of the worker: after an error it is thrown away.
    """

    def start(self, stored: SnapshotMarker | None, hand_over: HandOver) -> StreamStart:
        """Take the stream up behind the stored marker (None: it never began).

        Called once, before all else, when no other worker can publish the stream any more. What is published after
        `stored` is read again. Raises if the source cannot go on from exactly there: a gap is never silent.
        """

    def read(self, wait_s: float) -> LogPosition:
        """Hand over what the log has, waiting at most `wait_s` seconds for something, and return how far it was read.

        The position is right for everything handed over so far, so a snapshot may be closed with it. An empty call
        returns the position as it is, with a newer safe time if the source is known to have been silent.
        """

    def copy_chunk(self, rows: int) -> Chunk | None:
        """Return the next chunk of a table that is not copied whole, or None if there is none to be had right now.

        Its rows must be consumed before the next call of any kind. The position after it includes the chunk.
        """

    def acknowledge(self, durable: SnapshotMarker) -> None:
        """Let the source forget what lies before a marker that Kafka has committed.

        Called again with the same marker, it only shows the source that the worker is there.
        """
