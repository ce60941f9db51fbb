"""`verify` finds every kind of difference, and only those."""

from __future__ import annotations

from datetime import datetime

import psycopg
import pytest

from anabranch.verify import TableResult, _Suspects, compare_table, prepare
from anabranch_connectors.postgres import catalog, control

_TABLE = "CREATE TABLE orders (id int, part text, amount numeric, PRIMARY KEY (id, part))"
_FILL = "INSERT INTO orders SELECT n, 'p' || n % 3, n * 1.5 FROM generate_series(1, 3000) n"


def _compare(eu_database: str, us_database: str) -> TableResult:
    with control.connect(eu_database) as here, psycopg.connect(us_database, autocommit=True) as there:
        (table,) = catalog.load_tables(here, ["public.*"], {})
        prepare(here)
        prepare(there)

        def arrived(_moment: datetime) -> None:
            """The target has everything: it is written by hand here."""

        return compare_table(table, here, there, ("public", "orders"), arrived)


def _fill(*dsns: str) -> None:
    for dsn in dsns:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(_TABLE)
            connection.execute(_FILL)


def _execute(dsn: str, statement: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(statement.encode())


def test_equal_tables_are_equal(eu_database: str, us_database: str) -> None:
    _fill(eu_database, us_database)
    assert _compare(eu_database, us_database) == TableResult("public.orders", 3000)


@pytest.mark.parametrize(
    ("statement", "kind"),
    [
        ("DELETE FROM orders WHERE id = 77", "missing"),
        ("INSERT INTO orders VALUES (9000, 'x', 1)", "extra"),
        ("UPDATE orders SET amount = NULL WHERE id = 77", "different"),
        ("UPDATE orders SET amount = 115.50 WHERE id = 77", "different"),
    ],
)
def test_one_wrong_row_in_three_thousand_is_found(
    eu_database: str, us_database: str, statement: str, kind: str
) -> None:
    _fill(eu_database, us_database)
    _execute(us_database, statement)
    result = _compare(eu_database, us_database)
    assert not result.equal
    assert (result.missing, result.extra, result.different) == tuple(
        int(kind == other) for other in ("missing", "extra", "different")
    )
    assert result.unsettled == 0
    assert len(result.samples) == 1
    assert result.samples[0].endswith(kind)


def test_a_changed_key_is_one_row_missing_and_one_too_many(eu_database: str, us_database: str) -> None:
    _fill(eu_database, us_database)
    _execute(us_database, "UPDATE orders SET part = 'other' WHERE id = 77")
    result = _compare(eu_database, us_database)
    assert (result.missing, result.extra, result.different) == (1, 1, 0)


def test_a_busy_row_settles_when_the_target_shows_an_image_that_the_source_had() -> None:
    suspects = _Suspects()
    assert not suspects.settle({"k": "1"}, {"k": "0"})
    assert not suspects.settle({"k": "2"}, {"k": "0"})
    assert suspects.settle({"k": "3"}, {"k": "2"})
    assert not suspects.wrong


def test_a_row_that_rests_and_still_differs_is_wrong() -> None:
    suspects = _Suspects()
    assert not suspects.settle({"k": "1", "busy": "1"}, {"k": "0", "busy": "0"})
    assert not suspects.settle({"k": "1", "busy": "2"}, {"k": "0", "busy": "0"})
    assert suspects.wrong == {"k": "different"}
    assert suspects.open == {"busy": "different"}
