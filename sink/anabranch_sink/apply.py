"""Applies cut after cut: the steps of a micro-batch, without the micro-batch.

1. progress (kept from the last cut; read from the target when the sink starts or has lost it)
2. choose the cut
3. read its ranges       (in the tasks)
4. filter and check      (in the tasks; counts are compared in the driver)
5. reduce                (in the tasks)
6. stage                 (in the tasks)
7. publish
8. report

One cut is published while the next is staged; both wait for their turn to be published, and fail in order.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import structlog
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from anabranch_connectors.api import Applied, Buffer, Publication, RoutedVersion, TargetPart
from anabranch_connectors.target_errors import StagingLostError, TargetBusyError, TargetConstraintError
from anabranch_schemas import failpoints
from anabranch_schemas.errors import AnabranchError
from anabranch_schemas.marker import TableVersion
from anabranch_sink import publish, ranges, stage
from anabranch_sink.config import SinkConfig, parallelism
from anabranch_sink.cut import Cut, choose
from anabranch_sink.errors import JobFailedError
from anabranch_sink.markers import MarkerReader
from anabranch_sink.report import Reporter

if TYPE_CHECKING:
    from anabranch_schemas.registry import SchemaRegistry

_log = structlog.get_logger("anabranch.sink")
_ATTEMPTS = 5
_POLL_S = 0.05
# While a cut is being published: short, because its end may allow the next.
_PUBLISHING_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class _Publishing:
    """A cut that is staged and on its way into the target."""

    cut: Cut
    publication: Publication
    outcome: Future[int]
    begun: float


class Applier:
    """Applies what the marker reader has: used from one thread, with another of its own that publishes."""

    def __init__(self, spark: SparkSession, config: SinkConfig, registry: SchemaRegistry, target: TargetPart) -> None:
        self._spark = spark
        self._config = config
        self._registry = registry
        self._target = target
        self._schemas: dict[int, str] = {}
        self._tasks = parallelism(config.spark)
        self._reporter = Reporter(config.name, config.kafka, {ref.name: ref.marker_topic for ref in config.streams})
        self._publisher = ThreadPoolExecutor(1, "publish")
        self._publishing: _Publishing | None = None
        # Markers up to here are applied one at a time, because a cut with them was refused.
        self._careful: dict[str, int] = {}
        # 1.
        self.applied: dict[str, Applied] = dict(target.acquire([ref.name for ref in config.streams]))
        self.markers = MarkerReader(config.kafka, config.streams, self.applied)

    def close(self) -> None:
        """Let go of Kafka; the target is released by who gave it."""
        self._finish()
        self._publisher.shutdown()
        self._reporter.mirror()
        self.markers.close()

    def run(self, stopping: Callable[[], bool], *, linger_s: float = 0.0, limit_s: float = float("inf")) -> None:
        """Apply cuts until nothing more can be applied and no marker came for `linger_s`.

        Ends after the cuts in hand when `stopping` says so, and after `limit_s` in any case. Everything that was on
        Kafka at the call has then been read, unless it ended early.
        """
        begun = idle_since = time.monotonic()
        ends = self.markers.ends()
        while not stopping() and time.monotonic() - begun < limit_s:
            self.markers.poll(0)
            if self._step():
                idle_since = time.monotonic()
                continue
            if self.markers.reached(ends) and time.monotonic() - idle_since >= linger_s:
                return
            self.markers.poll(_POLL_S)
        self._settle()

    def _step(self) -> bool:
        """Stage the next cut while the one before is published, then hand it to be published too.

        Tells whether there was anything to do.
        """
        # 2.
        cut = self._next()
        if not cut:
            if self._publishing is None:
                return False
            if self._publishing.outcome.done():
                self._settle()
            else:
                self.markers.poll(_PUBLISHING_POLL_S)
            return True
        begun = time.monotonic()
        buffer: Buffer = 0 if self._publishing is not None and self._publishing.publication.buffer else 1
        try:
            publication = self._stage(cut, buffer, per_unit=False)
        except AnabranchError:
            # The cut before comes first: its failure is the news, and if it was refused this one is chosen anew.
            if self._settle():
                raise
            return True
        if self._settle():
            outcome = self._publisher.submit(self._publish, publication)
            self._publishing = _Publishing(cut, publication, outcome, begun)
        return True

    def _next(self) -> Cut:
        """Choose the cut behind the one that is being published."""
        taken = self._publishing.cut.streams if self._publishing is not None else {}
        pending = {
            stream: tuple(islice(run, len(taken.get(stream, ())), None)) for stream, run in self.markers.pending.items()
        }
        applied = self._progress()
        careful = any(applied.get(stream, Applied()).marker < upto for stream, upto in self._careful.items())
        return choose(pending, applied, 0 if careful else self._config.row_budget)

    def _progress(self) -> dict[str, Applied]:
        """Return what is applied when the cut that is being published is."""
        return self.applied | (self._publishing.cut.progress(self.applied) if self._publishing is not None else {})

    def _settle(self) -> bool:
        """Wait for the cut that is being published; False if it has to be chosen anew, and all that follows it."""
        done, self._publishing = self._publishing, None
        if done is None:
            return True
        try:
            try:
                parked = done.outcome.result()
            except StagingLostError as error:
                _log.warning("staging was lost; staging the cut again", **error.as_dict())
                parked = self._apply(done, per_unit=False)
        except TargetConstraintError:
            if sum(1 for pending_marker in done.cut if pending_marker.records) > 1:
                self._careful = {stream: run[-1].marker.number for stream, run in done.cut.streams.items()}
                return False
            parked = self._apply(done, per_unit=True)
        self.applied |= done.cut.progress(self.applied)
        self.markers.applied({stream: len(run) for stream, run in done.cut.streams.items()})
        # 8.
        self._reporter.applied(done.cut, self.applied, seconds=time.monotonic() - done.begun, parked=parked)
        return True

    def _finish(self) -> None:
        """Let what is being published end, well or not: what ends the sink is something else."""
        done, self._publishing = self._publishing, None
        if done is not None:
            done.outcome.exception()

    def _apply(self, again: _Publishing, *, per_unit: bool) -> int:
        """Stage and publish a cut once more, and again if staging is lost; return the units set aside."""
        for attempt in range(1, _ATTEMPTS + 1):
            publication = self._stage(again.cut, again.publication.buffer, per_unit=per_unit)
            try:
                return self._publish(publication)
            except StagingLostError as error:
                if attempt == _ATTEMPTS:
                    raise
                _log.warning("staging was lost; staging the cut again", **error.as_dict())
        raise AssertionError("unreachable")

    def _publish(self, publication: Publication) -> int:
        # 7.
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._target.publish(publication)
            except TargetBusyError as error:
                if attempt == _ATTEMPTS:
                    raise
                _log.warning("the target was busy; publishing again", **error.as_dict())
        raise AssertionError("unreachable")

    def _stage(self, cut: Cut, buffer: Buffer, *, per_unit: bool) -> Publication:
        """Do steps 3 to 6; a cut without records needs none of them, and no Spark job."""
        versions = tuple(self._versions(cut))
        base = Publication(cut.progress(self._progress()), versions=versions, buffer=buffer)
        if not cut.records:
            if versions and self._config.create:
                self._target.prepare(versions, buffer)  # a table without rows is a table all the same
            return base
        marked = ranges.of_cut(cut)
        plan = stage.TaskPlan(
            kafka=self._config.kafka,
            group=f"anabranch-{self._config.name}-read",
            ranges=marked,
            versions=versions,
            staging=self._target.prepare(versions, buffer),
            per_unit=per_unit,
            driver_pid=os.getpid(),
        )
        # 3. 4. 5. 6.
        try:
            receipts = stage.stage(self._spark.sparkContext, plan, self._tasks)
        except (PySparkException, Py4JError) as error:
            raise _job_failed(error) from error
        failpoints.hit("sink.after_stage")
        park = self._config.on_constraint == "park"
        return publish.publication(receipts, marked, base, per_unit=per_unit, park=park)

    def _versions(self, cut: Cut) -> list[RoutedVersion]:
        versions: dict[tuple[str, int, int], TableVersion] = {}
        for pending in cut:
            for version in pending.marker.schemas:
                versions[version.topic, version.value_schema_id, version.key_schema_id] = version
        return [self._routed(version) for version in versions.values()]

    def _routed(self, version: TableVersion) -> RoutedVersion:
        schema, _, table = version.table.partition(".")
        target_schema, target_table = self._config.target_of(schema, table)
        return RoutedVersion(
            version,
            target_schema,
            target_table,
            self._schema(version.key_schema_id),
            self._schema(version.value_schema_id),
        )

    def _schema(self, schema_id: int) -> str:
        if schema_id not in self._schemas:
            self._schemas[schema_id] = self._registry.schema(schema_id)
        return self._schemas[schema_id]


def _job_failed(error: Exception) -> JobFailedError:
    # The text of a failed job may quote data: only its kind is told, the rest is in Spark's own log.
    return JobFailedError(
        f"the Spark job of a cut failed ({type(error).__name__}); nothing was applied",
        advice="look at the log of the Spark driver and executors for the first exception",
    )
