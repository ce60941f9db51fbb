"""One message of PostgreSQL's protocol, and the type of a conversation made of them."""

from __future__ import annotations

import struct
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Message:
    """A message of the server: its type byte and its body without the length."""

    type: bytes
    body: bytes


Conversation = Generator[bytes, Message, _T]
"""Yields bytes to send, is sent the server's next message, returns the result."""


def frame(kind: bytes, body: bytes) -> bytes:
    """Return a message of ours as it goes over the wire; the length counts itself but not the type."""
    return kind + struct.pack("!I", len(body) + 4) + body


def error_fields(body: bytes) -> dict[str, str]:
    """Return the fields of an ErrorResponse or NoticeResponse by their one-letter codes."""
    parts = body.split(b"\0")
    return {part[:1].decode("latin-1"): part[1:].decode("utf-8", "replace") for part in parts if part}
