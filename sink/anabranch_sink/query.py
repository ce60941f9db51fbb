"""The Structured Streaming query of a sink, from its start to its end.

The micro-batch is a signal that marker topics have moved, and its checkpoint a hint where to listen from. What is
applied next is decided by the target's progress and the markers alone, so a checkpoint that is lost, behind, ahead or
torn changes nothing; one that Spark cannot use is wiped.
"""

from __future__ import annotations

import json
import math
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from anabranch_connectors.api import TargetPart
from anabranch_connectors.postgres.target import PostgresTarget
from anabranch_schemas.errors import AnabranchError
from anabranch_sink import session
from anabranch_sink.apply import Applier
from anabranch_sink.config import SinkConfig, spark_kafka_options
from anabranch_sink.errors import JobFailedError, KafkaReadError

if TYPE_CHECKING:
    from anabranch_schemas.registry import SchemaRegistry

_log = structlog.get_logger("anabranch.sink")
_POLL_S = 0.1
_WAIT_SAYS_S = 10.0
# Writing a batch's commit took 30 ms; without it the next start repeats a batch, which costs nothing but its time.
_NOTE_S = 2.0


def run_sink(
    config: SinkConfig,
    registry: SchemaRegistry,
    *,
    stop_event: threading.Event,
    spark: SparkSession | None = None,
    target: TargetPart | None = None,
) -> None:
    """Run a sink until `stop_event` is set; the cut in hand is finished first.

    Waits for marker topics that do not exist yet. With `spark` that session is used and left running.

    Raises:
        AnabranchError: whatever ended the sink; its `action` says whether starting it again can help.
    """
    own = spark is None
    active = spark or session.build(config)
    try:
        if own:
            session.warm(active, config)
        if _await_topics(config, stop_event):
            _run_on(active, config, registry, target, stop_event)
    finally:
        if own:
            active.stop()


def _run_on(
    spark: SparkSession,
    config: SinkConfig,
    registry: SchemaRegistry,
    target: TargetPart | None,
    stop_event: threading.Event,
) -> None:
    part = target or PostgresTarget(config.target, config.name, create=config.create)
    failure: AnabranchError | None = None
    try:
        _drive(config, registry, part, spark, stop_event)
    except AnabranchError as error:
        failure = error
        raise
    finally:
        part.release(failure.as_dict() if failure else None)


def _drive(
    config: SinkConfig, registry: SchemaRegistry, target: TargetPart, spark: SparkSession, stop_event: threading.Event
) -> None:
    applier = Applier(spark, config, registry, target)
    try:
        batch = _Batch(applier, config, stop_event.is_set)
        while True:
            batch.ran = False
            batch.open()
            query = _start(config, spark, applier, batch)
            try:
                # Spark takes seconds to begin its first batch, and what lies there already may start none at all.
                batch.stand_in(query)
            except BaseException:
                _stop(query)
                raise
            error = _follow(query, batch, stop_event)
            if error is None:
                return
            # The batch did not fail, so Spark cannot use the checkpoint. Nothing in it is needed.
            if not batch.ran and not Path(config.checkpoint).exists():
                raise _unexpected(error) from error
            _log.warning("the checkpoint cannot be used; starting from the target's progress", sink=config.name)
            shutil.rmtree(config.checkpoint, ignore_errors=True)
    finally:
        applier.close()


class _Batch:
    """The function of `foreachBatch`; keeps the error that ended it, which Spark would only show as text."""

    def __init__(self, applier: Applier, config: SinkConfig, stopping: Callable[[], bool]) -> None:
        self._applier = applier
        self._config = config
        self._stopping = stopping
        self.failure: Exception | None = None
        self.ran = False
        self._busy = threading.Lock()
        self._closed = False

    def stand_in(self, query: StreamingQuery) -> None:
        """Apply until the first batch waits for its turn, or the query has ended."""
        with self._busy:
            try:
                self._applier.run(lambda: self.ran or self._stopping() or not query.isActive, linger_s=math.inf)
            except BaseException:
                self._closed = True  # whatever waits for its turn must not go on behind a cut that failed
                raise

    def open(self) -> None:
        """Let batches act, for a query that is started anew."""
        self._closed = False

    def close(self) -> None:
        """Wait for the batch in hand; those that come later do nothing.

        A query must not be stopped while its batch waits for a lock that the stopping thread holds: it would wait for
        the batch in turn.
        """
        with self._busy:
            self._closed = True

    def __call__(self, _frame: DataFrame, _batch_id: int) -> None:
        self.ran = True
        with self._busy:
            if self._closed:
                return
            try:
                self._applier.run(self._stopping, linger_s=self._config.linger_s, limit_s=self._config.batch_s)
            except Exception as error:
                self.failure = error
                raise


