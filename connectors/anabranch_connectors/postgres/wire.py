"""PostgreSQL's frontend/backend protocol 3.0 as generators over messages; no socket is touched here.

A conversation is a generator: it yields bytes to send (possibly none) and is sent the next message of the server.
Whoever drives it owns the socket, TLS and the clock. The protocol is documented in the manual's chapter
"Frontend/Backend Protocol".
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from anabranch_connectors.postgres.auth import Credentials, authenticate
from anabranch_connectors.postgres.errors import ProtocolError, server_error
from anabranch_connectors.postgres.messages import Conversation, Message, error_fields, frame

_T = TypeVar("_T")

PROTOCOL_3_0 = 196608  # 3 << 16
SSL_REQUEST = struct.pack("!II", 8, 80877103)
# The largest message we accept outside of a stream. Answers to our commands are a few hundred bytes; a peer that is
# no PostgreSQL server (an HTTP server answers "HTTP/1.1 ...", length 0x5454502f) must not make us buffer gigabytes.
MAX_MESSAGE_BYTES = 16 << 20
_ASYNCHRONOUS = frozenset({b"N", b"A"})  # NoticeResponse, NotificationResponse


@dataclass(frozen=True, slots=True)
class Session:
    """What the server said at the start: its parameters (`server_version`, `in_hot_standby`, ...)."""

    parameters: Mapping[str, str] = field(default_factory=dict)


def startup(parameters: Mapping[str, str], credentials: Credentials) -> Conversation[Session]:
    """Open a session: startup message, authentication, parameters, until the server is ready.

    Raises:
        AuthenticationError: if the server refuses the user, or asks for a method that we do not speak.
        ServerError: if the server refuses for another reason (`too many connections`).
    """
    body = b"".join(f"{name}\0{value}\0".encode() for name, value in parameters.items()) + b"\0"
    message = yield struct.pack("!II", len(body) + 8, PROTOCOL_3_0) + body
    yield from authenticate(message, credentials)
    told: dict[str, str] = {}
    while True:
        message = yield b""
        match message.type:
            case b"S":
                name, value, _ = message.body.split(b"\0", 2)
                told[name.decode()] = value.decode("utf-8", "replace")
            case b"Z":
                return Session(told)
            case b"K" | b"v":
                pass
            case _:
                raise _unexpected(message, "the start of a session")


def simple_query(sql: str) -> Conversation[list[tuple[bytes | None, ...]]]:
    """Run one command and return the rows of its last result, in text format."""
    message = yield frame(b"Q", sql.encode() + b"\0")
    rows: list[tuple[bytes | None, ...]] = []
    failure: Exception | None = None
    while True:
        match message.type:
            case b"T":
                rows = []
            case b"D":
                rows.append(_data_row(message.body))
            case b"E":
                fields = error_fields(message.body)
                failure = server_error(fields)
                if is_fatal(fields):
                    raise failure
            case b"Z":
                break
            case b"C" | b"I" | b"S":
                pass
            case _:
                raise _unexpected(message, "the answer to a query")
        message = yield b""
    if failure is not None:
        raise failure
    return rows


def start_copy_both(command: str) -> Conversation[None]:
    """Send a replication command and return once the server has switched to CopyBoth mode."""
    message = yield frame(b"Q", command.encode() + b"\0")
    if message.type == b"E":
        fields = error_fields(message.body)
        if not is_fatal(fields):
            yield b""  # ReadyForQuery: the connection can be used further
        raise server_error(fields)
    if message.type != b"W":
        raise _unexpected(message, "the start of replication")


def is_fatal(fields: Mapping[str, str]) -> bool:
    """Return whether the server closes the connection after this error, so that no ReadyForQuery follows."""
    # V is the severity in English, S in the server's language (before 9.6, and from poolers, alone).
    return fields.get("V", fields.get("S", "")) in ("FATAL", "PANIC")


def is_asynchronous(message: Message) -> bool:
    """Return whether the server may send this message at any time, so that conversations never see it."""
    return message.type in _ASYNCHRONOUS


def take_message(buffer: bytearray) -> Message | None:
    """Cut the first whole message off `buffer`, or return None if more bytes are needed.

    Raises:
        ProtocolError: if the bytes cannot be a message.
    """
    if len(buffer) < 5:
        return None
    length = int.from_bytes(buffer[1:5], "big")
    if not 4 <= length <= MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {length} bytes", advice="check that host and port are a PostgreSQL server")
    if len(buffer) <= length:
        return None
    message = Message(bytes(buffer[:1]), bytes(buffer[5 : length + 1]))
    del buffer[: length + 1]
    return message


def drive(conversation: Generator[bytes, Message, _T], messages: list[Message]) -> tuple[_T, bytes]:
    """Run a conversation against a prepared list of messages; return its result and all that it sent.

    For tests and simulations: the list must be exactly what the conversation reads.
    """
    sent = next(conversation)
    for message in messages:
        try:
            sent += conversation.send(message)
        except StopIteration as stop:
            return stop.value, sent
    raise ProtocolError("the conversation wants more messages than there are")


def _data_row(body: bytes) -> tuple[bytes | None, ...]:
    count = int.from_bytes(body[:2], "big")
    values: list[bytes | None] = []
    at = 2
    for _ in range(count):
        length = int.from_bytes(body[at : at + 4], "big", signed=True)
        at += 4
        values.append(None if length < 0 else body[at : at + length])
        at += max(length, 0)
    return tuple(values)


def _unexpected(message: Message, during: str) -> Exception:
    if message.type == b"E":
        return server_error(error_fields(message.body))
    return ProtocolError(f"message {message.type!r} during {during}")
