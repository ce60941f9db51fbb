"""A row copied and the same row logged are the same bytes, for every type and edge value, on a real server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from anabranch_connectors.postgres.encode import NeedsCells, RowEncoder, compile_encoder

if TYPE_CHECKING:
    from tests.property.conftest import Edge

PADDING = 4096


def _encoder(edge: Edge) -> RowEncoder:
    return compile_encoder(edge.table, key_frame=b"\0\0\0\0\1", value_frame=b"\0\0\0\0\2", as_text=edge.printer)


def test_the_same_row_encodes_to_the_same_bytes(edge: Edge) -> None:
    encoder = _encoder(edge)
    for logged, copied in zip(edge.logged, edge.copied, strict=True):
        value, key, end, cells, missing = encoder.row_with_cells(logged, 0, b"head", b"tail")
        assert encoder.copy_row_with_cells(copied, 0, b"head", b"tail") == (
            value,
            key,
            len(copied) - PADDING,
            cells,
            missing,
        )
        assert end == len(logged) - PADDING == encoder.skip(logged, 0)


def test_the_generated_encoders_agree_with_the_cell_by_cell_one(edge: Edge) -> None:
    encoder = _encoder(edge)
    for row, (logged, copied) in enumerate(zip(edge.logged, edge.copied, strict=True)):
        value, key, end, cells, _ = encoder.row_with_cells(logged, 0, b"head", b"tail")
        assert bool(cells) == edge.beyond(row)
        if cells:
            for generated, data in ((encoder.row, logged), (encoder.copy_row, copied)):
                with pytest.raises(NeedsCells):
                    generated(data, 0, b"head", b"tail")
        else:
            assert encoder.row(logged, 0, b"head", b"tail") == (value, key, end)
            assert encoder.copy_row(copied, 0, b"head", b"tail") == (value, key, len(copied) - PADDING)


def test_a_full_old_image_is_the_row_as_it_was(edge: Edge) -> None:
    encoder = _encoder(edge)
    for logged in edge.logged:
        value, key, end, _, _ = encoder.row_with_cells(logged, 0, b"", b"")
        assert encoder.old_row(logged, 0) == (value, key, end)
