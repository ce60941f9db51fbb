"""What a replication connection brings: whole frames, and the rows among them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from anabranch_connectors.postgres.replication import ReplicationConnection, stream_error

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
