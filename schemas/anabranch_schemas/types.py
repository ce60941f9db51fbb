"""Logical types: what a column holds, whatever database it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Scalar(Enum):
    """Types without parameters."""

    BOOLEAN = "boolean"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    FLOAT32 = "float32"
    FLOAT64 = "float64"
    TEXT = "text"
    BYTES = "bytes"
    DATE = "date"
    TIME_TZ = "time_tz"
    TIMESTAMP_TZ = "timestamp_tz"
    INTERVAL = "interval"
    UUID = "uuid"
    JSON = "json"
    VARIABLE_DECIMAL = "variable_decimal"
    """numeric without a declared scale."""


@dataclass(frozen=True, slots=True)
class Decimal:
    """numeric(precision, scale)."""

    precision: int
    scale: int


@dataclass(frozen=True, slots=True)
class Time:
    """Time of day without zone; `precision` is the number of fractional digits (0 to 6)."""

    precision: int = 6


@dataclass(frozen=True, slots=True)
class Timestamp:
    """Date and time without zone; `precision` is the number of fractional digits (0 to 6)."""

    precision: int = 6


@dataclass(frozen=True, slots=True)
class Enumeration:
    """One of a list of labels, in their order."""

    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Array:
    """One-dimensional array; elements may be null."""

    element: LogicalType


@dataclass(frozen=True, slots=True)
class Opaque:
    """A type without a mapping of its own: travels as the source's text, with its name."""

    name: str


LogicalType = Scalar | Decimal | Time | Timestamp | Enumeration | Array | Opaque
