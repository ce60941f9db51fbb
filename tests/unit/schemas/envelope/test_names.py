from __future__ import annotations

import pytest

from anabranch_schemas.envelope.names import adjust, field_names, namespace
from anabranch_schemas.errors import TypeMappingError


@pytest.mark.parametrize(
    ("name", "avro"), [("id", "id"), ("a-b", "a_b"), ("1st", "_1st"), ("Täble漢", "T_ble_"), ("", "_"), ("a.b", "a_b")]
)
def test_a_name_becomes_valid(name: str, avro: str) -> None:
    assert adjust(name) == avro


def test_every_part_of_a_namespace_becomes_valid() -> None:
    assert namespace("shop.eu-1.2nd", "public", "1digit.x") == "shop.eu_1._2nd.public._1digit_x"


def test_a_stream_without_schemas_has_no_part_for_them() -> None:
    assert namespace("shop", "", "orders") == "shop.orders"


def test_two_columns_with_one_field_name_are_refused_by_name() -> None:
    with pytest.raises(TypeMappingError) as caught:
        field_names(("id", "a.b", "a-b"), where="public.t")
    assert caught.value.where == "public.t"
    assert "'a.b'" in caught.value.message
    assert "'a-b'" in caught.value.message
