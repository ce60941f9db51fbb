"""A real server that wants TLS and SCRAM: who gets in, what is encrypted, and a stream over it."""

from __future__ import annotations

import datetime as dt
import os
import ssl
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
from tests.integration.replication_frames import OPTIONS, wait_for_inserts

from anabranch.stack import postgres_binaries
from anabranch.stack.postgres import PostgresServer
from anabranch_connectors.postgres import publications, slots
from anabranch_connectors.postgres.catalog import load_tables
from anabranch_connectors.postgres.control import Connection, connect
from anabranch_connectors.postgres.errors import AuthenticationError
from anabranch_connectors.postgres.replication import ReplicationConnection


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
