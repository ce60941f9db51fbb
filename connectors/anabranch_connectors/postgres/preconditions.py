"""Whether a stream may be taken up where it was put down: what is looked at before a single row is read."""

from __future__ import annotations

from collections.abc import Mapping

from anabranch_connectors.postgres import control, publications, slots
from anabranch_connectors.postgres.errors import (
    BOOTSTRAP,
    MarkersMissingError,
    PublicationIncompleteError,
    TableMissingError,
    WalLevelError,
)
from anabranch_connectors.postgres.options import PostgresOptions
from anabranch_connectors.postgres.pgtable import PgTable
from anabranch_connectors.postgres.replication import ReplicationConnection, SystemIdentity
from anabranch_connectors.postgres.resume import Resume
from anabranch_schemas.marker import SnapshotMarker


def refuse_unfit(conn: control.Connection) -> None:
    """Refuse a server that cannot stream its log.

    Raises:
        WalLevelError: if `wal_level` is not logical.
    """
    level = control.fetch(conn, "SELECT current_setting('wal_level')")[0][0]
    if level != "logical":
        raise WalLevelError(
            f"wal_level is {level}, so the log does not hold row changes",
            where="wal_level",
            advice="ALTER SYSTEM SET wal_level = logical, then restart the server",
        )


def verify_position(
    conn: control.Connection, options: PostgresOptions, stored: SnapshotMarker | None, identity: SystemIdentity
) -> Resume | None:
    """Compare slot and server with the stored marker; return where to resume, None if the stream begins (anew).

    Raises:
        MarkersMissingError: if the stream has begun but has no marker.
        AnabranchError: what `slots.verify_position` raises.
    """
    resume = Resume.decode(stored.resume) if stored is not None else None
    if stored is not None and resume is None:
        return None  # it begins anew: whatever slot there is will do
    slots.verify_position(
        slots.find_slot(conn, options.slot),
        resume.stored if resume is not None else None,
        identity,
        database=conn.info.dbname,
        name=options.slot,
    )
    if stored is None:
        _refuse_lost_markers(conn, options)
    return resume


def check_position(options: PostgresOptions, stored: SnapshotMarker | None) -> None:
    """Raise what taking the stream up would raise, without touching anything."""
    conn = control.connect(options.dsn, application_name="anabranch check")
    try:
        with ReplicationConnection.connect(options.dsn, application_name="anabranch check") as replication:
            identity = replication.identify_system()
        resume = verify_position(conn, options, stored, identity)
        if resume is not None and publications.find_publication(conn, options.publication) is None:
            raise publications.missing(options.publication)
    finally:
        conn.close()


def refuse_unpublished(
    conn: control.Connection, options: PostgresOptions, stored: SnapshotMarker | None, tables: Mapping[str, PgTable]
) -> None:
    """Refuse a table that was streamed and has left the publication: it would come back with changes missing.

    Raises:
        PublicationIncompleteError: for the first such table.
    """
    publication = publications.find_publication(conn, options.publication)
    if stored is None or publication is None or publication.all_tables:
        return
    for state in stored.copy:
        table = tables.get(state.table)
        begun = state.done or state.last_key is not None
        if table is not None and begun and (table.schema, table.name) not in publication.tables:
            raise PublicationIncompleteError(
                "the table was taken out of the publication, or dropped and made again: changes may be missing",
                where=table.path,
                advice=BOOTSTRAP,
            )


def refuse_no_tables(options: PostgresOptions, tables: Mapping[str, PgTable]) -> None:
    """Refuse a stream without tables.

    Raises:
        TableMissingError: if no table matches the patterns.
    """
    if not tables:
        raise TableMissingError(
            f"no table matches {', '.join(options.tables)}",
            where=f"{options.stream}.tables",
            advice="correct the patterns (schema.table, with * and ?), or grant USAGE on the schema",
        )


def forget(conn: control.Connection, options: PostgresOptions) -> None:
    """Drop the stream's slot and publication, so that it begins anew."""
    slots.release(conn, options.slot, application_name=options.application_name)
    slots.drop_slot(conn, options.slot)
    owner = publications.read_owner(conn, options.publication)
    if owner is not None and owner.stream == options.stream:
        publications.drop_publication(conn, options.publication)


def _refuse_lost_markers(conn: control.Connection, options: PostgresOptions) -> None:
    owner = publications.read_owner(conn, options.publication)
    if owner is not None and owner.stream == options.stream and owner.branch:
        raise MarkersMissingError(
            "the publication says that the stream has begun, but its marker topic is gone or empty",
            where=options.stream,
            advice=BOOTSTRAP,
        )
