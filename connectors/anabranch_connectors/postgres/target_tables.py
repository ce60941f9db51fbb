"""Tables of a target database: what the catalog says about them, and making those that are missing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psycopg
from psycopg import sql

from anabranch_connectors.postgres.mapping import create_type
from anabranch_connectors.target_errors import SchemaMismatchError
from anabranch_schemas.table import Column, TableSchema
from anabranch_schemas.types import Enumeration

_COLUMNS = """
SELECT a.attname, format_type(a.atttypid, a.atttypmod), a.attgenerated <> '', a.attidentity
FROM pg_attribute a WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""
# An arbiter of ON CONFLICT must be immediate, whole and over plain columns.
_INDEXES = """
SELECT (SELECT array_agg(a.attname::text ORDER BY k.n) FROM unnest(i.indkey) WITH ORDINALITY k(attnum, n)
        JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum WHERE k.n <= i.indnkeyatts),
       i.indisunique AND i.indimmediate AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL
FROM pg_index i WHERE i.indrelid = %s AND (i.indisunique OR i.indisexclusion)
"""
_PARENTS = "SELECT confrelid::bigint FROM pg_constraint WHERE contype = 'f' AND conrelid = %s AND confrelid <> conrelid"
_REFERENCED = "SELECT EXISTS (SELECT FROM pg_constraint WHERE contype = 'f' AND confrelid = %s)"
_TYPE_NAME = re.compile(r'[\w .,()\[\]"]+')


@dataclass(frozen=True, slots=True)
class TargetColumn:
    """One column of a target table."""

    name: str
    type: str
    """As `format_type` prints it; can be written into a cast."""
    generated: bool
    identity: str
    """`a` GENERATED ALWAYS AS IDENTITY, `d` BY DEFAULT, else empty."""


@dataclass(frozen=True, slots=True)
class TargetTable:
    """What merging into a table must know."""

    oid: int
    schema: str
    name: str
    columns: Mapping[str, TargetColumn]
    unique: tuple[tuple[tuple[str, ...], bool], ...]
    """Unique and exclusion indexes: (columns, whether it can be the arbiter of ON CONFLICT)."""
    parents: tuple[int, ...]
    """Oids of the tables that its foreign keys point to."""
    referenced: bool
    """Whether a foreign key points to it."""

    @property
    def path(self) -> str:
        """`schema.table`."""
        return f"{self.schema}.{self.name}"

    @property
    def identifier(self) -> sql.Identifier:
        """The qualified name."""
        return sql.Identifier(self.schema, self.name)

    def has_arbiter(self, key: Sequence[str]) -> bool:
        """Tell whether ON CONFLICT can name exactly these columns."""
        return any(usable and set(columns) == set(key) for columns, usable in self.unique)

    def other_unique(self, key: Sequence[str]) -> bool:
        """Tell whether another index than the key's can refuse a row."""
        return any(not usable or set(columns) != set(key) for columns, usable in self.unique)


def load(connection: psycopg.Connection, schema: str, name: str) -> TargetTable | None:
    """Return a table (ordinary or partitioned) as the catalog has it, or None."""
    found = connection.execute(
        "SELECT c.oid::bigint FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE n.nspname = %s AND c.relname = %s AND c.relkind IN ('r', 'p')",
        (schema, name),
    ).fetchone()
    if found is None:
        return None
    oid = int(found[0])
    columns = connection.execute(_COLUMNS, (oid,)).fetchall()
    indexes = connection.execute(_INDEXES, (oid,)).fetchall()
    referenced = connection.execute(_REFERENCED, (oid,)).fetchone()
    return TargetTable(
        oid=oid,
        schema=schema,
        name=name,
        columns={column[0]: TargetColumn(*column) for column in columns},
        unique=tuple((tuple(columns or ()), usable) for columns, usable in indexes),
        parents=tuple(int(row[0]) for row in connection.execute(_PARENTS, (oid,))),
        referenced=bool(referenced and referenced[0]),
    )


def parents_first(tables: Sequence[TargetTable]) -> list[TargetTable]:
    """Order tables so that a table comes after those its foreign keys point to; cycles in order of their oids."""
    by_oid = {table.oid: table for table in tables}
    ordered: dict[int, TargetTable] = {}
    on_path: set[int] = set()

    def visit(table: TargetTable) -> None:
        if table.oid in ordered or table.oid in on_path:
            return
        on_path.add(table.oid)
        for parent in sorted(table.parents):
            if parent in by_oid:
                visit(by_oid[parent])
        ordered[table.oid] = table

    for oid in sorted(by_oid):
        visit(by_oid[oid])
    return list(ordered.values())


def create(connection: psycopg.Connection, table: TableSchema, schema: str, name: str) -> None:
    """Create a table as the source describes it: its schema, enum types, columns and primary key.

    Raises:
        SchemaMismatchError: if the target does not know one of the types.
    """
    with connection.transaction():
        connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(schema)))
        for column in table.columns:
            if isinstance(column.type, Enumeration):
                _create_enum(connection, column.source_type, column.type.labels)
        columns = [_column(column) for column in table.columns]
        if table.key:
            key = sql.SQL(", ").join(sql.Identifier(column) for column in table.key)
            columns.append(sql.SQL("PRIMARY KEY ({})").format(key))
        statement = sql.SQL("CREATE TABLE IF NOT EXISTS {} ({})").format(
            sql.Identifier(schema, name), sql.SQL(", ").join(columns)
        )
        try:
            connection.execute(statement)
        except psycopg.errors.UndefinedObject as error:
            raise SchemaMismatchError(
                f"the table cannot be created: {error.diag.message_primary}",
                where=f"{schema}.{name}",
                advice="install the extension or create the type at the target, or create the table by hand",
            ) from error


def _column(column: Column) -> sql.Composed:
    kind = column.source_type if isinstance(column.type, Enumeration) else create_type(column)
    return sql.SQL("{} {}{}").format(
        sql.Identifier(column.name), type_sql(kind), sql.SQL("" if column.nullable else " NOT NULL")
    )


def _create_enum(connection: psycopg.Connection, type_name: str, labels: Sequence[str]) -> None:
    if connection.execute("SELECT to_regtype(%s)", (type_name,)).fetchone() != (None,):
        return
    schema, dot, _ = type_name.rpartition(".")
    if dot:
        connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(type_sql(schema)))
    values = sql.SQL(", ").join(sql.Literal(label) for label in labels)
    connection.execute(sql.SQL("CREATE TYPE {} AS ENUM ({})").format(type_sql(type_name), values))


def type_sql(name: str) -> sql.SQL:
    """Return a type's printed name as SQL text; it is quoted already where it must be.

    Raises:
        SchemaMismatchError: if it is not the name of a type.
    """
    if not _TYPE_NAME.fullmatch(name):
        raise SchemaMismatchError("this is not the name of a type", where=name)
    return sql.SQL(name)
