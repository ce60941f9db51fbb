"""One-dimensional arrays with lower bound 1; every other array travels as the server's text in a cell."""

from __future__ import annotations

import struct

from anabranch_connectors.postgres.types.cell import CellDecoder, CellEncoder, NeedsCells, cell_function
from anabranch_schemas.envelope.varint import read_long, zigzag

_HEAD = struct.Struct("!iiI")  # dimensions, has nulls, element oid
_DIMENSION = struct.Struct("!ii")  # length, lower bound
_SIZE = struct.Struct("!i")
_EMPTY = b"\x00"

# Elements carry their type's oid, and the server insists on its own.
_OIDS = {
    "boolean": 16,
    "bytea": 17,
    "bigint": 20,
    "smallint": 21,
    "integer": 23,
    "text": 25,
    "json": 114,
    "real": 700,
    "double precision": 701,
    "bpchar": 1042,
    "date": 1082,
    "time": 1083,
    "timestamp": 1114,
    "timestamptz": 1184,
    "interval": 1186,
    "timetz": 1266,
    "numeric": 1700,
    "uuid": 2950,
    "jsonb": 3802,
}


def array(element: CellEncoder) -> CellEncoder:
    """Return the encoder of an array of `element`s, each of which may be NULL."""
    encode_element = element.encode

    def encode(raw: bytes) -> bytes:
        dimensions, _, _ = _HEAD.unpack_from(raw)
        if not dimensions:
            return _EMPTY
        count, lower = _DIMENSION.unpack_from(raw, 12)
        if dimensions != 1 or lower != 1:
            raise NeedsCells
        parts = [zigzag(count)]
        o = 20
        for _ in range(count):
            (size,) = _SIZE.unpack_from(raw, o)
            o += 4
            if size < 0:
                parts.append(b"\x00")
            else:
                parts += (b"\x02", encode_element(raw[o : o + size]))
                o += size
        parts.append(b"\x00")
        return b"".join(parts)

    return CellEncoder(encode, zero=_EMPTY, missing=_EMPTY)


def to_array(element: CellDecoder) -> CellDecoder:
    """Return the decoder of an array of `element`s."""
    decode_element = cell_function(element)
    oid = _OIDS[element.staging]

    def call(v: bytes, o: int) -> tuple[bytes, int]:
        parts: list[bytes] = []
        nulls = 0
        total = 0
        while True:
            count, o = read_long(v, o)
            if not count:
                break
            if count < 0:
                # A block with its size in bytes, for readers that skip it.
                count = -count
                _, o = read_long(v, o)
            total += count
            for _ in range(count):
                branch = v[o]
                o += 1
                if branch == 2:
                    data, o = decode_element(v, o)
                    parts += (_SIZE.pack(len(data)), data)
                elif branch == 0:
                    nulls = 1
                    parts.append(b"\xff\xff\xff\xff")
                else:
                    raise ValueError("not a branch of the union")
        if not total:
            return _HEAD.pack(0, 0, oid), o
        return b"".join((_HEAD.pack(1, nulls, oid), _DIMENSION.pack(total, 1), *parts)), o

    return CellDecoder(f"{element.staging}[]", "call", call=call)
