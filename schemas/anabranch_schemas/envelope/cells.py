"""The `ab.cells` header: cells whose envelope image cannot hold the value.

Big-endian, one entry a cell: `column u16 | kind u8 | length u32 | UTF-8 text`. `column` counts the fields of the
`Value` record from 0. A record without such cells has no header.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from anabranch_schemas.errors import TypeMappingError

HEADER = "ab.cells"
UNAVAILABLE = b"__debezium_unavailable_value"
"""What string and bytes columns hold in the envelope where the value is not in the log."""
_ENTRY = struct.Struct(">HBI")


class CellsError(TypeMappingError):
    """A change record's `ab.cells` header is not one that this version reads."""

    code = "type.cells"


class CellKind(IntEnum):
    """Why a cell is listed."""

    MISSING = 0
    """The value is not in the log: the column keeps what it has (unchanged TOAST)."""
    TEXT = 1
    """The value as the source prints it."""
    NULL = 2
    """NULL in a column that the schema calls NOT NULL (the row is older than the constraint)."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One listed cell; `text` is empty unless the kind is TEXT."""

    column: int
    kind: CellKind
    text: str = ""


def encode(cells: Iterable[Cell]) -> bytes:
    """Return the header value; empty if there are no cells."""
    out = []
    for cell in cells:
        text = cell.text.encode()
        out += [_ENTRY.pack(cell.column, cell.kind, len(text)), text]
    return b"".join(out)


def decode(data: bytes) -> tuple[Cell, ...]:
    """Read a header value.

    Raises:
        CellsError: if the bytes are not whole entries.
    """
    cells = []
    at = 0
    try:
        while at < len(data):
            column, kind, length = _ENTRY.unpack_from(data, at)
            at += _ENTRY.size
            if at + length > len(data):
                raise CellsError("an entry is cut off", where=HEADER)
            cells.append(Cell(column, CellKind(kind), data[at : at + length].decode()))
            at += length
    except (struct.error, ValueError) as error:
        raise CellsError(f"not a list of cells: {type(error).__name__}", where=HEADER) from None
    return tuple(cells)
