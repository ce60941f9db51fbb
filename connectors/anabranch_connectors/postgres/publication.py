"""One publication as one transaction of the target.

1. fence by the epoch row
2. recount the receipted rows
3. truncates: drop what is staged from before them, empty the tables
4. complete rows whose cells are missing
5. deletes, children first
6. inserts and updates, parents first
7. progress and safe time

With units, 3 to 6 happen for each unit in turn under a savepoint of its own, and a refused one is set aside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from anabranch_connectors.api import Publication, StagedTable, Truncation, Unit
from anabranch_connectors.postgres import merge_sql, sink_tables
from anabranch_connectors.postgres.merge_sql import Merge, Scope
from anabranch_connectors.postgres.refusals import translated
from anabranch_connectors.postgres.target_tables import parents_first
from anabranch_connectors.target_errors import PartialRowMissingError, StagingLostError, TargetConstraintError
from anabranch_schemas import failpoints


@dataclass(frozen=True, slots=True)
class Step:
    """One version of the cut: what is staged of it and how it is merged."""

    staged: StagedTable
    merge: Merge


class PublishingTransaction:
    """Runs one publication on an idle connection in autocommit mode."""

    def __init__(self, connection: psycopg.Connection, sink: str, epoch: int, *, as_replica: bool) -> None:
        self._connection = connection
        self._sink = sink
        self._epoch = epoch
        self._as_replica = as_replica

    def run(self, publication: Publication, steps: Sequence[Step], merges: Mapping[int, Merge]) -> int:
        """Apply everything and commit; return how many units were set aside. `merges` are those of all versions."""
        parked = 0
        with self._connection.transaction():
            # 1.
            sink_tables.fence(self._connection, self._sink, self._epoch)
            if steps or publication.truncations:
                self._suspend_triggers()
                # 2.
                for step in steps:
                    self._recount(step)
                ordered = _in_order(steps)
                if publication.units is None:
                    truncations = _latest(publication.truncations)
                    self._apply(ordered, truncations, merges, Scope.ATTEMPTS, {})
                else:
                    parked = self._apply_units(publication, ordered, merges)
            # 7.
            sink_tables.advance(self._connection, self._sink, publication.progress)
            failpoints.hit("sink.before_commit")
        failpoints.hit("sink.after_commit")
        return parked

    def _suspend_triggers(self) -> None:
        """Keep triggers and foreign keys from acting: their effects are in the stream. Else check them at the end."""
        if self._as_replica:
            self._connection.execute("SET LOCAL session_replication_role = replica")
        else:
            self._connection.execute("SET CONSTRAINTS ALL DEFERRED")

    def _recount(self, step: Step) -> None:
        row = self._connection.execute(
            merge_sql.recount(step.merge), {"attempts": list(step.staged.attempts)}
        ).fetchone()
        if row != (step.staged.rows,):
            raise StagingLostError(
                f"{row[0] if row else 0} of {step.staged.rows} rows are still staged; the cut is staged again",
                where=step.merge.target.path,
            )

    def _apply_units(self, publication: Publication, steps: Sequence[Step], merges: Mapping[int, Merge]) -> int:
        parked = 0
        for step in steps:
            self._connection.execute(f"ANALYZE {step.merge.staging.identifier.as_string(None)}")
        for unit in publication.units or ():
            parameters = {"seq": unit.seq, "ordinal": unit.ordinal}
            scope = Scope.TRANSACTION if unit.ordinal is None else Scope.COPIED_ROW
            truncations = [t for t in publication.truncations if t.seq == unit.seq and unit.ordinal is None]
            try:
                with self._connection.transaction():
                    self._apply(steps, _latest(truncations), merges, scope, parameters)
                    if not self._as_replica:
                        self._connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
                        self._connection.execute("SET CONSTRAINTS ALL DEFERRED")
            except psycopg.errors.IntegrityError as error:
                refusal = _placed(translated(error, self._sink), unit)
                if not publication.park:
                    raise refusal from error
                sink_tables.quarantine(self._connection, self._sink, unit, refusal)
                parked += 1
        return parked

    def _apply(
        self,
        steps: Sequence[Step],
        truncations: Sequence[Truncation],
        merges: Mapping[int, Merge],
        scope: Scope,
        parameters: Mapping[str, Any],
    ) -> None:
        # 3.
        self._truncate(steps, truncations, merges)
        # 4.
        for step in steps:
            if step.staged.cells:
                self._complete(step, scope, parameters)
        # 5.
        for step in reversed(steps):
            merge, repeated = step.merge, step.staged.repeated
            self._execute(step, parameters, merge_sql.delete(merge, scope, repeated=repeated, every=merge.replaces))
        # 6.
        for step in steps:
            self._insert(step, scope, parameters)

    def _truncate(self, steps: Sequence[Step], truncations: Sequence[Truncation], merges: Mapping[int, Merge]) -> None:
        emptied = {merges[t.version].target.oid: t for t in truncations}
        if not emptied:
            return
        for step in steps:
            truncation = emptied.get(step.merge.target.oid)
            if truncation is not None:
                position = {"seq": truncation.seq, "ordinal": truncation.ordinal}
                self._execute(step, position, merge_sql.drop_older(step.merge))
        targets = {merges[t.version].target.oid: merges[t.version].target for t in truncations}
        for target in reversed(parents_first(list(targets.values()))):
            self._connection.execute(merge_sql.empty(target))

    def _complete(self, step: Step, scope: Scope, parameters: Mapping[str, Any]) -> None:
        merge = step.merge
        # A column that the target generates needs no value; whether its cell is there does not matter.
        for at, name in merge.pairs:
            self._execute(step, parameters, merge_sql.fill_texts(merge, at))
            if step.staged.repeated:
                self._execute(step, parameters, merge_sql.fill_from_staged(merge, at))
            self._execute(step, parameters, merge_sql.fill_from_target(merge, at, name, scope))
        orphan = self._execute(step, parameters, merge_sql.orphans(merge, scope)).fetchone()
        if orphan is not None:
            raise PartialRowMissingError(
                "a row came without its unchanged large columns, and the target has no row to take them from "
                f"(partition {orphan[0]} offset {orphan[1]})",
                where=merge.target.path,
                advice="set REPLICA IDENTITY FULL for the table at the source, then run "
                "`anabranch bootstrap FILE --source NAME` to copy it anew",
            )

    def _insert(self, step: Step, scope: Scope, parameters: Mapping[str, Any]) -> None:
        """Insert and update; where unique values changed hands within the cut, delete its keys first and insert."""
        merge, repeated = step.merge, step.staged.repeated
        if merge.replaces:
            self._execute(step, parameters, merge_sql.insert(merge, scope, repeated=repeated, conflict=False))
            return
        upsert = merge_sql.insert(merge, scope, repeated=repeated, conflict=True)
        # Without replica role, deleting a referenced row would be refused or would cascade.
        if not merge.may_swap or (merge.target.referenced and not self._as_replica):
            self._execute(step, parameters, upsert)
            return
        try:
            with self._connection.transaction():
                self._execute(step, parameters, upsert)
        except (psycopg.errors.UniqueViolation, psycopg.errors.ExclusionViolation):
            self._execute(step, parameters, merge_sql.delete(merge, scope, repeated=repeated, every=True))
            self._execute(step, parameters, merge_sql.insert(merge, scope, repeated=repeated, conflict=False))

    def _execute(self, step: Step, parameters: Mapping[str, Any], statement: Any) -> psycopg.Cursor[Any]:
        return self._connection.execute(statement, {**parameters, "attempts": list(step.staged.attempts)})


def _in_order(steps: Sequence[Step]) -> list[Step]:
    """Order steps parents first; of one table's versions the older schema first."""
    by_table: dict[int, list[Step]] = {}
    for step in steps:
        by_table.setdefault(step.merge.target.oid, []).append(step)
    tables = parents_first([found[0].merge.target for found in by_table.values()])
    return [step for table in tables for step in by_table[table.oid]]


def _latest(truncations: Sequence[Truncation]) -> list[Truncation]:
    """Return the last truncate of each version; those before it no longer matter."""
    latest: dict[int, Truncation] = {}
    for truncation in sorted(truncations):
        latest[truncation.version] = truncation
    return list(latest.values())


def _placed(refusal: TargetConstraintError, unit: Unit) -> TargetConstraintError:
    """Return the refusal with the place of the unit that it is about."""
    places = ", ".join(f"{topic}[{partition}] {first}..{last}" for topic, partition, first, last in _first(unit.places))
    what = "transaction" if unit.ordinal is None else "copied row"
    return TargetConstraintError(
        f"{refusal.message}; {what} at seq {unit.seq} (txid {unit.txid}) "
        f"of {unit.stream} marker {unit.marker}: {places}",
        where=refusal.where,
        advice=refusal.advice,
        constraint=refusal.constraint,
        sqlstate=refusal.sqlstate,
    )


def _first(places: Sequence[tuple[str, int, int, int]]) -> Iterator[tuple[str, int, int, int]]:
    yield from places[:5]
