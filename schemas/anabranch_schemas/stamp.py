"""The stamp: one binary Kafka header on every change record, enough to order, de-duplicate and filter it.

Big-endian, fixed part of 39 bytes, then the vector time of the other sites:

    version u8 | op u8 | flags u16 | site u16 | epoch u32 | seq u64 | ordinal u32 | hlc u64 | txid u64 | count u8
    | count × (site u16, seq u64)

The sink parses stamps in bulk with numpy; nothing of the value is decoded for that.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag

import numpy as np
import numpy.typing as npt

from anabranch_schemas.errors import StampError
from anabranch_schemas.vector import VectorTime

HEADER = "ab.stamp"
VERSION = 1
_FIXED = struct.Struct(">BBHHIQIQQB")
_PAIR = struct.Struct(">HQ")
FIXED_SIZE = _FIXED.size  # 39

FIXED_DTYPE = np.dtype(
    [
        ("version", "u1"),
        ("op", "u1"),
        ("flags", ">u2"),
        ("site", ">u2"),
        ("epoch", ">u4"),
        ("seq", ">u8"),
        ("ordinal", ">u4"),
        ("hlc", ">u8"),
        ("txid", ">u8"),
        ("count", "u1"),
    ]
)


class Op(IntEnum):
    """What happened to the row, by Debezium's letters."""

    CREATE = ord("c")
    READ = ord("r")
    UPDATE = ord("u")
    DELETE = ord("d")
    TRUNCATE = ord("t")
    MESSAGE = ord("m")


class Flag(IntFlag):
    """Properties of one change record."""

    LAST = 1
    """The last row of its transaction."""
    COPIED = 2
    """A row of the copy phase."""
    PARTIAL = 4
    """Some columns are not in the record (unchanged TOAST); the `ab.cells` header names them."""
    FORWARDED = 8
    """Another site's change, passed on."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Version, vector time and transaction coordinates of one change."""

    op: Op
    site: int
    epoch: int
    seq: int
    ordinal: int
    hlc: int
    txid: int = 0
    flags: Flag = Flag(0)
    others: VectorTime = VectorTime()
    """Vector time of the other sites; the own entry is (site, seq)."""

    @property
    def version(self) -> tuple[int, int, int]:
        """The row version that this change makes: (hlc, site, seq)."""
        return self.hlc, self.site, self.seq

    @property
    def vector(self) -> VectorTime:
        """The whole vector time of the change."""
        return self.others.advance(self.site, self.seq)


def encode(stamp: Stamp) -> bytes:
    """Return the header value of a stamp."""
    head = _FIXED.pack(
        VERSION,
        stamp.op,
        stamp.flags,
        stamp.site,
        stamp.epoch,
        stamp.seq,
        stamp.ordinal,
        stamp.hlc,
        stamp.txid,
        len(stamp.others),
    )
    return head + b"".join(_PAIR.pack(site, seq) for site, seq in stamp.others.items())


def decode(data: bytes) -> Stamp:
    """Read a header value.

    Raises:
        StampError: if the bytes are not a whole stamp of a version that is known here.
    """
    if len(data) < FIXED_SIZE or data[0] != VERSION:
        raise StampError("not a stamp of version 1", where=HEADER)
    _, op, flags, site, epoch, seq, ordinal, hlc, txid, count = _FIXED.unpack_from(data)
    if len(data) != FIXED_SIZE + count * _PAIR.size:
        raise StampError(f"the stamp announces {count} sites but has {len(data)} bytes", where=HEADER)
    try:
        others = VectorTime(dict(_PAIR.iter_unpack(data[FIXED_SIZE:])))
        return Stamp(Op(op), site, epoch, seq, ordinal, hlc, txid, Flag(flags), others)
    except ValueError as error:
        raise StampError(str(error), where=HEADER) from None


def parse_bulk(stamps: Sequence[bytes]) -> npt.NDArray[np.void]:
    """Return the fixed parts of many stamps as one structured array of dtype `FIXED_DTYPE`.

    Raises:
        StampError: if one of them is shorter than the fixed part or of another version.
    """
    fixed = b"".join(data[:FIXED_SIZE] for data in stamps)
    if len(fixed) != FIXED_SIZE * len(stamps):
        raise StampError("a stamp is shorter than its fixed part", where=HEADER)
    table = np.frombuffer(fixed, dtype=FIXED_DTYPE)
    if len(table) and bool((table["version"] != VERSION).any()):
        raise StampError("a stamp has another version", where=HEADER)
    return table
