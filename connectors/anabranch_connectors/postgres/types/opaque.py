"""Types without a mapping of their own: the source's text, printed here where that is simple, else by the server."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address

from anabranch_connectors.postgres.types.cell import AsText, CellEncoder
from anabranch_connectors.postgres.types.text import MISSING
from anabranch_schemas.envelope.varint import sized


def opaque(oid: int, as_text: AsText) -> CellEncoder:
    """Return the encoder of a type by oid; `as_text` is asked only for types that are not printed here."""
    printer = _PRINTERS.get(oid)

    def encode(raw: bytes) -> bytes:
        return sized((printer(raw) if printer else as_text(oid, raw)).encode())

    return CellEncoder(encode, zero=b"\x00", missing=MISSING, from_text=sized, is_text=True)


def _unsigned(raw: bytes) -> str:
    return str(int.from_bytes(raw, "big"))


def _lsn(raw: bytes) -> str:
    return f"{int.from_bytes(raw[:4], 'big'):X}/{int.from_bytes(raw[4:], 'big'):X}"


def _mac(raw: bytes) -> str:
    return raw.hex(":")


def _bits(raw: bytes) -> str:
    """Print bit and varbit: a count of bits, then the bits from the left."""
    count = int.from_bytes(raw[:4], "big")
    return format(int.from_bytes(raw[4:], "big"), f"0{(len(raw) - 4) * 8}b")[:count] if count else ""


def _network(raw: bytes) -> str:
    """Print inet and cidr: family, prefix bits, is_cidr, address length, address."""
    address = IPv4Address(raw[4:]) if raw[3] == 4 else _ipv6(raw[4:])
    return f"{address}/{raw[1]}" if raw[2] or raw[1] != raw[3] * 8 else str(address)


def _ipv6(raw: bytes) -> str:
    # PostgreSQL prints IPv4 inside IPv6 with dots, as glibc's inet_ntop does.
    if raw[:12] == bytes(10) + b"\xff\xff":
        return f"::ffff:{IPv4Address(raw[12:])}"
    if not any(raw[:12]) and any(raw[12:14]):
        return f"::{IPv4Address(raw[12:])}"
    return str(IPv6Address(raw))


_PRINTERS: dict[int, Callable[[bytes], str]] = {
    26: _unsigned,  # oid
    28: _unsigned,  # xid
    29: _unsigned,  # cid
    5069: _unsigned,  # xid8
    3220: _lsn,
    829: _mac,
    774: _mac,
    1560: _bits,
    1562: _bits,
    869: _network,
    650: _network,
}
