"""What would fail later at a PostgreSQL target: rights, version, tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace

import psycopg

from anabranch_connectors.findings import Finding, Severity
from anabranch_connectors.postgres.control import Connection, connect, fetch
from anabranch_schemas.errors import AnabranchError

OLDEST_VERSION = 140000


@dataclass(frozen=True, slots=True)
class CheckedTarget:
    """What a sink wants of its target."""

    where: str
    """The sink's path in the pipeline file."""
    create: bool
    tables: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    """Target (schema, table) → key columns at the source"""


def check_target(dsn: str, target: CheckedTarget) -> list[Finding]:
    """Return all findings about a target, in the order in which they should be repaired."""
    try:
        with closing(connect(dsn, application_name="anabranch check")) as conn:
            return [finding for rule in _RULES for finding in rule(conn, target)]
    except AnabranchError as error:
        return [replace(Finding.of(error), where=f"{target.where}: {error.where}")]


def _version(conn: Connection, target: CheckedTarget) -> Iterator[Finding]:
    if conn.info.server_version < OLDEST_VERSION:
        yield Finding(
            "target.version",
            Severity.ERROR,
            target.where,
            f"the server's version is {conn.info.server_version // 10000}; 14 to 18 are supported",
            "upgrade the server",
        )


def _standby(conn: Connection, target: CheckedTarget) -> Iterator[Finding]:
    if fetch(conn, "SELECT pg_is_in_recovery()")[0][0]:
        yield Finding(
            "target.standby", Severity.ERROR, target.where, "a standby takes no writes", "name the primary in the dsn"
        )


def _own_schema(conn: Connection, target: CheckedTarget) -> Iterator[Finding]:
    exists, usable, creatable, user = fetch(
        conn,
        "SELECT to_regnamespace('anabranch') IS NOT NULL, "
        "coalesce(has_schema_privilege(to_regnamespace('anabranch')::oid, 'CREATE'), false), "
        "has_database_privilege(current_database(), 'CREATE'), current_user::text",
    )[0]
    if exists and not usable:
        repair = f"GRANT ALL ON SCHEMA anabranch TO {user}"
        yield Finding("target.rights", Severity.ERROR, target.where, "schema anabranch belongs to another role", repair)
    if not exists and not creatable:
        repair = f"CREATE SCHEMA anabranch AUTHORIZATION {user}, as the database's owner"
        yield Finding(
            "target.rights", Severity.ERROR, target.where, "schema anabranch is missing and may not be created", repair
        )


def _own_tables(conn: Connection, target: CheckedTarget) -> Iterator[Finding]:
    rows = fetch(
        conn,
        "SELECT c.relname::text, current_user::text FROM pg_class c "
        "WHERE c.relnamespace = to_regnamespace('anabranch') AND c.relkind = 'r' "
        "AND c.relname IN ('progress', 'sink', 'quarantine') "
        "AND NOT has_table_privilege(c.oid, 'SELECT, INSERT, UPDATE')",
    )
    for name, user in rows:
        yield Finding(
            "target.rights",
            Severity.ERROR,
            f"{target.where}: anabranch.{name}",
            "the table belongs to another role's sink",
            f"GRANT ALL ON ALL TABLES IN SCHEMA anabranch TO {user}, or use one role for all sinks of a database",
        )


def _replica_role(conn: Connection, target: CheckedTarget) -> Iterator[Finding]:
    try:
        conn.execute("SET session_replication_role = replica")
        conn.execute("RESET session_replication_role")
    except psycopg.errors.InsufficientPrivilege:
        user = fetch(conn, "SELECT current_user::text")[0][0]
        yield Finding(
            "target.replica_role",
            Severity.WARNING,
            target.where,
            "session_replication_role may not be set: triggers fire, and foreign keys are checked at the end",
            f"from PostgreSQL 15: GRANT SET ON PARAMETER session_replication_role TO {user}",
        )


def _tables(conn: Connection, target: CheckedTarget) -> Iterator[Finding]:
    for (schema, name), key in target.tables.items():
        where = f"{target.where}: {schema}.{name}"
        oid = fetch(conn, "SELECT to_regclass(format('%%I.%%I', %s::text, %s::text))::oid", (schema, name))[0][0]
        if oid is None:
            if not target.create:
                repair = "create the table, or set create: true"
                yield Finding("target.table_missing", Severity.ERROR, where, "the table does not exist", repair)
            continue
        rights = fetch(conn, "SELECT has_table_privilege(%s::oid, 'INSERT, UPDATE, DELETE, SELECT')", (oid,))[0][0]
        if not rights:
            repair = f"GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON {schema}.{name} TO CURRENT_USER"
            yield Finding("target.rights", Severity.ERROR, where, "the table may not be written", repair)
        unique = fetch(
            conn,
            "SELECT ARRAY(SELECT a.attname::text FROM unnest(i.indkey) k JOIN pg_attribute a "
            "ON a.attrelid = i.indrelid AND a.attnum = k) FROM pg_index i "
            "WHERE i.indrelid = %s AND i.indisunique AND i.indisvalid AND i.indpred IS NULL",
            (oid,),
        )
        if not any(set(columns) == set(key) for (columns,) in unique):
            repair = f"ALTER TABLE {schema}.{name} ADD PRIMARY KEY ({', '.join(key)})"
            message = "the table has no unique index on the source's key, so each update looks through all of it"
            yield Finding("target.key_index", Severity.WARNING, where, message, repair)


_Rule = Callable[[Connection, CheckedTarget], Iterator[Finding]]
_RULES: tuple[_Rule, ...] = (_version, _standby, _own_schema, _own_tables, _replica_role, _tables)
