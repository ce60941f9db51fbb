"""Rows on their way out: PostgreSQL's binary tuples straight to Avro bytes, by generated functions for each table.

A generated function walks a tuple once. A run of fixed-width columns is unpacked by one Struct that also takes the
kind and length of the column behind the run; a NULL in a run sends this run alone column by column. The same source
is generated for pgoutput's tuples (a kind byte, then the length) and for COPY's (a length, -1 for NULL), so a row
copied and the same row logged are the same bytes by construction.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from anabranch_connectors.postgres.cellwise import (
    BINARY,
    CellwiseEncoder,
    EncodedColumn,
    RawCell,
    RowEncodeError,
    copied_cells,
    logged_cells,
    skip_logged,
)
from anabranch_connectors.postgres.pgtable import PgTable, PgType
from anabranch_connectors.postgres.types import AsText, NeedsCells, encoder_for
from anabranch_schemas.envelope.varint import SMALL, SMALL_PRESENT, zigzag

__all__ = ["NeedsCells", "RowEncodeError", "RowEncoder", "compile_encoder"]

# A run reads ahead over its whole width; 64 columns of at most 21 bytes stay inside the caller's 4096 of padding.
_RUN_LIMIT = 64

Row = Callable[[bytes, int, bytes, bytes], tuple[bytes, bytes, int]]
OldRow = Callable[[bytes, int], tuple[bytes, bytes, int]]
Walk = Callable[[bytes, int], tuple[list[RawCell], int]]


class RowWithCells(Protocol):
    """The slow path of a row."""

    def __call__(
        self, b: bytes, o: int, head: bytes, tail: bytes, old: int = -1
    ) -> tuple[bytes, bytes, int, bytes, bool]:
        """Return (value, key, end, cells header, whether a value is missing)."""
        ...


@dataclass(frozen=True, slots=True)
class RowEncoder:
    """The encoders of one table. In all of them `b` is followed by at least 4096 readable bytes beyond the data.

    `value` is `head`, the after-image, `tail`; `key` is the framed key, empty for a table without one; `end` is the
    offset behind the tuple. An `image` is the Avro record without the union's branch.
    """

    row: Row
    """(b, o, head, tail) -> (value, key, end) of the TupleData at `o`. Raises NeedsCells: take `row_with_cells`."""
    row_with_cells: RowWithCells
    """The same for every row, slowly; what is missing in it is taken from the old tuple at `old` where that has it."""
    copy_row: Row
    """As `row`, from a tuple of COPY ... (FORMAT binary)."""
    copy_row_with_cells: RowWithCells
    """As `row_with_cells`, from a tuple of COPY ... (FORMAT binary)."""
    old_key: OldRow
    """(b, o) -> (image, key, end) of a `K` tuple: other NOT NULL columns show their type's zero."""
    old_row: OldRow
    """(b, o) -> (image, key, end) of an `O` tuple."""
    insert_head: bytes
    """Head of a value without a before-image: frame, before null, after present."""
    skip: Callable[[bytes, int], int]
    """(b, o) -> end of a TupleData that nobody needs."""


def compile_encoder(table: PgTable, *, key_frame: bytes, value_frame: bytes, as_text: AsText) -> RowEncoder:
    """Generate the encoders of a table; the frames are Confluent's five-byte prefixes.

    Raises:
        RowEncodeError: if a key column is not published.
    """
    columns = tuple(
        EncodedColumn(column.name, _base_oid(column.type), column.nullable, encoder_for(column.type, as_text))
        for column in table.published_columns
    )
    key = _key_indexes(table, columns)
    cellwise = CellwiseEncoder(table.path, columns, key, key_frame, as_text)
    logged = _Source(table.path, columns, key, key_frame, copied=False)
    copied = _Source(table.path, columns, key, key_frame, copied=True)
    old = _old_row(logged.old(), cellwise)
    return RowEncoder(
        row=logged.row(),
        row_with_cells=_row_with_cells(cellwise, logged_cells),
        copy_row=copied.row(),
        copy_row_with_cells=_row_with_cells(cellwise, copied_cells),
        old_key=old,
        old_row=old,
        insert_head=value_frame + b"\x00\x02",
        skip=skip_logged,
    )


def _base_oid(pg: PgType) -> int:
    return _base_oid(pg.base) if pg.base else pg.oid


def _key_indexes(table: PgTable, columns: tuple[EncodedColumn, ...]) -> tuple[int, ...]:
    index = {column.name: at for at, column in enumerate(columns)}
    absent = [name for name in table.key if name not in index]
    if absent:
        raise RowEncodeError(f"key column {absent[0]!r} is not published", where=table.path)
    return tuple(index[name] for name in table.key)


