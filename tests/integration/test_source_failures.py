"""What a source refuses to do, loudly: each failure has its code, and what a supervisor does about it."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from tests.integration.source_reader import StreamReader, check_markers, check_same, check_stream, fold, log_end
from tests.source_process import SourceProcess, SourceRun, SourceThread

from anabranch.stack.postgres import PostgresServer
from anabranch.stack.service import KafkaService
from anabranch_connectors.postgres import spill
from anabranch_connectors.postgres.replication import ReplicationConnection
from anabranch_schemas.errors import Action, RegistryError
from anabranch_schemas.registry import ServiceRegistry


@pytest.fixture
def db(db: psycopg.Connection) -> psycopg.Connection:
    db.execute("create table t (id int primary key, v text)")
    db.execute("insert into t values (1, 'copied')")
    return db


@pytest.fixture
def begun(run: SourceRun, reader: StreamReader, db: psycopg.Connection) -> SourceRun:
    """Return the run of a stream that has a stored position."""
    with SourceThread(run):
        reader.wait_for(log_end(run.dsn))
    return run


def drop_slot(db: psycopg.Connection, name: str) -> None:
    """Drop a slot when the worker that was stopped has let go of it on the server, too."""
    db.execute("select pg_terminate_backend(active_pid, 5000) from pg_replication_slots where slot_name = %s", (name,))
    db.execute("select pg_drop_replication_slot(%s)", (name,))


def failure(run: SourceRun) -> tuple[str, Action]:
    """Start a worker that ends by itself; return its error's code and action."""
    with SourceThread(run) as source:
        error = source.failure()
    assert error.where
    return error.code, error.action


def test_a_dropped_slot_is_a_gap(begun: SourceRun, db: psycopg.Connection) -> None:
    drop_slot(db, begun.prefix)
    assert failure(begun) == ("source.slot_missing", Action.STOP)


def test_a_slot_that_was_made_again_is_a_gap(begun: SourceRun, db: psycopg.Connection) -> None:
    drop_slot(db, begun.prefix)
    db.execute("insert into t values (2)")
    db.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (begun.prefix,))
    assert failure(begun) == ("source.slot_ahead", Action.STOP)


def test_a_slot_that_somebody_moved_is_a_gap(begun: SourceRun, db: psycopg.Connection) -> None:
    db.execute("insert into t values (2)")
    db.execute(
        "select pg_terminate_backend(active_pid, 5000) from pg_replication_slots where slot_name = %s", (begun.prefix,)
    )
    db.execute("select pg_replication_slot_advance(%s, pg_current_wal_flush_lsn())", (begun.prefix,))
    assert failure(begun) == ("source.slot_ahead", Action.STOP)


def test_a_slot_of_another_database_is_not_ours(run: SourceRun, db: psycopg.Connection) -> None:
    with psycopg.connect(run.dsn, dbname="postgres", autocommit=True) as other:
        other.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (run.prefix,))
        try:
            assert failure(run) == ("source.slot_foreign", Action.STOP)
        finally:
            other.execute("select pg_drop_replication_slot(%s)", (run.prefix,))


def test_a_slot_in_use_is_waited_for(begun: SourceRun) -> None:
    with ReplicationConnection.connect(begun.dsn, application_name="somebody else") as other:
        other.start(begun.prefix, 0, {"proto_version": "1", "publication_names": "none"})
        assert failure(begun) == ("source.slot_in_use", Action.RETRY)


def test_a_dropped_publication_is_a_gap(begun: SourceRun, db: psycopg.Connection) -> None:
    db.execute(f'drop publication "{begun.prefix}"')
    assert failure(begun) == ("source.publication_missing", Action.STOP)


def test_a_table_that_has_left_the_publication_is_a_gap(begun: SourceRun, db: psycopg.Connection) -> None:
    db.execute(f'alter publication "{begun.prefix}" drop table t')
    assert failure(begun) == ("source.publication_incomplete", Action.STOP)


def test_a_table_that_was_dropped_and_made_again_is_a_gap(begun: SourceRun, db: psycopg.Connection) -> None:
    db.execute("drop table t")
    db.execute("create table t (id int primary key)")
    assert failure(begun) == ("source.publication_incomplete", Action.STOP)


def test_a_publication_of_somebody_else_is_not_taken(run: SourceRun, db: psycopg.Connection) -> None:
    db.execute(f'create publication "{run.prefix}" for table t')
    assert failure(run) == ("source.publication_foreign", Action.STOP)


def test_lost_markers_are_a_loss_and_no_beginning(begun: SourceRun) -> None:
    admin = AdminClient(begun.consumer_kafka)
    admin.delete_topics([f"{begun.prefix}.markers"])[f"{begun.prefix}.markers"].result(30)
    assert failure(begun) == ("source.markers_missing", Action.STOP)


