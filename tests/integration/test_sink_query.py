"""The streaming query around the cuts: its checkpoint is a hint, and a killed process leaves nothing half done."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from pyspark.sql import SparkSession
from tests.integration.sink_driver import PYSPARK_SOCKETS
from tests.integration.sink_stream import SyntheticStream, insert

from anabranch_connectors.target_errors import TargetConstraintError
from anabranch_schemas.table import Column, TableSchema
from anabranch_schemas.types import Scalar
from anabranch_sink.config import SinkConfig
from anabranch_sink.query import run_sink

pytestmark = [pytest.mark.timeout(240), *PYSPARK_SOCKETS]
ITEM = TableSchema(
    "public",
    "item",
    (Column("id", Scalar.INT64, False, "bigint"), Column("n", Scalar.INT64, False, "bigint")),
    ("id",),
)


@pytest.fixture
def target(target: psycopg.Connection) -> psycopg.Connection:
    """Return a target that counts how often each row was written."""
    target.execute("create table item (id bigint primary key, n bigint)")
    target.execute("create table written (id bigint)")
    target.execute(
        "create function note_it() returns trigger language plpgsql as "
        "'begin insert into written values (new.id); return null; end'"
    )
    target.execute("create trigger t after insert or update on item for each row execute function note_it()")
    target.execute("alter table item enable always trigger t")
    return target


@pytest.fixture
def config(config: SinkConfig) -> SinkConfig:
    return replace(config, name="items-us", linger_s=0.1)


@contextmanager
def running(config: SinkConfig, stream: SyntheticStream, spark: SparkSession) -> Iterator[None]:
    """Run a sink beside the test; whatever ended it is raised here."""
    stop, ended = threading.Event(), []

    def work() -> None:
        try:
            run_sink(config, stream.schemas, stop_event=stop, spark=spark)
        except Exception as error:  # noqa: BLE001 - handed to the test's thread
            ended.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()
    if ended:
        raise ended[0]


def reached(target: psycopg.Connection, marker: int) -> None:
    """Wait until a marker is applied."""
    deadline = time.monotonic() + 60
    query = "select 1 from pg_tables where schemaname = 'anabranch' and tablename = 'quarantine'"
    while time.monotonic() < deadline:
        if (
            target.execute(query).fetchone()
            and target.execute("select 1 from anabranch.progress where marker >= %s", (marker,)).fetchone()
        ):
            return
        target.execute("select pg_sleep(0.02)")
    raise AssertionError(f"marker {marker} was not applied")


def put(stream: SyntheticStream, *ids: int) -> int:
    """Write a transaction and its marker; return the marker's number."""
    stream.transaction(*[insert(ITEM, id=i, n=i) for i in ids])
    return stream.close().number


def exactly_once(target: psycopg.Connection, count: int) -> None:
    assert target.execute("select count(*), count(distinct id) from written").fetchone() == (count, count)
    assert target.execute("select rows from anabranch.progress").fetchone() == (count,)


def test_markers_are_applied_as_they_come_and_a_stop_is_clean(
    config: SinkConfig, stream: SyntheticStream, spark: SparkSession, target: psycopg.Connection
) -> None:
    with running(config, stream, spark):
        for i in range(5):
            reached(target, put(stream, i))
    exactly_once(target, 5)
    assert target.execute("select state, error from anabranch.sink").fetchone() == ("stopped", None)


@pytest.mark.parametrize("harm", ["deleted", "last commit deleted", "torn", "of another time"])
def test_a_harmed_checkpoint_neither_repeats_nor_loses(
    config: SinkConfig, stream: SyntheticStream, spark: SparkSession, target: psycopg.Connection, harm: str
) -> None:
    with running(config, stream, spark):
        reached(target, put(stream, 1))
        reached(target, put(stream, 2))
    put(stream, 3)
    commits = sorted((p for p in (config.checkpoint / "commits").glob("[0-9]*")), key=lambda p: int(p.name))
    offsets = sorted((p for p in (config.checkpoint / "offsets").glob("[0-9]*")), key=lambda p: int(p.name))
    assert commits
    assert offsets
    for crc in config.checkpoint.rglob(".*.crc"):
        crc.unlink()
    if harm == "deleted":
        for found in sorted(config.checkpoint.rglob("*"), reverse=True):
            found.rmdir() if found.is_dir() else found.unlink()
    elif harm == "last commit deleted":
        commits[-1].unlink()
    elif harm == "torn":
        offsets[-1].write_text("v1\n{")
        commits[-1].unlink()
    else:
        text = offsets[-1].read_text().splitlines()
        text[-1] = json.dumps({stream.marker_topic: {"0": 1_000_000}})
        offsets[-1].write_text("\n".join(text))
    with running(config, stream, spark):
        reached(target, put(stream, 4))
    exactly_once(target, 4)


def test_what_ended_the_sink_is_raised_and_recorded(
    config: SinkConfig, stream: SyntheticStream, spark: SparkSession, target: psycopg.Connection
) -> None:
    target.execute("alter table item add constraint small check (n < 10)")
    put(stream, 1)
    put(stream, 99)
    with pytest.raises(TargetConstraintError):
        run_sink(config, stream.schemas, stop_event=threading.Event(), spark=spark)
    assert target.execute("select id from item").fetchall() == [(1,)]
    shown = target.execute("select error ->> 'code', error ->> 'where' from anabranch.sink").fetchone()
    assert shown == ("sink.constraint", "public.item")


_PROGRAM = """
import sys, threading
from pathlib import Path
from tests.integration.sink_stream import Schemas
from anabranch_sink.config import SinkConfig, StreamRef
from anabranch_sink.query import run_sink
bootstrap, target, topic, checkpoint, *rest = sys.argv[1:]
schemas = Schemas()
count = int(rest[0])
for text in rest[1 : 1 + count]:
    schemas.register("", text)
config = SinkConfig("items-us", "us", target, (StreamRef("eu.orders", topic, topic.removesuffix(".markers")),),
    {"bootstrap.servers": bootstrap}, Path(checkpoint), spark="local[2,4]", jars=tuple(map(Path, rest[1 + count :])))
run_sink(config, schemas, stop_event=threading.Event())
"""


@pytest.mark.parametrize("place", ["sink.mid_stage", "sink.before_commit", "sink.after_commit"])
def test_a_killed_driver_leaves_nothing_half_done(
    config: SinkConfig,
    stream: SyntheticStream,
    spark: SparkSession,
    target: psycopg.Connection,
    spark_jars: tuple[Path, ...],
    place: str,
) -> None:
    put(stream, *range(50))
    texts = stream.schemas.texts
    arguments = [stream.bootstrap, config.target, stream.marker_topic, str(config.checkpoint), str(len(texts)), *texts]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *arguments, *map(str, spark_jars)],
        env={**os.environ, "ANABRANCH_FAILPOINT": place},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=120,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    applied = target.execute("select count(*) from item").fetchone()
    assert applied == ((50,) if place == "sink.after_commit" else (0,))
    with running(config, stream, spark):
        reached(target, put(stream, 50))
    exactly_once(target, 51)
