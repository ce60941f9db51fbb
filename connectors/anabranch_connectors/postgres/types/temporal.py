"""Dates, times, timestamps and intervals. PostgreSQL counts from 2000-01-01, Connect from 1970-01-01."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

from anabranch_connectors.postgres.types.calendar import date_of, days_of
from anabranch_connectors.postgres.types.cell import CellDecoder, CellEncoder, NeedsCells
from anabranch_connectors.postgres.types.numbers import INT64
from anabranch_schemas.envelope.varint import SMALL, sized, zigzag

_DAYS = 10_957  # 1970-01-01 to 2000-01-01
_MICROS = _DAYS * 86_400_000_000
_MAX64 = (1 << 63) - 1
_MIN64 = -(1 << 63)
# Debezium's stand-ins for infinity and -infinity in microseconds; the JDBC driver's habit.
_INFINITY = 9_223_372_036_825_200_000
_MINUS_INFINITY = -9_223_372_036_832_400_000
_CACHED_SECONDS = 1 << 15


def _date(days: int) -> bytes:
    # PostgreSQL's infinities are the ends of int32, and so are ours: no date comes near them.
    return zigzag(days + _DAYS if -0x80000000 < days < 0x7FFFFFFF else days)


def _from_date(days: int) -> int:
    return days - _DAYS if -0x80000000 < days < 0x7FFFFFFF else days


def _micros(us: int) -> bytes:
    """Encode a timestamp as microseconds since 1970.

    Raises:
        NeedsCells: beyond int64 (the last 10 months of PostgreSQL's range) or at a stand-in for infinity.
    """
    since_1970 = us + _MICROS
    if since_1970 >= _INFINITY:
        if us != _MAX64:
            raise NeedsCells
        return zigzag(_INFINITY)
    return zigzag(since_1970 if us != _MIN64 else _MINUS_INFINITY)


def _from_micros(us: int) -> int:
    if us >= _INFINITY:
        return _MAX64
    return us - _MICROS if us > _MINUS_INFINITY else _MIN64


def _millis(us: int) -> bytes:
    if us == _MAX64:
        return zigzag(_INFINITY // 1000)
    if us == _MIN64:
        return zigzag(_MINUS_INFINITY // 1000)
    millis = (us + _MICROS) // 1000
    if millis == _INFINITY // 1000:
        raise NeedsCells
    return zigzag(millis)


def _from_millis(millis: int) -> int:
    if millis == _INFINITY // 1000:
        return _MAX64
    if millis == _MINUS_INFINITY // 1000:
        return _MIN64
    return millis * 1000 - _MICROS


def _time_millis(us: int) -> bytes:
    return zigzag(us // 1000)


def _number(code: str, name: str, function: Callable[[int], bytes], zero: bytes = b"\x00") -> CellEncoder:
    """Return the encoder of a type that PostgreSQL sends as one integer."""
    unpack = struct.Struct("!" + code).unpack

    def encode(raw: bytes) -> bytes:
        return function(unpack(raw)[0])

    return CellEncoder(encode, zero=zero, missing=zero, fixed=code, inline=name + "({c})", names={name: function})


DATE = _number("i", "date", _date)
TIME_MICROS = INT64
TIME_MILLIS = _number("q", "time_millis", _time_millis)
TIMESTAMP_MICROS = _number("q", "micros", _micros)
TIMESTAMP_MILLIS = _number("q", "millis", _millis)
TO_DATE = CellDecoder("date", "long", "i", "from_date({c})", {"from_date": _from_date})
TO_TIME_MICROS = CellDecoder("time", "long", "q")
TO_TIME_MILLIS = CellDecoder("time", "long", "q", "({c}) * 1000")
TO_TIMESTAMP_MICROS = CellDecoder("timestamp", "long", "q", "from_micros({c})", {"from_micros": _from_micros})
TO_TIMESTAMP_MILLIS = CellDecoder("timestamp", "long", "q", "from_millis({c})", {"from_millis": _from_millis})


def _clock(seconds: int) -> str:
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


class _Seconds(dict[int, bytes]):
    """Avro's length and the text up to the fraction, by seconds since 2000.

    Neighbouring rows were mostly written in the same seconds; the dictionary starts anew when it is full.
    """

    def __init__(self, precision: int) -> None:
        super().__init__()
        self._digits = precision

    def __missing__(self, second: int) -> bytes:
        # Out of range are only the infinities: int64's ends.
        if not -(1 << 63) // 1_000_000 < second < ((1 << 63) - 1) // 1_000_000:
            raise KeyError(second)
        if len(self) >= _CACHED_SECONDS:
            self.clear()
        days, rest = divmod(second, 86_400)
        text = f"{date_of(days)}T{_clock(rest)}{'.' if self._digits else 'Z'}".encode()
        fraction = self._digits + 1 if self._digits else 0
        self[second] = piece = SMALL[len(text) + fraction] + text
        return piece


_THOUSANDS = [b"%03d" % n for n in range(1000)]
_THOUSANDS_Z = [b"%03dZ" % n for n in range(1000)]


_EPOCH_SIX = sized(b"2000-01-01T00:00:00.000000Z")


def _zoned(precision: int) -> Callable[[int], bytes]:
    """Return the printer of timestamptz(precision): ISO in UTC with exactly `precision` fractional digits."""
    seconds = _Seconds(precision)
    unit = 10 ** (6 - precision)

    def infinite(us: int) -> bytes:
        return sized(b"infinity" if us > 0 else b"-infinity")

    # The rows of a transaction mostly carry the same time: now().
    last_us, last = 0, _EPOCH_SIX

    def six(us: int) -> bytes:
        nonlocal last_us, last
        if us == last_us:
            return last
        second, fraction = divmod(us, 1_000_000)
        try:
            last = seconds[second] + _THOUSANDS[fraction // 1000] + _THOUSANDS_Z[fraction % 1000]
        except KeyError:
            last = infinite(us)
        last_us = us
        return last

    def fewer(us: int) -> bytes:
        second, fraction = divmod(us, 1_000_000)
        try:
            piece = seconds[second]
        except KeyError:
            return infinite(us)
        return piece + b"%0*dZ" % (precision, fraction // unit) if precision else piece

    return six if precision == 6 else fewer


def timestamp_tz(precision: int) -> CellEncoder:
    """Return the encoder of timestamptz(precision)."""
    return _number("q", f"zoned{precision}", _zoned(precision), zero=sized(b"1970-01-01T00:00:00Z"))


_ISO = re.compile(rb"([+-]?\d{4,6})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?Z")


def _parse_zoned(text: bytes) -> int:
    """Return microseconds since 2000 of what `timestamp_tz` wrote."""
    match = _ISO.fullmatch(text)
    if not match:
        if text in (b"infinity", b"-infinity"):
            return _MAX64 if text == b"infinity" else _MIN64
        raise ValueError("not a timestamp")
    year, month, day, hour, minute, second = map(int, match.groups()[:6])
    fraction = int((match[7] or b"").ljust(6, b"0"))
    seconds = days_of(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second
    return seconds * 1_000_000 + fraction


class _Prefixes(dict[bytes, int]):
    """Microseconds since 2000 of the first 19 characters, `2024-01-02T03:04:05`."""

    def __missing__(self, text: bytes) -> int:
        us = _parse_zoned(text + b"Z")
        if len(self) >= _CACHED_SECONDS:
            self.clear()
        self[text] = us
        return us


_PREFIXES = _Prefixes()


def _zoned_parser() -> Callable[[bytes], int]:
    """Return a parser of `_parse_zoned`'s meaning that is quick for the usual form and for a time that comes again."""
    last_us, last = 0, b""

    def parse(text: bytes) -> int:
        nonlocal last_us, last
        if text == last:
            return last_us
        if len(text) == 27:  # 2024-01-02T03:04:05.123456Z
            digits = text[20:26]
            if text[19] == 46 and text[26] == 90 and digits.isdigit():
                last_us = _PREFIXES[text[:19]] + int(digits)
                last = text
                return last_us
        return _parse_zoned(text)

    return parse


TO_TIMESTAMP_TZ = CellDecoder("timestamptz", "sized", "q", "from_zoned({c})", {"from_zoned": _zoned_parser()})

_TIMETZ = struct.Struct("!qi")  # microseconds, seconds west of Greenwich


def time_tz(precision: int) -> CellEncoder:
    """Return the encoder of timetz(precision): ISO time with the value's own offset, to the second if it needs that."""
    unit = 10 ** (6 - precision)

    def encode(raw: bytes) -> bytes:
        us, west = _TIMETZ.unpack(raw)
        second, fraction = divmod(us, 1_000_000)
        digits = f".{fraction // unit:0{precision}d}" if precision else ""
        return sized(f"{_clock(second)}{digits}{_offset(-west)}".encode())

    name = f"time_tz{precision}"
    zero = sized(b"00:00:00Z")
    return CellEncoder(encode, zero=zero, missing=zero, fixed="12s", inline=name + "({c})", names={name: encode})


def _offset(east: int) -> str:
    if not east:
        return "Z"
    clock = _clock(abs(east))
    return ("-" if east < 0 else "+") + (clock if abs(east) % 60 else clock[:5])


_ISO_TIME = re.compile(rb"(\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?(?:Z|([+-])(\d\d):(\d\d)(?::(\d\d))?)")


def _from_time_tz(text: bytes) -> bytes:
    match = _ISO_TIME.fullmatch(text)
    if not match:
        raise ValueError("not a time with zone")
    second = int(match[1]) * 3600 + int(match[2]) * 60 + int(match[3])
    us = second * 1_000_000 + int((match[4] or b"").ljust(6, b"0"))
    west = int(match[6] or 0) * 3600 + int(match[7] or 0) * 60 + int(match[8] or 0)
    return _TIMETZ.pack(us, west if match[5] == b"-" else -west)


TO_TIME_TZ = CellDecoder("timetz", "sized", "12s", "from_time_tz({c})", {"from_time_tz": _from_time_tz})

_INTERVAL = struct.Struct("!qii")  # microseconds, days, months


def _interval(raw: bytes) -> bytes:
    """Encode an interval as ISO 8601 with every field; months, days and time keep their own signs.

    Raises:
        NeedsCells: for an infinite one (PostgreSQL 17): all three fields at the same end of their range.
    """
    us, days, months = _INTERVAL.unpack(raw)
    if raw in _INFINITE:
        raise NeedsCells
    sign = -1 if months < 0 else 1
    years, months = sign * (abs(months) // 12), sign * (abs(months) % 12)
    seconds, fraction = divmod(abs(us), 1_000_000)
    minus = "-" if us < 0 else ""
    hours, minutes, seconds = seconds // 3600, seconds // 60 % 60, seconds % 60
    time = (
        f"{minus if hours else ''}{hours}H{minus if minutes else ''}{minutes}M"
        f"{minus if seconds or fraction else ''}{seconds}{f'.{fraction:06d}' if fraction else ''}S"
    )
    return sized(f"P{years}Y{months}M{days}DT{time}".encode())


_INFINITE = {
    _INTERVAL.pack(_MAX64, 0x7FFFFFFF, 0x7FFFFFFF): "infinity",
    _INTERVAL.pack(_MIN64, -0x80000000, -0x80000000): "-infinity",
}
INTERVAL = CellEncoder(
    _interval,
    zero=sized(b"P0Y0M0DT0H0M0S"),
    missing=sized(b"P0Y0M0DT0H0M0S"),
    fixed="16s",
    inline="interval({c})",
    names={"interval": _interval},
    print=_INFINITE.__getitem__,
)
_ISO_INTERVAL = re.compile(
    rb"P(-?\d{1,9})Y(-?\d{1,2})M(-?\d{1,10})DT(-?\d{1,13})H(-?\d{1,2})M(-?)(\d{1,2})(?:\.(\d{1,6}))?S"
)


def _from_interval(text: bytes) -> bytes:
    match = _ISO_INTERVAL.fullmatch(text)
    if not match:
        raise ValueError("not an interval")
    second = int(match[7]) * 1_000_000 + int((match[8] or b"").ljust(6, b"0"))
    us = (int(match[4]) * 60 + int(match[5])) * 60_000_000 + (-second if match[6] else second)
    return _INTERVAL.pack(us, int(match[3]), int(match[1]) * 12 + int(match[2]))


TO_INTERVAL = CellDecoder("interval", "sized", "16s", "from_interval({c})", {"from_interval": _from_interval})
