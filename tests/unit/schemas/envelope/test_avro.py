from __future__ import annotations

import json
from typing import Any

import fastavro
import pytest

from anabranch_schemas.envelope.avro import envelope_schema, key_schema, read_table
from anabranch_schemas.errors import TypeMappingError
from anabranch_schemas.table import Column, TableSchema
from anabranch_schemas.types import Array, Decimal, Enumeration, LogicalType, Opaque, Scalar, Time, Timestamp

SOURCE: dict[str, Any] = {"type": "record", "name": "Source", "namespace": "x", "fields": []}
EVERY: tuple[LogicalType, ...] = (
    *Scalar,
    Scalar.VARIABLE_DECIMAL,
    Decimal(10, 2),
    *(Time(precision) for precision in range(7)),
    *(Timestamp(precision) for precision in range(7)),
    Enumeration(("a", "b")),
    Enumeration(("a, b", "c")),
    Enumeration(("",)),
    Enumeration(()),
    Opaque("inet"),
)


def table(*types: LogicalType, nullable: bool = True) -> TableSchema:
    columns = tuple(Column(f"c{at}", type_, nullable, source(type_)) for at, type_ in enumerate(types))
    return TableSchema(
        "public", "t", (Column("id", Scalar.INT64, nullable=False, source_type="bigint"), *columns), ("id",)
    )


def source(type_: LogicalType) -> str:
    if isinstance(type_, Array):
        return source(type_.element) + "[]"
    return type_.name if isinstance(type_, Opaque) else "some type"


@pytest.mark.parametrize("nullable", [True, False])
def test_every_type_comes_back_from_a_schema_that_parses(nullable: bool) -> None:  # noqa: FBT001 - a parameter of the test
    whole = table(*EVERY, *(Array(type_) for type_ in EVERY), nullable=nullable)
    envelope, key = envelope_schema(whole, "shop.eu", SOURCE), key_schema(whole, "shop.eu")
    fastavro.parse_schema(json.loads(json.dumps(envelope)))
    fastavro.parse_schema(key)
    assert read_table(json.loads(json.dumps(envelope)), key) == whole


def test_the_envelope_is_debeziums_field_for_field() -> None:
    whole = TableSchema(
        "inventory",
        "customers",
        (
            Column("id", Scalar.INT32, nullable=False, source_type="integer"),
            Column("small", Scalar.INT16, nullable=True, source_type="smallint"),
            Column("price", Decimal(10, 2), nullable=False, source_type="numeric(10,2)"),
            Column("mood", Enumeration(("sad", "ok")), nullable=True, source_type="app.mood"),
        ),
        ("id",),
    )
    envelope = envelope_schema(whole, "shop", SOURCE)
    assert [field["name"] for field in envelope["fields"]] == [
        *("before", "after", "source", "transaction", "op", "ts_ms", "ts_us", "ts_ns")
    ]
    assert (envelope["namespace"], envelope["name"]) == ("shop.inventory.customers", "Envelope")
    assert (envelope["connect.version"], envelope["connect.name"]) == (2, "shop.inventory.customers.Envelope")
    before, after = envelope["fields"][:2]
    assert after == {"name": "after", "type": ["null", "Value"], "default": None}
    assert before["type"][0] == "null"
    assert before["type"][1]["connect.name"] == "shop.inventory.customers.Value"
    assert [without_ours(field) for field in before["type"][1]["fields"]] == [
        {"name": "id", "type": "int"},
        {"name": "small", "type": ["null", {"type": "int", "connect.type": "int16"}], "default": None},
        {
            "name": "price",
            "type": {
                "type": "bytes",
                "scale": 2,
                "precision": 10,
                "connect.version": 1,
                "connect.parameters": {"scale": "2", "connect.decimal.precision": "10"},
                "connect.name": "org.apache.kafka.connect.data.Decimal",
                "logicalType": "decimal",
            },
        },
        {
            "name": "mood",
            "type": [
                "null",
                {
                    "type": "string",
                    "connect.version": 1,
                    "connect.parameters": {"allowed": "sad,ok"},
                    "connect.name": "io.debezium.data.Enum",
                },
            ],
            "default": None,
        },
    ]


def without_ours(field: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in field.items() if not name.startswith("anabranch.")}


def test_adjusted_names_come_back() -> None:
    columns = (Column("1st", Scalar.INT32, nullable=False, source_type="integer"),)
    whole = TableSchema("my schema", "1 täble", columns, ("1st",))
    envelope, key = envelope_schema(whole, "p", SOURCE), key_schema(whole, "p")
    fastavro.parse_schema(envelope)
    assert key["fields"][0]["name"] == "_1st"
    assert read_table(envelope, key) == whole


def test_the_key_has_its_own_order() -> None:
    columns = tuple(Column(name, Scalar.INT32, nullable=False, source_type="integer") for name in "abc")
    whole = TableSchema("s", "t", columns, ("c", "a"))
    key = key_schema(whole, "p")
    assert [field["name"] for field in key["fields"]] == ["c", "a"]
    assert key["connect.name"] == "p.s.t.Key"
    assert read_table(envelope_schema(whole, "p", SOURCE), key) == whole


@pytest.mark.parametrize("foreign", [{}, {"fields": []}, {"fields": [{"name": "before", "type": ["null"]}]}])
def test_a_foreign_schema_is_refused_as_such(foreign: dict[str, Any]) -> None:
    with pytest.raises(TypeMappingError):
        read_table(foreign, {"fields": []})
