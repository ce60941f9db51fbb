from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch_schemas.envelope.cells import Cell, CellKind, CellsError, decode, encode


@given(
    st.lists(
        st.builds(
            Cell,
            st.integers(0, 65535),
            st.sampled_from(CellKind),
            st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
        )
    )
)
def test_a_list_goes_there_and_back(cells: list[Cell]) -> None:
    assert decode(encode(cells)) == tuple(cells)


def test_the_layout_is_fixed() -> None:
    cells = (Cell(1, CellKind.MISSING), Cell(258, CellKind.TEXT, "é"))
    assert encode(cells) == bytes.fromhex("0001 00 00000000  0102 01 00000002 c3a9")


def test_a_cut_off_header_is_refused_as_such() -> None:
    whole = encode((Cell(1, CellKind.TEXT, "NaN"),))
    for cut in range(1, len(whole)):
        with pytest.raises(CellsError):
            decode(whole[:cut])


@pytest.mark.parametrize("damaged", ["0001 07 00000000", "0001 01 00000001 ff"])
def test_foreign_bytes_are_refused_as_such(damaged: str) -> None:
    with pytest.raises(CellsError):
        decode(bytes.fromhex(damaged))
