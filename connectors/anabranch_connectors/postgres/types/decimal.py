"""numeric: PostgreSQL's base-10000 digits to and from Connect's big-endian unscaled integer."""

from __future__ import annotations

import struct
from collections.abc import Callable

from anabranch_connectors.postgres.types.cell import CellDecoder, CellEncoder, NeedsCells
from anabranch_schemas.envelope.varint import SMALL, read_long, read_sized, sized, zigzag

_HEAD = struct.Struct("!HhHH").unpack_from  # digits, weight of the first, sign, display scale
_GROUPS1 = struct.Struct("!2xhH2xH").unpack
_GROUPS2 = struct.Struct("!2xhH2xHH").unpack
_GROUPS3 = struct.Struct("!2xhH2xHHH").unpack
_DIGITS = [struct.Struct(f"!8x{n}H").unpack_from for n in range(8)]
_NEGATIVE = 0x4000
_SPECIAL = {0xC000: "NaN", 0xD000: "Infinity", 0xF000: "-Infinity"}
_POWERS: list[int] = [10**n for n in range(64)]
_TWO = struct.Struct("!HhHHHH").pack
_FOUR = struct.Struct("!HhHHHHHH").pack
_MAX_SCALE = 16383
# numeric holds at most 131072 digits before and 16383 behind the point: 147455 * log2(10) / 8 = 61228 bytes.
_MAX_BYTES = 61_300


def _power(n: int) -> int:
    return _POWERS[n] if n < 64 else int(10**n)


def _unscaled(raw: bytes, scale: int) -> bytes:
    """Return the value times 10^scale, two's complement in the fewest bytes.

    Raises:
        NeedsCells: for NaN and the infinities.
    """
    count, weight, sign, _ = _HEAD(raw)
    n = 0
    for digit in _DIGITS[count](raw) if count < 8 else struct.unpack_from(f"!8x{count}H", raw):
        n = n * 10000 + digit
    # The last digit group counts 10000^(weight - count + 1); the division is exact, it drops zeros of that group.
    shift = (weight - count + 1) * 4 + scale
    if shift > 0:
        n *= _power(shift)
    elif n:
        n //= _power(-shift)
    if sign:
        if sign != _NEGATIVE:
            raise NeedsCells
        return (-n).to_bytes((n - 1).bit_length() // 8 + 1, "big", signed=True)
    return n.to_bytes(n.bit_length() // 8 + 1, "big")


def _fixed_scale(scale: int) -> Callable[[bytes], bytes]:
    """Return the encoder for one scale: most amounts have one to three groups and go the short way."""

    def encode(raw: bytes) -> bytes:
        n: int
        size = len(raw)
        if size == 12:
            weight, sign, n, low = _GROUPS2(raw)
            n = n * 10000 + low
            shift = weight * 4 - 4 + scale
        elif size == 14:
            weight, sign, n, middle, low = _GROUPS3(raw)
            n = (n * 10000 + middle) * 10000 + low
            shift = weight * 4 - 8 + scale
        elif size == 10:
            weight, sign, n = _GROUPS1(raw)
            shift = weight * 4 + scale
        else:
            return sized(_unscaled(raw, scale))
        if sign or shift > 63:
            return sized(_unscaled(raw, scale))
        n = n * _POWERS[shift] if shift >= 0 else n // _POWERS[-shift]
        size = (n.bit_length() >> 3) + 1
        return SMALL[size] + n.to_bytes(size, "big")

    return encode


def _variable(raw: bytes) -> bytes:
    scale = raw[6] << 8 | raw[7]
    return zigzag(scale) + sized(_unscaled(raw, scale))


def _print(raw: bytes) -> str:
    return _SPECIAL[int.from_bytes(raw[4:6], "big")]


def decimal(scale: int) -> CellEncoder:
    """Return the encoder of numeric(p, scale)."""
    return CellEncoder(_fixed_scale(scale), zero=b"\x02\x00", missing=b"\x02\x00", print=_print)


VARIABLE = CellEncoder(_variable, zero=b"\x00\x02\x00", missing=b"\x00\x02\x00", print=_print)


def _numeric(data: bytes, scale: int) -> bytes:
    """Return numeric's binary form of an unscaled integer; leading zero groups are dropped by the server.

    Raises:
        ValueError: if it is longer than any numeric.
    """
    if len(data) > _MAX_BYTES:
        raise ValueError("longer than any numeric")
    n = int.from_bytes(data, "big", signed=True)
    sign = 0
    if n < 0:
        sign = _NEGATIVE
        n = -n
    # Groups of four digits count from the point: fill up the last one behind it.
    fraction = (scale + 3) >> 2
    n *= _POWERS[-scale & 3]
    if n < 100_000_000:
        return _TWO(2, 1 - fraction, sign, scale, *divmod(n, 10000))
    if n < 10_000_000_000_000_000:
        high, low = divmod(n, 100_000_000)
        return _FOUR(4, 3 - fraction, sign, scale, *divmod(high, 10000), *divmod(low, 10000))
    groups = []
    while n:
        n, group = divmod(n, 10000)
        groups.append(group)
    count = len(groups)
    return struct.pack(f"!HhHH{count}H", count, count - fraction - 1, sign, scale, *reversed(groups))


def to_decimal(scale: int) -> CellDecoder:
    """Return the decoder of Connect's Decimal."""
    return CellDecoder("numeric", "sized", convert=lambda data: _numeric(data, scale))


def _read_variable(v: bytes, o: int) -> tuple[bytes, int]:
    scale, o = read_long(v, o)
    data, o = read_sized(v, o)
    if not 0 <= scale <= _MAX_SCALE:
        raise ValueError("not a scale of numeric")
    return _numeric(data, scale), o


TO_VARIABLE = CellDecoder("numeric", "call", call=_read_variable)
