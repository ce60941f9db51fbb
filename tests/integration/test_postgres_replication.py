"""A real server: the stream, TLS and SCRAM, and slots and publications that are gone, foreign or ahead."""

from __future__ import annotations

import datetime as dt
import os
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import psycopg
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from anabranch.stack import postgres_binaries
from anabranch.stack.postgres import PostgresServer
from anabranch_connectors.postgres import publications, slots
from anabranch_connectors.postgres.catalog import load_tables
from anabranch_connectors.postgres.control import Connection, connect
from anabranch_connectors.postgres.errors import (
    AuthenticationError,
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
from anabranch_connectors.postgres.replication import ReplicationConnection, stream_error
from anabranch_connectors.postgres.slots import StoredPosition

OPTIONS = {"proto_version": "1", "publication_names": "ab", "binary": "true"}
DEADLINE_S = 30.0


def frames(connection: ReplicationConnection, *, behind: bool = False) -> Iterator[bytes]:
    """Yield whole frames of the stream; fail when none comes for half a minute."""
    buffer = b""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        buffer += connection.receive(behind=behind, wait_s=1)
        while len(buffer) >= 5 and len(buffer) > (length := int.from_bytes(buffer[1:5], "big")):
            frame, buffer = buffer[: length + 1], buffer[length + 1 :]
            if frame[:1] != b"d":
                raise stream_error(frame)
            yield frame
            deadline = time.monotonic() + DEADLINE_S
    pytest.fail("the stream stood still")


def wait_for_inserts(connection: ReplicationConnection, count: int, *, behind: bool = False) -> int:
    """Read until `count` rows have been inserted and committed; return the end LSN of the last commit."""
    rows = 0
    for frame in frames(connection, behind=behind):
        if frame[5:6] != b"w":
            continue
        rows += frame[30:31] == b"I"
        if frame[30:31] == b"C" and rows >= count:
            assert rows == count
            return int.from_bytes(frame[40:48], "big")
    raise AssertionError


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


SLOT = f"ab_{os.getpid()}"


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


# TLS and SCRAM, on a server of their own


@dataclass(frozen=True)
class SecureServer:
    server: PostgresServer
    authority: Path
    certificate: Path
    key: Path

    def dsn(self, user: str = "scram", password: str | None = "right", **options: str) -> str:
        values = {"host": "localhost", "hostaddr": "127.0.0.1", "user": user, "sslmode": "require", **options}
        return psycopg.conninfo.make_conninfo(self.server.dsn(), password=password, **values)


def _certificate(
    name: str, issuer: tuple[x509.Name, ec.EllipticCurvePrivateKey] | None, *, host: str = ""
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    issuer_name, issuer_key = issuer or (subject, key)
    now = dt.datetime.now(dt.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer_name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=2))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    if host:
        names = [x509.DNSName(host), x509.IPAddress(ip_address("127.0.0.9"))]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(issuer_key, hashes.SHA256()), key


def _pem(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> tuple[str, str]:
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM).decode(), private.decode()


def _write(conn: Connection, name: str, text: str) -> None:
    """Write a file of the server's data directory, as the server."""
    lines = ", ".join("'" + line + "'" for line in text.strip().splitlines())
    command = f"COPY (SELECT unnest(ARRAY[{lines}])) TO PROGRAM 'umask 077; cat > {name}'"
    conn.execute(command)


HBA = """
local all all trust
hostnossl all plain 127.0.0.1/32 trust
hostssl all clear 127.0.0.1/32 password
hostnossl all clear 127.0.0.1/32 reject
hostssl all digest 127.0.0.1/32 md5
hostssl all certified 127.0.0.1/32 cert
host all postgres 127.0.0.1/32 trust
host all all 127.0.0.1/32 scram-sha-256
"""


@pytest.fixture(scope="module")
def secure(server_directory: Path) -> Iterator[SecureServer]:
    # The wheel's servers are built without TLS, the system's with it.
    system = [binaries for binaries in postgres_binaries._installed() if binaries.origin == "system"]
    if not system:
        if os.environ.get("CI") == "true":
            pytest.fail("TLS is tested with the system's PostgreSQL, and there is none")
        pytest.skip("no PostgreSQL of the system: TLS is not tested")
    server = PostgresServer(server_directory / "tls", binaries=system[0], name="postgres-tls")
    authority, authority_key = _certificate("anabranch test authority", None)
    issuer = (authority.subject, authority_key)
    files = server_directory / "tls-files"
    files.mkdir()
    (files / "ca.pem").write_text(_pem(authority, authority_key)[0])
    client, client_key = _pem(*_certificate("certified", issuer))
    (files / "client.pem").write_text(client)
    (files / "client.key").write_text(client_key)
    (files / "client.key").chmod(0o600)
    server.start()
    try:
        with psycopg.connect(server.dsn(), autocommit=True) as conn:
            certificate, key = _pem(*_certificate("server", issuer, host="localhost"))
            _write(conn, "server.crt", certificate)
            _write(conn, "server.key", key)
            _write(conn, "root.crt", (files / "ca.pem").read_text())
            conn.execute("ALTER SYSTEM SET ssl = on")
            conn.execute("ALTER SYSTEM SET ssl_ca_file = 'root.crt'")
            for name in ("scram", "clear", "plain", "certified"):
                conn.execute(f"CREATE ROLE {name} LOGIN REPLICATION PASSWORD 'right'")
            conn.execute("SET password_encryption = 'md5'")
            conn.execute("CREATE ROLE digest LOGIN REPLICATION PASSWORD 'right'")
            _write(conn, "pg_hba.conf", HBA)
        # A restart, not a reload: its end can be waited for.
        server.stop()
        server.start()
        yield SecureServer(server, files / "ca.pem", files / "client.pem", files / "client.key")
    finally:
        server.stop()


@pytest.mark.parametrize("user", ["scram", "clear", "digest"])
def test_every_method_lets_the_right_password_in_by_tls(secure: SecureServer, user: str) -> None:
    with ReplicationConnection.connect(secure.dsn(user)) as connection:
        assert connection.is_encrypted
        assert connection.identify_system().timeline == 1


@pytest.mark.parametrize("user", ["scram", "clear", "digest"])
def test_every_method_refuses_a_wrong_password(secure: SecureServer, user: str) -> None:
    with pytest.raises(AuthenticationError) as caught:
        ReplicationConnection.connect(secure.dsn(user, "hunter2"))
    assert "hunter2" not in str(caught.value)
    with pytest.raises(AuthenticationError):
        connect(secure.dsn(user, "hunter2"))


def test_scram_is_bound_to_the_servers_certificate(secure: SecureServer) -> None:
    with ReplicationConnection.connect(secure.dsn(channel_binding="require")) as connection:
        assert connection.is_encrypted
    with ReplicationConnection.connect(secure.dsn(channel_binding="disable")) as connection:
        assert connection.is_encrypted
    with pytest.raises(AuthenticationError):
        ReplicationConnection.connect(secure.dsn(channel_binding="require", sslmode="disable"))


def test_the_binding_is_to_this_certificate_and_no_other(secure: SecureServer, monkeypatch: pytest.MonkeyPatch) -> None:
    # What a man in the middle with a certificate of his own would look like to the server.
    other, _ = _certificate("somebody else", None)
    der = other.public_bytes(serialization.Encoding.DER)
    monkeypatch.setattr(ssl.SSLSocket, "getpeercert", lambda _self, **_: der)
    with pytest.raises(AuthenticationError):
        ReplicationConnection.connect(secure.dsn(channel_binding="require"))


@pytest.mark.parametrize(
    ("mode", "encrypted"), [("disable", False), ("allow", False), ("prefer", True), ("require", True)]
)
def test_sslmode_decides_where_the_server_leaves_the_choice(
    secure: SecureServer, mode: str, *, encrypted: bool
) -> None:
    with ReplicationConnection.connect(secure.dsn(sslmode=mode)) as connection:
        assert connection.is_encrypted is encrypted


def test_a_refusal_over_tls_falls_back_only_if_preferred(secure: SecureServer) -> None:
    with ReplicationConnection.connect(secure.dsn("plain", sslmode="prefer", password="wrong")) as connection:
        assert not connection.is_encrypted
    with ReplicationConnection.connect(secure.dsn("clear", sslmode="allow")) as connection:
        assert connection.is_encrypted
    with pytest.raises(AuthenticationError):
        ReplicationConnection.connect(secure.dsn("plain", sslmode="require", password="wrong"))


def test_verify_full_wants_the_authority_and_the_host(secure: SecureServer) -> None:
    root = str(secure.authority)
    with ReplicationConnection.connect(secure.dsn(sslmode="verify-full", sslrootcert=root)) as connection:
        assert connection.is_encrypted
    wrong_host = {"host": "127.0.0.1", "sslrootcert": root}
    with pytest.raises(AuthenticationError, match="certificate"):
        ReplicationConnection.connect(secure.dsn(sslmode="verify-full", **wrong_host))
    with ReplicationConnection.connect(secure.dsn(sslmode="verify-ca", **wrong_host)) as connection:
        assert connection.is_encrypted


def test_a_foreign_authority_is_refused(secure: SecureServer, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.pem"
    foreign.write_text(_pem(*_certificate("somebody else", None))[0])
    for mode in ("require", "verify-ca", "verify-full"):
        with pytest.raises(AuthenticationError, match="certificate"):
            ReplicationConnection.connect(secure.dsn(sslmode=mode, sslrootcert=str(foreign)))


def test_a_client_certificate_opens_the_door(secure: SecureServer) -> None:
    files = {"sslcert": str(secure.certificate), "sslkey": str(secure.key)}
    with ReplicationConnection.connect(secure.dsn("certified", None, **files)) as connection:
        assert connection.is_encrypted
    with pytest.raises(AuthenticationError):
        ReplicationConnection.connect(secure.dsn("certified", None))


def test_the_unix_socket_is_used_without_tls(secure: SecureServer) -> None:
    dsn = secure.dsn("scram", None, host=str(secure.server.directory), hostaddr="")
    with ReplicationConnection.connect(dsn) as connection:
        assert not connection.is_encrypted


def test_a_stream_over_tls_arrives_whole(secure: SecureServer) -> None:
    with connect(secure.dsn("postgres", None)) as conn:
        conn.execute("CREATE TABLE public.orders (id int PRIMARY KEY, note text)")
        publications.ensure_publication(conn, "ab", "eu.orders", load_tables(conn, ["public.*"]))
        slots.create_slot(conn, "tls")
        with ReplicationConnection.connect(secure.dsn()) as connection:
            connection.start("tls", 0, OPTIONS)
            conn.execute("INSERT INTO public.orders SELECT g, repeat('x', 200) FROM generate_series(1, 20000) g")
            end = wait_for_inserts(connection, 20_000, behind=True)
            connection.feedback(end, reply=True)
            conn.execute("INSERT INTO public.orders VALUES (0, 'one more')")
            wait_for_inserts(connection, 1)
