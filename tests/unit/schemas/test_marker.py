from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch_schemas.errors import MarkerError
from anabranch_schemas.marker import AVRO_SCHEMA_TEXT, CopyState, MarkerKind, SnapshotMarker, decode, encode
from anabranch_schemas.vector import VectorTime

MARKER = SnapshotMarker(
    stream="eu.orders",
    site=1,
    branch="b",
    epoch=2,
    number=3,
    kind=MarkerKind.LOG,
    first_seq=4,
    last_seq=5,
    safe_hlc=6,
    vector=VectorTime({1: 5}),
    transactions=7,
    rows=8,
)


def test_it_copies_as_long_as_a_table_is_not_done() -> None:
    done, begun = CopyState("t", None, done=True), CopyState("u", b"k", done=False)
    assert not MARKER.copying
    assert not replace(MARKER, copy=(done,)).copying
    assert replace(MARKER, copy=(done, begun)).copying


def test_the_schema_is_one_line_of_json() -> None:
    schema = json.loads(AVRO_SCHEMA_TEXT)
    assert "\n" not in AVRO_SCHEMA_TEXT
    assert (schema["namespace"], schema["name"]) == ("dev.anabranch", "SnapshotMarker")


def test_a_cut_off_marker_is_refused() -> None:
    whole = encode(MARKER)
    for end in range(len(whole)):
        with pytest.raises(MarkerError):
            decode(whole[:end])


@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused_as_such(data: bytes) -> None:
    with suppress(MarkerError):
        decode(data)


@given(st.integers(0), st.binary(min_size=1, max_size=8))
def test_damaged_bytes_are_refused_as_such(at: int, junk: bytes) -> None:
    whole = encode(MARKER)
    at %= len(whole)
    with suppress(MarkerError):
        decode(whole[:at] + junk + whole[at + len(junk) :])
