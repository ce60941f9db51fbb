from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch_schemas.envelope.varint import PADDING, read_long, read_sized, read_unsigned, sized, unsigned, zigzag


def reference(n: int) -> bytes:
    """Return the varint seven bits at a time, as Avro's specification says it."""
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes((*out, n))


@given(st.integers(0, 63).flatmap(lambda bits: st.integers(0, (2 << bits) - 1)))
def test_unsigned_is_the_specifications_varint(n: int) -> None:
    assert unsigned(n) == reference(n)
    assert read_unsigned(b"x" + unsigned(n) + PADDING, 1) == (n, 1 + len(reference(n)))


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_zigzag_goes_there_and_back(n: int) -> None:
    assert zigzag(n) == reference(2 * n if n >= 0 else -2 * n - 1)
    assert read_long(zigzag(n) + PADDING, 0) == (n, len(zigzag(n)))


@pytest.mark.parametrize("n", [1 << bits for bits in range(64)] + [(1 << bits) - 1 for bits in range(65)])
def test_every_length_of_a_varint(n: int) -> None:
    assert unsigned(n) == reference(n)
    assert read_unsigned(reference(n) + PADDING, 0)[0] == n


@pytest.mark.parametrize("data", [b"\xff" * 9 + b"\x02", b"\xff" * 12])
def test_more_than_64_bits_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        read_unsigned(data + PADDING, 0)


def test_the_end_of_the_buffer_is_noticed() -> None:
    with pytest.raises(struct.error):
        read_unsigned(b"\x80" * 9, 0)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 8191, 8192, 20000])
def test_data_goes_behind_its_length(length: int) -> None:
    data = b"x" * length
    assert sized(data) == zigzag(length) + data
    assert read_sized(sized(data) + PADDING, 0) == (data, len(sized(data)))


@pytest.mark.parametrize("length", [-1, 100])
def test_a_length_that_cannot_be_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="beyond the record"):
        read_sized(zigzag(length) + PADDING, 0)
