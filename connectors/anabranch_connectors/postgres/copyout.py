"""COPY TO STDOUT over our own wire: whole tuples in large blocks.

COPY sends a message a row. Reading them one by one through psycopg costs 1.0 µs of CPU a row, libpq's own call 0.6 µs;
cutting large reads up here costs 0.25 µs, and with the server on the same machine gives 1.0M to 1.8M rows/s instead of
0.4M to 0.5M (five columns, 56 bytes a row).
"""

from __future__ import annotations

from collections.abc import Iterator

from anabranch_connectors.postgres.dial import Link
from anabranch_connectors.postgres.errors import ConnectError, ProtocolError, server_error
from anabranch_connectors.postgres.messages import error_fields, frame

# The decoder is called for blocks of about this many bytes.
_BLOCK_BYTES = 256 << 10
_READ_BYTES = 1 << 20
_SIGNATURE = b"PGCOPY\n\xff\r\n\0"
_HEADER_BYTES = len(_SIGNATURE) + 8  # flags and the length of an extension
_TRAILER = b"\xff\xff"
_COPY_DATA = 0x64  # d


def copy_out(link: Link, command: str) -> Iterator[bytes]:
    """Run a COPY ... TO STDOUT (FORMAT binary) and yield its tuples, without the format's header and trailer.

    Each block is whole tuples, about 256 KiB of them. If the iterator is closed before its end, so is the link:
    telling the server to stop needs no more than that.

    Raises:
        ServerError: if the server refuses. ConnectError: if it goes away.
    """
    finished = False
    try:
        yield from _whole_tuples(_joined(_pieces(link, command)))
        finished = True
    except OSError as error:
        raise ConnectError("the connection broke during a copy", where=link.where) from error
    finally:
        if not finished:
            link.close()


def _pieces(link: Link, command: str) -> Iterator[list[bytes]]:
    """Yield the CopyData bodies of each read."""
    # A sort can take long before its first row; a dead server is noticed by TCP's keepalives.
    link.socket.settimeout(None)
    link.socket.sendall(frame(b"Q", command.encode() + b"\0"))
    rest = bytes(link.buffer)
    link.buffer.clear()
    failure: Exception | None = None
    while True:
        data = link.socket.recv(_READ_BYTES)
        if not data:
            raise failure or ConnectionResetError("closed by the server")
        data = rest + data
        bodies: list[bytes] = []
        at, end = 0, len(data)
        while at + 5 <= end:
            after = at + 1 + int.from_bytes(data[at + 1 : at + 5], "big")
            if after > end:
                break
            kind = data[at]
            if kind == _COPY_DATA:
                bodies.append(data[at + 5 : after])
            elif kind == ord("E"):
                failure = server_error(error_fields(data[at + 5 : after]))
            elif kind == ord("Z"):
                if failure is not None:
                    raise failure
                yield bodies
                return
            elif kind not in b"HcCNS":
                raise ProtocolError(f"message {data[at : at + 1]!r} during a copy", where=link.where)
            at = after
        rest = data[at:]
        yield bodies


def _joined(pieces: Iterator[list[bytes]]) -> Iterator[bytes]:
    """Join reads to blocks; the bodies of one block are whole, so its tuples are too."""
    parts: list[bytes] = []
    size = 0
    for bodies in pieces:
        joined = b"".join(bodies)
        parts.append(joined)
        size += len(joined)
        if size >= _BLOCK_BYTES:
            yield b"".join(parts)
            parts, size = [], 0
    yield b"".join(parts)


def _whole_tuples(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Cut off the header of the first block and the trailer of the last."""
    block = next(blocks)
    extension = int.from_bytes(block[_HEADER_BYTES - 4 : _HEADER_BYTES], "big")
    block = block[_HEADER_BYTES + extension :]
    for later in blocks:
        # The trailer may come alone in a last block, never cut in two: it is one message.
        if block and later:
            yield block
        block = later or block
    if not block.endswith(_TRAILER):
        raise ProtocolError("a copy ended without its trailer")
    if len(block) > len(_TRAILER):
        yield block[: -len(_TRAILER)]
