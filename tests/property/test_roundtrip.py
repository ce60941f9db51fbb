"""PostgreSQL to Avro to PostgreSQL: every type and edge value comes back with the same text."""

from __future__ import annotations

import io
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import fastavro
import pytest

from anabranch_connectors.postgres.decode import RowDecodeError, compile_decoder
from anabranch_connectors.postgres.encode import compile_encoder
from anabranch_connectors.postgres.envelope import SOURCE_SCHEMA, EnvelopeTail
from anabranch_connectors.postgres.mapping import table_schema
from anabranch_schemas.envelope import cells as cells_header
from anabranch_schemas.envelope.avro import envelope_schema, key_schema, read_table

if TYPE_CHECKING:
    from tests.property.conftest import Edge, EdgeDatabase


class Pipe:
    """Encoder, schemas and decoder of one edge's table."""

    def __init__(self, edge: Edge) -> None:
        self.table = table_schema(edge.table)
        self.envelope = envelope_schema(self.table, "p", SOURCE_SCHEMA)
        self.key = key_schema(self.table, "p")
        self.encoder = compile_encoder(
            edge.table, key_frame=b"\0\0\0\0\1", value_frame=b"\0\0\0\0\2", as_text=edge.printer
        )
        self.decoder = compile_decoder(self.envelope, self.key)
        tails = EnvelopeTail("1", "p", "d")
        tails.begin(1_700_000_000_000_000, 7, 1_700_000_000_000_001, 0)
        self._tail = tails.tail(tails.table("public", edge.table.name), ord("c"), 1 << 30)

    def encode(self, logged: bytes) -> tuple[bytes, bytes, bytes]:
        """Return (value, key, cells header)."""
        value, key, _, cells, _ = self.encoder.row_with_cells(logged, 0, self.encoder.insert_head, self._tail)
        return value, key, cells


def test_every_value_comes_back(edge: Edge, edge_database: EdgeDatabase) -> None:
    pipe = Pipe(edge)
    encoded = [pipe.encode(logged) for logged in edge.logged]
    rows = [pipe.decoder.after(value) for value, _, _ in encoded]
    staged = edge_database.staged(edge, pipe.decoder.columns, rows)
    restored = []
    for (null, v, w), (_, _, header) in zip(staged, encoded, strict=True):
        cells = {cell.column: cell.text for cell in cells_header.decode(header)}
        restored.append((null and 1 not in cells, cells.get(1, v), cells.get(2, w)))
    assert tuple(restored) == edge.texts


def test_the_fields_one_by_one_are_the_row(edge: Edge) -> None:
    pipe = Pipe(edge)
    for at, logged in enumerate(edge.logged):
        value, key, _ = pipe.encode(logged)
        assert b"".join(pipe.decoder.after_fields(value)) == pipe.decoder.after(value)
        assert pipe.decoder.key_fields(key) == [struct.pack("!ii", 4, at)]


def test_the_schemas_bring_the_table_back(edge: Edge) -> None:
    pipe = Pipe(edge)
    assert read_table(pipe.envelope, pipe.key) == pipe.table


def test_fastavro_reads_the_envelope_to_its_end(edge: Edge) -> None:
    pipe = Pipe(edge)
    parsed = fastavro.parse_schema(pipe.envelope)
    for logged in edge.logged:
        body = io.BytesIO(pipe.encode(logged)[0][5:])
        record: Any = fastavro.schemaless_reader(body, parsed, None)
        assert not body.read()
        assert record["op"] == "c"
        assert record["source"]["table"] == edge.table.name


def test_a_before_image_is_passed_over(edge: Edge) -> None:
    pipe = Pipe(edge)
    for logged in edge.logged:
        value, _, _ = pipe.encode(logged)
        image, _, _ = pipe.encoder.old_row(logged, 0)
        update = value[:5] + b"\x02" + image + b"\x02" + value[7:]
        assert pipe.decoder.after(update) == pipe.decoder.after(value)


def test_a_record_that_is_cut_off_is_refused_as_such(edge: Edge) -> None:
    pipe = Pipe(edge)
    value, key, _ = pipe.encode(edge.logged[0])
    image, _, _ = pipe.encoder.old_row(edge.logged[0], 0)
    for cut in range(min(7 + len(image), 600)):
        with pytest.raises(RowDecodeError):
            pipe.decoder.after(value[:cut])
    for cut in range(len(key)):
        with pytest.raises(RowDecodeError):
            pipe.decoder.key_fields(key[:cut])


def test_damaged_bytes_raise_nothing_else(edge: Edge) -> None:
    pipe = Pipe(edge)
    value, key, _ = pipe.encode(edge.logged[0])
    for at in range(min(len(value), 200)):
        for byte in (0, 1, 2, 3, 0x7F, 0x80, 0xFE, 0xFF):
            damaged = value[:at] + bytes((byte,)) + value[at + 1 :]
            with suppress(RowDecodeError):
                pipe.decoder.after(damaged)
            with suppress(RowDecodeError):
                pipe.decoder.after_fields(damaged)
            with suppress(RowDecodeError):
                pipe.decoder.key_fields(key[:at] + bytes((byte,)) + key[at + 1 :])
