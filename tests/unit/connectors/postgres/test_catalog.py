"""Which tables a pattern means, who owns a publication, and what may be a key."""

from __future__ import annotations

import pytest

from anabranch_connectors.postgres.catalog import _key, matches
from anabranch_connectors.postgres.errors import TableKeyError
from anabranch_connectors.postgres.pgtable import PgColumn, PgType
from anabranch_connectors.postgres.publications import Owner, parse_owner
from anabranch_schemas.errors import ConfigError

INT = PgType(23, "integer")
COLUMNS = (
    PgColumn("a", INT, nullable=False),
    PgColumn("b", INT, nullable=False),
    PgColumn("maybe", INT, nullable=True),
    PgColumn("computed", INT, nullable=False, generated=True),
)


def key(identity: str, *, primary: str = "", index: str = "", option: str = "") -> tuple[str, ...]:
    return _key(
        "public.t",
        COLUMNS,
        identity,
        primary=tuple(primary.split()),
        index=tuple(index.split()),
        option=tuple(option.split()),
    )


def test_patterns_match_schema_and_name() -> None:
    assert matches("public", "orders", ["app.*", "public.*"])
    assert matches("public", "orders", ["public.ord?rs"])
    assert not matches("public", "orders", ["public.order"])
    assert not matches("public", "Orders", ["public.orders"])


def test_the_primary_key_comes_first() -> None:
    assert key("d", primary="b a", option="a") == ("b", "a")
    assert key("f", primary="a", option="b") == ("a",)
    assert key("i", primary="a", index="a b") == ("a",)


def test_a_primary_key_that_deletes_do_not_carry_is_not_the_key() -> None:
    assert key("i", primary="a", index="b") == ("b",)


def test_columns_of_the_option_serve_a_table_with_full_identity() -> None:
    assert key("f", option="b a") == ("b", "a")


@pytest.mark.parametrize(
    ("identity", "arguments"),
    [
        ("d", {}),
        ("f", {}),
        ("n", {"primary": "a"}),
        ("d", {"option": "a"}),
        ("f", {"option": "maybe"}),
        ("d", {"primary": "computed"}),
    ],
)
def test_what_cannot_tell_rows_apart_is_refused_with_its_repair(identity: str, arguments: dict[str, str]) -> None:
    with pytest.raises(TableKeyError) as caught:
        key(identity, **arguments)
    assert caught.value.where == "public.t"
    assert caught.value.advice


def test_a_table_without_a_key_is_told_both_repairs() -> None:
    with pytest.raises(TableKeyError) as caught:
        key("d")
    assert "ADD PRIMARY KEY" in caught.value.advice
    assert "key.columns" in caught.value.advice
    assert "REPLICA IDENTITY FULL" in caught.value.advice


def test_an_option_that_names_no_column_is_a_mistake_in_the_file() -> None:
    with pytest.raises(ConfigError):
        key("f", option="nothing")


def test_an_owner_survives_its_comment() -> None:
    owner = Owner("eu.orders;branch=x", "7000-1-ab")
    assert parse_owner(owner.comment()) == owner
    assert Owner("eu.orders", "7").comment() == "anabranch:stream=eu.orders;branch=7"


@pytest.mark.parametrize("comment", [None, "", "the sales team's", "anabranch:stream=x"])
def test_a_users_comment_is_no_owner(comment: str | None) -> None:
    assert parse_owner(comment) is None
