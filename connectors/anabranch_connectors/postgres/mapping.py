"""From PostgreSQL's catalog to the table as it travels, and the type names for a table made from it."""

from __future__ import annotations

from anabranch_connectors.postgres.pgtable import PgTable, PgType
from anabranch_connectors.postgres.types import decoder_for, logical_type
from anabranch_schemas.table import Column, TableSchema
from anabranch_schemas.types import Array, LogicalType, Opaque

__all__ = ["create_type", "logical_type", "table_schema"]


def table_schema(table: PgTable) -> TableSchema:
    """Return the published columns and the key of a table, with logical types.

    A domain travels as its base type: its constraints were checked where the row was written, and a target need not
    have the domain.
    """
    columns = tuple(
        Column(column.name, logical_type(column.type), column.nullable, _base(column.type).name)
        for column in table.published_columns
    )
    return TableSchema(table.schema, table.name, columns, table.key)


def create_type(column: Column) -> str:
    """Return the type name for creating a column at a target.

    Types of pg_catalog keep their name. A type that the target may not have (enum, composite, extension) becomes
    text, or an array of text, which holds every value of it.
    """
    if not _user_defined(column.source_type):
        return column.source_type
    return "text[]" if isinstance(column.type, Array) else _stand_in(column.type)


def _stand_in(logical: LogicalType) -> str:
    return "text" if isinstance(logical, Opaque) else decoder_for(logical, "").staging


def _user_defined(name: str) -> bool:
    """Tell whether a type's name is schema-qualified; a dot inside the parentheses of a typmod does not count."""
    return "." in name.split("(", 1)[0]


def _base(pg: PgType) -> PgType:
    return _base(pg.base) if pg.base else pg
