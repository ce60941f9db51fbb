"""Processes and their descendants on Linux, and the watcher that ends them when their owner is gone.

Standard library only: the watcher runs this very file as a script, without the package.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal as signals
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcessId", "descendants", "identify", "kill_tree", "signal_tree", "users_of", "wait_gone"]


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process that cannot be mistaken for a later one with the same number."""

    pid: int
    started: int
    """Start time in clock ticks since boot, field 22 of proc(5)'s stat."""

    @property
    def alive(self) -> bool:
        """Tell whether it still runs; a zombie does not."""
        state = _stat(self.pid)
        return state is not None and state[2] == self.started and state[0] not in "ZX"


def identify(pid: int) -> ProcessId | None:
    """Return the process that has this number now."""
    state = _stat(pid)
    return None if state is None else ProcessId(pid, state[2])


def descendants(root: int) -> tuple[int, ...]:
    """Return the numbers of all processes below `root`, parents before children.

    By parenthood, not by process group: every PostgreSQL backend leads a session of its own.
    """
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (state := _stat(int(entry.name))) is not None:
            children.setdefault(state[1], []).append(int(entry.name))
    found = list(children.get(root, ()))
    for pid in found:  # grows while it is read: breadth first
        found.extend(children.get(pid, ()))
    return tuple(found)


def users_of(directory: Path) -> tuple[ProcessId, ...]:
    """Return the processes that work in a directory; without being root, only our own are seen."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if (entry / "cwd").readlink() == directory and (process := identify(int(entry.name))) is not None:
                    found.append(process)
    return tuple(found)


def signal_tree(root: ProcessId, number: int) -> None:
    """Send a signal to a process and to all below it; the root first, so that a stopped root forks no more."""
    if root.alive:
        _send(root.pid, number)
        for pid in descendants(root.pid):
            _send(pid, number)


def kill_tree(root: ProcessId) -> None:
    """End a process and all below it with SIGKILL and wait until the kernel has taken them down."""
    if not root.alive:
        return
    _send(root.pid, signals.SIGSTOP)
    everyone = [root, *filter(None, map(identify, descendants(root.pid)))]
    for process in everyone:
        if process.alive:
            _send(process.pid, signals.SIGKILL)
    for process in everyone:
        wait_gone(process, 10.0)


def wait_gone(process: ProcessId, timeout_s: float) -> bool:
    """Wait until a process, child or not, has ended; return whether it has."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        if identify(process.pid) != process:
            return True
        # Readable when the last thread is gone: a JVM's ports stay taken for a while after its first thread's end.
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))
    finally:
        os.close(descriptor)


def _stat(pid: int) -> tuple[str, int, int] | None:
    """Return state, parent and start time of a process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name is in parentheses and may itself hold spaces and parentheses; after it come fields 3, 4, ... 22.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[1]), int(fields[19])


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _watch() -> None:
    """Read `PID STARTED` lines until the owner of the pipe is gone, then end what they name."""
    owned = [ProcessId(int(pid), int(started)) for pid, started in (line.split() for line in sys.stdin)]
    for process in owned:
        kill_tree(process)


if __name__ == "__main__":
    _watch()
