"""Watches the server process that reads a slot: when it began, and what it uses."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import LiteralString

from bench.figure import BenchError
from bench.ground import connect

_APPEAR_S = 120.0
_LOOK_S = 0.005
# The statement that the process runs is START_REPLICATION until it ends, so this is when it was received.
_ACTIVE: LiteralString = """
    SELECT a.pid, extract(epoch FROM a.query_start)::float8
    FROM pg_replication_slots s JOIN pg_stat_activity a ON a.pid = s.active_pid
    WHERE s.slot_name = %s AND a.query ILIKE 'START_REPLICATION%%'
"""


@dataclass(frozen=True, slots=True)
class Walsender:
    """A running walsender; `began` is when it was told to start (`time.time`: server and bench share a clock)."""

    pid: int
    began: float


def await_walsender(dsn: str, slot: str, alive: Callable[[], None]) -> Walsender:
    """Return the walsender of a slot as soon as it streams."""
    deadline = time.monotonic() + _APPEAR_S
    with connect(dsn) as conn:
        while time.monotonic() < deadline:
            row = conn.execute(_ACTIVE, (slot,)).fetchone()
            if row is not None:
                return Walsender(row[0], row[1])
            alive()
            time.sleep(_LOOK_S)
    raise BenchError(f"nobody reads the slot {slot}")
