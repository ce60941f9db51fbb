"""The protocol, driven by prepared messages: sessions, authentication, queries, and what is refused."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from scramp import ScramMechanism

from anabranch_connectors.postgres.auth import Credentials, authenticate
from anabranch_connectors.postgres.conninfo import connection_options, endpoints
from anabranch_connectors.postgres.copyout import copy_out
from anabranch_connectors.postgres.dial import Link
from anabranch_connectors.postgres.errors import (
    AuthenticationError,
    ConnectError,
    ProtocolError,
    ReplicationEndedError,
    ServerError,
    TransientServerError,
    server_error,
)
from anabranch_connectors.postgres.lsn import lsn_int, lsn_text
from anabranch_connectors.postgres.messages import Message, frame
from anabranch_connectors.postgres.replication import ReplicationConnection, stream_error
from anabranch_connectors.postgres.wire import drive, simple_query, start_copy_both, startup, take_message
from anabranch_schemas.errors import Action, ConfigError

READY = Message(b"Z", b"I")
# md5(md5('lovelace' || 'ada')::bytea || '\x01020304'), computed by a server
MD5_OF_ADA = b"3dc6aced3147251a8d6cb4ab889c0f43"


def authentication(code: int, rest: bytes = b"") -> Message:
    return Message(b"R", struct.pack("!I", code) + rest)


def refusal(sqlstate: str, text: str, severity: str = "FATAL") -> Message:
    return Message(b"E", f"SFEHLER\0V{severity}\0C{sqlstate}\0M{text}\0Dsecret detail\0\0".encode())


def test_a_trusted_session_starts_and_keeps_the_servers_parameters() -> None:
    parameters = Message(b"S", b"server_version\x0016.1\x00")
    messages = [authentication(0), parameters, Message(b"K", bytes(8)), READY]
    session, sent = drive(startup({"user": "ada", "database": "shop"}, Credentials("ada")), messages)
    assert session.parameters == {"server_version": "16.1"}
    assert sent == b"\0\0\0\x20\0\3\0\0user\0ada\0database\0shop\0\0"


def test_a_cleartext_password_is_sent_as_it_is() -> None:
    _, sent = drive(startup({"user": "a"}, Credentials("a", "pw")), [authentication(3), authentication(0), READY])
    assert sent.endswith(b"p\0\0\0\x07pw\0")


def test_an_md5_password_is_hashed_with_user_and_salt() -> None:
    answer = authenticate(authentication(5, b"\1\2\3\4"), Credentials("ada", "lovelace"))
    assert next(answer) == frame(b"p", b"md5" + MD5_OF_ADA + b"\0")


def scram_exchange(client_password: str, server_password: str, *, lie: bool = False) -> None:
    mechanism = ScramMechanism("SCRAM-SHA-256")
    credential = mechanism.make_auth_info(server_password)
    server = mechanism.make_server(lambda _: credential)
    conversation = authenticate(authentication(10, b"SCRAM-SHA-256\0\0"), Credentials("ada", client_password))
    first = next(conversation)
    name, length_and_text = first[5:].split(b"\0", 1)
    assert name == b"SCRAM-SHA-256"
    server.set_client_first(length_and_text[4:].decode())
    final = conversation.send(authentication(11, server.get_server_first().encode()))
    server.set_client_final(final[5:].decode())
    proof = "v=" + "A" * 43 + "=" if lie else server.get_server_final()
    conversation.send(authentication(12, proof.encode()))
    with pytest.raises(StopIteration):
        conversation.send(authentication(0))


def test_scram_proves_both_sides() -> None:
    scram_exchange("right", "right")


def test_a_server_that_does_not_know_the_password_is_refused() -> None:
    with pytest.raises(AuthenticationError):
        scram_exchange("right", "right", lie=True)


def test_scram_with_binding_is_not_answered_without_tls() -> None:
    conversation = authenticate(authentication(10, b"SCRAM-SHA-256-PLUS\0SCRAM-SHA-256\0\0"), Credentials("a", "b"))
    assert next(conversation)[5:].startswith(b"SCRAM-SHA-256\0")


@pytest.mark.parametrize(
    "request_message", [authentication(0), authentication(3), authentication(10, b"SCRAM-SHA-256\0\0")]
)
def test_channel_binding_that_is_required_is_not_bargained_away(request_message: Message) -> None:
    with pytest.raises(AuthenticationError):
        next(authenticate(request_message, Credentials("a", "b", channel_binding="require")))


def test_a_missing_password_is_said_so() -> None:
    with pytest.raises(AuthenticationError, match="none is given"):
        next(authenticate(authentication(3), Credentials("ada")))


def test_kerberos_is_refused_by_name() -> None:
    with pytest.raises(AuthenticationError, match="GSSAPI"):
        next(authenticate(authentication(7), Credentials("ada")))


def test_a_wrong_password_is_an_authentication_error() -> None:
    with pytest.raises(AuthenticationError, match="28P01") as caught:
        drive(startup({"user": "a"}, Credentials("a", "hunter2")), [authentication(3), refusal("28P01", "no")])
    assert "hunter2" not in str(caught.value)
    assert caught.value.action is Action.STOP


def test_too_many_connections_pass() -> None:
    with pytest.raises(TransientServerError) as caught:
        drive(startup({"user": "a"}, Credentials("a")), [refusal("53300", "too many clients")])
    assert caught.value.action is Action.RETRY


def test_credentials_do_not_show_the_password() -> None:
    assert "hunter2" not in repr(Credentials("ada", "hunter2"))


def test_a_query_gives_rows_with_nulls() -> None:
    row = Message(b"D", struct.pack("!Hi", 2, 2) + b"ab" + struct.pack("!i", -1))
    rows, sent = drive(simple_query("SELECT 1"), [Message(b"T", b""), row, Message(b"C", b"SELECT 1\0"), READY])
    assert rows == [(b"ab", None)]
    assert sent == b"Q\0\0\0\x0dSELECT 1\0"


def test_a_failed_query_is_raised_after_the_server_is_ready_again() -> None:
    conversation = simple_query("nonsense")
    next(conversation)
    conversation.send(refusal("42601", "syntax error", "ERROR"))
    with pytest.raises(ServerError) as caught:
        conversation.send(READY)
    assert caught.value.sqlstate == "42601"


def test_a_fatal_error_is_raised_at_once_because_nothing_follows() -> None:
    conversation = simple_query("SELECT 1")
    next(conversation)
    with pytest.raises(TransientServerError, match="57P01"):
        conversation.send(refusal("57P01", "terminating connection"))


def test_a_server_error_keeps_no_detail_and_no_values() -> None:
    failed = server_error({"C": "22P02", "M": 'invalid input syntax for type integer: "4929 1234"', "D": "row"})
    assert "4929" not in str(failed)
    assert "22P02" in str(failed)


def test_replication_that_is_refused_carries_the_sqlstate() -> None:
    with pytest.raises(ServerError) as caught:
        drive(start_copy_both("START_REPLICATION"), [refusal("55006", "slot is active", "ERROR"), READY])
    assert caught.value.sqlstate == "55006"


def test_a_message_is_cut_only_when_it_is_whole() -> None:
    buffer = bytearray(b"Z\0\0\0\5")
    assert take_message(buffer) is None
    buffer += b"IN"
    assert take_message(buffer) == READY
    assert bytes(buffer) == b"N"


def test_a_peer_that_is_no_postgresql_is_not_believed() -> None:
    with pytest.raises(ProtocolError):
        take_message(bytearray(b"HTTP/1.1 400 Bad Request\r\n"))


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (frame(b"E", b"C57P01\0Mterminating connection\0\0"), TransientServerError),
        (frame(b"E", b"C42704\0Mgone\0\0"), ServerError),
        (frame(b"c", b""), ReplicationEndedError),
        (frame(b"C", b"COPY 0\0"), ReplicationEndedError),
        (frame(b"?", b""), ProtocolError),
    ],
)
def test_frames_that_end_a_stream_become_errors(data: bytes, kind: type[Exception]) -> None:
    assert type(stream_error(data)) is kind


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0/0"), (0x16B374D848, "16/B374D848"), (2**64 - 1, "FFFFFFFF/FFFFFFFF")]
)
def test_lsn_texts_are_postgresqls(number: int, text: str) -> None:
    assert lsn_text(number) == text
    assert lsn_int(text) == number


@pytest.mark.parametrize("text", ["", "16", "1/2/3", "123456789/0", "x/0"])
def test_what_is_no_lsn_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        lsn_int(text)


def test_hosts_are_tried_in_order_with_their_ports() -> None:
    found = endpoints(connection_options("postgresql://u:p@one:1,two:2/db"))
    assert [(e.host, e.port, e.password) for e in found] == [("one", 1, "p"), ("two", 2, "p")]


def test_one_port_serves_all_hosts() -> None:
    assert [e.port for e in endpoints(connection_options("host=a,b port=7 user=u"))] == [7, 7]


def test_hosts_and_ports_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError):
        endpoints(connection_options("host=a,b,c port=7,8 user=u"))


def test_a_dsn_that_cannot_be_parsed_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        connection_options("postgresql://u:hunter2@[h/db")
    assert "hunter2" not in str(caught.value)


def test_the_environment_gives_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", "from the environment")
    (endpoint,) = endpoints(connection_options("host=h user=u"))
    assert endpoint.password == "from the environment"


def test_a_password_file_is_read_unless_others_can_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGPASSWORD", raising=False)
    path = tmp_path / "pgpass"
    path.write_text("# mine\nother:*:*:*:wrong\nh:5432:*:u:a\\:b\\\\c\n")
    path.chmod(0o600)
    options = connection_options(f"host=h user=u passfile={path}")
    assert endpoints(options)[0].password == "a:b\\c"
    path.chmod(0o644)
    assert endpoints(options)[0].password is None


HEADER = b"PGCOPY\n\xff\r\n\0" + struct.pack("!II", 0, 0)


def copied(stream: bytes, step: int) -> list[bytes]:
    """Return the blocks of a COPY whose bytes arrive in pieces of `step`."""
    ours, theirs = socket.socketpair()
    link = Link(_Dripping(ours, step), where="test", timeout_s=5)  # type: ignore[arg-type]  # what copy_out uses of it
    theirs.sendall(stream)
    theirs.close()
    try:
        return list(copy_out(link, "COPY ..."))
    finally:
        ours.close()


class _Dripping:
    """A socket whose reads are short."""

    def __init__(self, inner: socket.socket, step: int) -> None:
        self._inner = inner
        self._step = step

    def recv(self, _size: int) -> bytes:
        return self._inner.recv(self._step)

    def sendall(self, data: bytes) -> None:
        assert data.startswith(b"Q")

    def settimeout(self, seconds: float | None) -> None:
        self._inner.settimeout(seconds)

    def close(self) -> None:
        self._inner.close()


ROW = b"\0\1\0\0\0\4\0\0\0\7"
END = frame(b"c", b"") + frame(b"C", b"COPY\0") + frame(b"Z", b"I")


@pytest.mark.parametrize("step", [1, 2, 7, 64, 100_000])
def test_a_copy_gives_tuples_without_header_and_trailer_however_it_arrives(step: int) -> None:
    rows = [frame(b"d", HEADER + ROW), *[frame(b"d", ROW)] * 40, frame(b"d", b"\xff\xff")]
    assert b"".join(copied(frame(b"H", b"\1\0\0") + b"".join(rows) + END, step)) == ROW * 41


def test_an_empty_copy_gives_nothing() -> None:
    assert copied(frame(b"H", b"\1\0\0") + frame(b"d", HEADER + b"\xff\xff") + END, 1 << 20) == []


def test_blocks_hold_whole_tuples() -> None:
    wide = b"\0\1" + struct.pack("!I", 1000) + b"x" * 1000
    stream = frame(b"d", HEADER + wide) + frame(b"d", wide) * 2999 + frame(b"d", b"\xff\xff") + END
    blocks = copied_in_background(stream)
    assert len(blocks) > 2
    assert all(len(block) % len(wide) == 0 for block in blocks)
    assert b"".join(blocks) == wide * 3000


def copied_in_background(stream: bytes) -> list[bytes]:
    """As `copied`, for more than a socket's buffer holds."""
    ours, theirs = socket.socketpair()
    sender = threading.Thread(target=theirs.sendall, args=(stream,))
    sender.start()
    blocks = list(copy_out(Link(ours, where="test", timeout_s=5), "COPY ..."))
    sender.join()
    theirs.close()
    ours.close()
    return blocks


