"""What an account can reach, and where its server lives when it cannot."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from anabranch.stack import account
from anabranch.stack.account import Account, prepare_directory, reachable_directory
from anabranch.stack.errors import StackError

STRANGER = Account("stranger", 54321, 54321)


@pytest.fixture
def open_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory to which only its own mode counts."""
    monkeypatch.setattr(Path, "parents", property(lambda path: (tmp_path,) if path != tmp_path else ()))
    tmp_path.chmod(0o711)
    return tmp_path


def test_one_closed_parent_closes_everything_below(open_directory: Path) -> None:
    assert STRANGER.can_traverse(open_directory / "not" / "there" / "yet")
    open_directory.chmod(0o700)
    assert not STRANGER.can_traverse(open_directory / "not" / "there" / "yet")


def test_the_owner_and_the_group_have_bits_of_their_own(open_directory: Path) -> None:
    entry = open_directory.stat()
    open_directory.chmod(0o070)
    assert Account("group", 54321, entry.st_gid).can_traverse(open_directory)
    assert not Account("owner", entry.st_uid, entry.st_gid).can_traverse(open_directory)
    open_directory.chmod(0o700)
    assert Account("owner", entry.st_uid, 54321).can_traverse(open_directory)


def test_the_wanted_directory_is_taken_when_it_can_be_reached(open_directory: Path) -> None:
    assert reachable_directory(open_directory / "data", STRANGER) == open_directory / "data"


def test_without_another_account_any_directory_will_do(tmp_path: Path) -> None:
    assert reachable_directory(tmp_path / "data", None) == tmp_path / "data"


def test_the_stand_in_is_the_same_at_every_start_and_differs_between_directories(open_directory: Path) -> None:
    open_directory.chmod(0o700)
    stand_ins = [reachable_directory(open_directory / name / "data", STRANGER) for name in ("a", "a", "b")]
    assert stand_ins[0] == stand_ins[1] != stand_ins[2]
    assert stand_ins[0].name.startswith("data-")


def test_a_shared_place_that_is_not_ours_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "shared"
    place.symlink_to(tmp_path)
    monkeypatch.setattr(account, "_SHARED", place)
    with pytest.raises((StackError, FileExistsError)):
        prepare_directory(place / "data-1", None)


def test_a_prepared_directory_exists(tmp_path: Path) -> None:
    prepare_directory(tmp_path / "a" / "b", None)
    assert (tmp_path / "a" / "b").stat().st_uid == os.geteuid()
