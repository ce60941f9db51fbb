"""Everything about a PostgreSQL source that would fail later, found before it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from anabranch_connectors.findings import Finding, Severity
from anabranch_connectors.postgres.catalog import find_tables, is_standby, load_table_by_oid, matches
from anabranch_connectors.postgres.control import Connection, connect, fetch, quote_name
from anabranch_connectors.postgres.errors import BOOTSTRAP, ServerError
from anabranch_connectors.postgres.pgtable import PgTable
from anabranch_connectors.postgres.publications import Publication, find_publication
from anabranch_connectors.postgres.replication import ReplicationConnection
from anabranch_connectors.postgres.slots import PLUGIN, find_slot
from anabranch_schemas.errors import AnabranchError

OLDEST_VERSION = 140000
_INSUFFICIENT_PRIVILEGE = "42501"
_SHOWN_NAMES = 5


@dataclass(frozen=True, slots=True)
class CheckedSource:
    """The options of a source that a check looks at."""

    patterns: Sequence[str]
    slot: str
    publication: str
    stream: str
    adopt: bool = False
    key_columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def check_source(dsn: str, source: CheckedSource) -> list[Finding]:
    """Return all findings about a source, in the order in which they should be repaired.

    Changes nothing at the server. A server that cannot be reached is a finding too.
    """
    try:
        conn = connect(dsn, application_name="anabranch check")
    except AnabranchError as error:
        return [Finding.of(error)]
    with conn:
        found = list(_server(conn, dsn, source))
        user = conn.info.user
        tables = list(_tables(conn, source, found))
        for rule in (_patterns, _slot, _publication):
            found += _guarded(rule, conn, source)
        found += _rights(conn, source, tables, user)
    return found


_Rule = Callable[[Connection, CheckedSource], Iterator[Finding]]


def _guarded(rule: _Rule, conn: Connection, source: CheckedSource) -> list[Finding]:
    """Run a rule; an error that it meets is what it found."""
    try:
        return list(rule(conn, source))
    except AnabranchError as error:
        return [Finding.of(error)]


def _server(conn: Connection, dsn: str, source: CheckedSource) -> Iterator[Finding]:
    version = conn.info.server_version
    if version < OLDEST_VERSION:
        yield _error("source.version", "server", f"PostgreSQL {version // 10000} is too old", "upgrade to 14 or newer")
    if is_standby(conn):
        yield _error(
            "source.standby",
            "server",
            "the server is a standby, which can neither hold our publication nor date a copy",
            "point the DSN at the primary (target_session_attrs=primary with several hosts)",
        )
    settings = _settings(conn)
    if settings["wal_level"] != "logical":
        yield _error(
            "source.wal_level",
            "server",
            f"wal_level is {settings['wal_level']}, so the log does not carry row changes",
            "ALTER SYSTEM SET wal_level = logical; then restart the server",
        )
    full = list(_capacity(conn, source, settings))
    yield from full
    if all(finding.code != "source.senders_exhausted" for finding in full):
        yield from _replication(dsn, conn.info.user)


def _settings(conn: Connection) -> dict[str, str]:
    names = ["wal_level", "max_replication_slots", "max_wal_senders", "max_slot_wal_keep_size"]
    rows: list[tuple[str, str]] = fetch(conn, "SELECT name, setting FROM pg_settings WHERE name = ANY(%s)", (names,))
    return dict(rows)


def _capacity(conn: Connection, source: CheckedSource, settings: Mapping[str, str]) -> Iterator[Finding]:
    (slots, mine, senders), *_ = fetch(
        conn,
        """
        SELECT (SELECT count(*) FROM pg_replication_slots),
               (SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s),
               (SELECT count(*) FROM pg_stat_get_wal_senders())
        """,
        (source.slot,),
    )
    limit = int(settings["max_replication_slots"])
    if not mine and slots >= limit:
        yield _error(
            "source.slots_exhausted",
            "server",
            f"all {limit} replication slots are taken",
            f"drop an unused slot, or ALTER SYSTEM SET max_replication_slots = {limit + 4} and restart the server",
        )
    limit = int(settings["max_wal_senders"])
    if senders >= limit:
        yield _error(
            "source.senders_exhausted",
            "server",
            f"all {limit} WAL senders are taken",
            f"ALTER SYSTEM SET max_wal_senders = {limit + 4} and restart the server",
        )
    if settings["max_slot_wal_keep_size"] == "-1":
        yield Finding(
            "source.wal_unbounded",
            Severity.INFO,
            "server",
            "max_slot_wal_keep_size is not set: while this source is down, log can fill the server's disk",
            "ALTER SYSTEM SET max_slot_wal_keep_size = '100GB' (what the disk allows); SELECT pg_reload_conf()",
        )


def _replication(dsn: str, user: str) -> Iterator[Finding]:
    try:
        with ReplicationConnection.connect(dsn, application_name="anabranch check") as replication:
            replication.identify_system()
    except ServerError as error:
        if error.sqlstate == _INSUFFICIENT_PRIVILEGE:
            yield _error(
                "source.replication_right",
                f"role {user}",
                "the role may not replicate",
                f"ALTER ROLE {quote_name(user)} REPLICATION",
            )
        else:
            yield Finding.of(error)
    except AnabranchError as error:
        yield Finding.of(error)


def _tables(conn: Connection, source: CheckedSource, found: list[Finding]) -> Iterator[PgTable]:
    """Yield the tables that can be read, and put the others' reasons into `found`."""
    for oid, _ in find_tables(conn, source.patterns):
        try:
            yield load_table_by_oid(conn, oid, source.key_columns)
        except AnabranchError as error:
            found.append(Finding.of(error))


