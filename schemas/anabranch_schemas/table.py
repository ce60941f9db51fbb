"""The shape of a table as it travels: columns with logical types, and the key."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch_schemas.types import LogicalType


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    `source_type` is the type's full name at the source (PostgreSQL: `format_type`, e.g. `numeric(10,2)`); it
    travels in the Avro schema, so that a target can create the same column and unknown types keep their name.
    """

    name: str
    type: LogicalType
    nullable: bool
    source_type: str


@dataclass(frozen=True, slots=True)
class TableSchema:
    """Columns in their order at the source, and the names of the key columns in key order."""

    schema: str
    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]

    @property
    def path(self) -> str:
        """`schema.table`, as it is shown to people."""
        return f"{self.schema}.{self.name}"

    @property
    def key_columns(self) -> tuple[Column, ...]:
        """The key columns, in key order."""
        by_name = {column.name: column for column in self.columns}
        return tuple(by_name[name] for name in self.key)
