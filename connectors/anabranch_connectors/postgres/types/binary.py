"""bytea and uuid."""

from __future__ import annotations

from anabranch_connectors.postgres.types.cell import CellDecoder, CellEncoder
from anabranch_connectors.postgres.types.text import MISSING
from anabranch_schemas.envelope.varint import sized

BYTES = CellEncoder(sized, zero=b"\x00", missing=MISSING, skip=0, is_text=True)
TO_BYTES = CellDecoder("bytea", "sized")

_NIL = sized(b"00000000-0000-0000-0000-000000000000")


def _uuid(raw: bytes) -> bytes:
    h = raw.hex()
    return f"\x48{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}".encode()  # 0x48: the length 36, zigzag


def _from_uuid(text: bytes) -> bytes:
    data = bytes.fromhex(text.decode("ascii").replace("-", ""))
    if len(data) != 16:
        raise ValueError("not a uuid")
    return data


UUID = CellEncoder(_uuid, zero=_NIL, missing=_NIL, fixed="16s", inline="uuid({c})", names={"uuid": _uuid})
TO_UUID = CellDecoder("uuid", "sized", "16s", "from_uuid({c})", {"from_uuid": _from_uuid})
