"""Keeps a pipeline's parts running, each in a process group of its own.

    STARTING -> RUNNING -> (ends 0) STOPPED
                        -> (ends with exit status 1) FAILED: stays down until an operator acts
                        -> (anything else, kill -9 too) RESTARTING -> STARTING, with backoff

A part that ends with 1 has left its error in its state file. The supervisor itself keeps nothing that matters: killed
and started again it ends what its children left behind and starts them anew; their positions are in Kafka and the
target.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import structlog

from anabranch.states import PartState, PartStatus, StateFiles

log = structlog.get_logger("anabranch.run")

STOPPED_BY_ERROR = 1
_FIRST_BACKOFF_S = 0.25
_LONGEST_BACKOFF_S = 30.0
_STABLE_S = 60.0  # a part that ran this long starts its backoff anew
_DRAIN_S = 60.0


@dataclass(slots=True)
class Part:
    """One child process and what is wanted of it."""

    kind: str
    name: str
    command: Sequence[str]
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    failures: int = 0
    started: float = 0.0
    next_start: float = 0.0
    ended: bool = False
    exit_status: int | None = None
    log_file: IO[bytes] | None = field(default=None, repr=False)


class Supervisor:
    """Starts the parts, watches them, and ends them in order."""

    def __init__(
        self,
        parts: Sequence[Part],
        states: StateFiles,
        *,
        log_dir: Path | None = None,
        environment: Callable[[Part], dict[str, str]] | None = None,
    ) -> None:
        self.parts = list(parts)
        self._states = states
        self._log_dir = log_dir
        self._environment = environment or (lambda _: {})

    def run(self, stop: threading.Event) -> bool:
        """Supervise until `stop` is set or all parts have ended; return whether none has failed."""
        self.start()
        try:
            while not stop.wait(0.1):
                if not self.look():
                    break
        finally:
            self.drain()
        return all(part.exit_status in (0, None) for part in self.parts)

    def start(self) -> None:
        """Start every part, ending first what an earlier supervisor left running."""
        for part in self.parts:
            left = self._states.read(part.kind, part.name)
            if left is not None and left.pid is not None and left.state in (PartState.RUNNING, PartState.STARTING):
                _kill_group(left.pid)
            self._start(part)

    def look(self) -> bool:
        """Restart what has died; return whether anything runs or will."""
        now = time.monotonic()
        for part in self.parts:
            if part.ended:
                continue
            if part.process is None:
                if now >= part.next_start:
                    self._start(part)
            elif part.process.poll() is not None:
                self._died(part, now)
        return any(not part.ended for part in self.parts)

    def drain(self) -> None:
        """Ask every part to end (SIGTERM), wait, and kill what does not."""
        for part in self.parts:
            part.ended = True
            if part.process is not None and part.process.poll() is None:
                part.process.terminate()
        deadline = time.monotonic() + _DRAIN_S
        for part in self.parts:
            if part.process is not None:
                self._await_end(part, part.process, deadline)
                part.process = None
            if part.log_file is not None:
                part.log_file.close()
                part.log_file = None

    def _await_end(self, part: Part, process: subprocess.Popen[bytes], deadline: float) -> None:
        try:
            part.exit_status = process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("a part did not end in time and is killed", part=f"{part.kind} {part.name}")
        _kill_group(process.pid)
        process.wait()
        if part.exit_status == 0:
            self._states.write(part.kind, part.name, PartStatus(PartState.STOPPED, restarts=part.restarts))

    def kill(self, part: Part) -> None:
        """Kill a part and all its processes as a lost machine would; it is started again by `look`."""
        if part.process is not None:
            _kill_group(part.process.pid)

    def _start(self, part: Part) -> None:
        part.started = time.monotonic()
        if self._log_dir is not None and part.log_file is None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            part.log_file = (self._log_dir / f"{part.kind}-{part.name}.log").open("ab")
        part.process = subprocess.Popen(  # noqa: S603 - our own command line
            list(part.command),
            stdin=subprocess.DEVNULL,
            stdout=part.log_file or None,
            stderr=part.log_file or None,
            start_new_session=True,
            env={**os.environ, **self._environment(part)},
        )
        status = PartStatus(PartState.RUNNING, part.process.pid, part.restarts)
        self._states.write(part.kind, part.name, status)

    def _died(self, part: Part, now: float) -> None:
        assert part.process is not None
        status = part.process.returncode
        _kill_group(part.process.pid)  # Spark's JVM and Python workers, if any outlived it
        part.process = None
        if status in (0, STOPPED_BY_ERROR):
            part.ended, part.exit_status = True, status
            if status == 0:
                self._states.write(part.kind, part.name, PartStatus(PartState.STOPPED, restarts=part.restarts))
            return
        part.failures = 1 if now - part.started > _STABLE_S else part.failures + 1
        part.restarts += 1
        backoff = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (part.failures - 1))
        part.next_start = now + backoff
        cause = f"signal {-status}" if status < 0 else f"exit status {status}"
        log.warning("a part ended and is started again", part=f"{part.kind} {part.name}", cause=cause, after_s=backoff)
        left = self._states.read(part.kind, part.name)
        error = left.error if left else None
        self._states.write(part.kind, part.name, PartStatus(PartState.RESTARTING, restarts=part.restarts, error=error))


def part_command(command: str, file: Path, option: str, name: str) -> list[str]:
    """Return the command line that runs one part of a pipeline file."""
    return [sys.executable, "-m", "anabranch", command, str(file), option, name]


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
