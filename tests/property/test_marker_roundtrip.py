"""A marker is what it was, and its Avro is what its schema says to any reader."""

from __future__ import annotations

import io
import json

import fastavro
from hypothesis import given
from hypothesis import strategies as st

from anabranch_schemas.marker import (
    AVRO_SCHEMA_TEXT,
    CopyState,
    MarkerKind,
    Range,
    SnapshotMarker,
    TableVersion,
    decode,
    encode,
)
from anabranch_schemas.vector import VectorTime

SEQ = st.integers(0, (1 << 63) - 1)
U64 = st.integers(0, (1 << 64) - 1)
INT = st.integers(0, (1 << 31) - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
MARKERS = st.builds(
    SnapshotMarker,
    stream=TEXT,
    site=st.integers(0, 65535),
    branch=TEXT,
    epoch=st.integers(0, (1 << 32) - 1),
    number=SEQ,
    kind=st.sampled_from(MarkerKind),
    first_seq=SEQ,
    last_seq=SEQ,
    safe_hlc=U64,
    vector=st.dictionaries(st.integers(0, 65535), SEQ, max_size=4).map(VectorTime),
    transactions=SEQ,
    rows=SEQ,
    ranges=st.lists(st.builds(Range, TEXT, INT, SEQ, SEQ, SEQ, U64), max_size=3).map(tuple),
    copy=st.lists(st.builds(CopyState, TEXT, st.none() | st.binary(), st.booleans()), max_size=3).map(tuple),
    schemas=st.lists(st.builds(TableVersion, TEXT, TEXT, INT, INT), max_size=3).map(tuple),
    resume=st.binary(),
    last_hlc=U64,
    closed_us=SEQ,
    facts=st.dictionaries(TEXT, TEXT, max_size=2),
)
SCHEMA = fastavro.parse_schema(json.loads(AVRO_SCHEMA_TEXT))


@given(MARKERS)
def test_a_marker_is_what_it_was(marker: SnapshotMarker) -> None:
    assert decode(encode(marker)) == marker


@given(MARKERS)
def test_any_reader_of_avro_can_read_it(marker: SnapshotMarker) -> None:
    value = fastavro.schemaless_reader(io.BytesIO(encode(marker)), SCHEMA, None)
    assert isinstance(value, dict)
    assert (value["number"], value["resume"], value["kind"]) == (marker.number, marker.resume, marker.kind.value)
    assert set(value) == set(SnapshotMarker.__slots__)
