"""From a DSN to an open connection: hosts in turn, TLS by sslmode, and the socket that drives a conversation."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from anabranch_connectors.postgres.auth import Credentials
from anabranch_connectors.postgres.conninfo import Endpoint, connection_options, endpoints
from anabranch_connectors.postgres.errors import AuthenticationError, ConnectError, ProtocolError
from anabranch_connectors.postgres.messages import Conversation, Message
from anabranch_connectors.postgres.wire import SSL_REQUEST, Session, is_asynchronous, startup, take_message
from anabranch_schemas.errors import AnabranchError, ConfigError

_T = TypeVar("_T")

# A host that does not answer at all (a dropped packet filter) would otherwise hold us for the kernel's two minutes.
_CONNECT_TIMEOUT_S = 10.0
_READ_BYTES = 65536
# A peer that vanished is noticed after 30 + 3 * 10 = 60 s; the kernel's own default is more than two hours.
_KEEPALIVES = (
    ("keepalives_idle", "TCP_KEEPIDLE", 30),
    ("keepalives_interval", "TCP_KEEPINTVL", 10),
    ("keepalives_count", "TCP_KEEPCNT", 3),
    ("tcp_user_timeout", "TCP_USER_TIMEOUT", 0),
)


class Link:
    """A socket, plain or TLS, that drives conversations and keeps what came beyond them in `buffer`."""

    def __init__(self, sock: socket.socket, *, where: str, timeout_s: float) -> None:
        self.socket = sock
        self.where = where
        self.timeout_s = timeout_s
        self.buffer = bytearray()
        self.session = Session()

    def run(self, conversation: Conversation[_T]) -> _T:
        """Drive a conversation to its end and return its result.

        Raises:
            ConnectError: if the peer goes away or does not answer within the timeout.
        """
        deadline = time.monotonic() + self.timeout_s
        try:
            self.socket.settimeout(self.timeout_s)
            outgoing = next(conversation)
            while True:
                if outgoing:
                    self.socket.sendall(outgoing)
                outgoing = conversation.send(self._next_message(deadline))
        except StopIteration as stop:
            value: _T = stop.value
            return value
        except OSError as error:
            raise ConnectError(f"the connection broke: {_reason(error)}", where=self.where) from error
        except AnabranchError as error:
            error.where = error.where or self.where
            raise

    def close(self) -> None:
        """Close the socket; the server notices and frees the slot."""
        self.socket.close()

    def _next_message(self, deadline: float) -> Message:
        while True:
            message = take_message(self.buffer)
            if message is None:
                if time.monotonic() > deadline:
                    raise TimeoutError("timed out")
                data = self.socket.recv(_READ_BYTES)
                if not data:
                    raise ConnectionResetError("closed by the server")
                self.buffer += data
            elif not is_asynchronous(message):
                return message


def dial(dsn: str, parameters: Mapping[str, str], *, receive_buffer: int = 0) -> Link:
    """Connect to the first host of `dsn` that answers and lets us in.

    `parameters` are added to the startup message; `receive_buffer` (bytes, 0: the kernel's choice) is set before the
    connection is made, because the window that TCP offers is agreed in the handshake.

    Raises:
        ConnectError: if no host can be reached.
        AuthenticationError: if a host is reached and refuses us, or its certificate is not accepted.
    """
    options = connection_options(dsn)
    failures: list[str] = []
    for endpoint in endpoints(options):
        try:
            return _Attempt(endpoint, options, parameters, receive_buffer).open()
        except ConnectError as error:
            failures.append(f"{endpoint.where}: {error.message}")
    raise ConnectError(
        "no server could be reached: " + "; ".join(failures),
        where=",".join(endpoint.where for endpoint in endpoints(options)),
        advice="check that the server runs, listens on this address, and that no firewall is between",
    )


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One host of the connection string, and all that is needed to try it."""

    endpoint: Endpoint
    options: Mapping[str, str]
    parameters: Mapping[str, str]
    receive_buffer: int

    def open(self) -> Link:
        """Try with and without TLS in the order of sslmode (libpq's rules)."""
        mode = self.options["sslmode"]
        plain, encrypted = self._plain, self._encrypted
        if self.endpoint.is_unix:  # libpq never uses TLS there
            return plain()
        match mode:
            case "disable":
                return plain()
            case "allow":
                return _first(plain, encrypted)
            case "prefer":
                return _first(encrypted, plain)
            case "require" | "verify-ca" | "verify-full":
                return encrypted()
        raise ConfigError(f"unknown sslmode {mode!r}", where="dsn", advice="one of disable ... verify-full")

    def _plain(self) -> Link:
        return self._start(self._connect())

    def _encrypted(self) -> Link:
        sock = self._connect()
        try:
            sock.sendall(SSL_REQUEST)
            # Exactly one byte: anything more was sent before TLS and could be injected (CVE-2021-23222).
            answer = sock.recv(1)
        except OSError as error:
            sock.close()
            raise ConnectError(_reason(error), where=self.endpoint.where) from error
        if answer == b"N" and self.options["sslmode"] in ("allow", "prefer"):
            return self._start(sock)
        if answer != b"S":
            sock.close()
            if answer in (b"N", b"E"):
                raise AuthenticationError(
                    "the server does not offer TLS",
                    where=self.endpoint.where,
                    advice="set ssl = on at the server, or sslmode=prefer in the DSN",
                )
            if not answer:
                raise ConnectError("closed by the server", where=self.endpoint.where)
            raise ProtocolError("the peer is not a PostgreSQL server", where=self.endpoint.where)
        return self._start(self._wrap(sock))

    def _wrap(self, sock: socket.socket) -> ssl.SSLSocket:
        context = tls_context(self.options)
        try:
            return context.wrap_socket(sock, server_hostname=self.endpoint.host)
        except ssl.SSLCertVerificationError as error:
            sock.close()
            raise AuthenticationError(
                f"the server's certificate is not accepted: {error.verify_message}",
                where=self.endpoint.where,
                advice="check sslrootcert, and that the certificate names the host of the DSN",
            ) from error
        except ssl.SSLError as error:
            sock.close()
            raise AuthenticationError(f"TLS failed: {error.reason}", where=self.endpoint.where) from error
        except OSError as error:
            sock.close()
            raise ConnectError(_reason(error), where=self.endpoint.where) from error

    def _connect(self) -> socket.socket:
        timeout_s = float(self.options.get("connect_timeout") or 0) or _CONNECT_TIMEOUT_S
        failure: OSError = OSError("no address")
        try:
            for family, address in _addresses(self.endpoint):
                sock = socket.socket(family, socket.SOCK_STREAM)
                try:
                    self._tune(sock)
                    sock.settimeout(timeout_s)
                    sock.connect(address)
                except OSError as error:
                    sock.close()
                    failure = error
                else:
                    return sock
        except OSError as error:  # the name does not resolve
            failure = error
        raise ConnectError(_reason(failure), where=self.endpoint.where) from failure

    def _tune(self, sock: socket.socket) -> None:
        if self.receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.receive_buffer)
        if self.endpoint.is_unix:
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.options.get("keepalives", "1") == "0":
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, option, default in _KEEPALIVES:
            value = int(self.options.get(name) or default)
            # Not every system has each of them.
            if value and hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def _start(self, sock: socket.socket) -> Link:
        timeout_s = float(self.options.get("connect_timeout") or 0) or _CONNECT_TIMEOUT_S
        link = Link(sock, where=self.endpoint.where, timeout_s=timeout_s)
        try:
            encrypted = sock if isinstance(sock, ssl.SSLSocket) else None
            credentials = Credentials(
                self.options["user"], self.endpoint.password, encrypted, self.options["channel_binding"]
            )
            link.session = link.run(startup(self._startup_parameters(), credentials))
            self._check_session(link.session)
        except BaseException:
            link.close()
            raise
        return link

    def _startup_parameters(self) -> dict[str, str]:
        parameters = {"user": self.options["user"], "database": self.options["dbname"]}
        if self.options.get("options"):
            parameters["options"] = self.options["options"]
        return parameters | dict(self.parameters)

    def _check_session(self, session: Session) -> None:
        wanted = self.options.get("target_session_attrs", "any")
        standby = session.parameters.get("in_hot_standby") == "on"
        if (standby and wanted in ("primary", "read-write")) or (not standby and wanted in ("standby", "read-only")):
            raise ConnectError(f"the server is not {wanted}", where=self.endpoint.where)


