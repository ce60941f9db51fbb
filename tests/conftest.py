"""Real servers for the tests: one broker and two PostgreSQL servers a session, a database a test."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from anabranch.stack.containers import ContainerKafka, ContainerPostgres, choose_backend
from anabranch.stack.errors import JarDownloadError, JavaMissingError, PostgresMissingError, StackError
from anabranch.stack.jars import resolve
from anabranch.stack.java import find_java
from anabranch.stack.kafka import KafkaBroker
from anabranch.stack.postgres import PostgresServer, find_postgres
from anabranch.stack.service import KafkaService, PostgresService, Service

_MISSING = (JavaMissingError, JarDownloadError, PostgresMissingError)


def pytest_report_header() -> list[str]:
    """Say which real servers the tests will use."""
    described: dict[str, Callable[[], str]] = {
        "services": choose_backend,
        "java": lambda: f"{find_java().version} ({find_java().origin})",
        "postgres": lambda: f"{find_postgres().version} ({find_postgres().origin})",
    }
    lines = []
    for what, describe in described.items():
        try:
            lines.append(f"{what}: {describe()}")
        except StackError as error:
            lines.append(f"{what}: missing: {error.message}")
    return lines


@contextmanager
def _running(service: Service) -> Iterator[None]:
    """Run a service; what it needs and the machine lacks is a skip, in CI a failure."""
    try:
        service.start()
    except _MISSING as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    try:
        yield
    finally:
        service.stop()


@pytest.fixture(scope="session")
def server_directory() -> Iterator[Path]:
    """Return a directory that other accounts can enter: pytest's own are closed, and PostgreSQL refuses to be root."""
    directory = Path(tempfile.mkdtemp(prefix="anabranch-test-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def kafka(server_directory: Path) -> Iterator[KafkaService]:
    """Return a running broker."""
    broker: KafkaService
    broker = ContainerKafka() if choose_backend() == "docker" else KafkaBroker(server_directory / "kafka")
    with _running(broker):
        yield broker


def _postgres(directory: Path, name: str) -> PostgresService:
    if choose_backend() == "docker":
        return ContainerPostgres(name)
    return PostgresServer(directory / name, name=name)


@pytest.fixture(scope="session")
def postgres_eu(server_directory: Path) -> Iterator[PostgresService]:
    """Return the running server of the site eu."""
    server = _postgres(server_directory, "postgres-eu")
    with _running(server):
        yield server


@pytest.fixture(scope="session")
def postgres_us(server_directory: Path) -> Iterator[PostgresService]:
    """Return the running server of the site us."""
    server = _postgres(server_directory, "postgres-us")
    with _running(server):
        yield server


@pytest.fixture(scope="session")
def spark_jars() -> tuple[Path, ...]:
    """Return the jars that PySpark needs to read Kafka."""
    try:
        return resolve("spark")
    except _MISSING as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


@contextmanager
def _database(server: PostgresService) -> Iterator[str]:
    """Make a database; drop it with its slots and connections afterwards."""
    name = f"t_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    try:
        yield server.dsn(name)
    finally:
        with psycopg.connect(server.dsn(), autocommit=True) as admin:
            # A database with slots cannot be dropped, and a slot in use cannot either: end its reader first, and wait.
            admin.execute(
                "select pg_terminate_backend(active_pid, 5000) from pg_replication_slots "
                "where database = %s and active_pid is not null",
                (name,),
            )
            admin.execute(
                "select pg_drop_replication_slot(slot_name) from pg_replication_slots where database = %s", (name,)
            )
            admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture
def eu_database(postgres_eu: PostgresService) -> Iterator[str]:
    """Return the DSN of a new, empty database in the site eu."""
    with _database(postgres_eu) as dsn:
        yield dsn


@pytest.fixture
def us_database(postgres_us: PostgresService) -> Iterator[str]:
    """Return the DSN of a new, empty database in the site us."""
    with _database(postgres_us) as dsn:
        yield dsn


@pytest.fixture
def topic_prefix() -> str:
    """Return a prefix that no other test uses."""
    return f"t{uuid.uuid4().hex[:12]}"
