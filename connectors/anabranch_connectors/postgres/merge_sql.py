"""The statements that bring staged rows into a table. Pure: from descriptions to SQL.

Parameters: `attempts` (bigint[]), and for one unit `seq` and `ordinal`. The staging is always `s`, the target `t`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from psycopg import sql

from anabranch_connectors.postgres.staging import StagingTable
from anabranch_connectors.postgres.target_tables import TargetTable, type_sql
from anabranch_connectors.target_errors import SchemaMismatchError


class Scope(Enum):
    """Which staged rows a statement is about."""

    ATTEMPTS = "s._attempt = ANY(%(attempts)s)"
    """Every row that the receipts name."""
    TRANSACTION = "s._attempt = ANY(%(attempts)s) AND s._seq = %(seq)s AND s._op <> 'r'"
    """Those of one source transaction."""
    COPIED_ROW = "s._attempt = ANY(%(attempts)s) AND s._seq = %(seq)s AND s._op = 'r' AND s._ordinal = %(ordinal)s"
    """One row of the copy phase."""


@dataclass(frozen=True, slots=True)
class Merge:
    """One staging table and the target table that its rows go to, column by column."""

    staging: StagingTable
    target: TargetTable
    pairs: tuple[tuple[int, str], ...]
    """(staging column, target column) of what is written; generated columns of the target are left out."""
    key: tuple[tuple[int, str], ...]
    """The same for the key."""

    @property
    def replaces(self) -> bool:
        """Tell whether rows must be deleted and inserted because they cannot be updated in place.

        So it is without an index that ON CONFLICT could name, and with GENERATED ALWAYS identities beside the key.
        """
        names = {name for _, name in self.key}
        always = any(self.target.columns[name].identity == "a" for _, name in self.pairs if name not in names)
        return always or not self.target.has_arbiter(tuple(names))

    @property
    def may_swap(self) -> bool:
        """Tell whether unique values may change hands within a cut: there are further unique indexes."""
        return self.target.other_unique([name for _, name in self.key])


def plan(staging: StagingTable, target: TargetTable) -> Merge:
    """Match the columns of a version with those of its target.

    Raises:
        SchemaMismatchError: if the target lacks a column, or generates a key column.
    """
    missing = [name for name in staging.columns if name not in target.columns]
    if missing:
        raise SchemaMismatchError(
            f"the target has no column {', '.join(missing)}",
            where=target.path,
            advice="add the column at the target with the source's type, or leave it out at the source",
        )
    pairs = [(at, name) for at, name in enumerate(staging.columns) if not target.columns[name].generated]
    key = tuple((at, staging.columns[at]) for at in staging.key)
    if not key or any(target.columns[name].generated for _, name in key):
        raise SchemaMismatchError(
            "rows of the table cannot be told apart: there is no key, or the target generates it",
            where=target.path,
            advice="give the table a primary key, or name key columns at the source",
        )
    return Merge(staging, target, tuple(pairs), key)


def recount(merge: Merge) -> sql.Composed:
    """Count the rows of the attempts."""
    return sql.SQL("SELECT count(*) FROM {} s WHERE {}").format(merge.staging.identifier, _where(Scope.ATTEMPTS))


def drop_older(merge: Merge) -> sql.Composed:
    """Delete staged rows that a truncate at (seq, ordinal) came after."""
    return sql.SQL("DELETE FROM {} s WHERE {} AND (s._seq, s._ordinal) < (%(seq)s, %(ordinal)s)").format(
        merge.staging.identifier, _where(Scope.ATTEMPTS)
    )


def empty(target: TargetTable) -> sql.Composed:
    """Delete all rows. TRUNCATE would tear: readers with an older snapshot would find the table empty."""
    return sql.SQL("DELETE FROM {}").format(target.identifier)


def fill_texts(merge: Merge, column: int) -> sql.Composed:
    """Set a staged column where `_cells` has its text."""
    return sql.SQL(
        "UPDATE {staging} s SET {column} = (s._cells ->> {index})::{type} "
        "WHERE s._attempt = ANY(%(attempts)s) AND s._cells ->> {index} IS NOT NULL"
    ).format(
        staging=merge.staging.identifier,
        column=_staged(column),
        index=sql.Literal(str(column)),
        type=type_sql(merge.staging.types[column]),
    )


def fill_from_staged(merge: Merge, column: int) -> sql.Composed:
    """Set a missing staged column from the newest earlier staged image of the key that has it."""
    return sql.SQL(
        "UPDATE {staging} s SET {column} = o.{column}, _cells = s._cells - {index} FROM {staging} o "
        "WHERE s._attempt = ANY(%(attempts)s) AND s._cells ? {index} AND s._cells ->> {index} IS NULL "
        "AND o.ctid = (SELECT p.ctid FROM {staging} p WHERE p._attempt = s._attempt AND {same} "
        "AND p._offset < s._offset AND p._op <> 'd' AND NOT coalesce(p._cells ? {index}, false) "
        "ORDER BY p._offset DESC LIMIT 1)"
    ).format(
        staging=merge.staging.identifier,
        column=_staged(column),
        index=sql.Literal(str(column)),
        same=sql.SQL(" AND ").join(sql.SQL("p.{0} = s.{0}").format(_staged(at)) for at, _ in merge.key),
    )


def fill_from_target(merge: Merge, column: int, name: str, scope: Scope) -> sql.Composed:
    """Set a missing staged column from the target's row."""
    return sql.SQL(
        "UPDATE {staging} s SET {column} = t.{name}::{type} FROM {target} t "
        "WHERE {where} AND s._cells ? {index} AND s._cells ->> {index} IS NULL AND {same}"
    ).format(
        staging=merge.staging.identifier,
        column=_staged(column),
        name=sql.Identifier(name),
        type=type_sql(merge.staging.types[column]),
        target=merge.target.identifier,
        where=_where(scope),
        index=sql.Literal(str(column)),
        same=_same_key(merge),
    )


