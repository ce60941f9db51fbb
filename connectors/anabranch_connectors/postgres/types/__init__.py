"""Which logical type, which encoder and which decoder a PostgreSQL type has."""

from __future__ import annotations

import re

from anabranch_connectors.postgres.pgtable import PgType
from anabranch_connectors.postgres.types import binary, decimal, documents, numbers, temporal, text
from anabranch_connectors.postgres.types.cell import (
    AsText,
    CellDecoder,
    CellEncoder,
    NeedsCells,
    RowDecodeError,
    cell_function,
)
from anabranch_connectors.postgres.types.collection import array, to_array
from anabranch_connectors.postgres.types.opaque import opaque
from anabranch_schemas.types import Array, Decimal, Enumeration, LogicalType, Opaque, Scalar, Time, Timestamp

__all__ = [
    "AsText",
    "CellDecoder",
    "CellEncoder",
    "NeedsCells",
    "RowDecodeError",
    "cell_function",
    "decoder_for",
    "encoder_for",
    "logical_type",
]

_NUMERIC, _TIME, _TIMETZ, _TIMESTAMP, _TIMESTAMPTZ, _JSONB = 1700, 1083, 1266, 1114, 1184, 3802
_VECTORS = (22, 30)
"""int2vector and oidvector are not arrays to their users: they count from 0 and have a text form of their own."""
_SCALARS: dict[int, Scalar] = {
    16: Scalar.BOOLEAN,
    17: Scalar.BYTES,
    19: Scalar.TEXT,
    20: Scalar.INT64,
    21: Scalar.INT16,
    23: Scalar.INT32,
    25: Scalar.TEXT,
    114: Scalar.JSON,
    700: Scalar.FLOAT32,
    701: Scalar.FLOAT64,
    1042: Scalar.TEXT,
    1043: Scalar.TEXT,
    1082: Scalar.DATE,
    1186: Scalar.INTERVAL,
    2950: Scalar.UUID,
    _TIMETZ: Scalar.TIME_TZ,
    _TIMESTAMPTZ: Scalar.TIMESTAMP_TZ,
    _JSONB: Scalar.JSON,
}
_ENCODERS = {
    Scalar.BOOLEAN: numbers.BOOLEAN,
    Scalar.INT16: numbers.INT16,
    Scalar.INT32: numbers.INT32,
    Scalar.INT64: numbers.INT64,
    Scalar.FLOAT32: numbers.FLOAT32,
    Scalar.FLOAT64: numbers.FLOAT64,
    Scalar.TEXT: text.TEXT,
    Scalar.BYTES: binary.BYTES,
    Scalar.DATE: temporal.DATE,
    Scalar.INTERVAL: temporal.INTERVAL,
    Scalar.UUID: binary.UUID,
    Scalar.JSON: documents.JSON,
    Scalar.VARIABLE_DECIMAL: decimal.VARIABLE,
}
_DECODERS = {
    Scalar.BOOLEAN: numbers.TO_BOOLEAN,
    Scalar.INT16: numbers.TO_INT16,
    Scalar.INT32: numbers.TO_INT32,
    Scalar.INT64: numbers.TO_INT64,
    Scalar.FLOAT32: numbers.TO_FLOAT32,
    Scalar.FLOAT64: numbers.TO_FLOAT64,
    Scalar.BYTES: binary.TO_BYTES,
    Scalar.DATE: temporal.TO_DATE,
    Scalar.TIME_TZ: temporal.TO_TIME_TZ,
    Scalar.TIMESTAMP_TZ: temporal.TO_TIMESTAMP_TZ,
    Scalar.INTERVAL: temporal.TO_INTERVAL,
    Scalar.UUID: binary.TO_UUID,
    Scalar.VARIABLE_DECIMAL: decimal.TO_VARIABLE,
}
_CITEXT = re.compile(r"(.*\.)?citext")


