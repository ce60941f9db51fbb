"""Rows cell by cell: the slow path beside the generated encoders, for the rows that those refuse.

It handles what a generated encoder answers with NeedsCells: unchanged TOAST, values that the Avro type cannot hold,
cells in text form, and NULLs older than a NOT NULL constraint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anabranch_connectors.postgres.types import AsText, CellEncoder, NeedsCells
from anabranch_schemas.envelope import cells as cells_header
from anabranch_schemas.envelope.cells import Cell, CellKind
from anabranch_schemas.errors import TypeMappingError

BINARY, NULL, TEXT, UNCHANGED = b"bntu"
RawCell = tuple[int, bytes]
"""Kind as in pgoutput's TupleData, and the data."""


class RowEncodeError(TypeMappingError):
    """A row does not fit the table that its encoder was made for."""

    code = "type.unencodable"


@dataclass(frozen=True, slots=True)
class EncodedColumn:
    """A published column with its encoder; `oid` is the base type's, for the server's printing."""

    name: str
    oid: int
    nullable: bool
    encoder: CellEncoder


@dataclass(frozen=True, slots=True)
class Image:
    """A row as Avro: one body a column (with the union's branch), and the cells that are not in it."""

    bodies: tuple[bytes, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class CellwiseEncoder:
    """Encodes raw cells of one table."""

    table: str
    columns: tuple[EncodedColumn, ...]
    key: tuple[int, ...]
    key_frame: bytes
    as_text: AsText

    def row(self, new: Sequence[RawCell], old: Sequence[RawCell] | None = None) -> tuple[bytes, bytes, bytes, bool]:
        """Return (image, key, cells header, whether a value is missing); `old` fills in what `new` leaves out.

        Raises:
            RowEncodeError: if a key column's value is missing or cannot be held.
        """
        image = self._image(self._filled(new, old))
        missing = any(cell.kind is CellKind.MISSING for cell in image.cells)
        return b"".join(image.bodies), self._key(image), cells_header.encode(image.cells), missing

    def old(self, old: Sequence[RawCell]) -> tuple[bytes, bytes]:
        """Return (image, key) of an old tuple; NULL in a NOT NULL column becomes the type's zero."""
        image = self._image(old)
        return b"".join(image.bodies), self._key(image)

    def _filled(self, new: Sequence[RawCell], old: Sequence[RawCell] | None) -> Sequence[RawCell]:
        if old is None:
            return new
        # In a key-only old tuple every other column is NULL, and a NULL is never left out as unchanged.
        return [o if n[0] == UNCHANGED and o[0] != NULL else n for n, o in zip(new, old, strict=True)]

    def _image(self, raw: Sequence[RawCell]) -> Image:
        if len(raw) != len(self.columns):
            raise RowEncodeError(
                f"a row has {len(raw)} columns, the table {len(self.columns)}",
                where=self.table,
                advice="the table's shape has changed since its encoder was made: restart the source",
            )
        bodies: list[bytes] = []
        cells: list[Cell] = []
        for index, (column, cell) in enumerate(zip(self.columns, raw, strict=True)):
            try:
                bodies.append(self._body(column, cell))
            except NeedsCells:
                bodies.append(self._stand_in(column, cell[0]))
                cells.append(self._cell(index, column, cell))
        return Image(tuple(bodies), tuple(cells))

    def _body(self, column: EncodedColumn, cell: RawCell) -> bytes:
        kind, data = cell
        if kind == NULL and column.nullable:
            return b"\x00"
        if kind == BINARY:
            body = column.encoder.encode(data)
        elif kind == TEXT:
            if column.encoder.from_text is None:
                raise NeedsCells
            body = column.encoder.from_text(data)
        else:
            raise NeedsCells
        return b"\x02" + body if column.nullable else body

    def _stand_in(self, column: EncodedColumn, kind: int) -> bytes:
        encoder = column.encoder
        if kind == NULL:
            return encoder.zero
        if column.nullable:
            return b"\x02" + encoder.missing if encoder.is_text and kind == UNCHANGED else b"\x00"
        return encoder.missing

    def _cell(self, index: int, column: EncodedColumn, cell: RawCell) -> Cell:
        kind, data = cell
        if kind == NULL:
            return Cell(index, CellKind.NULL)
        if kind == UNCHANGED:
            return Cell(index, CellKind.MISSING)
        if kind == TEXT:
            return Cell(index, CellKind.TEXT, data.decode())
        printer = column.encoder.print
        return Cell(index, CellKind.TEXT, printer(data) if printer else self.as_text(column.oid, data))

    def _key(self, image: Image) -> bytes:
        unheld = {cell.column for cell in image.cells}.intersection(self.key)
        if unheld:
            raise RowEncodeError(
                "a key column has no value, or one that a key cannot carry",
                where=f"{self.table}.{self.columns[min(unheld)].name}",
                advice="a key cannot hold NaN, infinite numerics or multi-dimensional arrays; if the table's replica "
                "identity is another index, set it to the primary key or to FULL",
            )
        if not self.key:
            return b""
        return self.key_frame + b"".join(image.bodies[index] for index in self.key)


def logged_cells(b: bytes, o: int) -> tuple[list[RawCell], int]:
    """Return (cells, end) of the pgoutput TupleData at `o`."""
    count = int.from_bytes(b[o : o + 2], "big")
    o += 2
    cells: list[RawCell] = []
    for _ in range(count):
        kind = b[o]
        o += 1
        data = b""
        if kind in (BINARY, TEXT):
            start = o + 4
            o = start + int.from_bytes(b[o:start], "big")
            data = b[start:o]
        cells.append((kind, data))
    return cells, o


def copied_cells(b: bytes, o: int) -> tuple[list[RawCell], int]:
    """Return (cells, end) of the binary COPY tuple at `o`."""
    count = int.from_bytes(b[o : o + 2], "big")
    o += 2
    cells: list[RawCell] = []
    for _ in range(count):
        start = o + 4
        length = int.from_bytes(b[o:start], "big", signed=True)
        o = start + max(length, 0)
        cells.append((NULL, b"") if length < 0 else (BINARY, b[start:o]))
    return cells, o


def skip_logged(b: bytes, o: int) -> int:
    """Return the offset behind the pgoutput TupleData at `o`."""
    count = int.from_bytes(b[o : o + 2], "big")
    o += 2
    for _ in range(count):
        kind = b[o]
        o += 5 + int.from_bytes(b[o + 1 : o + 5], "big") if kind in (BINARY, TEXT) else 1
    return o