def _patterns(conn: Connection, source: CheckedSource) -> Iterator[Finding]:
    rows = fetch(
        conn,
        """
        SELECT n.nspname::text, c.relname::text, c.relpersistence::text
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND n.nspname !~ '^pg_'
          AND n.nspname NOT IN ('information_schema', 'anabranch') ORDER BY 1, 2
        """,
    )
    logged = [(schema, name) for schema, name, persistence in rows if persistence == "p"]
    for pattern in source.patterns:
        if not any(matches(schema, name, [pattern]) for schema, name in logged):
            wildcard = any(character in pattern for character in "*?[")
            yield Finding(
                "source.pattern_unmatched",
                Severity.WARNING if wildcard else Severity.ERROR,
                f"tables: {pattern}",
                "the pattern names no table",
                "write it as schema.table, or create the table first",
            )
    for schema, name, persistence in rows:
        if persistence == "u" and matches(schema, name, source.patterns):
            table = quote_name(schema, name)
            yield Finding(
                "source.unlogged_table",
                Severity.WARNING,
                f"{schema}.{name}",
                "the table is unlogged: its changes are not in the log, and it is left out",
                f"ALTER TABLE {table} SET LOGGED, or exclude it",
            )
    others = [f"{schema}.{name}" for schema, name in logged if not matches(schema, name, source.patterns)]
    if others:
        shown = ", ".join(others[:_SHOWN_NAMES]) + (", ..." if len(others) > _SHOWN_NAMES else "")
        yield Finding(
            "source.tables_unmatched",
            Severity.INFO,
            "tables",
            f"{len(others)} tables are matched by no pattern: {shown}",
        )


def _slot(conn: Connection, source: CheckedSource) -> Iterator[Finding]:
    slot = find_slot(conn, source.slot)
    if slot is None:
        return
    if slot.plugin != PLUGIN or slot.database != conn.info.dbname:
        yield _error(
            "source.slot_foreign",
            slot.name,
            f"the slot belongs to plugin {slot.plugin!r} and database {slot.database!r}",
            "choose another slot name for this source",
        )
    elif slot.is_lost:
        yield _error("source.slot_lost", slot.name, "the server has invalidated the slot", BOOTSTRAP)
    elif slot.wal_status == "unreserved":
        yield Finding(
            "source.slot_unreserved",
            Severity.WARNING,
            slot.name,
            "the slot is so far behind that the next checkpoint may remove its log",
            "start the source now, or raise max_slot_wal_keep_size",
        )
    if slot.active:
        yield Finding("source.slot_in_use", Severity.INFO, slot.name, f"the slot is being read (pid {slot.active_pid})")


