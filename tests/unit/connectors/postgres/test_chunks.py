"""Positions of rows: their texts, their codec, and the order of keys that needs no server."""

from __future__ import annotations

import struct
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch_connectors.postgres.control import quote_name, quote_text
from anabranch_connectors.postgres.keys import KeyPosition, _binary_array, _order, key_literals, key_position
from anabranch_connectors.postgres.pgtable import PgColumn, PgTable, PgType

BIGINT = PgType(20, "bigint")
TEXT = PgType(25, "text")
UUID_TYPE = PgType(2950, "uuid")
MOOD = PgType(99999, "app.mood", kind="e", labels=("sad", "ok"))
POSITIVE = PgType(88888, "app.positive", kind="d", base=BIGINT)


def table(*types: PgType) -> PgTable:
    columns = tuple(PgColumn(f"k{place}", kind, nullable=False) for place, kind in enumerate(types))
    return PgTable(1, "public", "t", columns, tuple(column.name for column in columns))


def field(value: bytes) -> bytes:
    return struct.pack("!i", len(value)) + value


def no_server(oid: int, data: bytes) -> str:
    raise AssertionError((oid, data))


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (BIGINT, struct.pack("!q", -(2**63)), str(-(2**63))),
        (PgType(21, "smallint"), b"\xff\xfe", "-2"),
        (POSITIVE, struct.pack("!q", 12), "12"),
        (TEXT, "Ærø 'quoted'".encode(), "Ærø 'quoted'"),
        (PgType(1042, "character(4)"), b"ab  ", "ab  "),
        (UUID_TYPE, UUID(int=5).bytes, str(UUID(int=5))),
        (PgType(17, "bytea"), b"\x00\xff", "\\x00ff"),
        (PgType(16, "boolean"), b"\x01", "t"),
    ],
)
def test_common_keys_are_printed_without_a_server(kind: PgType, value: bytes, text: str) -> None:
    assert key_position(table(kind), [field(value)], no_server).texts == (text,)


def test_other_keys_are_printed_by_the_server_under_their_own_oid() -> None:
    asked: list[tuple[int, bytes]] = []

    def printer(oid: int, data: bytes) -> str:
        asked.append((oid, data))
        return "sad"

    assert key_position(table(MOOD, BIGINT), [field(b"sad"), field(bytes(8))], printer).texts == ("sad", "0")
    assert asked == [(99999, b"sad")]


@given(st.lists(st.text()).map(tuple))
def test_a_position_survives_its_encoding(texts: tuple[str, ...]) -> None:
    try:
        encoded = KeyPosition(texts).encode()
    except UnicodeEncodeError:
        return  # half a surrogate pair is no text that PostgreSQL can hold
    assert KeyPosition.decode(encoded) == KeyPosition(texts)


def test_a_position_becomes_typed_literals() -> None:
    literals = key_literals(table(BIGINT, MOOD), KeyPosition(("7", "o'k")))
    assert literals == "'7'::bigint, 'o''k'::app.mood"


def test_names_and_texts_are_quoted() -> None:
    assert quote_name("a.b", 'c"d') == '"a.b"."c""d"'
    assert quote_text("it's") == "'it''s'"
    assert quote_text("a\\b'") == " E'a\\\\b'''"


def column(oid: int, *, by_bytes: bool = True) -> PgColumn:
    return PgColumn("k", PgType(oid, "?"), nullable=False, collation_is_c=by_bytes)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1))
def test_integers_and_times_compare_with_their_sign(left: int, right: int) -> None:
    for oid in (20, 1114, 1184):
        order = _order(column(oid))
        assert order is not None
        assert (order(struct.pack("!q", left)) <= order(struct.pack("!q", right))) == (left <= right)


def test_text_is_compared_here_only_if_it_compares_by_bytes() -> None:
    assert _order(column(25)) is not None
    assert _order(column(1043)) is not None
    assert _order(column(25, by_bytes=False)) is None
    assert _order(column(1043, by_bytes=False)) is None


@pytest.mark.parametrize("oid", [1042, 1700, 701, 869, 99999])
def test_types_with_an_order_of_their_own_are_left_to_the_server(oid: int) -> None:
    # bpchar ignores trailing blanks, numeric and float have NaN, inet puts families first, enums their labels
    assert _order(column(oid)) is None


def test_an_array_is_written_in_postgresqls_binary_form() -> None:
    assert _binary_array([field(b"\0\0\0\7"), field(b"\0\0\0\x08")], 23) == struct.pack(
        "!5i ii ii", 1, 0, 23, 2, 1, 4, 7, 4, 8
    )