def tls_context(options: Mapping[str, str]) -> ssl.SSLContext:
    """Return the TLS settings that sslmode and the ssl* options of a DSN ask for.

    Raises:
        ConfigError: if a file that the DSN names cannot be read.
    """
    mode = options["sslmode"]
    root = options.get("sslrootcert") or _default_file("root.crt")
    # libpq: `require` with a root certificate at hand verifies like verify-ca.
    verify = mode in ("verify-ca", "verify-full") or (mode == "require" and bool(root))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = mode == "verify-full" or options.get("sslrootcert") == "system"
    context.verify_mode = ssl.CERT_REQUIRED if verify or context.check_hostname else ssl.CERT_NONE
    try:
        if context.verify_mode == ssl.CERT_REQUIRED:
            _load_roots(context, root)
        certificate = options.get("sslcert") or _default_file("postgresql.crt")
        if certificate and options.get("sslcertmode") != "disable":
            key = options.get("sslkey") or _default_file("postgresql.key") or None
            # A password is always given, so that OpenSSL never asks for one on the terminal.
            context.load_cert_chain(certificate, key, password=options.get("sslpassword") or "")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"a certificate or key of the DSN cannot be read: {_reason(error)}",
            where="dsn",
            advice="check sslrootcert, sslcert and sslkey",
        ) from error
    return context


def _load_roots(context: ssl.SSLContext, root: str) -> None:
    if root == "system":
        context.load_default_certs()
    elif root:
        context.load_verify_locations(root)
    else:
        raise OSError("no root certificate: set sslrootcert")


def _default_file(name: str) -> str:
    path = Path.home() / ".postgresql" / name
    return str(path) if path.exists() else ""


def _first(first: Callable[[], Link], second: Callable[[], Link]) -> Link:
    try:
        return first()
    except AuthenticationError as refused:
        # pg_hba.conf may allow only the other kind. A wrong password fails both times and keeps its first message.
        try:
            return second()
        except AuthenticationError:
            raise refused from None


def _addresses(endpoint: Endpoint) -> Iterator[tuple[socket.AddressFamily, str | tuple[str, int]]]:
    if endpoint.is_unix:
        yield socket.AF_UNIX, f"{endpoint.host}/.s.PGSQL.{endpoint.port}"
        return
    name = endpoint.hostaddr or endpoint.host
    for family, _, _, _, address in socket.getaddrinfo(name, endpoint.port, type=socket.SOCK_STREAM):
        yield family, (str(address[0]), int(address[1]))


def _reason(error: OSError) -> str:
    return (error.strerror or str(error) or type(error).__name__).lower()