def _publication(conn: Connection, source: CheckedSource) -> Iterator[Finding]:
    found = find_publication(conn, source.publication)
    if found is None:
        if not fetch(conn, "SELECT has_database_privilege(current_database(), 'CREATE')")[0][0]:
            yield _error(
                "source.publication_right",
                f"database {conn.info.dbname}",
                "the publication does not exist and the role may not create it",
                f"GRANT CREATE ON DATABASE {quote_name(conn.info.dbname)} TO {quote_name(conn.info.user)}, or create "
                "the publication for it and set publication.adopt: true",
            )
        return
    if found.owner is None and not source.adopt:
        yield _error(
            "source.publication_foreign",
            found.name,
            "a publication of that name exists and is not one of ours",
            "choose another publication name, or set publication.adopt: true to use this one",
        )
    elif found.owner is not None and found.owner.stream != source.stream:
        yield _error(
            "source.publication_foreign",
            found.name,
            f"the publication belongs to stream {found.owner.stream!r}",
            "choose another publication name for this source",
        )
    if not found.complete:
        yield _error(
            "source.publication_incomplete",
            found.name,
            "the publication leaves out some operations",
            f"ALTER PUBLICATION {quote_name(found.name)} SET (publish = 'insert, update, delete, truncate')",
        )


def _rights(conn: Connection, source: CheckedSource, tables: Sequence[PgTable], user: str) -> Iterator[Finding]:
    superuser, create_role = fetch(conn, "SELECT rolsuper, rolcreaterole FROM pg_roles WHERE rolname = current_user")[0]
    if superuser or create_role:
        yield Finding(
            "source.excess_rights",
            Severity.WARNING,
            f"role {user}",
            "the role is a superuser" if superuser else "the role may create roles",
            "use a role of its own: CREATE ROLE anabranch LOGIN REPLICATION; GRANT SELECT ON the tables",
        )
    publication = find_publication(conn, source.publication)
    rows = fetch(
        conn,
        """
        SELECT c.oid, has_table_privilege(c.oid, 'SELECT') AND has_schema_privilege(c.relnamespace, 'USAGE'),
               row_security_active(c.oid), pg_has_role(c.relowner, 'USAGE')
        FROM pg_class c WHERE c.oid = ANY(%s)
        """,
        ([table.oid for table in tables],),
    )
    rights = {oid: (select, hidden, owner) for oid, select, hidden, owner in rows}
    for table in tables:
        # A table dropped since it was loaded is no finding.
        if table.oid in rights:
            yield from _table_rights(table, rights[table.oid], publication, user)


def _table_rights(
    table: PgTable, rights: tuple[bool, bool, bool], publication: Publication | None, user: str
) -> Iterator[Finding]:
    select, hidden, owner = rights
    name = quote_name(table.schema, table.name)
    if not select:
        yield _error(
            "source.select_right",
            table.path,
            "the role may not read the table, so it cannot be copied",
            f"GRANT USAGE ON SCHEMA {quote_name(table.schema)} TO {quote_name(user)}; "
            f"GRANT SELECT ON {name} TO {quote_name(user)}",
        )
    if hidden:
        yield _error(
            "source.row_security",
            table.path,
            "row security hides rows of the table from the role, so a copy would be incomplete",
            f"ALTER ROLE {quote_name(user)} BYPASSRLS",
        )
    published = publication is not None and (publication.all_tables or (table.schema, table.name) in publication.tables)
    if not published and not owner:
        yield _error(
            "source.publication_right",
            table.path,
            "the role does not own the table, so it cannot put it into the publication",
            f"make the publication as the owner ({name} in it) and set publication.adopt: true",
        )


def _error(code: str, where: str, message: str, repair: str) -> Finding:
    return Finding(code, Severity.ERROR, where, message, repair)
