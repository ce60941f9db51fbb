from __future__ import annotations

import pytest

from anabranch_connectors.postgres.decode import RowDecodeError, RowDecoder, StagedColumn, compile_decoder
from anabranch_connectors.postgres.envelope import SOURCE_SCHEMA
from anabranch_schemas.envelope.avro import envelope_schema, key_schema
from anabranch_schemas.envelope.varint import sized, zigzag
from anabranch_schemas.errors import TypeMappingError
from anabranch_schemas.table import Column, TableSchema
from anabranch_schemas.types import Array, Decimal, Enumeration, LogicalType, Opaque, Scalar, Timestamp

FRAME = b"\0\0\0\0\1"
# What stands behind an after-image is never read, but there is always a source struct of some length.
REST = bytes(40)


def decoder(*types: tuple[LogicalType, str], nullable: bool = False, key: tuple[str, ...] = ("c0",)) -> RowDecoder:
    columns = tuple(Column(f"c{at}", type_, nullable, name) for at, (type_, name) in enumerate(types))
    table = TableSchema("public", "t", columns, key)
    return compile_decoder(envelope_schema(table, "p", SOURCE_SCHEMA), key_schema(table, "p"))


def field(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


@pytest.mark.parametrize(
    ("logical", "source", "staging"),
    [
        (Scalar.TEXT, "character varying(10)", "text"),
        (Scalar.TEXT, "character(5)", "bpchar"),
        (Scalar.JSON, "json", "json"),
        (Scalar.JSON, "jsonb", "jsonb"),
        (Decimal(10, 2), "numeric(10,2)", "numeric"),
        (Timestamp(3), "timestamp(3) without time zone", "timestamp"),
        (Enumeration(("a",)), "app.mood", "text"),
        (Opaque("inet"), "inet", "text"),
        (Array(Enumeration(("a",))), "app.mood[]", "text[]"),
        (Array(Scalar.TEXT), "character(3)[]", "bpchar[]"),
        (Array(Scalar.JSON), "jsonb[]", "jsonb[]"),
    ],
)
def test_a_column_is_staged_in_the_form_that_comes_out(logical: LogicalType, source: str, staging: str) -> None:
    assert decoder((logical, source)).columns == (StagedColumn("c0", staging),)


def test_a_before_image_is_passed_over() -> None:
    rows = decoder((Scalar.INT32, "integer"), (Scalar.TEXT, "text"))
    before = zigzag(-5) + sized(b"x" * 100)
    after = zigzag(1 << 20) + sized(b"new")
    fields = field((1 << 20).to_bytes(4, "big")) + field(b"new")
    assert rows.after(FRAME + b"\x02" + before + b"\x02" + after + REST) == fields
    assert rows.after(FRAME + b"\x00\x02" + after + REST) == fields


def test_nulls_in_and_out_of_fused_runs() -> None:
    rows = decoder((Scalar.INT32, "integer"), (Scalar.INT16, "smallint"), (Scalar.TEXT, "text"), nullable=True)
    null = b"\xff\xff\xff\xff"
    assert rows.after(FRAME + b"\x00\x02" + b"\x00\x02\x02\x00" + REST) == null + field(b"\0\1") + null
    assert rows.after_fields(FRAME + b"\x00\x02" + b"\x02\x02\x00\x02\x02x" + REST) == [
        field(b"\0\0\0\1"),
        null,
        field(b"x"),
    ]


def test_a_key_is_read_in_key_order() -> None:
    rows = decoder((Scalar.INT32, "integer"), (Scalar.TEXT, "text"), key=("c1", "c0"))
    assert rows.key_columns == (StagedColumn("c1", "text"), StagedColumn("c0", "integer"))
    assert rows.key_fields(FRAME + sized(b"k") + zigzag(3)) == [field(b"k"), field(b"\0\0\0\3")]


@pytest.mark.parametrize(
    "value",
    [
        b"",
        FRAME,
        b"\1\0\0\0\1\x00\x02\x02" + REST,  # another frame
        FRAME + b"\x00\x00" + REST,  # no after-image
        FRAME + b"\x04\x02\x02" + REST,  # no such branch
        FRAME + b"\x00\x02" + zigzag(1 << 31) + REST,  # beyond int4
        FRAME + b"\x00\x02" + b"\xff" * 12 + REST,  # more than 64 bits
    ],
)
def test_what_is_not_of_the_schema_is_refused_without_its_bytes(value: bytes) -> None:
    with pytest.raises(RowDecodeError) as caught:
        decoder((Scalar.INT32, "integer")).after(value)
    assert caught.value.code == "type.undecodable"
    assert caught.value.where == "public.t"
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("logical", "body"),
    [
        (Scalar.TEXT, zigzag(-1)),
        (Scalar.TEXT, zigzag(-10_000)),
        (Scalar.TEXT, zigzag(1 << 40)),
        (Scalar.BOOLEAN, b"\x02"),
        (Scalar.UUID, sized(b"not a uuid")),
        (Scalar.TIMESTAMP_TZ, sized(b"2024-13-01T00:00:00Z")),
        (Scalar.TIMESTAMP_TZ, sized(b"+999999-01-01T00:00:00Z")),
        (Scalar.TIME_TZ, sized("٠١:٠٢:٠٣Z".encode())),
        (Scalar.INTERVAL, sized(b"P1Y")),
        (Scalar.VARIABLE_DECIMAL, zigzag(1 << 40) + sized(b"\1")),
        (Scalar.VARIABLE_DECIMAL, zigzag(-1) + sized(b"\1")),
        (Scalar.VARIABLE_DECIMAL, zigzag(0) + sized(b"\1" * 100_000)),
        (Array(Scalar.INT32), zigzag(1 << 50)),
        (Array(Scalar.INT32), zigzag(1) + b"\x04"),
    ],
)
def test_a_value_that_cannot_be_is_refused(logical: LogicalType, body: bytes) -> None:
    with pytest.raises(RowDecodeError):
        decoder((logical, "some type")).after(FRAME + b"\x00\x02" + body + REST)


def test_an_array_in_several_blocks_is_one_array() -> None:
    body = zigzag(1) + b"\x02\x02" + zigzag(-1) + zigzag(2) + b"\x02\x04" + b"\x00"
    (array,) = decoder((Array(Scalar.INT16), "smallint[]")).after_fields(FRAME + b"\x00\x02" + body + REST)
    assert array[4:] == bytes.fromhex("00000001 00000000 00000015 00000002 00000001  00000002 0001 00000002 0002")


def test_a_foreign_schema_is_refused() -> None:
    with pytest.raises(TypeMappingError):
        compile_decoder({"type": "record", "name": "x", "fields": []}, {"fields": []})
