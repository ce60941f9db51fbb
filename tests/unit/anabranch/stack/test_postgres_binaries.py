"""Which PostgreSQL is taken, and how its programs are made reachable."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.stack import account, postgres_binaries
from anabranch.stack.account import Account
from anabranch.stack.errors import PostgresMissingError
from anabranch.stack.postgres_binaries import PostgresBinaries, find_postgres, reachable_binaries


def installed(*versions: str) -> list[PostgresBinaries]:
    return [PostgresBinaries(Path("/wheel", version, "bin"), version, "wheel") for version in versions]


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANABRANCH_POSTGRES", raising=False)


def test_the_first_found_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_binaries, "_installed", lambda: installed("18.4", "16.14"))
    assert find_postgres().major == 18
    assert find_postgres(16).version == "16.14"


def test_the_environment_chooses_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_binaries, "_installed", lambda: installed("18.4", "16.14"))
    monkeypatch.setenv("ANABRANCH_POSTGRES", "16")
    assert find_postgres().major == 16
    assert find_postgres(18).major == 18


def test_the_error_lists_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_binaries, "_installed", lambda: installed("18.4", "16.14"))
    with pytest.raises(PostgresMissingError, match=r"no PostgreSQL 17; there is: 18\.4 \(wheel\), 16\.14 \(wheel\)"):
        find_postgres(17)


def test_a_release_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANABRANCH_POSTGRES", "latest")
    with pytest.raises(PostgresMissingError, match="'latest' is no major release"):
        find_postgres()


def test_the_wheel_is_found() -> None:
    assert {binaries.major for binaries in postgres_binaries._installed() if binaries.origin == "wheel"} >= {16, 18}


def test_programs_in_a_closed_place_are_copied_once_with_their_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "closed" / "pgserver"
    (package / "pginstall18" / "bin").mkdir(parents=True)
    (package / "pginstall18" / "bin" / "postgres").write_text("a program")
    (package.parent / "pgserver.libs").mkdir()
    (package.parent / "pgserver.libs" / "libpq.so").write_text("a library")
    monkeypatch.setattr(Account, "can_traverse", lambda _account, path: "closed" not in path.parts)
    monkeypatch.setattr(account, "_SHARED", tmp_path / "shared")
    stranger = Account("stranger", 54321, 54321)
    found = PostgresBinaries(package / "pginstall18" / "bin", "18.4", "wheel")

    copy = reachable_binaries(found, stranger)
    assert copy.program("postgres").read_text() == "a program"
    assert (copy.bin.parents[2] / "pgserver.libs" / "libpq.so").exists()
    assert reachable_binaries(found, stranger) == copy
    assert reachable_binaries(found, None) == found
