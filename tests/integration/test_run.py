"""`anabranch run` as its users run it: a command that supervises, drains, and comes back."""

from __future__ import annotations

import json
import os
import signal
import site
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from tests.source_process import ROOT
from tests.waiting import wait_until

from anabranch.stack.service import KafkaService

pytestmark = pytest.mark.timeout(300)
_TIMEOUT_S = 120.0


class Command:
    """The command line, on one pipeline file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Start `anabranch run`."""
        log = self.file.with_suffix(".log").open("ab")
        command = [sys.executable, "-m", "anabranch", "run", str(self.file)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        log.close()

    def call(self, *words: str) -> tuple[int, dict[str, Any], str]:
        """Run another command; return its exit status, its JSON and its standard error."""
        command = [sys.executable, "-m", "anabranch", words[0], str(self.file), *words[1:]]
        done = subprocess.run(command, capture_output=True, check=False)
        return done.returncode, json.loads(done.stdout or b"{}"), done.stderr.decode()

    def status(self) -> dict[str, Any]:
        """Return `status -o json`."""
        return self.call("status", "-o", "json")[1]

    def safe(self) -> bool:
        """Tell whether the sink has a safe time."""
        sinks = self.status().get("sinks", [])
        return bool(sinks and sinks[0]["safe_time"])


@pytest.fixture
def command(
    kafka: KafkaService,
    eu_database: str,
    us_database: str,
    topic_prefix: str,
    tmp_path: Path,
    spark_jars: tuple[Path, ...],
) -> Iterator[Command]:
    with psycopg.connect(eu_database, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id bigint PRIMARY KEY, item text NOT NULL)")
        connection.execute("INSERT INTO orders SELECT n, 'item ' || n FROM generate_series(1, 100) n")
    document = {
        "name": topic_prefix,
        "kafka": {"bootstrap.servers": kafka.bootstrap},
        "sites": [{"id": 1, "name": "eu"}, {"id": 2, "name": "us"}],
        "sources": [{"name": "orders", "site": "eu", "connector": "postgres", "dsn": "${env:EU}"}],
        "sinks": [
            {
                "name": "orders-us",
                "site": "us",
                "connector": "postgres",
                "dsn": us_database,
                "from": ["eu.orders"],
                "create": True,
            }
        ],
    }
    file = tmp_path / "shop.yaml"
    file.write_text(yaml.safe_dump(document))
    os.environ["EU"] = eu_database
    running = Command(file)
    try:
        yield running
    finally:
        if running.process is not None and running.process.poll() is None:
            running.process.terminate()
            running.process.wait(_TIMEOUT_S)
        del os.environ["EU"]


def test_a_pipeline_runs_comes_back_after_kill_9_and_drains_on_sigterm(command: Command, eu_database: str) -> None:
    code, checked, _ = command.call("check", "-o", "json")
    assert code == 0
    assert checked["ok"]

    command.run()
    wait_until(command.safe, "the sink has no safe time")
    code, verified, _ = command.call("verify", "-o", "json")
    assert code == 0
    assert verified["tables"][0]["rows"] == 100

    # The supervisor is killed, and its parts are left behind.
    first = command.process
    assert first is not None
    epoch = command.status()["streams"][0]["epoch"]
    first.kill()
    first.wait()
    with psycopg.connect(eu_database, autocommit=True) as connection:
        connection.execute("UPDATE orders SET item = 'changed' WHERE id % 2 = 0")
        connection.execute("DELETE FROM orders WHERE id % 10 = 0")
    command.run()
    wait_until(lambda: command.status()["streams"][0]["epoch"] > epoch, "the stream was not taken up again")
    code, verified, error = command.call("verify", "-o", "json")
    assert code == 0, error
    assert verified["equal"]
    status = command.status()
    stream, sink = status["streams"][0], status["sinks"][0]
    assert (stream["name"], stream["state"], stream["phase"]) == ("eu.orders", "running", "replicate")
    assert sink["applied"].keys() == {"eu.orders"}
    assert sink["transactions"] == 2
    assert sink["quarantined"] == 0

    process = command.process
    assert process is not None
    process.send_signal(signal.SIGTERM)
    assert process.wait(_TIMEOUT_S) == 0
    status = command.status()
    assert {part["state"] for part in (*status["streams"], *status["sinks"])} == {"stopped"}


def test_a_part_that_cannot_go_on_is_shown_with_its_reason_and_repair(command: Command, eu_database: str) -> None:
    command.run()
    wait_until(command.safe, "the sink has no safe time")
    process = command.process
    assert process is not None
    process.send_signal(signal.SIGTERM)
    assert process.wait(_TIMEOUT_S) == 0
    with psycopg.connect(eu_database, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database()"
        )
        connection.execute("DELETE FROM orders WHERE id > 50")
    command.run()
    wait_until(lambda: command.status()["streams"][0]["state"] == "failed", "the source did not stop")
    code, status, _ = command.call("status", "-o", "json")
    assert code == 1
    error = status["streams"][0]["error"]
    assert error["code"] == "source.slot_missing"
    assert "anabranch bootstrap" in error["advice"]
    process = command.process
    assert process is not None
    process.send_signal(signal.SIGTERM)
    assert process.wait(_TIMEOUT_S) == 1

    # The repair that the advice names.
    done = subprocess.run(
        [sys.executable, "-m", "anabranch", "bootstrap", str(command.file), "--source", "orders", "--yes"],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    command.run()
    wait_until(
        lambda: command.status()["streams"][0]["phase"] == "replicate" and command.safe(),
        "the stream did not begin anew",
    )
    code, verified, stderr = command.call("verify", "-o", "json")
    assert code == 0, stderr
    assert verified["tables"][0]["rows"] == 50


def test_the_package_reaches_executors_that_lack_it(
    command: Command, us_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", str(_bare_python(tmp_path)))
    document = yaml.safe_load(command.file.read_text())
    document["sinks"][0]["spark"] = {
        "master": "local-cluster[1,1,1024]",
        "conf": {"spark.submit.pyFiles": str(_packed(tmp_path))},
    }
    command.file.write_text(yaml.safe_dump(document))
    command.run()
    wait_until(command.safe, "the sink has no safe time")
    with psycopg.connect(us_database) as target:
        assert target.execute("SELECT count(*) FROM orders").fetchone() == (100,)


def _bare_python(directory: Path) -> Path:
    """Return an interpreter that has what we need, without us: no .pth file is read."""
    script = directory / "python"
    path = f"$PYTHONPATH:{site.getsitepackages()[0]}"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{path}" exec {sys.executable} -S "$@"\n')
    script.chmod(0o755)
    return script


def _packed(directory: Path) -> Path:
    """Return our packages as a wheel has them."""
    archive = directory / "anabranch-0-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as packed:
        for room in ("schemas", "connectors", "source", "sink", "anabranch"):
            for file in (ROOT / room).rglob("*.py"):
                packed.write(file, file.relative_to(ROOT / room))
    return archive
