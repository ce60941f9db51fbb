"""Publications: made or adopted, owned by name, extended without harm when tables are added."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from anabranch_connectors.postgres.control import Connection, fetch, quote_name, quote_text, run, translated
from anabranch_connectors.postgres.errors import (
    BOOTSTRAP,
    PublicationForeignError,
    PublicationIncompleteError,
    PublicationMissingError,
    ServerError,
)
from anabranch_connectors.postgres.pgtable import PgTable

_PREFIX = "anabranch:stream="
_BRANCH = ";branch="
_DUPLICATE_OBJECT = "42710"


@dataclass(frozen=True, slots=True)
class Owner:
    """Which stream a publication belongs to, and the branch of the history that it was last used on."""

    stream: str
    branch: str

    def comment(self) -> str:
        """Return the text that is kept as the publication's comment."""
        return f"{_PREFIX}{self.stream}{_BRANCH}{self.branch}"


@dataclass(frozen=True, slots=True)
class Publication:
    """One publication; `tables` are (schema, name) of the tables named in it, partitioned ones by their root."""

    name: str
    owner: Owner | None
    commented: bool
    all_tables: bool
    complete: bool
    """Whether it publishes inserts, updates, deletes and truncates."""
    via_root: bool
    tables: frozenset[tuple[str, str]]


def parse_owner(comment: str | None) -> Owner | None:
    """Return who a publication's comment names, None if it is not one of ours."""
    if not comment or not comment.startswith(_PREFIX):
        return None
    stream, found, branch = comment[len(_PREFIX) :].rpartition(_BRANCH)
    return Owner(stream, branch) if found else None


def find_publication(conn: Connection, name: str) -> Publication | None:
    """Return the publication of that name, None if the database has none."""
    rows = fetch(
        conn,
        """
        SELECT p.puballtables, p.pubinsert AND p.pubupdate AND p.pubdelete AND p.pubtruncate, p.pubviaroot,
               obj_description(p.oid, 'pg_publication'),
               ARRAY(SELECT ARRAY[n.nspname::text, c.relname::text]
                     FROM pg_publication_rel r JOIN pg_class c ON c.oid = r.prrelid
                     JOIN pg_namespace n ON n.oid = c.relnamespace WHERE r.prpubid = p.oid),
               ARRAY(SELECT ARRAY[t.schemaname::text, t.tablename::text]
                     FROM pg_publication_tables t WHERE t.pubname = p.pubname)
        FROM pg_publication p WHERE p.pubname = %s
        """,
        (name,),
        where=name,
    )
    if not rows:
        return None
    all_tables, complete, via_root, comment, named, published = rows[0]
    tables = frozenset((schema, table) for schema, table in [*named, *published])
    return Publication(name, parse_owner(comment), comment is not None, all_tables, complete, via_root, tables)


def read_owner(conn: Connection, name: str) -> Owner | None:
    """Return who owns a publication; None if it has no owner of ours or does not exist."""
    publication = find_publication(conn, name)
    return None if publication is None else publication.owner


def mark_branch(conn: Connection, publication: str, stream: str, branch: str) -> None:
    """Record that `stream` owns the publication, and uses it on `branch`."""
    comment = quote_text(Owner(stream, branch).comment())
    run(conn, f"COMMENT ON PUBLICATION {quote_name(publication)} IS {comment}", where=publication)


def ensure_publication(
    conn: Connection,
    name: str,
    stream: str,
    tables: Sequence[PgTable],
    *,
    branch: str = "",
    adopt: bool = False,
    stored: bool = False,
) -> Publication:
    """Make the publication publish `tables` for `stream`; create it if it is new. Calling it again changes nothing.

    `adopt` allows taking over one that a user made (it has no owner of ours); `stored` says that the stream already
    has a stored position, so that a missing publication means changes were not published.

    Raises:
        PublicationForeignError: if another stream owns it, or a user made it and `adopt` is not set.
        PublicationMissingError: if it is missing and `stored` is set.
        PublicationIncompleteError: if one to be adopted leaves out operations.
    """
    found = find_publication(conn, name)
    if found is None:
        if stored:
            raise PublicationMissingError(
                "the publication is gone although the stream has a stored position: changes may be missing",
                where=name,
                advice=BOOTSTRAP,
            )
        try:
            return _create(conn, name, Owner(stream, branch), tables)
        except ServerError as error:
            if error.sqlstate != _DUPLICATE_OBJECT:
                raise
            # Another worker was faster; whether it is the same stream is seen below.
            found = find_publication(conn, name)
            if found is None:
                raise
    _check_usable(found, stream, tables, adopt=adopt)
    if found.owner is None:
        mark_branch(conn, name, stream, branch)
    if not found.all_tables:
        _add(conn, name, [table for table in tables if (table.schema, table.name) not in found.tables])
    return _existing(conn, name)


