"""Chunks of a table in key order, read in one consistent snapshot as binary COPY."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from anabranch_connectors.postgres.conninfo import OUTPUT_SETTINGS
from anabranch_connectors.postgres.control import quote_name
from anabranch_connectors.postgres.copyout import copy_out
from anabranch_connectors.postgres.dial import Link, dial
from anabranch_connectors.postgres.errors import ConnectError
from anabranch_connectors.postgres.keys import KeyBound, KeyPosition, key_literals, key_position
from anabranch_connectors.postgres.lsn import lsn_int
from anabranch_connectors.postgres.pgtable import PgColumn, PgTable
from anabranch_connectors.postgres.printer import TYPES_WITHOUT_BINARY_FORM
from anabranch_connectors.postgres.snapshot import Snapshot
from anabranch_connectors.postgres.wire import simple_query
from anabranch_schemas.errors import AnabranchError

__all__ = ["ChunkReader", "ChunkSnapshot", "KeyBound", "KeyPosition", "key_position"]

_MICROS = "(extract(epoch FROM statement_timestamp()) * 1000000)::int8"


@dataclass(frozen=True, slots=True)
class ChunkSnapshot:
    """What a chunk was read in: every transaction that `snapshot` sees has a commit LSN ≤ `high_mark`."""

    snapshot: Snapshot
    high_mark: int
    snapshot_us: int
    """The server's clock when the snapshot was asked for, microseconds since 1970."""


class ChunkReader:
    """Reads chunks on a connection of its own. Used by one thread; `open` ends the snapshot before."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._link: Link | None = None
        self._text_only: frozenset[int] = frozenset()

    def open(self) -> ChunkSnapshot:
        """Begin a read-only transaction; return (1) its snapshot and then (2) the high mark, in this order.

        Raises:
            ServerError: on a standby, which cannot say where its log is written (SQLSTATE 55000).
        """
        link = self._fresh_link()
        link.run(simple_query("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"))
        # (1) Taken by the first statement; statement_timestamp() lies just before it.
        text, micros = _row(link, f"SELECT pg_current_snapshot(), {_MICROS}")
        # (2) A commit that (1) sees was written to the log before it became visible, so before this position.
        (position,) = _row(link, "SELECT pg_current_wal_insert_lsn()")
        return ChunkSnapshot(Snapshot.parse(text), lsn_int(position), int(micros))

    def read(self, table: PgTable, after: KeyPosition | None, rows: int) -> Iterator[bytes]:
        """Yield the next `rows` rows of `table` with a key greater than `after`, in key order.

        Each block is whole tuples of COPY's binary format, one after another, without the file's header and trailer:
        int16 count of fields, then int32 length (-1: null) and bytes for each of `table.published_columns`. Fewer
        rows than asked for means that the table ends there. Columns whose type has no binary form come as text.
        Closing the iterator early ends the snapshot.

        Raises:
            ServerError: if the server refuses. ConnectError: if it goes away.
        """
        columns = ", ".join(self._selected(column) for column in table.published_columns)
        keys = ", ".join(quote_name(name) for name in table.key)
        beyond = "" if after is None else f" WHERE ({keys}) > ({key_literals(table, after)})"
        # Inheritance children are tables of their own; a partitioned root has rows only in its partitions.
        source = ("ONLY " if table.kind == "r" else "") + quote_name(table.schema, table.name)
        query = f"SELECT {columns} FROM {source}{beyond} ORDER BY {keys} LIMIT {rows:d}"
        try:
            yield from copy_out(self._opened(), f"COPY ({query}) TO STDOUT (FORMAT binary)")
        except AnabranchError as error:
            error.where = table.path
            self.close()
            raise
        except GeneratorExit:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection, and the snapshot with it."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _opened(self) -> Link:
        if self._link is None:
            raise ConnectError("no snapshot is open", advice="call open() first")
        return self._link

    def _fresh_link(self) -> Link:
        """Return the connection outside of any transaction, made anew if there is none."""
        if self._link is not None:
            self._link.run(simple_query("ROLLBACK"))
            return self._link
        # With row_security off a policy makes the copy fail; otherwise rows would be left out without a word.
        parameters = {"application_name": "anabranch copy", "row_security": "off", **OUTPUT_SETTINGS}
        link = dial(self._dsn, parameters)
        rows = link.run(simple_query(TYPES_WITHOUT_BINARY_FORM))
        self._text_only = frozenset(int(oid or b"0") for (oid,) in rows)
        self._link = link
        return link

    def _selected(self, column: PgColumn) -> str:
        name = quote_name(column.name)
        return f"{name}::text" if column.type.oid in self._text_only else name


def _row(link: Link, query: str) -> tuple[str, ...]:
    (row,) = link.run(simple_query(query))
    return tuple((value or b"").decode() for value in row)
