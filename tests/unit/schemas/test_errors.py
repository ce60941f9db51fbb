from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import pytest

import anabranch_connectors
import anabranch_schemas
import anabranch_source
from anabranch_schemas.errors import Action, AnabranchError, RegistryError


def subclasses(of: type[AnabranchError]) -> Iterator[type[AnabranchError]]:
    for found in of.__subclasses__():
        if found.__module__.startswith("anabranch_"):
            yield found
            yield from subclasses(found)


@pytest.fixture(scope="module")
def classes() -> list[type[AnabranchError]]:
    for package in (anabranch_schemas, anabranch_connectors, anabranch_source):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    return [*dict.fromkeys(subclasses(AnabranchError))]


def test_an_error_says_code_place_and_advice() -> None:
    error = RegistryError("it does not answer", where="http://r", advice="start it")
    assert str(error) == "registry.unavailable [http://r]: it does not answer\n  -> start it"
    assert str(RegistryError("it does not answer")) == "registry.unavailable: it does not answer"
    assert error.as_dict() == {
        "code": "registry.unavailable",
        "where": "http://r",
        "message": "it does not answer",
        "advice": "start it",
    }


def test_every_class_has_a_code_of_its_own_and_a_sentence(classes: list[type[AnabranchError]]) -> None:
    codes = [found.code for found in classes]
    assert len(set(codes)) == len(codes) > 20
    for found in classes:
        assert found.__name__.endswith("Error")
        head, _, tail = found.code.partition(".")
        assert head.isidentifier(), found.code
        assert tail.replace("_", "a").isalpha(), found.code
        assert isinstance(found.action, Action)
        assert found.__doc__, found