def missing(name: str) -> PublicationMissingError:
    """Return the error of a publication that has gone under a stored position."""
    return PublicationMissingError(
        "the publication is gone although the stream has a stored position: changes may not have been published",
        where=name,
        advice=BOOTSTRAP,
    )


def remove_tables(conn: Connection, name: str, tables: Iterable[PgTable]) -> None:
    """Take tables out of a publication; those that are not in it are left alone."""
    found = find_publication(conn, name)
    if found is None or found.all_tables:
        return
    for table in tables:
        if (table.schema, table.name) in found.tables:
            run(conn, f"ALTER PUBLICATION {quote_name(name)} DROP TABLE {_target(table)}", where=name)


def drop_publication(conn: Connection, name: str) -> None:
    """Drop a publication if it exists."""
    run(conn, f"DROP PUBLICATION IF EXISTS {quote_name(name)}", where=name)


def _create(conn: Connection, name: str, owner: Owner, tables: Sequence[PgTable]) -> Publication:
    targets = ", ".join(_target(table) for table in tables)
    for_tables = f"FOR TABLE {targets} " if tables else ""
    # One transaction: a publication without its owner's name would be foreign to us after a crash.
    with translated(name), conn.transaction():
        run(
            conn,
            f"CREATE PUBLICATION {quote_name(name)} {for_tables}WITH (publish_via_partition_root = true)",
            where=name,
        )
        mark_branch(conn, name, owner.stream, owner.branch)
    return _existing(conn, name)


def _check_usable(found: Publication, stream: str, tables: Sequence[PgTable], *, adopt: bool) -> None:
    if found.owner is not None and found.owner.stream != stream:
        raise PublicationForeignError(
            f"the publication belongs to stream {found.owner.stream!r}, not to {stream!r}",
            where=found.name,
            advice="choose another publication name for this source",
        )
    if found.owner is None and not adopt:
        raise PublicationForeignError(
            "a publication of that name exists and is not one of ours",
            where=found.name,
            advice="choose another publication name, or set publication.adopt: true to use this one",
        )
    if not found.complete:
        raise PublicationIncompleteError(
            "the publication leaves out some operations",
            where=found.name,
            advice=f"ALTER PUBLICATION {quote_name(found.name)} SET (publish = 'insert, update, delete, truncate')",
        )
    if not found.via_root and any(table.kind == "p" for table in tables):
        raise PublicationIncompleteError(
            "the publication sends the rows of partitions under the partitions' own names",
            where=found.name,
            advice=f"ALTER PUBLICATION {quote_name(found.name)} SET (publish_via_partition_root = true)",
        )


def _add(conn: Connection, name: str, tables: Sequence[PgTable]) -> None:
    for table in tables:
        try:
            run(conn, f"ALTER PUBLICATION {quote_name(name)} ADD TABLE {_target(table)}", where=name)
        except ServerError as error:
            # Added by another worker between our look and this command.
            if error.sqlstate != _DUPLICATE_OBJECT:
                raise


def _target(table: PgTable) -> str:
    # ONLY: inheritance children are tables of their own, matched by their own names. Partitions always come along.
    only = "ONLY " if table.kind == "r" else ""
    return only + quote_name(table.schema, table.name)


def _existing(conn: Connection, name: str) -> Publication:
    found = find_publication(conn, name)
    if found is None:
        raise PublicationMissingError("the publication was dropped meanwhile", where=name, advice=BOOTSTRAP)
    return found
