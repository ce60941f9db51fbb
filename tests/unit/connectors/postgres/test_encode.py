from __future__ import annotations

import struct

import pytest

from anabranch_connectors.postgres.encode import NeedsCells, RowEncodeError, RowEncoder, compile_encoder
from anabranch_connectors.postgres.pgtable import PgColumn, PgTable, PgType
from anabranch_schemas.envelope.cells import UNAVAILABLE, Cell, CellKind, decode
from anabranch_schemas.envelope.varint import sized

PADDING = bytes(4096)
BIGINT, INTEGER, TEXT = PgType(20, "bigint"), PgType(23, "integer"), PgType(25, "text")
NUMERIC = PgType(1700, "numeric(10,2)", (10 << 16 | 2) + 4)
NAN = struct.pack("!HhHH", 0, 0, 0xC000, 0)
UNCHANGED = object()


def column(name: str, type_: PgType, *, nullable: bool = False) -> PgColumn:
    return PgColumn(name, type_, nullable)


def encoder(*columns: PgColumn, key: tuple[str, ...] = ("id",)) -> RowEncoder:
    def as_text(oid: int, data: bytes) -> str:
        return f"{oid}:{data.hex()}"

    table = PgTable(1, "public", "t", columns, key)
    return compile_encoder(table, key_frame=b"KKKKK", value_frame=b"VVVVV", as_text=as_text)


def logged(*cells: bytes | str | object | None) -> bytes:
    """Return a TupleData: bytes are binary, str is text, None NULL."""
    out = [struct.pack("!h", len(cells))]
    for cell in cells:
        if cell is None:
            out.append(b"n")
        elif isinstance(cell, bytes):
            out.append(b"b" + struct.pack("!i", len(cell)) + cell)
        elif isinstance(cell, str):
            out.append(b"t" + struct.pack("!i", len(cell.encode())) + cell.encode())
        else:
            out.append(b"u")
    return b"".join(out)


def big(n: int) -> bytes:
    return struct.pack("!q", n)


def test_head_and_tail_surround_the_image() -> None:
    rows = encoder(column("id", BIGINT), column("v", TEXT, nullable=True))
    data = logged(big(5), b"abc")
    assert rows.insert_head == b"VVVVV\x00\x02"
    value, key, end = rows.row(b"??" + data + PADDING, 2, rows.insert_head, b"tail")
    assert value == b"VVVVV\x00\x02" + b"\x0a" + b"\x02\x06abc" + b"tail"
    assert (key, end) == (b"KKKKK\x0a", 2 + len(data))


def test_a_table_without_a_key_has_an_empty_one() -> None:
    rows = encoder(column("id", BIGINT), key=())
    assert rows.row(logged(big(5)) + PADDING, 0, b"", b"")[1] == b""


def test_a_composite_key_has_the_keys_order() -> None:
    rows = encoder(column("a", TEXT), column("id", BIGINT), key=("id", "a"))
    assert rows.row(logged(b"x", big(1)) + PADDING, 0, b"", b"")[1] == b"KKKKK\x02\x02x"


def test_unchanged_toast_is_missing_and_shows_debeziums_placeholder() -> None:
    rows = encoder(
        column("id", BIGINT),
        column("s", TEXT, nullable=True),
        column("r", TEXT),
        column("n", NUMERIC, nullable=True),
        column("m", NUMERIC),
    )
    data = logged(big(1), UNCHANGED, UNCHANGED, UNCHANGED, UNCHANGED)
    with pytest.raises(NeedsCells):
        rows.row(data + PADDING, 0, b"", b"")
    value, key, end, header, missing = rows.row_with_cells(data + PADDING, 0, b"", b"")
    assert value == b"\x02" + b"\x02" + sized(UNAVAILABLE) + sized(UNAVAILABLE) + b"\x00" + b"\x02\x00"
    assert (key, end, missing) == (b"KKKKK\x02", len(data), True)
    assert decode(header) == tuple(Cell(at, CellKind.MISSING) for at in (1, 2, 3, 4))


def test_a_full_old_tuple_fills_in_unchanged_toast() -> None:
    rows = encoder(column("id", BIGINT), column("s", TEXT, nullable=True))
    old, new = logged(big(1), b"whole"), logged(big(1), UNCHANGED)
    value, _, end, header, missing = rows.row_with_cells(old + new + PADDING, len(old), b"", b"", 0)
    assert (value, header, missing) == (b"\x02\x02\x0awhole", b"", False)
    assert end == len(old) + len(new)


def test_a_key_only_old_tuple_fills_in_the_key_and_nothing_else() -> None:
    rows = encoder(column("id", TEXT), column("s", TEXT, nullable=True))
    old, new = logged(b"key", None), logged(UNCHANGED, UNCHANGED)
    _, key, _, header, missing = rows.row_with_cells(old + new + PADDING, len(old), b"", b"", 0)
    assert (key, missing) == (b"KKKKK\x06key", True)
    assert decode(header) == (Cell(1, CellKind.MISSING),)


