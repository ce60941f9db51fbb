"""Avro's variable-length integers by table: 14 bits a step instead of 7.

The tables are part of the generated encoders' and decoders' vocabulary; an encoder inlines the short cases and calls
`zigzag` for the rest.
"""

from __future__ import annotations

import struct

_MASK = (1 << 14) - 1

PLAIN = [bytes((i,)) if i < 128 else bytes((0x80 | (i & 127), i >> 7)) for i in range(1 << 14)]
"""The varint of every number below 2^14: one or two bytes, the last of its number."""
MORE = [bytes((0x80 | (i & 127), 0x80 | (i >> 7))) for i in range(1 << 14)]
"""Two bytes that hold 14 bits and say that more follow."""
MORE_PRESENT = [b"\x02" + piece for piece in MORE]
"""The same behind the union branch "present" of a nullable field."""
SMALL = [PLAIN[i << 1] for i in range(1 << 13)]
"""The zigzag varint of 0 to 8191."""
SMALL_PRESENT = [b"\x02" + piece for piece in SMALL]
"""The same behind the union branch "present" of a nullable field."""


def zigzag(n: int) -> bytes:
    """Return a 64-bit signed integer as a zigzag varint."""
    return unsigned((n << 1) ^ (n >> 63))


def unsigned(n: int) -> bytes:
    """Return a 64-bit unsigned integer as a varint."""
    if n < 1 << 14:
        return PLAIN[n]
    if n < 1 << 28:
        return MORE[n & _MASK] + PLAIN[n >> 14]
    if n < 1 << 42:
        return MORE[n & _MASK] + MORE[(n >> 14) & _MASK] + PLAIN[n >> 28]
    if n < 1 << 56:
        return MORE[n & _MASK] + MORE[(n >> 14) & _MASK] + MORE[(n >> 28) & _MASK] + PLAIN[n >> 42]
    # More than 56 bits: up to 8 are left, one or two bytes.
    return (
        MORE[n & _MASK] + MORE[(n >> 14) & _MASK] + MORE[(n >> 28) & _MASK] + MORE[(n >> 42) & _MASK] + PLAIN[n >> 56]
    )


def sized(data: bytes) -> bytes:
    """Return Avro's string or bytes: the length, then the data."""
    return (SMALL[len(data)] if len(data) < 8192 else zigzag(len(data))) + data


_INTS = list(range(1 << 14))
_PAIR_VALUE = [_INTS[(h & 127) | ((h >> 1) & 0x3F80) if h & 0x80 else h & 127] for h in range(1 << 16)]
"""What the two bytes of a little-endian u16 contribute to a varint."""
_PAIR_SIZE = bytes(1 if not h & 0x80 else 2 if not h & 0x8000 else 0 for h in range(1 << 16))
"""How many of the two bytes belong to the varint's end; 0 if it goes on."""
_PAIRS = struct.Struct("<5H").unpack_from
PADDING = bytes(10)
"""What must follow a buffer so that `read_unsigned` may look ahead: the longest varint has ten bytes."""


def read_unsigned(v: bytes, o: int) -> tuple[int, int]:
    """Return (number before un-zigzag, offset behind it) of the varint at `o`; ten bytes must be readable there.

    Raises:
        ValueError: if the varint has more than 64 bits.
        struct.error: if fewer than ten bytes are left.
    """
    a, b, c, d, e = _PAIRS(v, o)
    n = _PAIR_VALUE[a]
    if size := _PAIR_SIZE[a]:
        return n, o + size
    n |= _PAIR_VALUE[b] << 14
    if size := _PAIR_SIZE[b]:
        return n, o + 2 + size
    n |= _PAIR_VALUE[c] << 28
    if size := _PAIR_SIZE[c]:
        return n, o + 4 + size
    n |= _PAIR_VALUE[d] << 42
    if size := _PAIR_SIZE[d]:
        return n, o + 6 + size
    n |= _PAIR_VALUE[e] << 56
    if not (size := _PAIR_SIZE[e]) or n >> 64:
        raise ValueError("a varint has more than 64 bits")
    return n, o + 8 + size


def read_long(v: bytes, o: int) -> tuple[int, int]:
    """Return (signed number, offset behind it) of the zigzag varint at `o`; raises as `read_unsigned`."""
    n, o = read_unsigned(v, o)
    return (n >> 1) ^ -(n & 1), o


def read_sized(v: bytes, o: int) -> tuple[bytes, int]:
    """Return (data, offset behind it) of the string or bytes at `o`.

    Raises:
        ValueError: if the length is negative or reaches beyond the buffer.
        struct.error: if fewer than ten bytes are left.
    """
    n, o = read_unsigned(v, o)
    end = o + (n >> 1)
    if n & 1 or end > len(v):
        raise ValueError("a length reaches beyond the record")
    return v[o:end], end
