"""Which Java is taken, and what is said when there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.stack.errors import JavaMissingError
from anabranch.stack.java import find_java, parse_version


@pytest.fixture(autouse=True)
def _no_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    find_java.cache_clear()
    yield
    find_java.cache_clear()


def fake_java(home: Path, version: str) -> Path:
    launcher = home / "bin" / "java"
    launcher.parent.mkdir(parents=True)
    launcher.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    launcher.chmod(0o755)
    return launcher


@pytest.mark.parametrize(
    ("text", "feature"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_392"', 8),
        ('openjdk version "25" 2025-09-16', 25),
        ('openjdk version "21-ea" 2023-09-19', 21),
        ("Error: could not find libjava.so", None),
    ],
)
def test_the_feature_release_is_read_from_every_spelling(text: str, feature: int | None) -> None:
    assert parse_version(text) == feature


def test_java_home_comes_before_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = fake_java(tmp_path / "home", "21.0.2")
    fake_java(tmp_path / "path", "17.0.1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path}/path/bin:/bin:/usr/bin")
    assert (find_java().path, find_java().version, find_java().origin) == (wanted, 21, "JAVA_HOME")


def test_an_old_java_home_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(tmp_path / "home", "1.8.0_392")
    wanted = fake_java(tmp_path / "path", "17.0.1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path}/path/bin:/bin:/usr/bin")
    assert find_java().path == wanted


def test_the_error_names_what_was_passed_over_and_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_java(tmp_path / "home", "11.0.2")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(JavaMissingError, match="is Java 11") as caught:
        find_java()
    assert "openjdk-17" in caught.value.advice
