from __future__ import annotations

import io
from typing import Any

import fastavro
import pytest

from anabranch_connectors.postgres.envelope import SOURCE_SCHEMA, EnvelopeTail
from anabranch_schemas.envelope.avro import envelope_schema
from anabranch_schemas.table import Column, TableSchema
from anabranch_schemas.types import Scalar

TABLE = TableSchema("public", "t", (Column("id", Scalar.INT32, nullable=False, source_type="integer"),), ("id",))
PARSED = fastavro.parse_schema(envelope_schema(TABLE, "p", SOURCE_SCHEMA))


def read(tail: bytes) -> dict[str, Any]:
    body = io.BytesIO(b"\x00\x02\x02" + tail)
    record: Any = fastavro.schemaless_reader(body, PARSED, None)
    assert not body.read()
    return dict(record)


@pytest.fixture
def tails() -> EnvelopeTail:
    return EnvelopeTail("3.7", "shop", "orders")


def test_rows_of_a_transaction_share_all_but_their_lsn(tails: EnvelopeTail) -> None:
    tails.begin(1_700_000_000_123_456, 771, 1_700_000_000_200_000, 99)
    piece = tails.table("public", "t")
    for lsn in (1 << 24, (1 << 24) + 8191, (1 << 24) + 8192, 99_999_999, 100_000_000, 1 << 62):
        record = read(tails.tail(piece, ord("u"), lsn))
        assert record["source"]["lsn"] == lsn
        assert record["source"]["sequence"] == f'["99","{lsn}"]'
        assert (record["source"]["txId"], record["source"]["snapshot"]) == (771, "false")
        assert (record["source"]["ts_ms"], record["source"]["ts_ns"]) == (1_700_000_000_123, 1_700_000_000_123_456_000)
        assert (record["op"], record["transaction"], record["ts_us"]) == ("u", None, 1_700_000_000_200_000)


def test_a_new_transaction_on_the_same_page_shows_itself(tails: EnvelopeTail) -> None:
    piece = tails.table("public", "t")
    tails.begin(1_000_000, 1, 5, 0)
    assert read(tails.tail(piece, ord("c"), 1 << 24))["source"]["sequence"] == f'[null,"{1 << 24}"]'
    tails.begin(2_000_000, 2, 6, 1 << 24)
    record = read(tails.tail(piece, ord("d"), (1 << 24) + 1))
    assert (record["source"]["txId"], record["source"]["ts_us"], record["ts_us"]) == (2, 2_000_000, 6)
    assert record["source"]["sequence"] == f'["{1 << 24}","{(1 << 24) + 1}"]'
    assert record["op"] == "d"


@pytest.mark.parametrize("marker", ["first", "first_in_data_collection", "true", "last_in_data_collection", "last"])
def test_a_copied_row_shows_its_place(tails: EnvelopeTail, marker: str) -> None:
    tails.begin_copy(1_700_000_000_123_456, 1_700_000_000_200_000, 0)
    record = read(tails.copy_tail(tails.table("public", "t"), 1 << 30, marker))
    assert (record["op"], record["source"]["snapshot"], record["source"]["lsn"]) == ("r", marker, 1 << 30)
    assert (record["source"]["txId"], record["source"]["sequence"]) == (None, f'[null,"{1 << 30}"]')
    assert (record["source"]["schema"], record["source"]["table"]) == ("public", "t")


def test_an_lsn_may_go_back_over_the_place_where_it_gains_a_digit(tails: EnvelopeTail) -> None:
    tails.begin(1, 2, 3, 4)
    piece = tails.table("public", "t")
    for lsn in (10_000_000_000, 9_999_998_976, 10_000_000_001):
        assert read(tails.tail(piece, ord("c"), lsn))["source"]["sequence"] == f'["4","{lsn}"]'


def test_percent_signs_in_names_are_only_characters() -> None:
    tails = EnvelopeTail("%d", "%b", "100%")
    tails.begin(1, 2, 3, 4)
    record = read(tails.tail(tails.table("%s", "%%"), ord("c"), 1 << 30))
    assert [record["source"][name] for name in ("version", "name", "db", "schema", "table")] == [
        *("%d", "%b", "100%", "%s", "%%")
    ]