def _row_with_cells(cellwise: CellwiseEncoder, walk: Walk) -> RowWithCells:
    def row_with_cells(
        b: bytes, o: int, head: bytes, tail: bytes, old: int = -1
    ) -> tuple[bytes, bytes, int, bytes, bool]:
        new, end = walk(b, o)
        image, key, cells, missing = cellwise.row(new, walk(b, old)[0] if old >= 0 else None)
        return head + image + tail, key, end, cells, missing

    return row_with_cells


def _old_row(fast: OldRow, cellwise: CellwiseEncoder) -> OldRow:
    def old_row(b: bytes, o: int) -> tuple[bytes, bytes, int]:
        try:
            return fast(b, o)
        except NeedsCells:
            raw, end = logged_cells(b, o)
            return *cellwise.old(raw), end

    return old_row


def _stale(table: str, found: int, expected: int) -> RowEncodeError:
    return RowEncodeError(
        f"a row has {found} columns, the table {expected}",
        where=table,
        advice="the table's shape has changed since its encoder was made: restart the source",
    )


class _Source:
    """Writes the source of a table's functions and compiles it.

    Local names: `k3` kind (or COPY's length) of column 3, `c3` its raw value, `p3` its Avro piece, `l` and `s` length
    and start of a variable-width cell.
    """

    def __init__(
        self, table: str, columns: tuple[EncodedColumn, ...], key: tuple[int, ...], key_frame: bytes, *, copied: bool
    ) -> None:
        self._table = table
        self._columns = columns
        self._key = key
        self._copied = copied
        self._lead = 4 if copied else 5
        self._names: dict[str, object] = {
            "join": b"".join,
            "KEY": key_frame,
            "Z": SMALL,
            "ZP": SMALL_PRESENT,
            "zz": zigzag,
            "NeedsCells": NeedsCells,
            "stale": _stale,
            "TABLE": table,
            "int_at": struct.Struct("!i").unpack_from,
            "size_at": struct.Struct("!I").unpack_from,
        }
        for at, column in enumerate(columns):
            self._names |= column.encoder.names
            self._names[f"E{at}"] = column.encoder.encode
            self._names[f"S{at}"] = struct.Struct("!" + column.encoder.fixed).unpack_from

    def row(self) -> Row:
        """Compile `row`."""
        body = self._body(zero_for_null=False)
        pieces = ", ".join(("head", *self._pieces(range(len(self._columns))), "tail"))
        compiled: Row = self._compile("row(b, o, head, tail)", body, pieces)
        return compiled

    def old(self) -> OldRow:
        """Compile `old_row`."""
        body = self._body(zero_for_null=True)
        pieces = ", ".join(self._pieces(range(len(self._columns))))
        compiled: OldRow = self._compile("old(b, o)", body, pieces + ",")
        return compiled

    def _compile(self, signature: str, body: Iterator[str], pieces: str) -> Callable[..., tuple[bytes, bytes, int]]:
        key = " + ".join(("KEY", *self._pieces(self._key))) if self._key else "b''"
        lines = [f"def {signature}:", *(" " + line for line in body), f" return join(({pieces})), {key}, o"]
        exec(compile("\n".join(lines), f"<encoder of {self._table}>", "exec"), self._names)  # noqa: S102 - our own source
        compiled: Callable[..., tuple[bytes, bytes, int]] = self._names[signature.partition("(")[0]]  # type: ignore[assignment]  # put there by exec
        return compiled

    def _pieces(self, columns: range | tuple[int, ...]) -> Iterator[str]:
        for at in columns:
            yield f"p{at}"
            if self._passes(at):
                yield f"c{at}"

    def _passes(self, at: int) -> bool:
        return self._columns[at].encoder.skip is not None

    def _body(self, *, zero_for_null: bool) -> Iterator[str]:
        at = 0
        count = len(self._columns)
        if not count:
            yield "o += 2"
        while at < count:
            run: list[int] = []
            first = at == 0
            while at < count and self._columns[at].encoder.fixed and len(run) < _RUN_LIMIT:
                run.append(at)
                at += 1
            last = at if at < count and not self._columns[at].encoder.fixed else -1
            yield from self._run(run, last, first=first, zero_for_null=zero_for_null)
            at += last >= 0

    def _run(self, run: list[int], last: int, *, first: bool, zero_for_null: bool) -> Iterator[str]:
        """Write one fused read of `run` and of the kind and length of the variable-width column `last`."""
        codes = [("i" if self._copied else "B4x") + self._columns[at].encoder.fixed for at in run]
        targets = [name for at in run for name in (f"k{at}", f"c{at}")]
        if last >= 0:
            codes.append("i" if self._copied else "BI")
            targets += [f"k{last}"] if self._copied else [f"k{last}", "l"]
        if first:
            codes.insert(0, "H")
            targets.insert(0, "n")
        read = struct.Struct("!" + "".join(codes))
        name = f"R{run[0] if run else last}"
        self._names[name] = read.unpack_from
        yield f"{', '.join(targets)}, = {name}(b, o)"
        if first:
            count = len(self._columns)
            yield f"if n != {count}: raise stale(TABLE, n, {count})"
        indent = ""
        if run:
            yield f"if {self._all_present(run)}:"
            indent = " "
        for at in run:
            yield f"{indent}p{at} = {self._fixed_piece(at)}"
        if last >= 0:
            for line in self._variable(last, read.size, zero_for_null=zero_for_null):
                yield indent + line
        else:
            yield f"{indent}o += {read.size}"
        if run:
            yield "else:"
            if first:
                yield " o += 2"
            for at in (*run, *([last] if last >= 0 else ())):
                for line in self._alone(at, zero_for_null=zero_for_null):
                    yield " " + line

    def _all_present(self, run: list[int]) -> str:
        kinds = [f"k{at}" for at in run]
        # A NULL's length is -1: its sign survives the `or`, whatever is misread behind it.
        return f"{' | '.join(kinds)} >= 0" if self._copied else f"{' == '.join(kinds)} == {BINARY}"

    def _fixed_piece(self, at: int) -> str:
        column = self._columns[at]
        inline = column.encoder.inline.format(c=f"c{at}")
        if not column.nullable:
            return inline
        if column.encoder.inline_present:
            return column.encoder.inline_present.format(c=f"c{at}")
        return f"b'\\x02' + {inline}"

    def _variable(self, at: int, width: int, *, zero_for_null: bool) -> Iterator[str]:
        """Write the branches of a variable-width cell whose kind and length were read as part of `width` bytes."""
        length = f"k{at}" if self._copied else "l"
        yield f"if k{at} {'>= 0' if self._copied else f'== {BINARY}'}:"
        yield f" s = o + {width}; o = s + {length}; {self._variable_piece(at, length)}"
        yield from self._null(at, width if self._copied else width - 4, zero_for_null=zero_for_null)

    def _variable_piece(self, at: int, length: str) -> str:
        column = self._columns[at]
        skip = column.encoder.skip
        present = "b'\\x02' + " if column.nullable else ""
        if skip is None:
            return f"p{at} = {present}E{at}(b[s:o])"
        size = f"{length} - {skip}" if skip else length
        start = f"s + {skip}" if skip else "s"
        table = "ZP" if column.nullable else "Z"
        return f"c{at} = b[{start}:o]; p{at} = {table}[{size}] if {length} < 8192 else {present}zz({size})"

    def _null(self, at: int, width: int, *, zero_for_null: bool) -> Iterator[str]:
        column = self._columns[at]
        empty = f"c{at} = b''; " if self._passes(at) else ""
        # An old tuple without the key (the replica identity is another index) must not pass for the key 0.
        zero = column.encoder.zero if zero_for_null and at not in self._key else None
        stand_in = b"\x00" if column.nullable else zero
        if stand_in is not None:
            yield "else:" if self._copied else f"elif k{at} == {ord('n')}:"
            yield f" {empty}p{at} = {stand_in!r}; o += {width}"
        if stand_in is None or not self._copied:
            yield "else: raise NeedsCells"

    def _alone(self, at: int, *, zero_for_null: bool) -> Iterator[str]:
        """Write the read of one cell by itself."""
        lead = self._lead
        encoder = self._columns[at].encoder
        yield f"k{at}, = int_at(b, o)" if self._copied else f"k{at} = b[o]"
        if not encoder.fixed:
            if not self._copied:
                yield "l, = size_at(b, o + 1)"
            yield from self._variable(at, lead, zero_for_null=zero_for_null)
            return
        width = struct.calcsize("!" + encoder.fixed)
        yield f"if k{at} {'>= 0' if self._copied else f'== {BINARY}'}:"
        yield f" c{at}, = S{at}(b, o + {lead}); o += {lead + width}; p{at} = {self._fixed_piece(at)}"
        yield from self._null(at, 4 if self._copied else 1, zero_for_null=zero_for_null)
