"""Avro schemas of a table's key and envelope, as Confluent's AvroData prints them for Debezium, and the way back.

What Connect's vocabulary cannot say travels in properties of the *fields*, not of their types: a reference to a named
record (the second VariableScaleDecimal of a table) has no room for properties of its own.

    anabranch.type       the column's type at the source
    anabranch.name       its name, where Avro's rules changed it
    anabranch.logical    "opaque": the string is the source's text of a type without a mapping
    anabranch.precision  fractional digits of a time, where it is not the semantic type's own (3 or 6)
    anabranch.labels     an enum's labels, where one of them holds the comma that joins them in `allowed`
"""

from __future__ import annotations

from typing import Any

from anabranch_schemas.envelope.names import field_names, namespace
from anabranch_schemas.errors import TypeMappingError
from anabranch_schemas.table import Column, TableSchema
from anabranch_schemas.types import Array, Decimal, Enumeration, LogicalType, Opaque, Scalar, Time, Timestamp

_VARIABLE = "io.debezium.data.VariableScaleDecimal"
_DECIMAL = "org.apache.kafka.connect.data.Decimal"
_ENUM = "io.debezium.data.Enum"
_PLAIN: dict[Scalar, str | dict[str, Any]] = {
    Scalar.BOOLEAN: "boolean",
    Scalar.INT16: {"type": "int", "connect.type": "int16"},
    Scalar.INT32: "int",
    Scalar.INT64: "long",
    Scalar.FLOAT32: "float",
    Scalar.FLOAT64: "double",
    Scalar.TEXT: "string",
    Scalar.BYTES: "bytes",
}
_SEMANTIC: dict[Scalar, tuple[str, str]] = {
    Scalar.DATE: ("int", "io.debezium.time.Date"),
    Scalar.TIME_TZ: ("string", "io.debezium.time.ZonedTime"),
    Scalar.TIMESTAMP_TZ: ("string", "io.debezium.time.ZonedTimestamp"),
    Scalar.INTERVAL: ("string", "io.debezium.time.Interval"),
    Scalar.UUID: ("string", "io.debezium.data.Uuid"),
    Scalar.JSON: ("string", "io.debezium.data.Json"),
}
_FROM_SEMANTIC: dict[str, LogicalType] = {
    **{name: scalar for scalar, (_, name) in _SEMANTIC.items()},
    "io.debezium.time.Time": Time(3),
    "io.debezium.time.MicroTime": Time(6),
    "io.debezium.time.Timestamp": Timestamp(3),
    "io.debezium.time.MicroTimestamp": Timestamp(6),
    _VARIABLE: Scalar.VARIABLE_DECIMAL,
}
_FROM_PLAIN = {name: scalar for scalar, name in _PLAIN.items() if isinstance(name, str)}


def key_schema(table: TableSchema, prefix: str) -> dict[str, Any]:
    """Return the Avro schema of a table's key: the key columns in key order.

    Raises:
        TypeMappingError: if two columns share an Avro name.
    """
    space = namespace(prefix, table.schema, table.name)
    return _record("Key", space, _fields(table.key_columns, table.path), f"{space}.Key")


def envelope_schema(table: TableSchema, prefix: str, source: dict[str, Any]) -> dict[str, Any]:
    """Return the Avro schema of a table's envelope; `source` is the schema of the connector's source struct.

    Raises:
        TypeMappingError: if two columns share an Avro name.
    """
    space = namespace(prefix, table.schema, table.name)
    value = _record("Value", "", _fields(table.columns, table.path), f"{space}.Value")
    fields = [
        _optional("before", value),
        _optional("after", "Value"),
        {"name": "source", "type": source},
        _optional("transaction", _TRANSACTION),
        {"name": "op", "type": "string"},
        _optional("ts_ms", "long"),
        _optional("ts_us", "long"),
        _optional("ts_ns", "long"),
    ]
    envelope = _record("Envelope", space, fields, f"{space}.Envelope", version=2)
    return {**envelope, "anabranch.schema": table.schema, "anabranch.table": table.name}


def read_table(envelope_schema: dict[str, Any], key_schema: dict[str, Any]) -> TableSchema:
    """Return the table that the two schemas were made of.

    Raises:
        TypeMappingError: if they are not schemas that this module made.
    """
    try:
        before = next(field for field in envelope_schema["fields"] if field["name"] == "before")
        value = next(branch for branch in before["type"] if isinstance(branch, dict))
        return TableSchema(
            schema=envelope_schema["anabranch.schema"],
            name=envelope_schema["anabranch.table"],
            columns=tuple(_column(field) for field in value["fields"]),
            key=tuple(field.get("anabranch.name", field["name"]) for field in key_schema["fields"]),
        )
    except (KeyError, TypeError, StopIteration, ValueError) as error:
        raise TypeMappingError(
            f"not an envelope's schema: {type(error).__name__} {error}", where=str(envelope_schema.get("connect.name"))
        ) from None


def semantic(base: str, name: str, **parameters: str) -> dict[str, Any]:
    """Return a primitive type with Connect's name and version 1, as AvroData orders the properties."""
    extra = {"connect.parameters": parameters} if parameters else {}
    return {"type": base, "connect.version": 1, **extra, "connect.name": name}


