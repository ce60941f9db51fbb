"""The embedded stack for real: services that crash, freeze and come back with their data."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from anabranch.stack.embedded import EmbeddedStack, StackAddress, down, status, up
from anabranch.stack.kafka import KafkaBroker
from anabranch.stack.postgres import PostgresServer, find_postgres
from anabranch.stack.service import KafkaService

pytestmark = pytest.mark.timeout(300)


def make_topic(bootstrap: str, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, num_partitions=1, replication_factor=1)])[topic].result(30)


def write_transaction(bootstrap: str, topic: str, value: bytes) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": topic, "log_level": 0})
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce(topic, value)
    producer.commit_transaction(60)


def read_first(bootstrap: str, topic: str) -> bytes | None:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": topic, "isolation.level": "read_committed"})
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        message = consumer.poll(60)
        assert message is not None
        value = message.value()
        assert value is None or isinstance(value, bytes)
        return value
    finally:
        consumer.close()


def test_a_transaction_is_read_back(kafka: KafkaService, topic_prefix: str) -> None:
    make_topic(kafka.bootstrap, topic_prefix)
    write_transaction(kafka.bootstrap, topic_prefix, b"one")
    assert read_first(kafka.bootstrap, topic_prefix) == b"one"


def test_a_topic_is_never_made_by_accident(kafka: KafkaService, topic_prefix: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    admin.list_topics(topic_prefix, timeout=30)
    assert topic_prefix not in admin.list_topics(timeout=30).topics


def test_both_sites_can_decode_their_log(eu_database: str, us_database: str) -> None:
    for dsn in (eu_database, us_database):
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("create table t (id int primary key)")
            connection.execute("create publication p for all tables")
            connection.execute("select pg_create_logical_replication_slot('s_' || current_database(), 'pgoutput')")
            connection.execute("insert into t values (1)")
            row = connection.execute(
                "select count(*) from pg_logical_slot_get_binary_changes('s_' || current_database(), null, null, "
                "'proto_version', '1', 'publication_names', 'p')"
            ).fetchone()
            assert row == (4,)  # begin, relation, insert, commit


def test_durability_settings_are_postgresqls_own(eu_database: str) -> None:
    with psycopg.connect(eu_database) as connection:
        for setting in ("fsync", "synchronous_commit", "full_page_writes"):
            assert connection.execute(f"show {setting}").fetchone() == ("on",)


@pytest.mark.parametrize("major", [16, 18])
def test_a_killed_postgres_comes_back_at_the_same_address_with_what_was_committed(
    major: int, server_directory: Path
) -> None:
    server = PostgresServer(server_directory / f"crash-{major}", binaries=find_postgres(major))
    server.start()
    try:
        dsn = server.dsn()
        with psycopg.connect(dsn) as connection:
            connection.execute("create table t as select 1 as id")
        server.kill()
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(dsn)
        server.start()
        assert server.dsn() == dsn
        with psycopg.connect(dsn) as connection:
            assert connection.execute("select id from t").fetchall() == [(1,)]
    finally:
        server.stop()


def test_a_frozen_postgres_does_not_answer_until_it_goes_on(server_directory: Path) -> None:
    server = PostgresServer(server_directory / "freeze")
    server.start()
    try:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            server.signal(signal.SIGSTOP)
            connection.pgconn.send_query(b"select 1")
            assert connection.pgconn.is_busy()
            server.signal(signal.SIGCONT)
            result = connection.pgconn.get_result()
            assert result is not None
            assert result.get_value(0, 0) == b"1"
            assert connection.pgconn.get_result() is None
    finally:
        server.stop()


def test_a_killed_broker_comes_back_at_the_same_address_with_what_was_acknowledged(
    server_directory: Path, topic_prefix: str
) -> None:
    broker = KafkaBroker(server_directory / "crash-kafka")
    broker.start()
    try:
        bootstrap = broker.bootstrap
        make_topic(bootstrap, topic_prefix)
        write_transaction(bootstrap, topic_prefix, b"kept")
        broker.kill()
        broker.start()
        assert broker.bootstrap == bootstrap
        assert read_first(bootstrap, topic_prefix) == b"kept"
    finally:
        broker.stop()


@pytest.fixture
def stack_left_running(server_directory: Path) -> Iterator[tuple[Path, str]]:
    """Bring a stack up in another process that ends; return its directory and what it printed."""
    directory = server_directory / "left-running"
    script = f"from pathlib import Path; from anabranch.stack import up; print(up(Path({str(directory)!r})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    try:
        assert done.returncode == 0, done.stderr
        yield directory, done.stdout
    finally:
        down(directory)


def test_a_stack_outlives_the_process_that_brought_it_up(stack_left_running: tuple[Path, str]) -> None:
    directory, printed = stack_left_running
    before = status(directory)
    assert before["running"]
    address = up(directory)
    assert f"{address}\n" == printed
    assert status(directory) == before
    for site in address.postgres:
        with psycopg.connect(site.dsn) as connection:
            connection.execute("create table t as select 1 as id")

    for service in before["services"]:
        os.kill(service["pid"], signal.SIGKILL)
    assert up(directory) == address
    for site in address.postgres:
        with psycopg.connect(site.dsn) as connection:
            assert connection.execute("select id from t").fetchall() == [(1,)]

    assert down(directory)
    assert not down(directory)
    assert [service["running"] for service in status(directory)["services"]] == [False, False, False]


def test_a_stack_stops_when_its_block_ends(server_directory: Path) -> None:
    with EmbeddedStack(server_directory / "block", sites=("only",)) as stack:
        address = stack.start()
        assert isinstance(address, StackAddress)
        assert [site.site for site in address.postgres] == ["only"]
        pids = [service.pid for service in stack.services]
        assert None not in pids
    assert [service.pid for service in stack.services] == [None, None]
