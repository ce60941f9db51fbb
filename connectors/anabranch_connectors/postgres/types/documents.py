"""json and jsonb: text on both sides; jsonb's binary form has a version byte before it."""

from __future__ import annotations

from anabranch_connectors.postgres.types.cell import CellDecoder, CellEncoder
from anabranch_connectors.postgres.types.text import MISSING
from anabranch_schemas.envelope.varint import sized

_VERSION = b"\x01"


def _jsonb(raw: bytes) -> bytes:
    return sized(raw[1:])


JSON = CellEncoder(sized, zero=b"\x00", missing=MISSING, skip=0, from_text=sized, is_text=True)
JSONB = CellEncoder(_jsonb, zero=b"\x00", missing=MISSING, skip=1, from_text=sized, is_text=True)
TO_JSON = CellDecoder("json", "sized")
TO_JSONB = CellDecoder("jsonb", "sized", prefix=_VERSION)