def test_a_value_beyond_its_avro_type_travels_as_text() -> None:
    rows = encoder(column("id", BIGINT), column("n", NUMERIC, nullable=True))
    value, _, _, header, missing = rows.row_with_cells(logged(big(1), NAN) + PADDING, 0, b"", b"")
    assert (value, missing) == (b"\x02\x00", False)
    assert decode(header) == (Cell(1, CellKind.TEXT, "NaN"),)


def test_the_server_prints_what_is_not_printed_here() -> None:
    array = PgType(1007, "integer[]", element=INTEGER)
    rows = encoder(column("id", BIGINT), column("a", array, nullable=True))
    matrix = struct.pack("!iiI4i", 2, 0, 23, 1, 1, 1, 1) + struct.pack("!ii", 4, 7)
    _, _, _, header, _ = rows.row_with_cells(logged(big(1), matrix) + PADDING, 0, b"", b"")
    assert decode(header) == (Cell(1, CellKind.TEXT, f"1007:{matrix.hex()}"),)


def test_a_null_older_than_its_constraint_travels_as_a_cell() -> None:
    rows = encoder(column("id", BIGINT), column("n", INTEGER))
    data = logged(big(1), None) + PADDING
    with pytest.raises(NeedsCells):
        rows.row(data, 0, b"", b"")
    value, _, _, header, _ = rows.row_with_cells(data, 0, b"", b"")
    assert value == b"\x02\x00"
    assert decode(header) == (Cell(1, CellKind.NULL),)


def test_cells_in_text_form_are_taken() -> None:
    rows = encoder(column("id", BIGINT), column("s", TEXT), column("n", INTEGER, nullable=True))
    value, _, _, header, _ = rows.row_with_cells(logged(big(1), "abc", "7") + PADDING, 0, b"", b"")
    assert value == b"\x02\x06abc\x00"
    assert decode(header) == (Cell(2, CellKind.TEXT, "7"),)


def test_an_old_key_shows_zeros_where_null_cannot_be() -> None:
    rows = encoder(
        column("a", INTEGER),
        column("id", BIGINT),
        column("s", TEXT),
        column("n", NUMERIC),
        column("x", TEXT, nullable=True),
    )
    data = logged(None, big(3), None, None, None)
    image, key, end = rows.old_key(data + PADDING, 0)
    assert image == b"\x00" + b"\x06" + b"\x00" + b"\x02\x00" + b"\x00"
    assert (key, end) == (b"KKKKK\x06", len(data))


def test_an_old_tuple_without_the_key_does_not_pass_for_key_zero() -> None:
    rows = encoder(column("id", BIGINT), column("identity", BIGINT))
    with pytest.raises(RowEncodeError) as caught:
        rows.old_key(logged(None, big(3)) + PADDING, 0)
    assert caught.value.where == "public.t.id"


def test_an_old_row_holds_a_value_beyond_its_avro_type_as_null() -> None:
    rows = encoder(column("id", BIGINT), column("n", NUMERIC, nullable=True))
    assert rows.old_row(logged(big(3), NAN) + PADDING, 0)[0] == b"\x06\x00"


@pytest.mark.parametrize("cell", [UNCHANGED, NAN])
def test_a_key_that_cannot_be_held_is_refused_by_column(cell: object) -> None:
    rows = encoder(column("id", NUMERIC))
    with pytest.raises(RowEncodeError) as caught:
        rows.row_with_cells(logged(cell) + PADDING, 0, b"", b"")
    assert caught.value.where == "public.t.id"


def test_a_row_of_another_shape_is_refused() -> None:
    rows = encoder(column("id", BIGINT), column("v", INTEGER))
    data = logged(big(1)) + PADDING
    with pytest.raises(RowEncodeError):
        rows.row(data, 0, b"", b"")
    with pytest.raises(RowEncodeError):
        rows.row_with_cells(data, 0, b"", b"")


def test_a_key_column_that_is_not_published_is_refused() -> None:
    with pytest.raises(RowEncodeError):
        encoder(PgColumn("id", BIGINT, nullable=False, generated=True))


def test_a_table_wider_than_one_fused_run() -> None:
    columns = [column("id", BIGINT), *(column(f"c{at}", BIGINT, nullable=True) for at in range(200))]
    rows = encoder(*columns)
    data = logged(big(1), *(big(at) if at % 70 else None for at in range(200)))
    value, _, end = rows.row(data + PADDING, 0, b"", b"")
    assert (value, end) == (rows.row_with_cells(data + PADDING, 0, b"", b"")[0], len(data))


def test_a_tuple_is_skipped_whole() -> None:
    rows = encoder(column("id", BIGINT), column("s", TEXT, nullable=True))
    data = logged(big(1), UNCHANGED) + logged(big(2), "text")
    assert rows.skip(data, rows.skip(data, 0)) == len(data)
