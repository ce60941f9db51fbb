"""Every finding of a check, on a real server that has the fault."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from anabranch.stack.postgres import PostgresServer
from anabranch_connectors.findings import Severity
from anabranch_connectors.postgres import publications, slots
from anabranch_connectors.postgres.catalog import load_tables
from anabranch_connectors.postgres.check import CheckedSource, check_source
from anabranch_connectors.postgres.control import Connection, connect
from anabranch_connectors.postgres.errors import SlotLostError
from anabranch_connectors.postgres.replication import ReplicationConnection

SOURCE = CheckedSource(patterns=["public.*"], slot="ab_check", publication="ab", stream="eu.orders")


@pytest.fixture
def control(eu_database: str) -> Iterator[Connection]:
    with connect(eu_database) as conn:
        run(conn, "CREATE TABLE public.orders (id int PRIMARY KEY)")
        yield conn


def run(conn: Connection, text: str) -> Any:
    return conn.execute(text)


def found(dsn: str, source: CheckedSource = SOURCE) -> dict[tuple[str, str], Severity]:
    findings = check_source(dsn, source)
    assert all(finding.repair for finding in findings if finding.severity is Severity.ERROR)
    return {(finding.code, finding.where): finding.severity for finding in findings}


def codes(dsn: str, source: CheckedSource = SOURCE) -> set[str]:
    return {code for code, _ in found(dsn, source)}


@pytest.fixture
def reader(eu_database: str, control: Connection) -> Iterator[str]:
    """A role without rights; its DSN."""
    role = "ab_check_reader"
    run(control, f"DROP ROLE IF EXISTS {role}")
    run(control, f"CREATE ROLE {role} LOGIN")
    yield psycopg.conninfo.make_conninfo(eu_database, user=role)
    run(control, f"DROP OWNED BY {role}")
    run(control, f"DROP ROLE {role}")


def test_a_good_source_has_no_errors(eu_database: str, control: Connection) -> None:
    assert control.info.dbname
    assert Severity.ERROR not in found(eu_database).values()
    assert found(eu_database)["source.excess_rights", "role postgres"] is Severity.WARNING


def test_a_role_of_its_own_with_just_enough_rights_is_not_even_warned(
    eu_database: str, control: Connection, reader: str
) -> None:
    publications.ensure_publication(control, "ab", "eu.orders", load_tables(control, ["public.*"]))
    run(control, "ALTER ROLE ab_check_reader REPLICATION")
    run(control, "GRANT SELECT ON public.orders TO ab_check_reader")
    assert set(found(reader).values()) <= {Severity.INFO}


def test_missing_rights_are_found(reader: str) -> None:
    assert {
        ("source.replication_right", "role ab_check_reader"),
        ("source.select_right", "public.orders"),
        ("source.publication_right", "public.orders"),
    } <= found(reader).keys()
    assert "source.excess_rights" not in codes(reader)


def test_row_security_that_hides_rows_is_found(control: Connection, reader: str) -> None:
    run(control, "ALTER TABLE public.orders ENABLE ROW LEVEL SECURITY")
    run(control, "GRANT SELECT ON public.orders TO ab_check_reader")
    assert "source.row_security" in codes(reader)
    run(control, "ALTER ROLE ab_check_reader BYPASSRLS")
    assert "source.row_security" not in codes(reader)


def test_tables_that_cannot_be_published_are_found(eu_database: str, control: Connection) -> None:
    run(control, "CREATE TABLE public.keyless (id int)")
    run(control, "CREATE TABLE public.nothing (id int PRIMARY KEY)")
    run(control, "ALTER TABLE public.nothing REPLICA IDENTITY NOTHING")
    run(control, "CREATE UNLOGGED TABLE public.fleeting (id int PRIMARY KEY)")
    findings = found(eu_database)
    assert findings["source.table_without_key", "public.keyless"] is Severity.ERROR
    assert findings["source.table_without_key", "public.nothing"] is Severity.ERROR
    assert findings["source.unlogged_table", "public.fleeting"] is Severity.WARNING


def test_patterns_and_tables_that_do_not_meet_are_found(eu_database: str, control: Connection) -> None:
    run(control, "CREATE TABLE public.other (id int PRIMARY KEY)")
    source = CheckedSource(["public.orders", "public.gone", "app.*"], "ab_check", "ab", "eu.orders")
    findings = found(eu_database, source)
    assert findings["source.pattern_unmatched", "tables: public.gone"] is Severity.ERROR
    assert findings["source.pattern_unmatched", "tables: app.*"] is Severity.WARNING
    assert findings["source.tables_unmatched", "tables"] is Severity.INFO
    assert ("source.pattern_unmatched", "tables: public.orders") not in findings


def test_a_foreign_publication_is_found(eu_database: str, control: Connection) -> None:
    run(control, "CREATE PUBLICATION ab FOR ALL TABLES WITH (publish = 'insert')")
    assert {"source.publication_foreign", "source.publication_incomplete"} <= codes(eu_database)
    adopted = CheckedSource(["public.*"], "ab_check", "ab", "eu.orders", adopt=True)
    assert "source.publication_foreign" not in codes(eu_database, adopted)
    publications.mark_branch(control, "ab", "eu.stock", "")
    assert "source.publication_foreign" in codes(eu_database, adopted)


def test_a_slot_of_another_database_is_found(eu_database: str, us_database: str, control: Connection) -> None:
    assert us_database
    other = psycopg.conninfo.make_conninfo(eu_database, dbname="postgres")
    with connect(other) as conn:
        slots.create_slot(conn, "ab_check")
        try:
            assert "source.slot_foreign" in codes(eu_database)
        finally:
            slots.drop_slot(conn, "ab_check")
    assert "source.slot_foreign" not in codes(eu_database)
    assert control.info.dbname


def test_a_server_that_cannot_be_reached_is_a_finding() -> None:
    (finding,) = check_source("postgresql://ada:hunter2@127.0.0.1:1/db", SOURCE)
    assert finding.code == "connect.refused"
    assert "hunter2" not in repr(finding)


@pytest.fixture(scope="module")
def poor(server_directory: Path) -> Iterator[str]:
    """A server as it comes, with one slot; its DSN."""
    settings = {"wal_level": "replica", "max_replication_slots": "1", "max_wal_senders": "1"}
    server = PostgresServer(server_directory / "poor", settings=settings, name="postgres-poor")
    server.start()
    try:
        with connect(server.dsn()) as conn:
            run(conn, "CREATE TABLE public.orders (id int PRIMARY KEY)")
            run(conn, "SELECT pg_create_physical_replication_slot('taken')")
        yield server.dsn()
    finally:
        server.stop()


def test_server_settings_that_are_too_low_are_found(poor: str) -> None:
    findings = found(poor)
    assert findings["source.wal_level", "server"] is Severity.ERROR
    assert findings["source.slots_exhausted", "server"] is Severity.ERROR


def test_senders_that_are_all_taken_are_found(poor: str) -> None:
    with ReplicationConnection.connect(poor) as taken:
        assert taken.identify_system().timeline == 1
        assert "source.senders_exhausted" in codes(poor)


@pytest.fixture
def forgetful(server_directory: Path) -> Iterator[Connection]:
    """A server that keeps no log for slots."""
    settings = {"max_slot_wal_keep_size": "1MB", "max_wal_size": "32MB", "min_wal_size": "32MB"}
    server = PostgresServer(server_directory / "forgetful", settings=settings, name="postgres-forgetful")
    server.start()
    try:
        with connect(server.dsn()) as conn:
            run(conn, "CREATE TABLE public.orders (id int PRIMARY KEY)")
            yield conn
    finally:
        server.stop()


def test_a_slot_that_lost_its_log_is_found_and_refused(forgetful: Connection) -> None:
    slot = slots.create_slot(forgetful, "ab_check")
    for number in range(6):
        run(forgetful, f"INSERT INTO public.orders VALUES ({number})")
        run(forgetful, "SELECT pg_switch_wal()")
    run(forgetful, "CHECKPOINT")
    dsn = psycopg.conninfo.make_conninfo("", host="127.0.0.1", port=forgetful.info.port, user="postgres")
    assert "source.slot_lost" in codes(dsn)
    with ReplicationConnection.connect(dsn) as replication:
        identity = replication.identify_system()
        with pytest.raises(SlotLostError):
            slots.verify_position(
                slots.find_slot(forgetful, "ab_check"), None, identity, database="postgres", name="ab_check"
            )
        with pytest.raises(SlotLostError):
            replication.start("ab_check", slot.confirmed_flush, {"proto_version": "1", "publication_names": "ab"})
