"""The task: reads its partitions, checks and reduces them, stages the winners, and answers with one receipt.

A task may run twice or at the same time twice; every attempt draws a number of its own, stages under it, and counts
only if its receipt reaches the driver.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter

import numpy as np
from pyspark import SparkContext
from pyspark.serializers import CPickleSerializer

from anabranch_connectors.api import RoutedVersion, StagedRows, StagingPart
from anabranch_schemas import failpoints
from anabranch_schemas.errors import AnabranchError
from anabranch_schemas.stamp import Op
from anabranch_sink.errors import KafkaReadError, VersionUnknownError
from anabranch_sink.ranges import MarkedRange
from anabranch_sink.read import BATCH, RangeReader
from anabranch_sink.reduce import Reducer, UnitFacts, Winners

# Rows held before they are staged: with Avro of 150 to 1,000 bytes 40 to 260 MB a task. A cut of the default budget
# stays below it; only a transaction greater than the budget stages a key more than once.
_HELD_MAX = 262_144
_HELD_BYTES_MAX = 128 << 20
# A task costs some 10 ms: below this many records a second one is not worth it.
_TASK_ROWS_MIN = 4_000

Place = tuple[str, int]
"""(topic, partition)"""


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """What every task of a cut knows."""

    kafka: Mapping[str, str]
    group: str
    ranges: tuple[MarkedRange, ...]
    versions: tuple[RoutedVersion, ...]
    staging: StagingPart
    per_unit: bool
    driver_pid: int
    held_max: int = _HELD_MAX
    batch: int = BATCH


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one attempt staged and saw."""

    attempt: int
    staged: dict[int, tuple[int, int]]
    """Version → (rows, rows with cells)."""
    repeated: bool
    found: dict[int, tuple[int, int]]
    """Range index → (records, digest)."""
    truncations: list[tuple[int, int, int]]
    """(version, seq, ordinal)."""
    units: dict[tuple[str, int, int, int | None], UnitFacts]
    """(stream, marker, seq, ordinal of a copied row) → facts."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error of ours as a task's answer: Spark would try again, and show its text in place of its type."""

    module: str
    name: str
    facts: dict[str, str]

    def error(self) -> AnabranchError:
        """Return the error as the task raised it."""
        import importlib  # noqa: PLC0415 - only on the way down

        kind: type[AnabranchError] = getattr(importlib.import_module(self.module), self.name)
        return kind(self.facts["message"], where=self.facts["where"], advice=self.facts["advice"])


def stage(context: SparkContext, plan: TaskPlan, tasks: int) -> list[Receipt]:
    """Run the one Spark job of a cut and return the receipts of the attempts that succeeded.

    Raises whatever a task raised, as the AnabranchError that it was if it was one.
    """
    groups = grouped(plan.ranges, tasks)
    job = context.parallelize(groups, len(groups)).mapPartitions(partial(run_task, plan))
    # Not `collect`: Spark opens a socket for each, whose file the JVM remembers until it ends; half a million a day. It
    # also takes 7 ms more.
    packed = job._jrdd.collect()  # noqa: SLF001 - what `collect` itself is made of
    answers = [answer for frame in packed for answer in CPickleSerializer().loads(bytes(frame))]  # type: ignore[no-untyped-call]  # Spark's own
    for answer in answers:
        if isinstance(answer, _Failure):
            raise answer.error()
    return [answer for answer in answers if isinstance(answer, Receipt)]


