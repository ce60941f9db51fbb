"""Booleans, integers and floats."""

from __future__ import annotations

import struct

from anabranch_connectors.postgres.types.cell import CellDecoder, CellEncoder
from anabranch_schemas.envelope.varint import MORE, MORE_PRESENT, PLAIN, SMALL, SMALL_PRESENT, zigzag

_INT_NAMES = {"Z": SMALL, "ZP": SMALL_PRESENT, "C14": MORE, "CP14": MORE_PRESENT, "F14": PLAIN, "zz": zigzag}
# One table for 13 bits, two for 27, the function for the rest: most keys and counters stay inline.
_INT = "(Z[{c}] if 0 <= {c} < 8192 else C14[({c} << 1) & 16383] + F14[{c} >> 13] if 0 < {c} < 134217728 else zz({c}))"
_INT_PRESENT = (
    "(ZP[{c}] if 0 <= {c} < 8192 else CP14[({c} << 1) & 16383] + F14[{c} >> 13] if 0 < {c} < 134217728 "
    "else b'\\x02' + zz({c}))"
)
_TRUTH = (b"\x00", b"\x01")


def _int_encoder(code: str) -> CellEncoder:
    unpack = struct.Struct("!" + code).unpack

    def encode(raw: bytes) -> bytes:
        return zigzag(unpack(raw)[0])

    return CellEncoder(
        encode,
        zero=b"\x00",
        missing=b"\x00",
        fixed=code,
        inline=_INT,
        inline_present=_INT_PRESENT,
        names=_INT_NAMES,
    )


def _reversed(raw: bytes) -> bytes:
    """Turn the byte order; the bits of a float go through untouched, NaN payloads included."""
    return raw[::-1]


def _float_encoder(width: int) -> CellEncoder:
    zero = bytes(width)
    return CellEncoder(_reversed, zero=zero, missing=zero, fixed=f"{width}s", inline="{c}[::-1]")


def _bool(raw: bytes) -> bytes:
    return b"\x01" if raw[0] else b"\x00"


def truth(byte: int) -> bool:
    """Return an Avro boolean.

    Raises:
        ValueError: if the byte is neither 0 nor 1.
    """
    if byte > 1:
        raise ValueError("not a boolean")
    return byte == 1


BOOLEAN = CellEncoder(_bool, zero=b"\x00", missing=b"\x00", fixed="?", inline="TRUTH[{c}]", names={"TRUTH": _TRUTH})
INT16 = _int_encoder("h")
INT32 = _int_encoder("i")
INT64 = _int_encoder("q")
FLOAT32 = _float_encoder(4)
FLOAT64 = _float_encoder(8)

TO_BOOLEAN = CellDecoder("boolean", "bool", "?", "truth({c})", {"truth": truth})
TO_INT16 = CellDecoder("smallint", "long", "h")
TO_INT32 = CellDecoder("integer", "long", "i")
TO_INT64 = CellDecoder("bigint", "long", "q")
TO_FLOAT32 = CellDecoder("real", "float", "4s", "{c}[::-1]")
TO_FLOAT64 = CellDecoder("double precision", "double", "8s", "{c}[::-1]")
