"""Days and ISO dates, proleptic Gregorian: no year is skipped and year 0 is 1 BC, as in PostgreSQL."""

from __future__ import annotations

# Days from 0000-03-01, the start of the era arithmetic below, to 2000-01-01.
_TO_2000 = 730_425
_ERA = 146_097  # days in 400 years


def date_of(days: int) -> str:
    """Return the ISO date of a day counted from 2000-01-01; years beyond 9999 carry a `+`, before 0 a `-`.

    Howard Hinnant's civil_from_days, http://howardhinnant.github.io/date_algorithms.html.
    """
    era, day = divmod(days + _TO_2000, _ERA)
    year = (day - day // 1460 + day // 36524 - day // 146096) // 365
    day -= 365 * year + year // 4 - year // 100
    shifted = (5 * day + 2) // 153
    month = shifted + 3 if shifted < 10 else shifted - 9
    year += era * 400 + (month <= 2)
    text = f"{year:04d}" if 0 <= year <= 9999 else f"+{year}" if year > 0 else f"-{-year:04d}"
    return f"{text}-{month:02d}-{day - (153 * shifted + 2) // 5 + 1:02d}"


def days_of(year: int, month: int, day: int) -> int:
    """Return the days from 2000-01-01 to a date.

    Raises:
        ValueError: if month or day cannot be.
    """
    if not (0 < month < 13 and 0 < day < 32):
        raise ValueError("not a date")
    year -= month <= 2
    era, of_era = divmod(year, 400)
    of_year = (153 * (month - 3 if month > 2 else month + 9) + 2) // 5 + day - 1
    return era * _ERA + of_era * 365 + of_era // 4 - of_era // 100 + of_year - _TO_2000