def grouped(ranges: Sequence[MarkedRange], tasks: int) -> list[list[Place]]:
    """Divide the partitions that ranges lie in between at most `tasks` tasks, evenly by records."""
    weights: dict[Place, int] = {}
    for marked in ranges:
        place = marked.range.topic, marked.range.partition
        weights[place] = weights.get(place, 0) + marked.range.rows
    count = max(1, min(tasks, len(weights), sum(weights.values()) // _TASK_ROWS_MIN))
    groups: list[_Group] = [_Group() for _ in range(count)]
    for place in sorted(weights, key=lambda place: (-weights[place], place)):
        lightest = min(groups, key=lambda group: group.rows)
        lightest.places.append(place)
        lightest.rows += weights[place]
    return [group.places for group in groups]


@dataclass(slots=True)
class _Group:
    places: list[Place] = field(default_factory=list)
    rows: int = 0


def run_task(plan: TaskPlan, groups: Iterable[list[Place]]) -> Iterator[Receipt | _Failure]:
    """Do a task's work."""
    for places in groups:
        try:
            yield _Task(plan).run(places)
        except AnabranchError as error:
            # Spark tries again at once, which helps with the target; Kafka has had all the time it can be given.
            if error.action.value == "retry" and not isinstance(error, KafkaReadError):
                raise
            yield _Failure(type(error).__module__, type(error).__qualname__, error.as_dict())


_readers: dict[tuple[str, tuple[tuple[str, str], ...]], RangeReader] = {}
"""By group and properties, of this process: Spark keeps Python workers for the next task."""


def _reader(plan: TaskPlan) -> RangeReader:
    known = plan.group, tuple(sorted(plan.kafka.items()))
    reader = _readers.get(known)
    if reader is None:
        reader = _readers[known] = RangeReader(plan.kafka, plan.group, plan.batch)
    return reader


class _Task:
    def __init__(self, plan: TaskPlan) -> None:
        self._plan = plan
        self._attempt = secrets.randbits(62)
        self._by_value = {(v.version.topic, v.version.value_schema_id): i for i, v in enumerate(plan.versions)}
        self._by_key = {(v.version.topic, v.version.key_schema_id): i for i, v in enumerate(plan.versions)}
        self._staged: dict[int, tuple[int, int]] = {}
        self._takes = 0

    def run(self, places: Sequence[Place]) -> Receipt:
        mine = set(places)
        reducer = Reducer(self._plan.ranges, per_unit=self._plan.per_unit)
        ranges = [r for r in self._plan.ranges if (r.range.topic, r.range.partition) in mine]
        for records in _reader(self._plan).read(ranges):
            reducer.add(records)
            if reducer.held >= self._plan.held_max or reducer.held_bytes >= _HELD_BYTES_MAX:
                self._stage(reducer)
        self._stage(reducer)
        if failpoints.armed("sink.task_retry"):
            raise RuntimeError("failpoint sink.task_retry")
        return Receipt(
            attempt=self._attempt,
            staged=self._staged,
            repeated=self._takes > 1,
            found=reducer.found,
            truncations=[
                (self._version(self._by_value, topic, frame), seq, ordinal)
                for topic, frame, seq, ordinal in reducer.truncations
            ],
            units=reducer.units,
        )

    def _stage(self, reducer: Reducer) -> None:
        if not reducer.held:
            return
        self._takes += 1
        parts = ((v, winners, rows) for winners in reducer.take() for v, rows in self._by_version(winners))
        for version, run in groupby(parts, key=itemgetter(0)):
            self._plan.staging.write(version, (self._part(version, winners, rows) for _, winners, rows in run))
            if failpoints.armed("sink.mid_stage"):
                os.kill(self._plan.driver_pid, signal.SIGKILL)

    def _by_version(self, winners: Winners) -> Iterator[tuple[int, list[int] | None]]:
        """Split winners by version; None stands for all rows. Deletes go by the schema of their key."""
        frames = [value[:5] if value is not None else None for value in winners.values]
        deletes = winners.meta["op"] == int(Op.DELETE)
        if not deletes.any() and len(distinct := set(frames)) == 1:
            yield self._version(self._by_value, winners.topic, distinct.pop() or b""), None
            return
        by_version: dict[int, list[int]] = {}
        known: dict[tuple[bool, bytes], int] = {}
        for row, deleted in enumerate(deletes.tolist()):
            frame = winners.keys[row][:5] if deleted else frames[row] or b""
            version = known.get((deleted, frame))
            if version is None:
                table = self._by_key if deleted else self._by_value
                version = known[deleted, frame] = self._version(table, winners.topic, frame)
            by_version.setdefault(version, []).append(row)
        yield from by_version.items()

    def _version(self, table: Mapping[tuple[str, int], int], topic: str, frame: bytes) -> int:
        schema_id = int.from_bytes(frame[1:5], "big")
        version = table.get((topic, schema_id))
        if version is None:
            raise VersionUnknownError(
                f"a record is framed with schema id {schema_id}, which no marker of the cut names",
                where=topic,
                advice="nothing of the cut was applied; is something else writing this topic?",
            )
        return version

    def _part(self, version: int, winners: Winners, rows: Sequence[int] | None) -> StagedRows:
        if rows is None:
            part = StagedRows(self._attempt, winners.meta, winners.keys, winners.values, winners.cells, winners.earlier)
        else:
            place = {old: new for new, old in enumerate(rows)} if winners.cells else {}
            part = StagedRows(
                self._attempt,
                winners.meta[np.array(rows)],
                [winners.keys[row] for row in rows],
                [winners.values[row] for row in rows],
                {place[old]: cells for old, cells in winners.cells.items() if old in place},
                {place[old]: images for old, images in winners.earlier.items() if old in place},
            )
        count, cells = self._staged.get(version, (0, 0))
        self._staged[version] = count + len(part.keys), cells + len(part.cells)
        return part
