"""Log sequence numbers: an unsigned 64-bit byte position in the write-ahead log, and PostgreSQL's text for it."""

from __future__ import annotations


def lsn_text(lsn: int) -> str:
    """Return `lsn` as PostgreSQL writes it: `16/B374D848`."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def lsn_int(text: str) -> int:
    """Return the position that PostgreSQL's text (`16/B374D848`) stands for.

    Raises:
        ValueError: if the text is no LSN.
    """
    high, slash, low = text.partition("/")
    if not slash or len(high) > 8 or len(low) > 8:
        raise ValueError(f"not an LSN: {text!r}")
    return (int(high, 16) << 32) | int(low, 16)
