"""PostgreSQL's catalog: tables with their columns, resolved types and keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from anabranch_connectors.postgres.control import Connection, fetch, quote_name
from anabranch_connectors.postgres.errors import TableKeyError, TableMissingError
from anabranch_connectors.postgres.pgtable import PgColumn, PgTable, PgType
from anabranch_schemas.errors import ConfigError

OWN_SCHEMA = "anabranch"

# Keys must be valid, checked at once (a deferrable key is no identity), over plain columns and all rows.
_TABLES = """
SELECT c.oid, n.nspname::text, c.relname::text, c.relkind::text, c.relreplident::text,
       ARRAY(SELECT a.attname::text FROM pg_index i CROSS JOIN unnest(i.indkey) WITH ORDINALITY k(attnum, place)
             JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
             WHERE i.indrelid = c.oid AND i.indisprimary AND i.indisvalid AND i.indimmediate
               AND k.place <= i.indnkeyatts ORDER BY k.place),
       ARRAY(SELECT a.attname::text FROM pg_index i CROSS JOIN unnest(i.indkey) WITH ORDINALITY k(attnum, place)
             JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
             WHERE i.indrelid = c.oid AND i.indisreplident AND i.indisvalid
               AND k.place <= i.indnkeyatts ORDER BY k.place)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
"""
# Permanent tables and partitioned roots; partitions come with their root. `pg_` is reserved for the system.
_LOADABLE = """
WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relpersistence = 'p'
  AND n.nspname !~ '^pg_' AND n.nspname NOT IN ('information_schema', 'anabranch')
ORDER BY n.nspname, c.relname
"""
# A collation compares by bytes if it is C or POSIX, or PostgreSQL 17's built-in provider (b), whose order is by code
# point, which for UTF-8 is by byte. `default` is the database's.
_COLUMNS = """
SELECT a.attrelid, a.attname::text, a.atttypid, a.atttypmod, a.attnotnull, a.attgenerated <> '', a.attidentity::text,
       CASE WHEN a.attcollation = 0 THEN true
            WHEN l.collname = 'default' THEN d.by_bytes
            ELSE l.collname IN ('C', 'POSIX', 'ucs_basic') OR l.collprovider = 'b' END
FROM pg_attribute a LEFT JOIN pg_collation l ON l.oid = a.attcollation
CROSS JOIN (SELECT coalesce(to_jsonb(b) ->> 'datlocprovider', 'c') = 'b'
                   OR (b.datcollate IN ('C', 'POSIX') AND coalesce(to_jsonb(b) ->> 'datlocprovider', 'c') = 'c')
            FROM pg_database b WHERE b.datname = current_database()) d(by_bytes)
WHERE a.attrelid = ANY(%s) AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attrelid, a.attnum
"""
_TYPES = """
SELECT u.type, u.typmod, format_type(u.type, u.typmod), t.typtype::text,
       CASE WHEN t.typtype = 'd' THEN t.typbasetype END, t.typtypmod,
       CASE WHEN t.typelem <> 0 AND t.typsubscript = 'array_subscript_handler'::regproc THEN t.typelem END,
       ARRAY(SELECT e.enumlabel::text FROM pg_enum e WHERE e.enumtypid = t.oid ORDER BY e.enumsortorder)
FROM unnest(%s::oid[], %s::int4[]) u(type, typmod) JOIN pg_type t ON t.oid = u.type
"""

TypeId = tuple[int, int]
_TypeRow = tuple[str, str, TypeId | None, TypeId | None, tuple[str, ...]]


def server_version(conn: Connection) -> int:
    """Return the server's version as a number: 150018 is 15.18."""
    return conn.info.server_version


def is_standby(conn: Connection) -> bool:
    """Return whether the server is in recovery."""
    return bool(fetch(conn, "SELECT pg_is_in_recovery()")[0][0])


def matches(schema: str, name: str, patterns: Iterable[str]) -> bool:
    """Return whether a table is meant by one of the patterns (`public.*`, `public.orders`; shell wildcards)."""
    return any(fnmatchcase(f"{schema}.{name}", pattern) for pattern in patterns)


def find_tables(conn: Connection, patterns: Sequence[str]) -> list[tuple[int, str]]:
    """Return (oid, `schema.table`) of the tables that `load_tables` would load, whether they have a key or not."""
    rows = fetch(conn, _TABLES + _LOADABLE)
    return [(row[0], f"{row[1]}.{row[2]}") for row in rows if matches(row[1], row[2], patterns)]


def load_tables(
    conn: Connection, patterns: Sequence[str], key_columns: Mapping[str, tuple[str, ...]] | None = None
) -> tuple[PgTable, ...]:
    """Return the tables that the patterns name, by schema and name.

    Ordinary tables and partitioned roots that are logged; not those of the system or of schema `anabranch`.
    `key_columns` maps `schema.table` to the columns that tell rows apart where the table has no key of its own.

    Raises:
        TableKeyError: if a table's rows cannot be told apart, or publishing it would make its updates fail.
        ConfigError: if `key_columns` names a column that is not there.
    """
    rows = [row for row in fetch(conn, _TABLES + _LOADABLE) if matches(row[1], row[2], patterns)]
    return _tables(conn, rows, key_columns or {})


