"""The pipeline file is checked whole, and says where it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch import pipeline
from anabranch_schemas.errors import ConfigError

GOOD = """
name: shop
kafka: {bootstrap.servers: "localhost:9092", enable.ssl.certificate.verification: true, linger.ms: 3}
sites: [{id: 1, name: eu}, {id: 2, name: us}]
sources:
  - {name: orders, site: eu, connector: postgres, dsn: "postgresql://u:${env:PASSWORD}@h/db", tables: ["public.*"]}
sinks:
  - {name: orders-us, site: us, connector: postgres, dsn: "${file:target.dsn}", mode: mirror, from: [eu.orders]}
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setenv("PASSWORD", "secret-1")
    (tmp_path / "target.dsn").write_text("postgresql://u:secret-2@h/db\n")

    def loaded(text: str) -> pipeline.Pipeline:
        file = tmp_path / "p.yaml"
        file.write_text(text)
        return pipeline.load(file)

    return loaded


def test_a_good_file_is_read_with_its_references_filled_in(load: object) -> None:
    loaded = load(GOOD)  # type: ignore[operator]
    assert loaded.sources[0].dsn.get_secret_value() == "postgresql://u:secret-1@h/db"
    assert loaded.sinks[0].dsn.get_secret_value() == "postgresql://u:secret-2@h/db"
    assert loaded.kafka == {
        "bootstrap.servers": "localhost:9092",
        "enable.ssl.certificate.verification": "true",
        "linger.ms": "3",
    }
    assert loaded.stream(loaded.sources[0]) == "eu.orders"
    assert loaded.prefix(loaded.sources[0]) == "shop.eu.orders"
    assert loaded.state_dir is not None
    assert loaded.state_dir.name == "shop"


def test_no_secret_shows_in_the_model(load: object) -> None:
    assert "secret-" not in repr(load(GOOD))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("old", "new", "where", "message"),
    [
        ("tables:", "tabels:", "sources.0.tabels", "did you mean 'tables'?"),
        ("sinks:", "sink:", "sink", "did you mean 'sinks'?"),
        ("mode: mirror", "mode: mirrored", "sinks.0.mode", "'mirror'"),
        ("eu.orders", "eu.order", "", "did you mean 'eu.orders'?"),
        ("site: us", "site: usa", "", "did you mean 'us'?"),
        ("id: 2", "id: 1", "", "two sites have the id '1'"),
        ("bootstrap.servers", "bootstrap.server", "", "bootstrap.servers is missing"),
        ("${env:PASSWORD}", "${env:PASSWORT}", "sources[0].dsn", "no variable PASSWORT"),
        ("${file:target.dsn}", "${file:missing.dsn}", "sinks[0].dsn", "cannot read the file missing.dsn"),
        ("name: shop", "name: Shop!", "name", "pattern"),
        ("name: shop", "name: [shop", "p.yaml", "not valid YAML"),
    ],
)
def test_a_wrong_file_says_where_and_what_is_near(load: object, old: str, new: str, where: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError) as caught:
        load(GOOD.replace(old, new, 1) if old != "eu.orders" else GOOD.replace("[eu.orders]", "[eu.order]"))  # type: ignore[operator]
    assert where in caught.value.where
    assert message in caught.value.message
    assert "secret-" not in str(caught.value)


def test_a_file_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the file"):
        pipeline.load(tmp_path / "none.yaml")


def test_asking_for_a_part_that_is_not_there_names_the_nearest(load: object) -> None:
    loaded = load(GOOD)  # type: ignore[operator]
    with pytest.raises(ConfigError, match="did you mean 'orders'"):
        loaded.source("order")
    with pytest.raises(ConfigError, match="did you mean 'orders-us'"):
        loaded.sink("orders-uk")
