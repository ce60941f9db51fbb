"""The task: reads its partitions, checks and reduces them, stages the winners, and answers with one receipt.

A task may run twice or at the same time twice; every attempt draws a number of its own, stages under it, and counts
only if its receipt reaches the driver.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame

from anabranch_connectors.api import RoutedVersion, StagedRows, StagingPart
from anabranch_schemas import failpoints
from anabranch_schemas.errors import AnabranchError
from anabranch_schemas.stamp import Op
from anabranch_sink.errors import VersionUnknownError
from anabranch_sink.ranges import MarkedRange
from anabranch_sink.reduce import Reducer, Winners

# Rows held before they are staged: with Avro of 150 to 1,000 bytes 40 to 260 MB a task. A cut of the default budget
# stays below it; only a transaction greater than the budget stages a key more than once.
_HELD_MAX = 262_144
_SCHEMA = "receipt binary"


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """What every task of a cut knows."""

    ranges: tuple[MarkedRange, ...]
    versions: tuple[RoutedVersion, ...]
    staging: StagingPart
    per_unit: bool
    driver_pid: int
    held_max: int = _HELD_MAX


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
    units: list[tuple[str, int, int, int | None, int, int, list[tuple[str, int, int, int]]]]
    """(stream, marker, seq, ordinal of a copied row, hlc, txid, places)."""


def stage(frame: DataFrame, plan: TaskPlan) -> list[Receipt]:
    """Run the one Spark job of a cut and return the receipts of the attempts that succeeded.

    Raises whatever a task raised, as the AnabranchError that it was if it was one.
    """
    rows = frame.mapInArrow(partial(run_task, plan), _SCHEMA).collect()
    answers: list[dict[str, Any]] = [json.loads(bytes(row.receipt)) for row in rows]
    for answer in answers:
        if "error" in answer:
            raise _rebuilt(answer["error"])
    return [_receipt(answer) for answer in answers]


def run_task(plan: TaskPlan, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Do a task's work; an error of ours travels as the answer: Spark would try again and show its text."""
    try:
        answer = _Task(plan).run(batches)
    except AnabranchError as error:
        if error.action.value == "retry":
            raise
        answer = {"error": {"type": f"{type(error).__module__}:{type(error).__qualname__}", **error.as_dict()}}
    yield pa.RecordBatch.from_pydict({"receipt": pa.array([json.dumps(answer).encode()], pa.binary())})


class _Task:
    def __init__(self, plan: TaskPlan) -> None:
        self._plan = plan
        self._attempt = secrets.randbits(62)
        self._by_value = {(v.version.topic, v.version.value_schema_id): i for i, v in enumerate(plan.versions)}
        self._by_key = {(v.version.topic, v.version.key_schema_id): i for i, v in enumerate(plan.versions)}
        self._staged: dict[int, tuple[int, int]] = {}
        self._takes = 0

    def run(self, batches: Iterator[pa.RecordBatch]) -> dict[str, Any]:
        reducer = Reducer(self._plan.ranges, per_unit=self._plan.per_unit)
        for batch in batches:
            reducer.add(batch)
            if reducer.held >= self._plan.held_max:
                self._stage(reducer)
        self._stage(reducer)
        if failpoints.armed("sink.task_retry"):
            raise RuntimeError("failpoint sink.task_retry")
        return {
            "attempt": self._attempt,
            "staged": list(self._staged.items()),
            "repeated": self._takes > 1,
            "found": list(reducer.found.items()),
            "truncations": [
                (self._version(self._by_value, topic, frame), seq, ordinal)
                for topic, frame, seq, ordinal in reducer.truncations
            ],
            "units": [
                (*unit, facts.hlc, facts.txid, [(*place, *extent) for place, extent in facts.places.items()])
                for unit, facts in reducer.units.items()
            ],
        }

    def _stage(self, reducer: Reducer) -> None:
        if not reducer.held:
            return
        self._takes += 1
        for winners in reducer.take():
            for version, rows in self._by_version(winners):
                self._write(version, winners, rows)
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

    def _write(self, version: int, winners: Winners, rows: Sequence[int] | None) -> None:
        if rows is None:
            part = StagedRows(
                version, self._attempt, winners.meta, winners.keys, winners.values, winners.cells, winners.earlier
            )
        else:
            place = {old: new for new, old in enumerate(rows)} if winners.cells else {}
            part = StagedRows(
                version,
                self._attempt,
                winners.meta[np.array(rows)],
                [winners.keys[row] for row in rows],
                [winners.values[row] for row in rows],
                {place[old]: cells for old, cells in winners.cells.items() if old in place},
                {place[old]: images for old, images in winners.earlier.items() if old in place},
            )
        self._plan.staging.write(part)
        count, cells = self._staged.get(version, (0, 0))
        self._staged[version] = count + len(part.keys), cells + len(part.cells)


def _receipt(answer: Mapping[str, Any]) -> Receipt:
    return Receipt(
        attempt=answer["attempt"],
        staged={version: (rows, cells) for version, (rows, cells) in answer["staged"]},
        repeated=answer["repeated"],
        found={index: (rows, digest) for index, (rows, digest) in answer["found"]},
        truncations=[tuple(truncation) for truncation in answer["truncations"]],
        units=[(*unit[:6], [tuple(place) for place in unit[6]]) for unit in answer["units"]],
    )


def _rebuilt(error: Mapping[str, str]) -> AnabranchError:
    """Return the error that a task answered with."""
    import importlib  # noqa: PLC0415 - only on the way down

    module, _, name = error["type"].partition(":")
    kind: type[AnabranchError] = getattr(importlib.import_module(module), name)
    return kind(error["message"], where=error["where"], advice=error["advice"])
