"""A replication connection: commands, the raw CopyBoth stream in large pieces, and feedback.

How the stream is read decides what it costs the server. A walsender makes one `send` for every message. While TCP's
receive window is open, each `send` runs the whole network stack (one-row transactions: 14 µs of server CPU a row);
while the window is closed it only appends to the send queue (6.5 µs). A reader that keeps its socket empty holds the
server in the slow regime. So while we are behind we leave the window closed most of the time: a small fixed buffer,
and a nap each time it was drained. Measured: 141k to 165k one-row transactions/s, against 64k to 69k read as they come.
"""

from __future__ import annotations

import select
import ssl
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from anabranch_connectors.postgres.conninfo import OUTPUT_SETTINGS
from anabranch_connectors.postgres.dial import Link, dial
from anabranch_connectors.postgres.errors import (
    BOOTSTRAP,
    ProtocolError,
    ReplicationEndedError,
    ServerError,
    SlotError,
    SlotInUseError,
    SlotLostError,
    SlotMissingError,
    server_error,
)
from anabranch_connectors.postgres.lsn import lsn_int, lsn_text
from anabranch_connectors.postgres.messages import error_fields, frame
from anabranch_connectors.postgres.wire import simple_query, start_copy_both
from anabranch_schemas.errors import AnabranchError

# Fixed, which also turns off the kernel's autotuning. 16 KiB costs 10 to 15 % of throughput, 8 KiB stalls.
_RECEIVE_BUFFER = 32 << 10
# A read of less than this drained the socket. Not 32 KiB: a whole window can be a little less (28 to 32 KiB, as the
# kernel accounts it), and then every read would nap, for one window each 5 ms. Measured, one-row transactions/s, eight
# runs each: 32 KiB 34k to 37k in five of them; 24 KiB never, 141k to 165k on a quiet machine.
_DRAINED_BYTES = 24 << 10
# The window of 32 KiB closes within 2 to 3 ms; what is left of the nap is spent in the cheap regime. 2 ms is too short.
_NAP_S = 0.005
# One read takes whatever the kernel holds (it accounts twice SO_RCVBUF, so up to 64 KiB and a bit).
_READ_BYTES = 1 << 20
# A TLS record holds at most 16 KiB; records are joined up to this size so that the decoder is not called for each.
_TLS_GATHER_BYTES = 256 << 10
# A server that does not take 39 bytes for so long is gone: wal_sender_timeout, by default, is the same.
_SEND_TIMEOUT_S = 60.0
_HEARTBEAT_EPOCH_US = 946_684_800_000_000  # 2000-01-01, PostgreSQL's epoch, in microseconds since 1970
# 55006 object_in_use, 42704 undefined_object, 55000 object_not_in_prerequisite_state
_SLOT_ERRORS: Mapping[str, type[SlotError]] = {
    "55006": SlotInUseError,
    "42704": SlotMissingError,
    "55000": SlotLostError,
}


@dataclass(frozen=True, slots=True)
class SystemIdentity:
    """Which history a server writes: `system_id` and `timeline` are the branch, `wal_end` is flushed up to here."""

    system_id: str
    timeline: int
    wal_end: int


