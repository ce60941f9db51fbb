"""Locks, checksums, and downloads that fail half way."""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import Path

import pytest

from anabranch.stack import jars
from anabranch.stack.errors import JarChecksumError, JarDownloadError
from anabranch.stack.jars import LockedJar, cache_directory, fetch, parse_lock
from anabranch.stack.java import JavaRuntime


def locked(artifact: str, content: bytes = b"jar") -> LockedJar:
    return LockedJar("org.example", artifact, "1.0", hashlib.sha256(content).hexdigest())


@pytest.fixture
def ivy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file whose shell lines run in place of Ivy, in the directory to retrieve into."""
    launcher, lines = tmp_path / "java", tmp_path / "ivy.sh"
    # The last argument is the retrieve pattern: DIRECTORY/out/[artifact]-[revision].[ext].
    launcher.write_text(f'#!/bin/sh\nfor last; do :; done\nmkdir -p "${{last%/*}}"\ncd "${{last%/*}}"\n. {lines}\n')
    launcher.chmod(0o755)
    lines.write_text("")
    monkeypatch.setattr(jars, "find_java", lambda: JavaRuntime(launcher, 17, "PATH"))
    return lines


@pytest.mark.parametrize("lock", ["kafka", "spark"])
def test_a_shipped_lock_names_every_file_once_with_its_checksum(lock: str) -> None:
    found = parse_lock(resources.files("anabranch.stack").joinpath(f"jars-{lock}.lock").read_text())
    assert found
    assert len({jar.file_name for jar in found}) == len(found)
    assert all(len(bytes.fromhex(jar.sha256)) == 32 for jar in found)


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("ANABRANCH_CACHE", raising=False)
    assert cache_directory() == tmp_path / "xdg" / "anabranch"
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path / "own"))
    assert cache_directory() == tmp_path / "own"


def test_a_seeded_cache_needs_neither_java_nor_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> JavaRuntime:
        raise AssertionError("nothing is missing, so nothing is to be fetched")

    monkeypatch.setattr(jars, "find_java", refuse)
    (tmp_path / "a-1.0.jar").write_bytes(b"jar")
    assert fetch([locked("a")], tmp_path) == (tmp_path / "a-1.0.jar",)


def test_only_missing_jars_are_fetched_and_the_order_is_the_locks(tmp_path: Path, ivy: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "a-1.0.jar").write_bytes(b"jar")
    ivy.write_text("printf jar > b-1.0.jar\n")
    assert [path.name for path in fetch([locked("b"), locked("a")], cache)] == ["b-1.0.jar", "a-1.0.jar"]
    assert sorted(path.name for path in cache.iterdir()) == [".lock", "a-1.0.jar", "b-1.0.jar"]


def test_a_jar_with_another_checksum_is_removed(tmp_path: Path) -> None:
    jar = tmp_path / "a-1.0.jar"
    jar.write_bytes(b"not what was locked")
    with pytest.raises(JarChecksumError, match="was removed"):
        fetch([locked("a")], tmp_path)
    assert not jar.exists()


def test_a_download_with_another_checksum_never_enters_the_cache(tmp_path: Path, ivy: Path) -> None:
    ivy.write_text("printf forged > a-1.0.jar\n")
    with pytest.raises(JarChecksumError):
        fetch([locked("a")], tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_what_was_fetched_before_a_failure_is_kept_and_the_error_says_what_lacks(tmp_path: Path, ivy: Path) -> None:
    ivy.write_text("printf jar > a-1.0.jar\necho ':: org.example#b;1.0: not found'\nexit 1\n")
    with pytest.raises(JarDownloadError, match=r"1 jars .*b-1\.0\.jar.*b;1\.0: not found") as caught:
        fetch([locked("a"), locked("b")], tmp_path / "cache")
    assert "ANABRANCH_IVY_SETTINGS" in caught.value.advice
    assert (tmp_path / "cache" / "a-1.0.jar").exists()
