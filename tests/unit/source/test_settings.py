from __future__ import annotations

from anabranch_source.settings import StreamSettings


def test_names_follow_from_the_prefix() -> None:
    settings = StreamSettings(name="eu.orders", site=1, prefix="shop.eu.orders", kafka={})
    assert settings.marker_topic == "shop.eu.orders.markers"
    assert settings.transactional_id == "anabranch-shop.eu.orders-eu.orders"