def _record(
    name: str, space: str, fields: list[dict[str, Any]], connect_name: str, *, version: int = 0
) -> dict[str, Any]:
    return {
        "type": "record",
        "name": name,
        **({"namespace": space} if space else {}),
        "fields": fields,
        **({"connect.version": version} if version else {}),
        "connect.name": connect_name,
    }


def _optional(name: str, branch: Any) -> dict[str, Any]:
    return {"name": name, "type": ["null", branch], "default": None}


_TRANSACTION = _record(
    "block",
    "event",
    [
        {"name": "id", "type": "string"},
        {"name": "total_order", "type": "long"},
        {"name": "data_collection_order", "type": "long"},
    ],
    "event.block",
    version=1,
)


def _fields(columns: tuple[Column, ...], where: str) -> list[dict[str, Any]]:
    named: set[str] = set()
    names = field_names((column.name for column in columns), where=where)
    return [_field(column, name, named) for column, name in zip(columns, names, strict=True)]


def _field(column: Column, name: str, named: set[str]) -> dict[str, Any]:
    avro = _type(column.type, named)
    field = _optional(name, avro) if column.nullable else {"name": name, "type": avro}
    field["anabranch.type"] = column.source_type
    if name != column.name:
        field["anabranch.name"] = column.name
    return {**field, **_beyond_connect(column.type)}


def _beyond_connect(logical: LogicalType) -> dict[str, Any]:
    """Return the field properties that bring back what the Avro type does not say."""
    match logical:
        case Array(element):
            return _beyond_connect(element)
        case Opaque():
            return {"anabranch.logical": "opaque"}
        case Time(precision) | Timestamp(precision) if precision not in (3, 6):
            return {"anabranch.precision": precision}
        case Enumeration(labels) if any("," in label for label in labels) or not labels or labels == ("",):
            return {"anabranch.labels": list(labels)}
        case _:
            return {}


def _type(logical: LogicalType, named: set[str]) -> Any:  # noqa: PLR0911 - one a family
    match logical:
        case Scalar.VARIABLE_DECIMAL:
            return _variable_decimal(named)
        case Scalar():
            return _PLAIN[logical] if logical in _PLAIN else semantic(*_SEMANTIC[logical])
        case Decimal(precision, scale):
            return {
                "type": "bytes",
                "scale": scale,
                "precision": precision,
                "connect.version": 1,
                "connect.parameters": {"scale": str(scale), "connect.decimal.precision": str(precision)},
                "connect.name": _DECIMAL,
                "logicalType": "decimal",
            }
        case Time(precision):
            return _timed(precision, "int", "io.debezium.time.Time", "io.debezium.time.MicroTime")
        case Timestamp(precision):
            return _timed(precision, "long", "io.debezium.time.Timestamp", "io.debezium.time.MicroTimestamp")
        case Enumeration(labels):
            return semantic("string", _ENUM, allowed=",".join(labels))
        case Array(element):
            return {"type": "array", "items": ["null", _type(element, named)]}
        case Opaque():
            return "string"


def _timed(precision: int, milli_base: str, milli: str, micro: str) -> dict[str, Any]:
    return semantic(milli_base, milli) if precision <= 3 else semantic("long", micro)


def _variable_decimal(named: set[str]) -> Any:
    """Return the record at its first use in a schema and its name from then on."""
    if _VARIABLE in named:
        return _VARIABLE
    named.add(_VARIABLE)
    fields = [{"name": "scale", "type": "int"}, {"name": "value", "type": "bytes"}]
    record = _record("VariableScaleDecimal", "io.debezium.data", fields, _VARIABLE, version=1)
    return {**record, "connect.doc": "Variable scaled decimal"}


def _column(field: dict[str, Any]) -> Column:
    avro = field["type"]
    nullable = isinstance(avro, list)
    if nullable:
        avro = next(branch for branch in avro if branch != "null")
    return Column(
        name=field.get("anabranch.name", field["name"]),
        type=_logical(avro, field),
        nullable=nullable,
        source_type=field["anabranch.type"],
    )


def _logical(avro: Any, field: dict[str, Any]) -> LogicalType:  # noqa: PLR0911 - one a family
    if isinstance(avro, str):
        return _of_name(avro, field)
    if avro["type"] == "array":
        items = avro["items"]
        return Array(_logical(next(branch for branch in items if branch != "null"), field))
    if avro.get("connect.type") == "int16":
        return Scalar.INT16
    name = avro.get("connect.name", "")
    if name == _DECIMAL:
        return Decimal(avro["precision"], avro["scale"])
    if name == _ENUM:
        labels = field.get("anabranch.labels")
        return Enumeration(tuple(avro["connect.parameters"]["allowed"].split(",") if labels is None else labels))
    logical = _of_name(name, field)
    if "anabranch.precision" in field and isinstance(logical, Time | Timestamp):
        return type(logical)(field["anabranch.precision"])
    return logical


def _of_name(name: str, field: dict[str, Any]) -> LogicalType:
    if name == "string" and field.get("anabranch.logical") == "opaque":
        return Opaque(field["anabranch.type"].removesuffix("[]"))
    if name in _FROM_PLAIN:
        return _FROM_PLAIN[name]
    return _FROM_SEMANTIC[name]
