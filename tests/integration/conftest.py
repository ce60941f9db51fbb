"""What the tests of a source and of a sink begin with; a module that wants other settings overrides a fixture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import SparkSession
from tests.integration.sink_driver import Sink, create_tables
from tests.integration.sink_stream import Schemas, SyntheticStream
from tests.integration.source_reader import StreamReader
from tests.source_process import SourceRun

from anabranch.stack.service import KafkaService
from anabranch_connectors.postgres.target import PostgresTarget
from anabranch_sink import session
from anabranch_sink.apply import Applier
from anabranch_sink.config import SinkConfig

# A source, its database and a reader of its stream


@pytest.fixture
def run(eu_database: str, kafka: KafkaService, topic_prefix: str, tmp_path: Path) -> SourceRun:
    """Return what a worker is told."""
    return SourceRun(eu_database, kafka.bootstrap, topic_prefix, str(tmp_path / "spill"))


@pytest.fixture
def reader(run: SourceRun) -> Iterator[StreamReader]:
    """Return a reader of the worker's stream."""
    with StreamReader(run.bootstrap, run.prefix) as reader:
        yield reader


@pytest.fixture
def db(run: SourceRun) -> Iterator[psycopg.Connection]:
    """Return a connection to the worker's database."""
    with psycopg.connect(run.dsn, autocommit=True) as conn:
        yield conn


# A stream made by hand, a sink of it and its target


@pytest.fixture(scope="session")
def spark(spark_jars: tuple[Path, ...]) -> SparkSession:
    """Return the one session of the sink's tests; it ends with the process."""
    return session.build(SinkConfig("tests", "us", "", (), {}, Path(), spark="local[2,4]", jars=spark_jars))


@pytest.fixture
def stream(kafka: KafkaService, topic_prefix: str) -> SyntheticStream:
    """Return a stream that holds nothing yet."""
    return SyntheticStream(kafka.bootstrap, "eu.orders", topic_prefix, Schemas())


@pytest.fixture
def target(us_database: str) -> Iterator[psycopg.Connection]:
    """Return a connection to the sink's target, which has its tables."""
    with psycopg.connect(us_database, autocommit=True) as connection:
        create_tables(connection)
        yield connection


@pytest.fixture
def config(stream: SyntheticStream, us_database: str, tmp_path: Path) -> SinkConfig:
    """Return what the sink is told."""
    return SinkConfig(
        "orders-us",
        "us",
        us_database,
        (stream.ref,),
        {"bootstrap.servers": stream.bootstrap},
        tmp_path / "checkpoint",
        spark="local[2,4]",
    )


@pytest.fixture
def sink(
    spark: SparkSession, config: SinkConfig, stream: SyntheticStream, target: psycopg.Connection
) -> Iterator[Sink]:
    """Return a function that starts a driver of the sink; settings by keyword."""
    del target  # its tables come first
    started: list[tuple[Applier, PostgresTarget]] = []

    def start(**settings: Any) -> Applier:
        chosen = replace(config, **settings)
        part = PostgresTarget(chosen.target, chosen.name, create=chosen.create)
        started.append((Applier(spark, chosen, stream.schemas, part), part))
        return started[-1][0]

    yield start
    for applier, part in started:
        applier.close()
        part.release(None)
