"""The generated reference pages say what the code says."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

_SCRIPT = Path(__file__).parents[3] / "docs" / "generate.py"


@pytest.fixture(scope="module")
def generate() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("docs_generate", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("name", ["pipeline-file.md", "errors.md"])
def test_a_generated_page_is_what_the_code_would_write_today(generate: ModuleType, name: str) -> None:
    pages = {path.name: (path, text) for path, text in generate.pages().items()}
    path, text = pages[name]
    assert path.read_text(encoding="utf-8") == text, "run `python docs/generate.py`"


def test_every_error_code_belongs_to_one_class(generate: ModuleType) -> None:
    codes = [kind.code for kind in generate._errors()]
    assert len(codes) == len(set(codes)), sorted(code for code in codes if codes.count(code) > 1)


def test_a_key_without_a_meaning_is_refused(generate: ModuleType) -> None:
    with pytest.raises(generate.StaleMeaningsError, match="tables"):
        generate._agree("sources", {"name"}, {"name", "tables"})


def test_pages_of_the_navigation_are_there_and_no_page_is_outside_it() -> None:
    root = _SCRIPT.parents[1]
    navigation = yaml.safe_load((root / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    listed = set(_pages(navigation))
    there = {path.relative_to(root / "docs").as_posix() for path in (root / "docs").rglob("*.md")}
    assert listed == there


def _pages(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    if isinstance(entry, dict):
        return [page for value in entry.values() for page in _pages(value)]
    assert isinstance(entry, list)
    return [page for item in entry for page in _pages(item)]
