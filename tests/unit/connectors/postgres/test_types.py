from __future__ import annotations

import struct
from datetime import date, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch_connectors.postgres.mapping import create_type, table_schema
from anabranch_connectors.postgres.pgtable import PgColumn, PgTable, PgType
from anabranch_connectors.postgres.types import NeedsCells, encoder_for, logical_type
from anabranch_connectors.postgres.types.calendar import date_of, days_of
from anabranch_schemas.envelope.varint import PADDING, read_sized
from anabranch_schemas.table import Column
from anabranch_schemas.types import Array, Decimal, Enumeration, LogicalType, Opaque, Scalar, Time, Timestamp

INTEGER, TEXT = PgType(23, "integer"), PgType(25, "text")


def never(_oid: int, _data: bytes) -> str:
    raise AssertionError("printed here")


def numeric(precision: int, scale: int) -> PgType:
    return PgType(1700, f"numeric({precision},{scale})", (precision << 16 | scale & 0x7FF) + 4)


def text_of(pg: PgType, raw: bytes) -> str:
    return read_sized(encoder_for(pg, never).encode(raw) + PADDING, 0)[0].decode()


@pytest.mark.parametrize(
    ("pg", "logical"),
    [
        (numeric(10, 2), Decimal(10, 2)),
        (numeric(1000, 1000), Decimal(1000, 1000)),
        (numeric(3, -2), Scalar.VARIABLE_DECIMAL),
        (numeric(2, 5), Scalar.VARIABLE_DECIMAL),
        (PgType(1700, "numeric"), Scalar.VARIABLE_DECIMAL),
        (PgType(1083, "time(2) without time zone", 2), Time(2)),
        (PgType(1114, "timestamp without time zone"), Timestamp(6)),
        (PgType(90, "app.mood", kind="e", labels=("a",)), Enumeration(("a",))),
        (PgType(91, "app.posint", kind="d", base=INTEGER), Scalar.INT32),
        (PgType(92, "app.tags", kind="d", base=PgType(1009, "text[]", element=TEXT)), Array(Scalar.TEXT)),
        (
            PgType(1231, "numeric(10,2)[]", numeric(10, 2).typmod, element=PgType(1700, "numeric")),
            Array(Decimal(10, 2)),
        ),
        (PgType(22, "int2vector", element=PgType(21, "smallint")), Opaque("int2vector")),
        (PgType(93, "public.citext"), Scalar.TEXT),
        (PgType(94, "app.pair", kind="c"), Opaque("app.pair")),
        (PgType(869, "inet"), Opaque("inet")),
    ],
)
def test_what_a_type_holds(pg: PgType, logical: LogicalType) -> None:
    assert logical_type(pg) == logical


def test_published_columns_travel_and_a_domain_as_its_base() -> None:
    domain = PgType(91, "app.posint", kind="d", base=INTEGER)
    columns = (PgColumn("id", domain, nullable=False), PgColumn("sum", INTEGER, nullable=True, generated=True))
    assert table_schema(PgTable(1, "s", "t", columns, ("id",))).columns == (
        Column("id", Scalar.INT32, nullable=False, source_type="integer"),
    )


@pytest.mark.parametrize(
    ("logical", "source", "created"),
    [
        (Decimal(10, 2), "numeric(10,2)", "numeric(10,2)"),
        (Opaque("inet"), "inet", "inet"),
        (Array(Scalar.INT32), "integer[]", "integer[]"),
        (Enumeration(("a",)), "app.mood", "text"),
        (Array(Enumeration(("a",))), "app.mood[]", "text[]"),
        (Opaque("app.pair"), "app.pair", "text"),
        (Array(Opaque("app.pair")), "app.pair[]", "text[]"),
        (Scalar.TEXT, "public.citext", "text"),
    ],
)
def test_a_column_is_created_with_a_type_that_every_target_has(logical: LogicalType, source: str, created: str) -> None:
    assert create_type(Column("c", logical, nullable=True, source_type=source)) == created


@given(st.dates())
def test_dates_are_the_calendars(day: date) -> None:
    days = (day - date(2000, 1, 1)).days
    assert date_of(days) == day.isoformat()
    assert days_of(day.year, day.month, day.day) == days


@given(st.integers(-2_500_000, 108_000_000))
def test_each_day_follows_the_one_before_beyond_the_calendars_range_too(days: int) -> None:
    # 146097 days are exactly 400 years: every day has a twin that Python's calendar knows.
    era, rest = divmod(days, 146_097)
    twin = date(2000, 1, 1) + timedelta(days=rest)
    year = twin.year + era * 400
    text = f"{year:04d}" if 0 <= year <= 9999 else f"+{year}" if year > 0 else f"-{-year:04d}"
    assert date_of(days) == f"{text}-{twin:%m-%d}"
    assert days_of(year, twin.month, twin.day) == days


@pytest.mark.parametrize("end", [((1 << 63) - 1, 0x7FFFFFFF, 0x7FFFFFFF), (-(1 << 63), -0x80000000, -0x80000000)])
def test_an_infinite_interval_needs_a_cell(end: tuple[int, int, int]) -> None:
    encoder = encoder_for(PgType(1186, "interval"), never)
    raw = struct.pack("!qii", *end)
    with pytest.raises(NeedsCells):
        encoder.encode(raw)
    assert encoder.print is not None
    assert encoder.print(raw) == ("infinity" if end[0] > 0 else "-infinity")


@pytest.mark.parametrize(
    ("us", "days", "months", "text"),
    [
        (0, 0, 0, "P0Y0M0DT0H0M0S"),
        (14_706_789_012, 3, 14, "P1Y2M3DT4H5M6.789012S"),
        (-500_000, 1, -1, "P0Y-1M1DT0H0M-0.500000S"),
        (-3_600_000_000, -400, -25, "P-2Y-1M-400DT-1H0M0S"),
    ],
)
def test_an_interval_keeps_months_days_and_time_apart(us: int, days: int, months: int, text: str) -> None:
    assert text_of(PgType(1186, "interval"), struct.pack("!qii", us, days, months)) == text


@pytest.mark.parametrize(
    ("precision", "us", "text"),
    [
        (-1, 0, "2000-01-01T00:00:00.000000Z"),
        (-1, -1, "1999-12-31T23:59:59.999999Z"),
        (3, 1_500_000, "2000-01-01T00:00:01.500Z"),
        (0, 1_000_000, "2000-01-01T00:00:01Z"),
        (-1, (1 << 63) - 1, "infinity"),
        (2, -(1 << 63), "-infinity"),
        (-1, 252_455_616_000_000_000, "+10000-01-01T00:00:00.000000Z"),
        (-1, -64_464_508_800_000_000, "-0043-03-15T00:00:00.000000Z"),
    ],
)
def test_a_timestamp_with_zone_is_utc_to_its_precision(precision: int, us: int, text: str) -> None:
    assert text_of(PgType(1184, "timestamptz", precision), struct.pack("!q", us)) == text


@pytest.mark.parametrize(
    ("us", "west", "text"),
    [
        (0, 0, "00:00:00.000000Z"),
        (86_400_000_000, 57_599, "24:00:00.000000-15:59:59"),
        (1_000_001, -19_800, "00:00:01.000001+05:30"),
    ],
)
def test_a_time_with_zone_keeps_its_offset(us: int, west: int, text: str) -> None:
    assert text_of(PgType(1266, "timetz"), struct.pack("!qi", us, west)) == text
