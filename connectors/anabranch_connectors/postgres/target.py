"""The target part of PostgreSQL: fencing, staging and publishing.

Two connections, because one cut is prepared while the one before is published: a connection does one thing at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql

from anabranch_connectors.api import Applied, Buffer, Publication, RoutedVersion
from anabranch_connectors.postgres import merge_sql, sink_tables, target_tables
from anabranch_connectors.postgres.merge_sql import Merge
from anabranch_connectors.postgres.publication import PublishingTransaction, Step
from anabranch_connectors.postgres.refusals import translated
from anabranch_connectors.postgres.staging import PostgresStaging, StagingTable, staging_table
from anabranch_connectors.target_errors import TableMissingError, TargetError
from anabranch_schemas.envelope.avro import read_table

# A scan passes 20,000 dead rows in some 5 ms; emptying a table costs about as much.
_STAGED_MAX = 20_000


class PostgresTarget:
    """`TargetPart` of PostgreSQL."""

    def __init__(self, dsn: str, sink: str, *, create: bool = False) -> None:
        self._dsn = dsn
        self._sink = sink
        self._create = create
        self._connection: psycopg.Connection | None = None
        self._preparing: psycopg.Connection | None = None
        self._epoch = 0
        self._as_replica = False
        self._prepared: dict[str, StagingTable] = {}
        self._merges: dict[tuple[str, str, str], Merge] = {}
        self._staged_rows: dict[str, int] = {}

    def acquire(self, streams: Sequence[str]) -> Mapping[str, Applied]:
        """Connect, make the sink's tables, raise the epoch, and return the progress of the streams.

        Raises:
            TargetUnavailableError: if no connection can be made.
        """
        with self._translating():
            self._close()
            name = f"anabranch {self._sink}"
            self._connection = psycopg.connect(self._dsn, autocommit=True, application_name=name)
            self._preparing = psycopg.connect(self._dsn, autocommit=True, application_name=f"{name} prepare")
            # Sorting a cut by key: 200,000 rows of 150 bytes are 30 MB and should not go to disk.
            self._connection.execute("SET work_mem = '64MB'")
            sink_tables.create(self._connection)
            self._epoch = sink_tables.take_epoch(self._connection, self._sink)
            self._as_replica = self._may_act_as_replica(self._connection)
            self._prepared.clear()
            self._merges.clear()
            return sink_tables.applied(self._connection, streams)

    @staticmethod
    def _may_act_as_replica(connection: psycopg.Connection) -> bool:
        try:
            with connection.transaction():
                connection.execute("SET LOCAL session_replication_role = replica")
        except psycopg.errors.InsufficientPrivilege:
            return False
        return True

    def prepare(self, versions: Sequence[RoutedVersion], buffer: Buffer = 0) -> PostgresStaging:
        """Make staging, and with `create` missing tables, for these versions.

        Raises:
            TableMissingError, SchemaMismatchError: if a target table cannot take the rows.
        """
        assert self._preparing is not None, "acquire comes first"
        with self._translating():
            tables = [self._prepare(self._preparing, version, buffer) for version in versions]
        return PostgresStaging(self._dsn, tables, versions)

    def _prepare(self, connection: psycopg.Connection, version: RoutedVersion, buffer: Buffer) -> StagingTable:
        table = staging_table(self._sink, version, buffer)
        if table.name not in self._prepared:
            connection.execute(table.create())
            # What a driver before us left there counts for nobody.
            self._empty(connection, table)
            self._prepared[table.name] = table
        self._merge(connection, version, buffer)
        return table

    def _merge(self, connection: psycopg.Connection, version: RoutedVersion, buffer: Buffer) -> Merge:
        staging = staging_table(self._sink, version, buffer)
        place = (staging.name, version.target_schema, version.target_table)
        found = self._merges.get(place)
        if found is None:
            found = self._merges[place] = merge_sql.plan(staging, self._target(connection, version))
        return found

    def _target(self, connection: psycopg.Connection, version: RoutedVersion) -> target_tables.TargetTable:
        schema, name = version.target_schema, version.target_table
        found = target_tables.load(connection, schema, name)
        if found is None and self._create:
            source = read_table(json.loads(version.value_schema), json.loads(version.key_schema))
            target_tables.create(connection, source, schema, name)
            found = target_tables.load(connection, schema, name)
        if found is None:
            raise TableMissingError(
                f"the target has no table for the source's {version.version.table}",
                where=f"{schema}.{name}",
                advice="create it, set `create: true` for the sink, or map it to another table",
            )
        return found

    def publish(self, publication: Publication) -> int:
        """Apply a publication in one transaction."""
        assert self._connection is not None, "acquire comes first"
        connection, buffer = self._connection, publication.buffer
        transaction = PublishingTransaction(connection, self._sink, self._epoch, as_replica=self._as_replica)
        try:
            with self._translating():
                merges = {at: self._merge(connection, v, buffer) for at, v in enumerate(publication.versions)}
                steps = [Step(staged, merges[staged.version]) for staged in publication.staged]
                parked = transaction.run(publication, steps, merges)
        except TargetError:
            # The tables may have changed since they were looked at: look again at the next attempt.
            self._merges.clear()
            raise
        self._clean(connection, steps)
        return parked

    def _clean(self, connection: psycopg.Connection, steps: Sequence[Step]) -> None:
        """Empty staging tables that have grown."""
        for step in steps:
            name = step.merge.staging.name
            self._staged_rows[name] = self._staged_rows.get(name, 0) + step.staged.rows
            if self._staged_rows[name] >= _STAGED_MAX:
                self._empty(connection, step.merge.staging)

    def _empty(self, connection: psycopg.Connection, staging: StagingTable) -> None:
        try:
            with connection.transaction():
                # A zombie's COPY in progress may hold the table; then the next cut tries again.
                connection.execute("SET LOCAL lock_timeout = '200ms'")
                connection.execute(sql.SQL("TRUNCATE {}").format(staging.identifier))
            self._staged_rows[staging.name] = 0
        except psycopg.Error:
            # Housekeeping: what is committed stays so, and a broken connection shows at the next cut.
            return

    def release(self, error: Mapping[str, Any] | None) -> None:
        """Record how the driver ended and close."""
        if self._connection is None:
            return
        try:
            sink_tables.record_end(self._connection, self._sink, self._epoch, error)
        except psycopg.Error:
            # The target is gone; what ended the driver is the news, not this.
            return
        finally:
            self._close()

    def _close(self) -> None:
        for connection in (self._connection, self._preparing):
            if connection is not None:
                connection.close()
        self._connection = self._preparing = None

    @contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise translated(error, self._sink) from error
