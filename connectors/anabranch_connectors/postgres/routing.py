"""Routes for the versions of a stream's tables: what the log calls a relation, as topic, schema ids and encoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from anabranch_connectors.postgres import catalog
from anabranch_connectors.postgres.control import Connection
from anabranch_connectors.postgres.decode import compile_decoder
from anabranch_connectors.postgres.encode import compile_encoder
from anabranch_connectors.postgres.envelope import SOURCE_SCHEMA, EnvelopeTail
from anabranch_connectors.postgres.mapping import table_schema
from anabranch_connectors.postgres.pgtable import PgColumn, PgTable
from anabranch_connectors.postgres.stream import Relation, TableRoute
from anabranch_connectors.source_part import Router
from anabranch_schemas.envelope.avro import envelope_schema, key_schema
from anabranch_schemas.errors import TypeMappingError
from anabranch_schemas.registry import frame
from anabranch_schemas.table import TableSchema
from anabranch_schemas.types import Opaque


class Routing:
    """Knows the stream's tables and gives each version of them its route, once."""

    def __init__(
        self,
        tables: dict[str, PgTable],
        *,
        connection: Connection,
        prefix: str,
        router: Router,
        tail: EnvelopeTail,
        as_text: Callable[[int, bytes], str],
        unknown_types: str,
    ) -> None:
        self.tables = tables
        self._connection = connection
        self._prefix = prefix
        self._router = router
        self._tail = tail
        self._as_text = as_text
        self._unknown_types = unknown_types
        self._routes: dict[PgTable, TableRoute] = {}

    def relation(self, relation: Relation) -> TableRoute | None:
        """Return the route of a relation as the log describes it; None if the stream does not want its rows."""
        table = self.tables.get(f"{relation.schema}.{relation.name}")
        if table is None:
            return None
        logged = self._as_logged(table, relation)
        self.tables[table.path] = logged
        return self.table(logged)

    def table(self, table: PgTable) -> TableRoute:
        """Return the route of a table."""
        route = self._routes.get(table)
        if route is None:
            route = self._routes[table] = self._make(table)
        return route

    def _make(self, table: PgTable) -> TableRoute:
        shape = table_schema(table)
        self._refuse_unknown(shape)
        key = key_schema(shape, self._prefix)
        value = envelope_schema(shape, self._prefix, SOURCE_SCHEMA)
        version = self._router(shape, key, value)
        value_frame = frame(version.value_schema_id)
        return TableRoute(
            topic=version.topic,
            version=version,
            encoder=compile_encoder(
                table, key_frame=frame(version.key_schema_id), value_frame=value_frame, as_text=self._as_text
            ),
            piece=self._tail.table(table.schema, table.name),
            value_frame=value_frame,
            key_fields=compile_decoder(value, key).key_fields,
        )

    def _as_logged(self, table: PgTable, relation: Relation) -> PgTable:
        """Return the table with the columns that the log has at this point, which may be older than the catalog.

        What the log does not say (whether a column may be null) is taken from the catalog where the column is there.
        """
        known = {column.name: column for column in table.columns}
        described = [(c.name, c.type.oid, c.type.typmod) for c in table.published_columns]
        if described == list(relation.columns):
            return table
        fresh = {c.name: c for c in self._catalog_columns(relation)}
        known = {**known, **fresh}
        types = catalog.load_types(self._connection, {(oid, typmod) for _, oid, typmod in relation.columns})
        columns = []
        for name, oid, typmod in relation.columns:
            found = known.get(name)
            same = found is not None and (found.type.oid, found.type.typmod) == (oid, typmod)
            nullable = found.nullable if same and found is not None else name not in table.key
            columns.append(PgColumn(name, types[oid, typmod], nullable))
        return replace(table, columns=tuple(columns))

    def _catalog_columns(self, relation: Relation) -> tuple[PgColumn, ...]:
        found = catalog.load_tables(self._connection, [f"{relation.schema}.{relation.name}"], {})
        return found[0].columns if found else ()

    def _refuse_unknown(self, table: TableSchema) -> None:
        if self._unknown_types != "fail":
            return
        for column in table.columns:
            if isinstance(column.type, Opaque):
                raise TypeMappingError(
                    f"the column has the type {column.source_type}, which has no mapping of its own",
                    where=f"{table.path}.{column.name}",
                    advice="set unknown.types: text to carry its text with the type's name",
                )
