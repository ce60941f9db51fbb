"""Latency of a whole pipeline: from a commit at the source until the row is visible at the target.

`anabranch run` with default settings, under 1,000 one-row transactions a second by pgbench. Beside them a row is
committed every 20 ms; the target is asked every 2 ms which of these it shows. The peer is the goal.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import LiteralString, Self

import psycopg

from bench import part
from bench.figure import BenchError, Figure, Group, Round, Size
from bench.ground import Ground, connect, new_database
from bench.workloads import INSERT_10, NARROW, fill

_RATE = 1000
_CLIENTS = 4
_ROWS = 100_000
_PULSE_S = 0.02
_LOOK_S = 0.002
_START_S = 180.0
_DRAIN_S = 30.0
_GOALS_MS = {"latency-p50": (0.50, 400.0), "latency-p99": (0.99, 1000.0)}
_SCRIPT = f"\\set id random(1, {_ROWS})\nUPDATE t SET abalance = abalance + 1, ts = now() WHERE id = :id;\n"
_CONSISTENT: LiteralString = "SELECT bool_and(safe_time IS NOT NULL) FROM anabranch.progress"


def _rounds(ground: Ground, size: Size) -> Generator[Mapping[str, Round], None, None]:
    source, target = new_database(ground.eu, "latency"), new_database(ground.us, "latency")
    with connect(source) as conn:
        conn.execute(NARROW)
        conn.execute("CREATE TABLE pulse (id bigint PRIMARY KEY)")
        fill(conn, INSERT_10, _ROWS)
    file = ground.pipeline(
        "latency",
        {"name": "latency", "dsn": source, "tables": ["public.*"]},
        {"name": "us", "dsn": target, "from": ["eu.latency"], "create": True},
    )
    with part.run(file) as process:
        _await_consistent(target, process)
        with _load(ground, source, file.parent), _Pulses(source, target) as pulses:
            time.sleep(size.warm_up_s)
            for _ in count():
                process.check()
                lags = pulses.window(size.window_s)
                yield {name: _round(lags, share, goal) for name, (share, goal) in _GOALS_MS.items()}


def _round(lags_ms: list[float], share: float, goal: float) -> Round:
    ours = sorted(lags_ms)[int(share * len(lags_ms))]
    return Round(ours, goal, goal / ours, {"samples": len(lags_ms)})


class _Pulses:
    """Commits rows at the source and looks for them at the target, each on a connection and thread of its own."""

    def __init__(self, source: str, target: str) -> None:
        self._source = source
        self._target = target
        self._stop = threading.Event()
        self._committed: dict[int, float] = {}
        self._lags_ms: dict[int, float] = {}
        self._failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._guarded, args=(job,), daemon=True) for job in (self._commit, self._look)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def window(self, seconds: float) -> list[float]:
        """Return the lags of the rows that are committed during the next `seconds`."""
        first = max(self._committed, default=0) + 1
        time.sleep(seconds)
        last = max(self._committed, default=0)
        deadline = time.monotonic() + _DRAIN_S
        while last not in self._lags_ms:
            if self._failure is not None:
                raise self._failure
            if time.monotonic() > deadline:
                raise BenchError(f"the target did not show a row within {_DRAIN_S:.0f} s")
            time.sleep(_LOOK_S)
        return [self._lags_ms[number] for number in range(first, last + 1)]

    def _guarded(self, job: object) -> None:
        try:
            assert callable(job)
            job()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits for the result
            self._failure = error

    def _commit(self) -> None:
        with connect(self._source) as conn:
            for number in count(1):
                if self._stop.wait(_PULSE_S):
                    return
                conn.execute("INSERT INTO pulse VALUES (%s)", (number,))
                self._committed[number] = time.monotonic()

    def _look(self) -> None:
        shown = 0
        with connect(self._target) as conn:
            while not self._stop.wait(_LOOK_S):
                row = conn.execute("SELECT coalesce(max(id), 0) FROM pulse").fetchone()
                assert row is not None
                now = time.monotonic()
                for number in range(shown + 1, row[0] + 1):
                    # Visible before its commit returned to us: at once.
                    self._lags_ms[number] = max(0.0, now - self._committed.get(number, now)) * 1e3
                shown = row[0]


@contextmanager
def _load(ground: Ground, dsn: str, directory: Path) -> Iterator[None]:
    """Run one-row updates at a constant rate."""
    program = ground.postgres.program("pgbench")
    if not program.exists():
        raise BenchError(f"{program} is missing: install it (Debian and Ubuntu: apt install postgresql-contrib)")
    script = directory / "update.sql"
    script.write_text(_SCRIPT)
    command = [str(program), "--no-vacuum", "--file", str(script), "--rate", str(_RATE), "--time", "3600"]
    command += ["--client", str(_CLIENTS), "--protocol", "prepared", dsn]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield
            if process.poll() is not None:
                raise BenchError(f"pgbench ended with {process.returncode}")
        finally:
            process.terminate()


def _await_consistent(target: str, process: part.PartProcess) -> None:
    """Wait until the target says that it may be trusted."""
    deadline = time.monotonic() + _START_S
    with connect(target) as conn:
        while time.monotonic() < deadline:
            process.check()
            try:
                row = conn.execute(_CONSISTENT).fetchone()
            except psycopg.errors.UndefinedTable:
                row = None
            if row is not None and row[0]:
                return
            time.sleep(0.1)
    raise BenchError(f"the pipeline did not come up within {_START_S:.0f} s")


GROUPS = (
    Group(
        tuple(
            Figure(name, 1.0, "ms", f"goal {goal:.0f} ms / commit until visible, {share:.0%} of the rows within")
            for name, (share, goal) in _GOALS_MS.items()
        ),
        _rounds,
    ),
)