def test_an_error_in_the_middle_of_a_copy_is_raised() -> None:
    failed = frame(b"E", b"C57014\0Mcanceling statement\0\0") + frame(b"Z", b"I")
    with pytest.raises(TransientServerError):
        copied(frame(b"d", HEADER + ROW) + failed, 64)


def test_a_copy_that_is_cut_off_is_no_end() -> None:
    with pytest.raises(ConnectError):
        copied(frame(b"d", HEADER + ROW) + frame(b"d", ROW), 64)


def test_a_copy_that_nobody_wants_any_more_closes_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch_connectors.postgres.copyout._BLOCK_BYTES", 1)
    ours, theirs = socket.socketpair()
    theirs.sendall(b"".join([frame(b"d", HEADER + ROW), *[frame(b"d", ROW)] * 9]))
    blocks = copy_out(Link(_Dripping(ours, 64), where="test", timeout_s=5), "COPY ...")  # type: ignore[arg-type]  # as above
    next(blocks)
    blocks.close()  # type: ignore[attr-defined]  # it is a generator
    assert ours.fileno() == -1
    theirs.close()


# The stream, on a pair of sockets


@pytest.fixture
def stream() -> Iterator[tuple[ReplicationConnection, socket.socket]]:
    ours, theirs = socket.socketpair()
    connection = ReplicationConnection(Link(ours, where="test", timeout_s=5))
    theirs.sendall(frame(b"W", b"\0\0\0") + frame(b"d", b"k"))
    connection.start("ab", 100, {"proto_version": "1", "publication_names": "it's"})
    command = b"START_REPLICATION SLOT \"ab\" LOGICAL 0/64 (\"proto_version\" '1', \"publication_names\" 'it''s')\0"
    assert theirs.recv(1000) == frame(b"Q", command)
    yield connection, theirs
    connection.close()
    theirs.close()