def test_a_topic_that_is_deleted_under_a_worker_is_a_loss(
    run: SourceRun, reader: StreamReader, db: psycopg.Connection
) -> None:
    run = replace(run, message_timeout_ms=3000)
    admin = AdminClient(run.consumer_kafka)
    with SourceThread(run) as source:
        reader.wait_for(log_end(run.dsn))
        admin.delete_topics([f"{run.prefix}.public.t"])[f"{run.prefix}.public.t"].result(30)
        db.execute("insert into t values (2)")
        # The broker may say so, or its answer may not come in time; then the next worker finds out.
        assert source.failure().code in ("source.topic_missing", "source.publish")
    assert failure(run) == ("source.topic_missing", Action.STOP)
    assert f"{run.prefix}.public.t" not in admin.list_topics(timeout=30).topics


def test_a_server_without_a_logical_log_is_refused(
    server_directory: Path, kafka: KafkaService, topic_prefix: str, tmp_path: Path
) -> None:
    server = PostgresServer(server_directory / "replica", settings={"wal_level": "replica"}, name="replica")
    server.start()
    try:
        assert failure(SourceRun(server.dsn(), kafka.bootstrap, topic_prefix, str(tmp_path))) == (
            "source.wal_level",
            Action.STOP,
        )
    finally:
        server.stop()


def test_a_server_that_is_not_there_is_tried_again(run: SourceRun) -> None:
    assert failure(replace(run, dsn=f"postgresql://postgres@127.0.0.1:{_closed_port()}/postgres")) == (
        "connect.refused",
        Action.RETRY,
    )


def test_a_session_that_the_server_ends_is_tried_again(
    run: SourceRun, reader: StreamReader, db: psycopg.Connection
) -> None:
    with SourceThread(run) as source:
        reader.wait_for(log_end(run.dsn))
        db.execute(
            "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = %s", (run.prefix,)
        )
        error = source.failure()
    assert error.action is Action.RETRY
    db.execute("insert into t values (2)")
    with SourceThread(run):
        reader.wait_for(log_end(run.dsn))
    check_stream(reader, run.dsn, "public.t")


def test_a_registry_that_is_not_there_is_tried_again(run: SourceRun, db: psycopg.Connection) -> None:
    assert failure(replace(run, registry_url=f"http://127.0.0.1:{_closed_port()}")) == (
        "registry.unavailable",
        Action.RETRY,
    )


def test_a_service_that_is_not_there_cannot_be_read_either() -> None:
    registry = ServiceRegistry({"url": f"http://127.0.0.1:{_closed_port()}"})
    with pytest.raises(RegistryError, match="could not read schema 1"):
        registry.schema(1)


def test_a_full_disk_stops_the_source_and_loses_nothing(
    run: SourceRun, reader: StreamReader, db: psycopg.Connection
) -> None:
    run = replace(run, spill_bytes=100_000)
    with SourceThread(run):
        reader.wait_for(log_end(run.dsn))
    db.execute("insert into t select i, repeat('x', 100) from generate_series(2, 9000) i")
    # A limit on the size of files fails like a full disk, and needs no file system of its own.
    with SourceProcess(run, environment={"TEST_FILE_LIMIT": "300000"}) as source:
        outcome = source.outcome()
    assert (outcome["code"], outcome["action"]) == ("source.spill_full", "stop")
    with SourceThread(run):
        reader.wait_for(log_end(run.dsn))
    check_stream(reader, run.dsn, "public.t")


def test_a_spill_directory_that_is_none_stops_the_source(
    run: SourceRun, reader: StreamReader, db: psycopg.Connection, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with SourceThread(replace(run, spill_bytes=100_000, spill_dir=str(tmp_path / "file" / "below"))) as source:
        reader.wait_for(log_end(run.dsn))
        db.execute("insert into t select i, repeat('x', 100) from generate_series(2, 9000) i")
        error = source.failure()
    assert isinstance(error, spill.SpillError)
    assert error.where.endswith("below")


def _closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return port


def test_a_row_of_some_megabytes_travels_and_one_above_the_topics_limit_stops(
    begun: SourceRun, reader: StreamReader, db: psycopg.Connection
) -> None:
    noise = "select string_agg(md5(random()::text), '') from generate_series(1, 100000)"  # 3.2 MB
    with SourceThread(begun):
        db.execute(f"insert into t values (2, ({noise}))".encode())
        reader.wait_for(log_end(begun.dsn))
    records = reader.records()
    check_markers(reader.markers, records)
    check_same(begun.dsn, fold(records), "public.t")

    topic = f"{begun.prefix}.public.t"
    _limit(begun, topic, 1_000_000)
    db.execute(f"insert into t values (3, ({noise}))".encode())
    with SourceThread(begun) as source:
        error = source.failure()
    assert (error.code, error.action, error.where) == ("source.record_too_large", Action.STOP, topic)

    _limit(begun, topic, 10_000_000)
    with SourceThread(begun):
        reader.wait_for(log_end(begun.dsn))
    check_same(begun.dsn, fold(reader.records()), "public.t")


def _limit(run: SourceRun, topic: str, size: int) -> None:
    entry = ConfigEntry("max.message.bytes", str(size), incremental_operation=AlterConfigOpType.SET)
    admin = AdminClient(run.consumer_kafka)
    for done in admin.incremental_alter_configs([ConfigResource("TOPIC", topic, incremental_configs=[entry])]).values():
        done.result(30)
