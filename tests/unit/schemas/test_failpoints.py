from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch_schemas import failpoints

PASS = (
    "from anabranch_schemas import failpoints\nfor _ in range(3): failpoints.hit('a'); failpoints.hit('b'); print('x')"
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_passes", {})
    monkeypatch.delenv(failpoints.VARIABLE, raising=False)
    monkeypatch.delenv(failpoints.ONCE_VARIABLE, raising=False)


def run(**environment: str) -> tuple[int, int]:
    """Return how a process that passes the places a and b three times ends, and how many rounds it made."""
    done = subprocess.run(
        [sys.executable, "-uc", PASS], env={**os.environ, **environment}, capture_output=True, check=False
    )
    return done.returncode, done.stdout.count(b"x")


def test_nothing_is_armed_by_default() -> None:
    assert not failpoints.armed("a")
    failpoints.hit("a")


@pytest.mark.parametrize(("armed", "rounds"), [("a", 0), ("b", 0), ("a:2", 1), ("b:3", 2)])
def test_the_process_dies_at_the_armed_pass(armed: str, rounds: int) -> None:
    assert run(ANABRANCH_FAILPOINT=armed) == (-signal.SIGKILL, rounds)


@pytest.mark.parametrize("armed", ["c", "a:4", ""])
def test_it_lives_where_nothing_fires(armed: str) -> None:
    assert run(ANABRANCH_FAILPOINT=armed) == (0, 3)


def test_a_restarted_process_passes(tmp_path: Path) -> None:
    once = str(tmp_path / "fired")
    assert run(ANABRANCH_FAILPOINT="a:2", ANABRANCH_FAILPOINT_ONCE=once)[0] == -signal.SIGKILL
    assert run(ANABRANCH_FAILPOINT="a:2", ANABRANCH_FAILPOINT_ONCE=once) == (0, 3)


def test_a_milder_failure_fires_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failpoints.VARIABLE, "a:2")
    assert [failpoints.armed(name) for name in ("a", "b", "a", "a")] == [False, False, True, False]


def test_a_running_process_is_armed_by_a_file_that_goes_when_it_fires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "armed"
    monkeypatch.setenv(failpoints.FILE_VARIABLE, str(file))
    assert not failpoints.armed("a")
    file.write_text("a:2")
    assert [failpoints.armed(name) for name in ("b", "a", "a", "a")] == [False, False, True, False]
    assert not file.exists()
    file.write_text("b")
    assert failpoints.armed("b")