def _start(config: SinkConfig, spark: SparkSession, applier: Applier, batch: _Batch) -> StreamingQuery:
    # Where a new query starts to listen; one with a checkpoint goes on from there.
    listen = {
        ref.marker_topic: {"0": applier.applied[ref.name].marker_offset + 1 if ref.name in applier.applied else -2}
        for ref in config.streams
    }
    frame = (
        spark.readStream.format("kafka")
        .options(**spark_kafka_options(config.kafka))
        .option("assign", json.dumps({ref.marker_topic: [0] for ref in config.streams}))
        .option("startingOffsets", json.dumps(listen))
        .option("failOnDataLoss", "true")
        .option("kafka.isolation.level", "read_committed")
        .load()
        .select("offset")
    )
    return (
        frame.writeStream.foreachBatch(batch)
        .queryName(f"anabranch-{config.name}")
        .option("checkpointLocation", str(Path(config.checkpoint).absolute()))
        .trigger(processingTime=f"{round(config.trigger_s * 1e3)} milliseconds")
        .start()
    )


def _follow(query: StreamingQuery, batch: _Batch, stop_event: threading.Event) -> Exception | None:
    """Wait for the end; None if it was stopped, or what ended it although its batches did not fail.

    Raises:
        AnabranchError: what ended a batch.
    """
    while not stop_event.wait(_POLL_S) and query.isActive:
        pass
    # Stopping a query interrupts its batch: let it finish the cut in hand, and let Spark note that it did.
    batch.close()
    noted_by = time.monotonic() + _NOTE_S
    while query.isActive and query.status["isTriggerActive"] and time.monotonic() < noted_by:
        time.sleep(0.01)
    _stop(query)
    if isinstance(batch.failure, AnabranchError):
        raise batch.failure
    if batch.failure is not None:
        raise _unexpected(batch.failure) from batch.failure
    if stop_event.is_set():
        return None
    try:
        return query.exception() or JobFailedError("the streaming query ended without an error")
    except (PySparkException, Py4JError) as error:
        return error


def _stop(query: StreamingQuery) -> None:
    """Stop a query; if Spark cannot, that must not take the place of what ended it."""
    try:
        query.stop()
    except (PySparkException, Py4JError) as error:
        _log.warning("the streaming query could not be stopped", reason=type(error).__name__)


def _unexpected(error: Exception) -> JobFailedError:
    return JobFailedError(
        f"the streaming query ended ({type(error).__name__})",
        advice="look at the log of the Spark driver for the first exception; the sink goes on where the target is",
    )


def _await_topics(config: SinkConfig, stop_event: threading.Event) -> bool:
    """Wait until the marker topics exist; False if the sink was stopped before that."""
    admin = AdminClient(dict(config.kafka))
    said_at = 0.0
    while not stop_event.is_set():
        try:
            listed = admin.list_topics(timeout=15.0).topics
        except KafkaException as error:
            raise KafkaReadError(
                f"Kafka did not answer: {error.args[0].str()}",
                where=config.name,
                advice="check kafka.bootstrap.servers",
            ) from error
        missing = [ref.marker_topic for ref in config.streams if ref.marker_topic not in listed]
        if not missing:
            return True
        if time.monotonic() - said_at > _WAIT_SAYS_S:
            said_at = time.monotonic()
            _log.info("waiting for the source to make its marker topic", sink=config.name, topics=missing)
        stop_event.wait(_POLL_S)
    return False