def orphans(merge: Merge, scope: Scope) -> sql.Composed:
    """Find a row with missing columns and no row at the target: (partition, offset)."""
    return sql.SQL(
        "SELECT s._partition, s._offset FROM {source} s WHERE EXISTS (SELECT FROM jsonb_each(s._cells) e "
        "WHERE e.value = 'null') AND NOT EXISTS (SELECT FROM {target} t WHERE {same}) LIMIT 1"
    ).format(
        source=_newest(merge, scope, repeated=True),
        target=merge.target.identifier,
        same=_same_key(merge),
    )


def delete(merge: Merge, scope: Scope, *, repeated: bool, every: bool) -> sql.Composed:
    """Delete the target rows of staged deletes, or with `every` those of all staged keys."""
    condition = sql.SQL("") if every else sql.SQL(" AND s._op = 'd'")
    return sql.SQL("DELETE FROM {target} t USING {source} s WHERE {same}{condition}").format(
        target=merge.target.identifier,
        source=_newest(merge, scope, repeated=repeated),
        same=_same_key(merge),
        condition=condition,
    )


def insert(merge: Merge, scope: Scope, *, repeated: bool, conflict: bool) -> sql.Composed:
    """Insert staged rows in key order (which keeps index pages warm); with `conflict` update those that exist."""
    names = [name for _, name in merge.pairs]
    key = [name for _, name in merge.key]
    statement = sql.SQL(
        "INSERT INTO {target} ({columns}) OVERRIDING SYSTEM VALUE SELECT {values} FROM {source} s "
        "WHERE s._op <> 'd' ORDER BY {order}"
    ).format(
        target=merge.target.identifier,
        columns=_list(names),
        values=sql.SQL(", ").join(_cast(merge, at, name) for at, name in merge.pairs),
        source=_newest(merge, scope, repeated=repeated),
        order=sql.SQL(", ").join(sql.SQL("s.{}").format(_staged(at)) for at, _ in merge.key),
    )
    if not conflict:
        return statement
    others = [name for name in names if name not in key]
    if not others:
        return statement + sql.SQL(" ON CONFLICT ({}) DO NOTHING").format(_list(key))
    updates = sql.SQL(", ").join(sql.SQL("{0} = excluded.{0}").format(sql.Identifier(name)) for name in others)
    return statement + sql.SQL(" ON CONFLICT ({}) DO UPDATE SET {}").format(_list(key), updates)


def _newest(merge: Merge, scope: Scope, *, repeated: bool) -> sql.Composed:
    """Return the staged rows of a scope as a subquery; of a repeated key only the newest."""
    if not repeated:
        return sql.SQL("(SELECT * FROM {} s WHERE {})").format(merge.staging.identifier, _where(scope))
    key = sql.SQL(", ").join(sql.SQL("s.{}").format(_staged(at)) for at, _ in merge.key)
    return sql.SQL(
        "(SELECT DISTINCT ON ({key}) * FROM {staging} s WHERE {where} ORDER BY {key}, s._offset DESC)"
    ).format(key=key, staging=merge.staging.identifier, where=_where(scope))


def _same_key(merge: Merge) -> sql.Composed:
    return sql.SQL(" AND ").join(
        sql.SQL("t.{} = {}").format(sql.Identifier(name), _cast(merge, at, name)) for at, name in merge.key
    )


def _cast(merge: Merge, at: int, name: str) -> sql.Composed:
    return sql.SQL("s.{}::{}").format(_staged(at), type_sql(merge.target.columns[name].type))


def _where(scope: Scope) -> sql.SQL:
    return sql.SQL(scope.value)


def _staged(at: int) -> sql.Identifier:
    return sql.Identifier(f"c{at}")


def _list(names: Sequence[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, names))