Stream = tuple[ReplicationConnection, socket.socket]


def test_what_came_with_the_start_is_not_lost(stream: Stream) -> None:
    connection, server = stream
    assert connection.receive(behind=False, wait_s=0) == frame(b"d", b"k")
    assert connection.receive(behind=False, wait_s=0) == b""
    server.sendall(b"d\0\0")
    assert connection.receive(behind=False, wait_s=5) == b"d\0\0"


def test_a_closed_connection_ends_the_stream(stream: Stream) -> None:
    connection, server = stream
    connection.receive(behind=False, wait_s=0)
    server.close()
    with pytest.raises(ReplicationEndedError):
        connection.receive(behind=False, wait_s=5)
    with pytest.raises(ReplicationEndedError):
        connection.feedback(1)


def test_only_a_reader_that_is_behind_naps_and_only_after_it_drained_the_socket(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, server = stream
    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    connection.receive(behind=True, wait_s=0)  # what came with the start
    server.sendall(b"x" * 28_000)  # a whole window, as the kernel may account it
    assert len(connection.receive(behind=True, wait_s=5)) == 28_000
    assert naps == []
    server.sendall(b"x" * 100)
    connection.receive(behind=True, wait_s=5)
    assert naps == []
    server.sendall(b"x" * 100)
    connection.receive(behind=True, wait_s=5)
    assert naps == [0.005]
    connection.receive(behind=False, wait_s=0)
    assert naps == [0.005]


def test_feedback_never_goes_back(stream: Stream) -> None:
    connection, server = stream

    def told() -> tuple[int, ...]:
        message = server.recv(1000)
        assert message[:6] == b"d\0\0\0\x26r"
        *positions, _, reply = struct.unpack("!QQQqB", message[6:])
        return (*positions, reply)

    connection.feedback(0)
    assert told() == (100, 100, 100, 0)
    connection.feedback(500, written=700)
    assert told() == (700, 500, 500, 0)
    connection.feedback(300, reply=True)
    assert told() == (700, 500, 500, 1)