def logical_type(pg: PgType) -> LogicalType:  # noqa: PLR0911 - one a family
    """Return what a PostgreSQL type holds; types without a mapping are Opaque."""
    if pg.base:
        return logical_type(_typed_like(pg.base, pg.typmod))
    if pg.element and pg.oid not in _VECTORS:
        return Array(logical_type(_typed_like(pg.element, pg.typmod)))
    if pg.kind == "e":
        return Enumeration(pg.labels)
    if pg.oid == _NUMERIC:
        return _numeric(pg.typmod)
    if pg.oid == _TIME:
        return Time(_precision(pg.typmod))
    if pg.oid == _TIMESTAMP:
        return Timestamp(_precision(pg.typmod))
    if _CITEXT.fullmatch(pg.name):
        return Scalar.TEXT
    return _SCALARS.get(pg.oid) or Opaque(pg.name)


def encoder_for(pg: PgType, as_text: AsText) -> CellEncoder:  # noqa: PLR0911 - one a family
    """Return the encoder of a PostgreSQL type; `as_text` prints what is not printed here."""
    if pg.base:
        return encoder_for(_typed_like(pg.base, pg.typmod), as_text)
    match logical_type(pg):
        case Array() if pg.element:
            return array(encoder_for(_typed_like(pg.element, pg.typmod), as_text))
        case Enumeration():
            return text.TEXT
        case Decimal(_, scale):
            return decimal.decimal(scale)
        case Time(precision):
            return temporal.TIME_MILLIS if precision <= 3 else temporal.TIME_MICROS
        case Timestamp(precision):
            return temporal.TIMESTAMP_MILLIS if precision <= 3 else temporal.TIMESTAMP_MICROS
        case Scalar.TIMESTAMP_TZ:
            return temporal.timestamp_tz(_precision(pg.typmod))
        case Scalar.TIME_TZ:
            return temporal.time_tz(_precision(pg.typmod))
        case Scalar() as scalar:
            return documents.JSONB if pg.oid == _JSONB else _ENCODERS[scalar]
        case _:
            return opaque(pg.oid, as_text)


def decoder_for(logical: LogicalType, source_type: str) -> CellDecoder:  # noqa: PLR0911 - one a family
    """Return the decoder of a column of `logical` type; `source_type` tells apart what the logical type does not."""
    match logical:
        case Array(element):
            return to_array(decoder_for(element, source_type.removesuffix("[]")))
        case Decimal(_, scale):
            return decimal.to_decimal(scale)
        case Time(precision):
            return temporal.TO_TIME_MILLIS if precision <= 3 else temporal.TO_TIME_MICROS
        case Timestamp(precision):
            return temporal.TO_TIMESTAMP_MILLIS if precision <= 3 else temporal.TO_TIMESTAMP_MICROS
        case Scalar.TEXT:
            return text.TO_BPCHAR if source_type.startswith(("character(", "bpchar")) else text.TO_TEXT
        case Scalar.JSON:
            return documents.TO_JSONB if source_type == "jsonb" else documents.TO_JSON
        case Scalar():
            return _DECODERS[logical]
        case _:
            return text.TO_TEXT


def _typed_like(pg: PgType, typmod: int) -> PgType:
    """Return an element's or a base type with the typmod that the array or domain declares for it."""
    if pg.typmod != -1 or typmod == -1:
        return pg
    return PgType(pg.oid, pg.name, typmod, pg.kind, pg.base, pg.element, pg.labels)


def _precision(typmod: int) -> int:
    return 6 if typmod < 0 else typmod


def _numeric(typmod: int) -> LogicalType:
    """Return Decimal, or VARIABLE_DECIMAL where Avro's decimal has no such scale (none, negative, above precision)."""
    if typmod < 0:
        return Scalar.VARIABLE_DECIMAL
    precision = (typmod - 4) >> 16
    scale = ((typmod - 4) & 0x7FF ^ 1024) - 1024
    return Decimal(precision, scale) if 0 <= scale <= precision else Scalar.VARIABLE_DECIMAL
