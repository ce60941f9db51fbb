"""What the generators know of a type: how one cell goes from PostgreSQL's binary form to Avro, and back."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from anabranch_schemas.envelope.varint import read_sized, read_unsigned
from anabranch_schemas.errors import TypeMappingError

AsText = Callable[[int, bytes], str]
"""Ask the server to print a value: (type oid, binary form) -> text."""
Names = Mapping[str, object]
"""Globals that generated expressions use."""


class NeedsCells(Exception):  # noqa: N818 - a signal to take the slow path, not a failure
    """The Avro type cannot hold the cell: the row needs an `ab.cells` header."""


class RowDecodeError(TypeMappingError):
    """A record is cut off or not of its schema."""

    code = "type.undecodable"


@dataclass(frozen=True, slots=True)
class CellEncoder:
    """One column's way from PostgreSQL's binary form to the Avro body, without the union's branch.

    Generated code takes the first that is there: `fixed` (part of a fused run of fixed-width columns), `skip` (the
    bytes go through untouched), else it calls `encode`.
    """

    encode: Callable[[bytes], bytes]
    """Raises NeedsCells where the Avro type cannot hold the value."""
    zero: bytes
    """The body that stands for a NULL in a NOT NULL column of an old key image, as in Debezium."""
    missing: bytes
    """The body that stands for a value that is not there."""
    fixed: str = ""
    """Struct code of a fixed-width binary form."""
    inline: str = ""
    """With `fixed`: the body as an expression of `{c}`."""
    inline_present: str = ""
    """The same behind the union's branch, where that saves a concatenation."""
    names: Names = field(default_factory=dict)
    skip: int | None = None
    """The body is Avro's length and the binary form itself after this many bytes."""
    from_text: Callable[[bytes], bytes] | None = None
    """Body of a cell that the server sent as text, for types whose body is that text."""
    is_text: bool = False
    """Whether the body is a string or bytes: then a missing value shows Debezium's placeholder, nullable or not."""
    print: Callable[[bytes], str] | None = None
    """Print a value that raised NeedsCells as the server would; None leaves it to the server."""


@dataclass(frozen=True, slots=True)
class CellDecoder:
    """One column's way from the Avro body to a PostgreSQL binary field.

    `read` says what generated code reads at the offset: `long`, `bool`, `float` (4 bytes), `double` (8 bytes), `sized`
    (string or bytes), `sized1` (the same, the field has a prefix of its own) or `call`.
    """

    staging: str
    """Name of the PostgreSQL type whose binary form comes out."""
    read: str
    fixed: str = ""
    """Struct code of a fixed-width field; the value is `inline`."""
    inline: str = "{c}"
    names: Names = field(default_factory=dict)
    convert: Callable[[bytes], bytes] | None = None
    """With `sized`: field data from the Avro data; None passes it through."""
    prefix: bytes = b""
    """With `sized` and no `convert`: what the binary form has before the data (jsonb's version)."""
    call: Callable[[bytes, int], tuple[bytes, int]] | None = None
    """With `call`: (buffer, offset) -> (field data, offset behind it); at least ten readable bytes follow the data."""


def cell_function(decoder: CellDecoder) -> Callable[[bytes, int], tuple[bytes, int]]:
    """Return one function that decodes a cell of any kind, for arrays: (buffer, offset) -> (field data, end)."""
    if decoder.call:
        return decoder.call
    if decoder.fixed:
        return _fixed_function(decoder)
    convert = decoder.convert
    prefix = decoder.prefix

    def sized(v: bytes, o: int) -> tuple[bytes, int]:
        data, o = read_sized(v, o)
        return (convert(data) if convert else prefix + data), o

    return sized


def _fixed_function(decoder: CellDecoder) -> Callable[[bytes, int], tuple[bytes, int]]:
    pack = struct.Struct("!" + decoder.fixed).pack
    value: Callable[[object], object] = eval(f"lambda c: {decoder.inline.format(c='c')}", dict(decoder.names))  # noqa: S307 - our own expression
    width = {"bool": 1, "float": 4, "double": 8}.get(decoder.read, 0)

    def fixed(v: bytes, o: int) -> tuple[bytes, int]:
        if width:
            end = o + width
            if end > len(v):
                raise ValueError("a value is cut off")
            return pack(value(v[o:end] if width > 1 else v[o])), end
        if decoder.read == "sized":
            data, o = read_sized(v, o)
            return pack(value(data)), o
        n, o = read_unsigned(v, o)
        return pack(value((n >> 1) ^ -(n & 1))), o

    return fixed
