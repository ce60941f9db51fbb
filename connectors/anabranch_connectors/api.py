"""What a sink and a target part say to each other: progress, staged rows, publications.

A target part lives in the driver and owns the one connection that publishes. The staging part that `prepare` gives is
pickled into the executors and only ever adds rows to staging; nothing it writes counts before `publish` names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from anabranch_schemas.marker import TableVersion
from anabranch_schemas.vector import VectorTime


@dataclass(frozen=True, slots=True)
class Applied:
    """How far one stream is applied at the target: the facts of its newest applied marker, and totals."""

    site: int = 0
    marker: int = 0
    """Number of the newest applied marker; 0 before the first (numbers start at 1)."""
    marker_offset: int = -1
    """Its offset in the marker topic."""
    seq: int = 0
    branch: str = ""
    epoch: int = 0
    safe_hlc: int = 0
    vector: VectorTime = VectorTime()
    transactions: int = 0
    rows: int = 0


@dataclass(frozen=True, slots=True)
class RoutedVersion:
    """One schema version of a table and the target table that its rows go to."""

    version: TableVersion
    target_schema: str
    target_table: str
    key_schema: str
    """Avro, JSON text; as is `value_schema`, the envelope's."""
    value_schema: str


@dataclass(frozen=True, slots=True)
class StagedRows:
    """Reduced rows of one version, columns of equal length; `rare` things by row index."""

    attempt: int
    meta: npt.NDArray[np.void]
    """Fields op (u1), seq (u8), ordinal (u4), partition (i4), offset (i8)."""
    keys: Sequence[bytes]
    """Framed; never null."""
    values: Sequence[bytes | None]
    """Framed envelopes; not looked at where op is a delete."""
    cells: Mapping[int, bytes] = field(default_factory=dict)
    """`ab.cells` headers."""
    earlier: Mapping[int, Sequence[tuple[bytes, bytes]]] = field(default_factory=dict)
    """For partial rows: earlier images of the key in the cut, newest first, as (value, `ab.cells` or empty)."""


@dataclass(frozen=True, slots=True)
class StagedTable:
    """What the receipts say about one version: the attempts that count, and what they hold."""

    version: int
    attempts: tuple[int, ...]
    rows: int
    cells: int
    """Rows with cells to complete."""
    repeated: bool
    """Whether a key may be staged more than once by one attempt; the greatest offset counts."""


@dataclass(frozen=True, slots=True, order=True)
class Truncation:
    """A truncate of a version's table at (seq, ordinal): rows before it are gone."""

    version: int
    seq: int
    ordinal: int


@dataclass(frozen=True, slots=True)
class Unit:
    """The smallest thing that can be set aside: a source transaction, or one row of the copy phase."""

    stream: str
    marker: int
    hlc: int
    seq: int
    ordinal: int | None
    """Of a copied row; None for a transaction."""
    txid: int
    places: tuple[tuple[str, int, int, int], ...]
    """(topic, partition, first offset, last offset) of its records."""


@dataclass(frozen=True, slots=True)
class Publication:
    """What one target transaction applies."""

    progress: Mapping[str, Applied]
    """Streams that move, with their totals after it."""
    versions: Sequence[RoutedVersion] = ()
    """Those that staging was prepared for."""
    buffer: Buffer = 0
    """The one that staging was prepared in."""
    staged: Sequence[StagedTable] = ()
    truncations: Sequence[Truncation] = ()
    units: Sequence[Unit] | None = None
    """If given: apply unit by unit in this order, each under a savepoint; rows are staged once per key and unit."""
    park: bool = False
    """With `units`: set a refused unit aside and go on, instead of raising."""


Buffer = Literal[0, 1]
"""Staging is double-buffered: one cut is staged while the one before it is published from the other buffer."""


class StagingPart(Protocol):
    """Writes rows into staging from an executor. Pickled; one instance a task, called from one thread."""

    def write(self, version: int, parts: Iterable[StagedRows]) -> None:
        """Add rows to the staging of a version. Visible to `publish` when it returns; replays add them again."""


class TargetPart(Protocol):
    """A target in mode `mirror`, as the driver uses it, in the order of its methods.

    `publish` may be called from another thread than the others and run at the same time as `prepare`.
    """

    def acquire(self, streams: Sequence[str]) -> Mapping[str, Applied]:
        """Fence every driver of this sink before us and return the progress of these streams.

        Streams without progress are left out. Durable when it returns. Called again after a retryable error.
        """

    def prepare(self, versions: Sequence[RoutedVersion], buffer: Buffer = 0) -> StagingPart:
        """Make staging (and, where allowed, missing tables) for these versions. Cheap when nothing is new."""

    def publish(self, publication: Publication) -> int:
        """Apply a publication in one transaction, progress included; return how many units were set aside.

        All of it is durable when it returns, none of it if it raises. With no staged rows only progress moves.
        """

    def release(self, error: Mapping[str, Any] | None) -> None:
        """Record how the driver ended (None: it was stopped) and close. Never raises; does nothing if fenced."""
