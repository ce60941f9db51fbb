"""A real server: the stream, and slots and publications that are gone, foreign or ahead."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psycopg
import pytest
from tests.integration.replication_frames import OPTIONS, frames, wait_for_inserts

from anabranch_connectors.postgres import publications, slots
from anabranch_connectors.postgres.catalog import load_tables
from anabranch_connectors.postgres.control import Connection, connect
from anabranch_connectors.postgres.errors import (
    ConnectError,
    PublicationForeignError,
    PublicationIncompleteError,
    PublicationMissingError,
    ReplicationEndedError,
    ServerError,
    SlotAheadError,
    SlotForeignError,
    SlotInUseError,
    SlotMissingError,
    TransientServerError,
)
from anabranch_connectors.postgres.replication import ReplicationConnection
from anabranch_connectors.postgres.slots import StoredPosition

SLOT = f"ab_{os.getpid()}"


@pytest.fixture
def control(eu_database: str) -> Iterator[Connection]:
    with connect(eu_database) as conn:
        conn.execute("CREATE TABLE public.orders (id int PRIMARY KEY, note text)")
        yield conn


@pytest.fixture
def streaming(eu_database: str, control: Connection) -> Iterator[ReplicationConnection]:
    publications.ensure_publication(control, "ab", "eu.orders", load_tables(control, ["public.*"]))
    slots.create_slot(control, SLOT)
    with ReplicationConnection.connect(eu_database) as connection:
        connection.start(SLOT, 0, OPTIONS)
        yield connection


def stored(control: Connection, dsn: str) -> StoredPosition:
    with ReplicationConnection.connect(dsn) as connection:
        identity = connection.identify_system()
    slot = slots.find_slot(control, SLOT)
    assert slot is not None
    return StoredPosition(slot.confirmed_flush, identity.system_id, identity.timeline)


def verify(control: Connection, dsn: str, position: StoredPosition) -> None:
    with ReplicationConnection.connect(dsn) as connection:
        identity = connection.identify_system()
    slot = slots.find_slot(control, SLOT)
    slots.verify_position(slot, position, identity, database=control.info.dbname, name=SLOT)


# The stream


def test_rows_arrive(control: Connection, streaming: ReplicationConnection) -> None:
    control.execute("INSERT INTO public.orders SELECT g, 'x' FROM generate_series(1, 10) g")
    assert wait_for_inserts(streaming, 10) > 0


def test_a_backlog_larger_than_the_window_arrives_whole(control: Connection, streaming: ReplicationConnection) -> None:
    control.execute("INSERT INTO public.orders SELECT g, repeat('x', 200) FROM generate_series(1, 20000) g")
    wait_for_inserts(streaming, 20_000, behind=True)


def test_receive_gives_nothing_when_nothing_comes(streaming: ReplicationConnection) -> None:
    while streaming.receive(behind=False, wait_s=0.2):
        pass
    assert streaming.receive(behind=False, wait_s=0) == b""


def test_feedback_moves_the_slot_and_never_back(control: Connection, streaming: ReplicationConnection) -> None:
    control.execute("INSERT INTO public.orders VALUES (1, 'x')")
    end = wait_for_inserts(streaming, 1)
    streaming.feedback(end)
    # A keepalive of the server's own may come before the answer.
    answers = (frame for frame in frames(streaming) if frame[5:6] == b"k")
    for _ in range(20):
        streaming.feedback(0, reply=True)
        next(answers)
        slot = slots.find_slot(control, SLOT)
        if slot is not None and slot.confirmed_flush >= end:
            break
    assert slot is not None
    assert slot.confirmed_flush == end


def test_a_terminated_sender_ends_the_stream_with_its_sqlstate(
    control: Connection, streaming: ReplicationConnection
) -> None:
    slot = slots.find_slot(control, SLOT)
    assert slot is not None
    control.execute("SELECT pg_terminate_backend(%s)", (slot.active_pid,))
    with pytest.raises(TransientServerError, match="57P01"):
        list(frames(streaming))
    with pytest.raises(ReplicationEndedError):
        list(frames(streaming))


def test_a_query_that_fails_leaves_the_connection_usable(eu_database: str) -> None:
    with ReplicationConnection.connect(eu_database) as connection:
        with pytest.raises(SlotMissingError):
            connection.start("no slot", 0, {"a": "it's"})
        assert connection.identify_system().timeline >= 1


def test_a_closed_port_is_refused_and_tried_again(eu_database: str) -> None:
    with pytest.raises(ConnectError) as caught:
        ReplicationConnection.connect("postgresql://ada:hunter2@127.0.0.1:1/db")
    assert "hunter2" not in str(caught.value)
    options = psycopg.conninfo.conninfo_to_dict(eu_database)
    several = psycopg.conninfo.make_conninfo(
        eu_database, host=f"127.0.0.1,{options['host']}", port=f"1,{options['port']}"
    )
    with ReplicationConnection.connect(several) as connection:
        assert connection.identify_system().wal_end > 0


def test_a_database_that_does_not_exist_is_an_error_of_the_server(eu_database: str) -> None:
    dsn = psycopg.conninfo.make_conninfo(eu_database, dbname="nowhere")
    with pytest.raises(ServerError, match="3D000"):
        connect(dsn)


# Slots


def test_a_slot_in_use_is_refused_and_tried_again(
    eu_database: str, control: Connection, streaming: ReplicationConnection
) -> None:
    assert streaming.fileno() > 0
    with pytest.raises(SlotInUseError):
        verify(control, eu_database, stored(control, eu_database))
    with pytest.raises(SlotInUseError):
        slots.drop_slot(control, SLOT)
    with ReplicationConnection.connect(eu_database) as second, pytest.raises(SlotInUseError):
        second.start(SLOT, 0, OPTIONS)


def test_a_dropped_slot_is_missing(eu_database: str, control: Connection) -> None:
    slots.create_slot(control, SLOT)
    position = stored(control, eu_database)
    verify(control, eu_database, position)
    assert slots.drop_slot(control, SLOT)
    assert not slots.drop_slot(control, SLOT)
    with pytest.raises(SlotMissingError):
        verify(control, eu_database, position)
    with ReplicationConnection.connect(eu_database) as connection, pytest.raises(SlotMissingError):
        connection.start(SLOT, 0, OPTIONS)


def test_a_slot_that_was_made_again_is_ahead(eu_database: str, control: Connection) -> None:
    slots.create_slot(control, SLOT)
    position = stored(control, eu_database)
    slots.drop_slot(control, SLOT)
    control.execute("INSERT INTO public.orders VALUES (1, 'lost if nobody looks')")
    slots.create_slot(control, SLOT)
    with pytest.raises(SlotAheadError):
        verify(control, eu_database, position)


def test_a_slot_of_another_database_is_foreign(eu_database: str, control: Connection) -> None:
    slot = slots.create_slot(control, SLOT)
    with ReplicationConnection.connect(eu_database) as connection:
        identity = connection.identify_system()
    slots.verify_position(slot, None, identity, database=control.info.dbname, name=SLOT)
    with pytest.raises(SlotForeignError):
        slots.verify_position(slot, None, identity, database="elsewhere", name=SLOT)


def test_a_failover_slot_is_made_where_the_server_has_them(control: Connection) -> None:
    slot = slots.create_slot(control, SLOT, failover=True)
    assert slot.failover is (control.info.server_version >= 170000)
    assert slot.plugin == "pgoutput"


def test_a_name_that_is_taken_is_an_error(control: Connection) -> None:
    slots.create_slot(control, SLOT)
    with pytest.raises(ServerError, match="42710"):
        slots.create_slot(control, SLOT)


# Publications


def test_a_publication_is_made_owned_and_made_only_once(control: Connection) -> None:
    tables = load_tables(control, ["public.*"])
    first = publications.ensure_publication(control, "ab", "eu.orders", tables, branch="7-1")
    assert first.owner == publications.Owner("eu.orders", "7-1")
    assert first.tables == {("public", "orders")}
    assert first.via_root
    assert publications.ensure_publication(control, "ab", "eu.orders", tables) == first


def test_tables_are_added_and_removed(control: Connection) -> None:
    publications.ensure_publication(control, "ab", "eu.orders", load_tables(control, ["public.*"]))
    control.execute('CREATE TABLE public."new ""one""" (id int PRIMARY KEY)')
    control.execute("CREATE TABLE public.parts (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    control.execute("CREATE TABLE public.part_1 PARTITION OF public.parts FOR VALUES FROM (0) TO (9)")
    tables = load_tables(control, ["public.*"])
    for _ in range(2):
        found = publications.ensure_publication(control, "ab", "eu.orders", tables)
        assert found.tables == {("public", "orders"), ("public", 'new "one"'), ("public", "parts")}
    for _ in range(2):
        publications.remove_tables(control, "ab", tables[:1])
    found_again = publications.find_publication(control, "ab")
    assert found_again is not None
    assert len(found_again.tables) == 2


def test_the_branch_is_recorded(control: Connection) -> None:
    publications.ensure_publication(control, "ab", "eu.orders", ())
    publications.mark_branch(control, "ab", "eu.orders", "it's 8-2")
    assert publications.read_owner(control, "ab") == publications.Owner("eu.orders", "it's 8-2")


def test_another_streams_publication_is_refused(control: Connection) -> None:
    publications.ensure_publication(control, "ab", "eu.orders", ())
    with pytest.raises(PublicationForeignError):
        publications.ensure_publication(control, "ab", "eu.stock", (), adopt=True)


def test_a_users_publication_is_adopted_only_when_offered(control: Connection) -> None:
    control.execute("CREATE PUBLICATION ab FOR ALL TABLES")
    tables = load_tables(control, ["public.*"])
    with pytest.raises(PublicationForeignError):
        publications.ensure_publication(control, "ab", "eu.orders", tables)
    adopted = publications.ensure_publication(control, "ab", "eu.orders", tables, adopt=True)
    assert adopted.all_tables
    assert publications.read_owner(control, "ab") == publications.Owner("eu.orders", "")


def test_a_publication_that_leaves_out_deletes_is_refused(control: Connection) -> None:
    control.execute("CREATE PUBLICATION ab FOR TABLE public.orders WITH (publish = 'insert, update')")
    with pytest.raises(PublicationIncompleteError):
        publications.ensure_publication(control, "ab", "eu.orders", (), adopt=True)


def test_partitions_under_their_own_names_are_refused(control: Connection) -> None:
    control.execute("CREATE TABLE public.parts (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    control.execute("CREATE PUBLICATION ab FOR ALL TABLES")
    tables = load_tables(control, ["public.parts"])
    with pytest.raises(PublicationIncompleteError):
        publications.ensure_publication(control, "ab", "eu.orders", tables, adopt=True)


def test_a_publication_missing_under_a_stored_position_is_a_gap(control: Connection) -> None:
    with pytest.raises(PublicationMissingError):
        publications.ensure_publication(control, "ab", "eu.orders", (), stored=True)
    assert publications.find_publication(control, "ab") is None
