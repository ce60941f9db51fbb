"""One live pipeline with a bank at its source and a reader at its target, for tests that break it."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
import yaml
from psycopg import sql

from anabranch import pipeline as pipelines
from anabranch import verification
from anabranch.demo.bank import Bank
from anabranch.demo.reader import Reader
from anabranch.pipeline import Pipeline
from anabranch.running import pipeline_parts
from anabranch.stack.service import KafkaService, PostgresService
from anabranch.states import StateFiles
from anabranch.supervise import Part, Supervisor
from anabranch.verify import VerifyResult
from anabranch_schemas import failpoints

_TIMEOUT_S = 120.0


class LivePipeline:
    """A pipeline whose parts are real processes, restarted when they die, with failpoints that can be armed."""

    def __init__(self, loaded: Pipeline, file: Path, directory: Path, source: str, target: str) -> None:
        self.file = file
        self.loaded = loaded
        self.directory = directory
        self.target = target
        self.states = StateFiles(directory / "state")
        self.supervisor = Supervisor(
            pipeline_parts(loaded, file),
            self.states,
            log_dir=directory / "logs",
            environment=lambda part: {failpoints.FILE_VARIABLE: str(self._failpoint(part.kind))},
        )
        self.source = source
        self.bank = Bank(source, rate=100)
        self.reader = Reader(target, self.bank.pulses)
        self._stop = threading.Event()
        self._looking = threading.Thread(target=self._look, daemon=True)

    def start(self) -> None:
        """Start everything and wait until the target may be trusted."""
        self.supervisor.start()
        self._looking.start()
        self.reader.start()
        assert self.reader.consistent.wait(_TIMEOUT_S), self.logs()
        self.reader.check()
        self.bank.start()

    def stop(self) -> None:
        """Stop everything."""
        self.bank.stop()
        self._stop.set()
        self._looking.join()
        self.supervisor.drain()
        self.reader.stop()

    def part(self, kind: str) -> Part:
        """Return the pipeline's source or sink."""
        return next(part for part in self.supervisor.parts if part.kind == kind)

    def _failpoint(self, kind: str) -> Path:
        return self.directory / f"{kind}.failpoint"

    def kill(self, kind: str) -> None:
        """Kill -9 a part."""
        self.supervisor.kill(self.part(kind))

    def die_at(self, kind: str, place: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Let a running part die at a failpoint, and wait until it has and is back.

        `meanwhile` may make it reach the place.
        """
        armed = self._failpoint(kind)
        draft = armed.with_suffix(".draft")
        draft.write_text(place)
        draft.replace(armed)
        meanwhile()
        self.wait(lambda: not armed.exists(), f"{place} did not fire")
        self.advance()

    def applied(self) -> int:
        """Return the newest applied marker."""
        with psycopg.connect(self.target, autocommit=True) as connection:
            row = connection.execute("SELECT marker FROM anabranch.progress").fetchone()
        assert row is not None
        return int(row[0])

    def advance(self) -> None:
        """Wait until the target has applied something published from now on."""
        seen = self.applied()
        self.wait(lambda: self.applied() > seen + 1, "the target does not advance")

    def verify(self) -> VerifyResult:
        """Compare source and target row by row, with the bank at rest."""
        with self.bank.paused():
            return verification.verify(self.loaded, timeout_s=_TIMEOUT_S)

    def wait(self, condition: Callable[[], bool], failure: str) -> None:
        """Wait for a condition, within limits."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, f"{failure}\n{self.logs()}"
            assert not any(part.ended for part in self.supervisor.parts), f"a part gave up\n{self.logs()}"
            self._stop.wait(0.05)

    def logs(self) -> str:
        """Return the ends of the parts' logs."""
        files = sorted((self.directory / "logs").glob("*.log"))
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files)

    def _look(self) -> None:
        while not self._stop.wait(0.05):
            self.supervisor.look()


def write_pipeline(directory: Path, kafka: str, source: str, target: str, name: str) -> Path:
    """Write the bank's pipeline file."""
    document = {
        "name": name,
        "kafka": {"bootstrap.servers": kafka},
        "state.dir": str(directory / "state"),
        "sites": [{"id": 1, "name": "eu"}, {"id": 2, "name": "us"}],
        "sources": [
            {
                "name": "bank",
                "site": "eu",
                "connector": "postgres",
                "dsn": source,
                "tables": ["bank.*"],
                "copy.chunk.rows": 200,
                "spill.bytes": 4096,
                "topics": {"partitions": 2},
            }
        ],
        "sinks": [
            {
                "name": "bank-us",
                "site": "us",
                "connector": "postgres",
                "dsn": target,
                "from": ["eu.bank"],
                "create": True,
            }
        ],
    }
    file = directory / f"{name}.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


@pytest.fixture(scope="module")
def module_databases(postgres_eu: PostgresService, postgres_us: PostgresService) -> tuple[str, str]:
    """Return two new databases; the servers go with the session, and these with them."""
    name = f"bank_{uuid.uuid4().hex[:8]}"
    dsns = []
    for server in (postgres_eu, postgres_us):
        with psycopg.connect(server.dsn(), autocommit=True) as admin:
            admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        dsns.append(server.dsn(name))
    return dsns[0], dsns[1]


@pytest.fixture(scope="module")
def live(
    kafka: KafkaService,
    module_databases: tuple[str, str],
    server_directory: Path,
    spark_jars: tuple[Path, ...],
) -> Iterator[LivePipeline]:
    """Return a running bank; it is checked for torn reads when it stops."""
    source, target = module_databases
    Bank.create(source)
    directory = server_directory / "chaos"
    directory.mkdir(exist_ok=True)
    name = source.rsplit("_", 1)[1]
    file = write_pipeline(directory, kafka.bootstrap, source, target, f"c{name}")
    running = LivePipeline(pipelines.load(file), file, directory, source, target)
    try:
        running.start()
        yield running
    finally:
        running.stop()
