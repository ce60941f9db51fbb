"""A table as PostgreSQL's catalog describes it, resolved far enough that no later step asks the catalog again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PgType:
    """A column's type, with domains, arrays and enums resolved."""

    oid: int
    """As in pgoutput's Relation message (a domain's own oid for a domain)."""
    name: str
    """`format_type(oid, typmod)`, schema-qualified unless in pg_catalog: `numeric(10,2)`, `app.mood[]`."""
    typmod: int = -1
    kind: str = "b"
    """`pg_type.typtype`: b base, e enum, d domain, c composite, r range, m multirange; arrays are b with `element`."""
    base: PgType | None = None
    """What a domain is over."""
    element: PgType | None = None
    """What an array holds."""
    labels: tuple[str, ...] = ()
    """An enum's labels in their order."""


@dataclass(frozen=True, slots=True)
class PgColumn:
    """One column, in attnum order, dropped ones left out."""

    name: str
    type: PgType
    nullable: bool
    generated: bool = False
    identity: str = ""
    """`a` GENERATED ALWAYS, `d` BY DEFAULT, empty if not an identity column."""
    collation_is_c: bool = True
    """Whether text compares by bytes (also true for types without a collation)."""


@dataclass(frozen=True, slots=True)
class PgTable:
    """One table of a publication, or a target."""

    oid: int
    schema: str
    name: str
    columns: tuple[PgColumn, ...]
    key: tuple[str, ...]
    """Names of the key columns in key order: primary key, else the replica identity index, else `key.columns`."""
    replica_identity: str = "d"
    """d default, n nothing, f full, i index."""
    kind: str = "r"
    """r ordinary, p partitioned."""

    @property
    def path(self) -> str:
        """`schema.table`."""
        return f"{self.schema}.{self.name}"

    @property
    def published_columns(self) -> tuple[PgColumn, ...]:
        """The columns that travel: generated ones are computed again at the target."""
        return tuple(column for column in self.columns if not column.generated)
