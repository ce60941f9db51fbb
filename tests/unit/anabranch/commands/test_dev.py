"""`anabranch dev` prints what scripts rely on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from anabranch.commands.dev import default_directory, dev
from anabranch.stack import embedded
from anabranch.stack.embedded import SiteAddress, StackAddress

ADDRESS = StackAddress(
    "127.0.0.1:1",
    None,
    (SiteAddress("eu", "postgresql://postgres@127.0.0.1:2/postgres"), SiteAddress("us", "postgresql://x")),
    "/stack",
)


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "up", lambda _directory: ADDRESS)


@pytest.mark.usefixtures("running")
def test_up_prints_one_line_of_json() -> None:
    result = CliRunner().invoke(dev, ["up", "-o", "json"])
    assert result.exit_code == 0
    assert result.output.count("\n") == 1
    assert json.loads(result.output) == {
        "kafka": "127.0.0.1:1",
        "registry": None,
        "postgres": [
            {"site": "eu", "dsn": "postgresql://postgres@127.0.0.1:2/postgres"},
            {"site": "us", "dsn": "postgresql://x"},
        ],
        "dir": "/stack",
    }


@pytest.mark.usefixtures("running")
def test_up_prints_a_table_by_default() -> None:
    output = CliRunner().invoke(dev, ["up"]).output
    assert "postgres-eu" in output
    assert "anabranch dev down" in output


def test_nothing_to_stop_is_no_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(dev, ["down", "--dir", str(tmp_path / "none")])
    assert (result.exit_code, result.output) == (0, "Nothing was running.\n")


def test_the_status_of_nothing_is_exit_status_1(tmp_path: Path) -> None:
    result = CliRunner().invoke(dev, ["status", "-o", "json", "--dir", str(tmp_path / "none")])
    assert result.exit_code == 1
    assert json.loads(result.output) == {"dir": str(tmp_path / "none"), "running": False, "services": []}


def test_the_directory_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANABRANCH_HOME", str(tmp_path))
    assert default_directory() == tmp_path
    monkeypatch.delenv("ANABRANCH_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert default_directory() == tmp_path / "data" / "anabranch" / "dev"
