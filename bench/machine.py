"""The machine that is measured on: how busy it is, and what processes use of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_LOOK_S = 0.5
_IDLE = 0.85
_PATIENCE_S = 60.0


def cpu_s(pid: int) -> float:
    """Return the processor seconds that a process has used; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def wait_idle() -> float:
    """Wait until the machine is mostly idle, a minute at most; return the share that was still in use."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        idle = _idle_share()
        if idle >= _IDLE or time.monotonic() > deadline:
            return 1 - idle
        time.sleep(_LOOK_S)


def describe() -> str:
    """Return the processor's name and count."""
    text = Path("/proc/cpuinfo").read_text()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return f"{os.cpu_count()} × {names[0] if names else os.uname().machine}"


def _idle_share() -> float:
    idle, total = _ticks()
    time.sleep(_LOOK_S)
    idle_now, total_now = _ticks()
    return (idle_now - idle) / max(1, total_now - total)


def _ticks() -> tuple[int, int]:
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)
