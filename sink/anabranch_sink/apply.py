"""Applies cut after cut: the steps of a micro-batch, without the micro-batch.

1. progress (kept from the last cut; read from the target when the sink starts or has lost it)
2. choose the cut
3. read its ranges       (in the tasks)
4. filter and check      (in the tasks; counts are compared in the driver)
5. reduce                (in the tasks)
6. stage                 (in the tasks)
7. publish
8. report
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from anabranch_connectors.api import Applied, Publication, RoutedVersion, TargetPart
from anabranch_connectors.target_errors import StagingLostError, TargetBusyError, TargetConstraintError
from anabranch_schemas import failpoints
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


class Applier:
    """Applies what the marker reader has, from one thread."""

    def __init__(self, spark: SparkSession, config: SinkConfig, registry: SchemaRegistry, target: TargetPart) -> None:
        self._spark = spark
        self._config = config
        self._registry = registry
        self._target = target
        self._schemas: dict[int, str] = {}
        self._tasks = parallelism(config.spark)
        self._reporter = Reporter(config.name, config.kafka, {ref.name: ref.marker_topic for ref in config.streams})
        # Markers up to here are applied one at a time, because a cut with them was refused.
        self._careful: dict[str, int] = {}
        # 1.
        self.applied: dict[str, Applied] = dict(target.acquire([ref.name for ref in config.streams]))
        self.markers = MarkerReader(config.kafka, config.streams, self.applied)

    def close(self) -> None:
        """Let go of Kafka; the target is released by who gave it."""
        self._reporter.mirror()
        self.markers.close()

    def run(self, stopping: Callable[[], bool], *, linger_s: float = 0.0, limit_s: float = float("inf")) -> None:
        """Apply cuts until nothing more can be applied and no marker came for `linger_s`.

        Ends after the present cut when `stopping` says so, and after `limit_s` in any case. Everything that was on
        Kafka at the call has then been read, unless it ended early.
        """
        begun = idle_since = time.monotonic()
        ends = self.markers.ends()
        while not stopping() and time.monotonic() - begun < limit_s:
            self.markers.poll(0)
            if self.step():
                idle_since = time.monotonic()
                continue
            if self.markers.reached(ends) and time.monotonic() - idle_since >= linger_s:
                return
            self.markers.poll(0.05)

    def step(self) -> bool:
        """Choose and apply one cut; tell whether there was one."""
        # 2.
        pending = {stream: tuple(run) for stream, run in self.markers.pending.items()}
        careful = any(self.applied.get(stream, Applied()).marker < upto for stream, upto in self._careful.items())
        cut = choose(pending, self.applied, 0 if careful else self._config.row_budget)
        if not cut:
            return False
        begun = time.monotonic()
        try:
            parked = self._apply(cut, per_unit=False)
        except TargetConstraintError:
            if sum(1 for pending_marker in cut if pending_marker.records) > 1:
                self._careful = {stream: run[-1].marker.number for stream, run in cut.streams.items()}
                return True
            parked = self._apply(cut, per_unit=True)
        self.applied |= cut.progress(self.applied)
        self.markers.applied({stream: len(run) for stream, run in cut.streams.items()})
        # 8.
        self._reporter.applied(cut, self.applied, seconds=time.monotonic() - begun, parked=parked)
        return True

    def _apply(self, cut: Cut, *, per_unit: bool) -> int:
        """Apply a cut, again if another session was in the way or staging was lost; return the units set aside."""
        for attempt in range(1, _ATTEMPTS + 1):
            publication = self._stage(cut, per_unit=per_unit)
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

    def _stage(self, cut: Cut, *, per_unit: bool) -> Publication:
        """Do steps 3 to 6; a cut without records needs none of them, and no Spark job."""
        progress = cut.progress(self.applied)
        versions = tuple(self._versions(cut))
        if not cut.records:
            if versions and self._config.create:
                self._target.prepare(versions)  # a table without rows is a table all the same
            return Publication(progress)
        marked = ranges.of_cut(cut)
        plan = stage.TaskPlan(
            kafka=self._config.kafka,
            group=f"anabranch-{self._config.name}-read",
            ranges=marked,
            versions=versions,
            staging=self._target.prepare(versions),
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
        return publish.publication(receipts, marked, progress, per_unit=per_unit, park=park)

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