class ReplicationConnection:
    """One walsender. Used by one thread; commands come before `start`, and only the stream after it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._socket = link.socket
        self._tls = link.socket if isinstance(link.socket, ssl.SSLSocket) else None
        self._poll = select.poll()
        self._drained = False
        self._flushed = self._written = 0

    @classmethod
    def connect(cls, dsn: str, *, application_name: str = "anabranch") -> ReplicationConnection:
        """Connect with `replication=database`.

        Raises:
            ConnectError: if no host of the DSN can be reached.
            AuthenticationError: if the server refuses us, or we its certificate.
        """
        parameters = {"replication": "database", "application_name": application_name, **OUTPUT_SETTINGS}
        return cls(dial(dsn, parameters, receive_buffer=_RECEIVE_BUFFER))

    @property
    def parameters(self) -> Mapping[str, str]:
        """What the server said of itself at the start, `server_version` among it."""
        return self._link.session.parameters

    @property
    def is_encrypted(self) -> bool:
        """Whether the connection runs over TLS."""
        return self._tls is not None

    def identify_system(self) -> SystemIdentity:
        """Ask which history the server writes and how far it is flushed."""
        rows = self._link.run(simple_query("IDENTIFY_SYSTEM"))
        system_id, timeline, position = ((value or b"").decode() for value in rows[0][:3])
        return SystemIdentity(system_id, int(timeline), lsn_int(position))

    def start(self, slot: str, lsn: int, options: Mapping[str, str]) -> None:
        """Start logical streaming of `slot` after `lsn` with the plugin's `options`.

        PostgreSQL silently starts at the slot's confirmed position if that is later: check it before
        (`slots.verify_position`).

        Raises:
            SlotInUseError, SlotMissingError, SlotLostError: if the slot is not ours to read.
            ServerError: if the server refuses for another reason.
        """
        pairs = ", ".join(f"{_identifier(name)} {_literal(value)}" for name, value in options.items())
        command = f"START_REPLICATION SLOT {_identifier(slot)} LOGICAL {lsn_text(lsn)} ({pairs})"
        try:
            self._link.run(start_copy_both(command))
        except ServerError as error:
            refused = _SLOT_ERRORS.get(error.sqlstate)
            if refused is None:
                raise
            raise refused(error.message, where=slot, advice=BOOTSTRAP) from error
        self._flushed = self._written = lsn
        self._socket.setblocking(False)
        self._poll.register(self._socket, select.POLLIN)

    def receive(self, *, behind: bool, wait_s: float) -> bytes:
        """Return the next bytes of the CopyBoth stream; b"" if none came within `wait_s` seconds.

        They are protocol frames as they come: type byte, int32 length, body; the last one may be cut anywhere. Frames
        are not walked here, because the caller's decoder walks them anyway: when it meets one that is not `d`
        (CopyData), it raises `stream_error(frame)`.

        `behind` says that the last frame was older than the server's end of log: then this call naps first if the
        read before it drained the socket (see the top of this module). When not behind, it waits for readiness only.

        Raises:
            ReplicationEndedError: if the server has closed the connection.
        """
        if self._link.buffer:
            left = bytes(self._link.buffer)
            self._link.buffer.clear()
            return left
        if behind and self._drained:
            time.sleep(_NAP_S)
        try:
            data = self._read() if self._tls is None else self._read_tls()
            if data is None:
                if not self._poll.poll(wait_s * 1000):
                    return b""
                data = (self._read() if self._tls is None else self._read_tls()) or b""
        except OSError as error:
            raise self._ended() from error
        self._drained = len(data) < _DRAINED_BYTES
        return data

    def feedback(self, flushed: int, *, written: int | None = None, reply: bool = False) -> None:
        """Tell the server that everything before `flushed` is durable here and may be forgotten there.

        Positions never go back. `reply` asks the server to answer with a keepalive at once.

        Raises:
            ReplicationEndedError: if the connection is gone.
        """
        self._flushed = max(self._flushed, flushed)
        self._written = max(self._written, self._flushed, written or 0)
        clock = time.time_ns() // 1000 - _HEARTBEAT_EPOCH_US
        # written, flushed, applied: a server that waits for us (synchronous_standby_names) looks at any of them
        body = struct.pack("!cQQQqB", b"r", self._written, self._flushed, self._flushed, clock, reply)
        self._send(frame(b"d", body))

    def fileno(self) -> int:
        """Return the socket's file descriptor, to wait on it together with others.

        With TLS, decrypted bytes can be waiting although the descriptor is not ready: `receive` empties them, so wait
        only after it returned b"".
        """
        return self._socket.fileno()

    def close(self) -> None:
        """Close the connection. The slot stays, at its confirmed position."""
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> bytes | None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return None
        if not data:
            raise self._ended()
        return data

    def _read_tls(self) -> bytes | None:
        # Each recv gives one record at most, and records that OpenSSL holds do not make the descriptor ready again:
        # read until it wants the network (so that polling is right), or the piece is large enough.
        parts: list[bytes] = []
        size = 0
        while size < _TLS_GATHER_BYTES:
            try:
                data = self._socket.recv(_READ_BYTES)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            except ssl.SSLError as error:
                if parts:
                    break
                raise self._ended() from error
            if not data:
                if parts:
                    break
                raise self._ended()
            parts.append(data)
            size += len(data)
        return b"".join(parts) if parts else None

    def _send(self, data: bytes) -> None:
        view = memoryview(data)
        deadline = time.monotonic() + _SEND_TIMEOUT_S
        while view:
            try:
                view = view[self._socket.send(view) :]
            except (BlockingIOError, ssl.SSLWantWriteError):
                left_ms = max(0.0, deadline - time.monotonic()) * 1000
                if not _writable(self._socket.fileno(), left_ms):
                    raise self._ended() from None
            except OSError as error:
                raise self._ended() from error

    def _ended(self) -> ReplicationEndedError:
        return ReplicationEndedError("the server closed the replication connection", where=self._link.where)


def stream_error(frame_bytes: bytes) -> AnabranchError:
    """Return the error that a frame of the CopyBoth stream stands for which is not CopyData.

    `frame_bytes` is the whole frame, type byte first. ErrorResponse becomes a ServerError (or one that passes) with
    its SQLSTATE; CopyDone and CommandComplete become a ReplicationEndedError.
    """
    kind = frame_bytes[:1]
    if kind == b"E":
        return server_error(error_fields(frame_bytes[5:]), where="replication")
    if kind in (b"c", b"C", b"Z"):
        return ReplicationEndedError("the server ended the replication stream", where="replication")
    return ProtocolError(f"message {kind!r} in a replication stream", where="replication")


def _writable(descriptor: int, wait_ms: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(wait_ms))


def _identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