def load_table_by_oid(conn: Connection, oid: int, key_columns: Mapping[str, tuple[str, ...]] | None = None) -> PgTable:
    """Return the table of that oid.

    Raises:
        TableMissingError: if it has been dropped.
        TableKeyError: as `load_tables`.
    """
    rows = fetch(conn, _TABLES + "WHERE c.oid = %s", (oid,))
    if not rows:
        raise TableMissingError(f"no table has oid {oid}; it may have been dropped", where=f"oid {oid}")
    return _tables(conn, rows, key_columns or {})[0]


def _tables(
    conn: Connection, rows: Sequence[tuple[Any, ...]], key_columns: Mapping[str, tuple[str, ...]]
) -> tuple[PgTable, ...]:
    described = fetch(conn, _COLUMNS, ([row[0] for row in rows],))
    types = load_types(conn, {(row[2], row[3]) for row in described})
    columns: dict[int, list[PgColumn]] = {}
    for table, name, oid, typmod, required, generated, identity, by_bytes in described:
        column = PgColumn(name, types[oid, typmod], not required, generated, identity, by_bytes)
        columns.setdefault(table, []).append(column)
    result = []
    for oid, schema, name, kind, identity, primary, index in rows:
        shape = tuple(columns.get(oid, ()))
        option = key_columns.get(f"{schema}.{name}", ())
        path = f"{schema}.{name}"
        key = _key(path, shape, identity, primary=tuple(primary), index=tuple(index), option=option)
        result.append(PgTable(oid, schema, name, shape, key, identity, kind))
    return tuple(result)


def _key(
    path: str,
    columns: Sequence[PgColumn],
    identity: str,
    *,
    primary: tuple[str, ...],
    index: tuple[str, ...],
    option: tuple[str, ...],
) -> tuple[str, ...]:
    """Return the key: primary key, else replica identity index, else the option.

    A delete carries the columns of the replica identity only. So a primary key that does not lie within the identity
    index cannot be the key.
    """
    quoted = quote_name(*path.split(".", 1))
    if identity == "n":
        raise TableKeyError(
            "the table has REPLICA IDENTITY NOTHING: publishing it would make its updates and deletes fail",
            where=path,
            advice=f"ALTER TABLE {quoted} REPLICA IDENTITY DEFAULT (with a primary key) or FULL (with key.columns)",
        )
    if primary and (identity != "i" or set(primary) <= set(index)):
        return _travelling(path, columns, primary)
    if identity == "i" and index:
        return _travelling(path, columns, index)
    if not option:
        raise TableKeyError(
            "the table has neither a primary key nor a replica identity index",
            where=path,
            advice=f"ALTER TABLE {quoted} ADD PRIMARY KEY (...), or set key.columns for {path} "
            f"and ALTER TABLE {quoted} REPLICA IDENTITY FULL",
        )
    if identity != "f":
        raise TableKeyError(
            "key.columns is set, but deletes do not carry these columns",
            where=path,
            advice=f"ALTER TABLE {quoted} REPLICA IDENTITY FULL, or add a primary key",
        )
    return _chosen(path, columns, option)


def _chosen(path: str, columns: Sequence[PgColumn], option: tuple[str, ...]) -> tuple[str, ...]:
    by_name = {column.name: column for column in columns}
    for name in option:
        if name not in by_name:
            raise ConfigError(f"key.columns names {name!r}, which is no column of {path}", where="key.columns")
        if by_name[name].nullable:
            raise TableKeyError(
                f"key column {name!r} may be null: rows with null cannot be told apart, nor read in key order",
                where=path,
                advice=f"ALTER TABLE {quote_name(*path.split('.', 1))} ALTER COLUMN {quote_name(name)} SET NOT NULL",
            )
    return _travelling(path, columns, option)


def _travelling(path: str, columns: Sequence[PgColumn], key: tuple[str, ...]) -> tuple[str, ...]:
    generated = {column.name for column in columns if column.generated}
    if generated.intersection(key):
        raise TableKeyError(
            "a column of the key is generated, and generated columns do not travel",
            where=path,
            advice="make a unique index over other columns and name it in REPLICA IDENTITY USING INDEX",
        )
    return key


def load_types(conn: Connection, wanted: set[TypeId]) -> dict[TypeId, PgType]:
    """Load the types and all that they are made of, a level a round (a domain over an array of an enum takes three)."""
    rows: dict[TypeId, _TypeRow] = {}
    missing = wanted
    while missing:
        oids, typmods = [oid for oid, _ in missing], [typmod for _, typmod in missing]
        for oid, typmod, name, kind, base, base_typmod, element, labels in fetch(conn, _TYPES, (oids, typmods)):
            base_id = None if base is None else (base, base_typmod)
            # An array's type modifier is its elements'.
            element_id = None if element is None else (element, typmod)
            rows[oid, typmod] = (name, kind, base_id, element_id, tuple(labels))
        parts = {part for row in rows.values() for part in row[2:4] if part is not None}
        missing = parts - rows.keys()
    return {identifier: _resolve(identifier, rows) for identifier in wanted}


def _resolve(identifier: TypeId, rows: Mapping[TypeId, _TypeRow]) -> PgType:
    name, kind, base, element, labels = rows[identifier]
    return PgType(
        oid=identifier[0],
        name=name,
        typmod=identifier[1],
        kind=kind,
        base=None if base is None else _resolve(base, rows),
        element=None if element is None else _resolve(element, rows),
        labels=labels,
    )
