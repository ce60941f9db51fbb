"""The demo from start to end: stack, bank, pipeline, kills, proof."""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psycopg
import yaml

from anabranch import pipeline, verification
from anabranch.demo.bank import ROWS_PER_TRANSFER, Bank
from anabranch.demo.reader import Reader
from anabranch.running import pipeline_parts
from anabranch.stack import EmbeddedStack, StackAddress
from anabranch.states import StateFiles
from anabranch.supervise import Supervisor
from anabranch_schemas.errors import AnabranchError

_START_S = 120.0
_FIRST_KILL = 0.2  # of the run; then a kill at regular distances, source and sink in turn
_KILL_EVERY_S = 12.0  # a Spark driver needs some 8 s to come back: it should also work for a while


class DemoError(AnabranchError):
    """The pipeline of the demo did not come up."""

    code = "demo.failed"


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demo prints. `transactions` and `rows` are the source's; lost and duplicated are rows at the target."""

    transactions: int
    rows: int
    seconds: float
    rows_per_s: int
    lag_ms: dict[str, float | None]
    reads: int
    torn_reads: int
    lost: int
    duplicated: int
    kills: int
    verified: bool

    @property
    def passed(self) -> bool:
        """Tell whether every promise was kept."""
        return self.verified and not (self.torn_reads or self.lost or self.duplicated)

    def as_dict(self) -> dict[str, Any]:
        """Return the result as one JSON object."""
        return asdict(self)


Show = Callable[[str, dict[str, Any]], None]
"""(what is going on, figures so far); called a few times a second"""


def run_demo(*, seconds: float, rate: float, chaos: bool, show: Show, directory: Path | None = None) -> DemoResult:
    """Run the bank for `seconds` at `rate` transfers a second and prove the result.

    1. Start a Kafka broker and two PostgreSQL servers, with the bank in the first.
    2. Start the pipeline and wait until the target may be trusted.
    3. Write, poll the target, and kill the source worker and the Spark driver in turn if `chaos`.
    4. Stop writing, wait until the target has caught up, compare row by row.
    """
    with _directory(directory) as home:
        # 1.
        show("starting Kafka and PostgreSQL", {})
        stack = EmbeddedStack(home / "stack")
        address = stack.start()
        try:
            return _run_on(address, home, seconds=seconds, rate=rate, chaos=chaos, show=show)
        finally:
            stack.stop()


def _run_on(address: StackAddress, home: Path, *, seconds: float, rate: float, chaos: bool, show: Show) -> DemoResult:
    source_dsn, target_dsn = (_create_database(site.dsn) for site in address.postgres)
    Bank.create(source_dsn)
    file = _write_pipeline(home, address.kafka, source_dsn, target_dsn)
    loaded = pipeline.load(file)
    states = StateFiles(home / ".anabranch" / "bank")
    supervisor = Supervisor(pipeline_parts(loaded, file), states, log_dir=home / "logs")
    bank = Bank(source_dsn, rate=rate)
    reader = Reader(target_dsn, bank.pulses)
    # 2.
    show("starting the source worker and Spark", {})
    supervisor.start()
    stop_looking = threading.Event()
    looking = threading.Thread(target=_look, args=(supervisor, stop_looking), daemon=True)
    looking.start()
    reader.start()
    try:
        deadline = time.monotonic() + _START_S
        while not reader.consistent.wait(0.2):
            _refuse_failed(supervisor, states, home)
            if time.monotonic() > deadline:
                raise DemoError("the pipeline did not come up in time", where=str(home / "logs"), advice="see the logs")
        reader.check()
        # 3.
        began = time.monotonic()
        bank.start()
        kills = _watch(supervisor, bank, reader, seconds=seconds, chaos=chaos, show=show)
        bank.stop()
        # 4.
        show("waiting for the target, comparing row by row", _figures(bank, reader, began, kills))
        result = verification.verify(loaded, timeout_s=_START_S)
        took = time.monotonic() - began
    finally:
        stop_looking.set()
        looking.join()
        supervisor.drain()
    reader.stop()
    rows = bank.transfers * ROWS_PER_TRANSFER + len(bank.pulses)
    return DemoResult(
        transactions=bank.transfers + len(bank.pulses),
        rows=rows,
        seconds=round(took, 1),
        rows_per_s=round(rows / took),
        lag_ms={"p50": reader.percentile(0.5), "p99": reader.percentile(0.99)},
        reads=reader.reads,
        torn_reads=reader.torn,
        lost=sum(table.missing for table in result.tables),
        duplicated=sum(table.extra for table in result.tables),
        kills=kills,
        verified=result.equal,
    )


def _watch(supervisor: Supervisor, bank: Bank, reader: Reader, *, seconds: float, chaos: bool, show: Show) -> int:
    """Let the pipeline run, killing a part now and then; return how many were killed."""
    began = time.monotonic()
    victims = itertools.cycle(supervisor.parts)
    every = min(_KILL_EVERY_S, seconds / 3)
    next_kill = began + seconds * _FIRST_KILL
    kills = 0
    while (now := time.monotonic()) - began < seconds:
        if chaos and now >= next_kill:
            supervisor.kill(next(victims))
            kills += 1
            next_kill += every
        show("transfers are running", _figures(bank, reader, began, kills))
        time.sleep(0.2)
    return kills


def _figures(bank: Bank, reader: Reader, began: float, kills: int) -> dict[str, Any]:
    passed = max(0.001, time.monotonic() - began)
    return {
        "transactions": bank.transfers,
        "rows/s": round(bank.transfers * ROWS_PER_TRANSFER / passed),
        "lag ms p50": reader.percentile(0.5),
        "lag ms p99": reader.percentile(0.99),
        "reads": reader.reads,
        "torn reads": reader.torn,
        "kills": kills,
    }


def _look(supervisor: Supervisor, stop: threading.Event) -> None:
    while not stop.wait(0.1):
        supervisor.look()


def _refuse_failed(supervisor: Supervisor, states: StateFiles, home: Path) -> None:
    for part in supervisor.parts:
        if part.ended:
            status = states.read(part.kind, part.name)
            message = (status.error or {}).get("message", "no reason left") if status else "no reason left"
            raise DemoError(f"the {part.kind} ended: {message}", where=str(home / "logs"), advice="see the logs")


def _create_database(dsn: str) -> str:
    """Create the demo's database beside the server's own and return its DSN."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE DATABASE bank")
    return dsn.rsplit("/", 1)[0] + "/bank"


def _write_pipeline(home: Path, kafka: str, source: str, target: str) -> Path:
    file = home / "bank.yaml"
    document = {
        "name": "bank",
        "kafka": {"bootstrap.servers": kafka},
        "sites": [{"id": 1, "name": "eu"}, {"id": 2, "name": "us"}],
        "sources": [{"name": "accounts", "site": "eu", "connector": "postgres", "dsn": source, "tables": ["bank.*"]}],
        "sinks": [
            {
                "name": "accounts-us",
                "site": "us",
                "connector": "postgres",
                "dsn": target,
                "mode": "mirror",
                "from": ["eu.accounts"],
                "create": True,
            }
        ],
    }
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    return file


@contextmanager
def _directory(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="anabranch-demo-", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)  # PostgreSQL may run as another user and has to pass through
        yield Path(name)
