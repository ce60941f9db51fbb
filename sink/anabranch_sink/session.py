"""The Spark session of a sink."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from pyspark.sql import SparkSession

from anabranch_sink.config import SinkConfig, parallelism

_PY_FILES = "spark.submit.pyFiles"


def build(config: SinkConfig) -> SparkSession:
    """Start (or return) the session; settings of `config.conf` win over ours."""
    # Workers must be this interpreter: another from PATH would lack our packages.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(config.spark).appName(f"anabranch {config.name}")
    for name, value in {**settings(config), **config.conf}.items():
        if name != _PY_FILES:
            builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    for path in filter(None, config.conf.get(_PY_FILES, "").split(",")):
        _send(session, Path(path))
    return session


def _send(session: SparkSession, file: Path) -> None:
    """Give a Python file or archive to every executor; Spark knows a wheel only as a zip, which it is."""
    if file.suffix == ".whl":
        # Executors fetch it from the driver whenever they start.
        scratch = tempfile.mkdtemp(prefix="anabranch-")
        atexit.register(shutil.rmtree, scratch, ignore_errors=True)
        file = Path(shutil.copyfile(file, Path(scratch) / f"{file.stem}.zip"))
    session.sparkContext.addPyFile(str(file))


def warm(session: SparkSession, config: SinkConfig) -> None:
    """Run an empty job of a cut's kind: the first loads classes, and starts Python workers with all they import.

    It takes some seconds that would otherwise be the first transactions' lag.
    """
    tasks = parallelism(config.spark)
    session.sparkContext.parallelize(range(tasks), tasks).mapPartitions(_imported).collect()


def _imported(numbers: Iterable[int]) -> Iterator[int]:
    from anabranch_connectors.postgres import staging  # noqa: F401, PLC0415 - what a task will need
    from anabranch_sink import stage  # noqa: F401, PLC0415

    yield from numbers


def settings(config: SinkConfig) -> dict[str, str]:
    """Return our Spark settings."""
    return {
        **({"spark.jars": ",".join(map(str, config.jars))} if config.jars else {}),
        "spark.driver.memory": "1g",
        # The driver's own work is short and ever the same. The optimising compiler and a parallel collector take more
        # of two cores than they give back: see decision 13.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # A day has half a million jobs: what is remembered of them, for a page that nobody looks at, is kept small.
        "spark.ui.retainedJobs": "20",
        "spark.ui.retainedStages": "20",
        "spark.ui.retainedTasks": "200",
        # Shuffles are not used; adaptive plans cost tens of milliseconds for a cut of a few rows.
        "spark.sql.shuffle.partitions": str(parallelism(config.spark)),
        "spark.sql.adaptive.enabled": "false",
        "spark.python.worker.reuse": "true",
        # Half of what a task's hand-over over TCP costs.
        "spark.python.unix.domain.socket.enabled": "true",
        # With pyFiles the package reaches a worker after its daemon has started: then it is Spark's own.
        **({} if _PY_FILES in config.conf else {"spark.python.daemon.module": "anabranch_sink.worker_daemon"}),
        "spark.sql.session.timeZone": "UTC",
        # 20 batches of offsets and commits are plenty: the checkpoint is a hint.
        "spark.sql.streaming.minBatchesToRetain": "20",
        "spark.sql.streaming.stopTimeout": "30000",
        # Two attempts of one task at once would only stage twice.
        "spark.speculation": "false",
    }
