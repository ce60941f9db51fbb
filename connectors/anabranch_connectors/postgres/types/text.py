"""Text of every kind: the bytes of the binary form are the characters, so they go through untouched."""

from __future__ import annotations

from anabranch_connectors.postgres.types.cell import CellDecoder, CellEncoder
from anabranch_schemas.envelope.cells import UNAVAILABLE
from anabranch_schemas.envelope.varint import sized

MISSING = sized(UNAVAILABLE)

TEXT = CellEncoder(sized, zero=b"\x00", missing=MISSING, skip=0, from_text=sized, is_text=True)

TO_TEXT = CellDecoder("text", "sized")
TO_BPCHAR = CellDecoder("bpchar", "sized")
"""char(n) compares without its padding: the staged column must too, or keys do not meet."""
