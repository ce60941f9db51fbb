"""One server process: started once, found again by a later program through its record, and never left behind.

The record is a file beside the server's data with the process' number, start time and port. Whoever holds the directory
holds the server: `anabranch dev up` leaves it running, another `anabranch dev down` ends it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal as signals
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from anabranch.stack import process_tree
from anabranch.stack.errors import ServiceStartError
from anabranch.stack.process_tree import ProcessId

__all__ = ["ServerProcess", "free_port"]

# Below the kernel's usual range for outgoing connections (32768 and up), so that no client takes a port between our
# look and the server's bind.
_PORTS = range(20000, 32000)
_PROBE_EVERY_S = 0.02
# A killed JVM has given its memory and ports back in well under a second.
_GONE_TIMEOUT_S = 10


def free_port() -> int:
    """Return a loopback port that nobody listens on, chosen with the system's randomness.

    Not with `random`: test runners seed it alike in processes that run side by side.
    """
    for _ in range(100):
        port = secrets.choice(_PORTS)
        if port_is_free(port):
            return port
    raise ServiceStartError(f"no free port between {_PORTS.start} and {_PORTS.stop} on 127.0.0.1")


def port_is_free(port: int) -> bool:
    """Tell whether a server could listen on this loopback port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


class ServerProcess:
    """The process of one server, known by the record in its directory."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.log = directory / f"{name}.log"
        self._record = directory / "process.json"
        self._child: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def port(self) -> int | None:
        """Return the port that the server had when it was last started."""
        return self._read().get("port")

    @property
    def pid(self) -> int | None:
        """Return the number of the running process."""
        process = self._find()
        return None if process is None else process.pid

    def choose_port(self, wanted: int | None) -> int:
        """Return the wanted port, or the last one if it is free once the former process is gone, or another."""
        if wanted is not None:
            return wanted
        record = self._read()
        if not record:
            return free_port()
        process_tree.wait_gone(ProcessId(record["pid"], record["started"]), _GONE_TIMEOUT_S)
        return record["port"] if port_is_free(record["port"]) else free_port()

    def spawn(
        self,
        argv: Sequence[str],
        *,
        port: int,
        env: Mapping[str, str],
        user: int | None = None,
        group: int | None = None,
        outlives_parent: bool = False,
    ) -> None:
        """Start the server in a session of its own, with its output in the log."""
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd="/",
                env=dict(env),
                user=user,
                group=group,
                extra_groups=None if user is None else [],
                start_new_session=True,
            )
        process = process_tree.identify(child.pid)
        if process is None:
            raise ServiceStartError(f"{self.name} ended as it was started", where=str(self.log))
        if outlives_parent:
            child.returncode = 0  # Handed over: it is not ours to reap, and no reason for a ResourceWarning.
        else:
            self._child = child
            _watcher.own(process)
        partial = self._record.with_suffix(".partial")
        partial.write_text(json.dumps({"pid": process.pid, "started": process.started, "port": port}) + "\n")
        partial.replace(self._record)

    def wait_ready(self, probe: Callable[[], bool], timeout_s: float) -> None:
        """Wait until the probe is answered; raise with the end of the log when the server ends or time is up."""
        if not self.answers(probe, timeout_s):
            self._reap()
            raise ServiceStartError(f"{self.name} ended while starting: {self._log_end()}", where=str(self.log))

    def answers(self, probe: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until the running server answers the probe; return False when none runs, or it ends before that."""
        deadline = time.monotonic() + timeout_s
        while (process := self._find()) is not None:
            if probe():
                return True
            if time.monotonic() > deadline:
                raise ServiceStartError(
                    f"{self.name} did not answer within {timeout_s:.0f} s: {self._log_end()}", where=str(self.log)
                )
            process_tree.wait_gone(process, _PROBE_EVERY_S)
        return False

    def stop(self, number: int, timeout_s: float) -> None:
        """Ask the root process to end, waking it first if it was stopped; kill what is left after the timeout."""
        process = self._find()
        if process is not None:
            process_tree.signal_tree(process, signals.SIGCONT)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
            if not process_tree.wait_gone(process, timeout_s):
                process_tree.kill_tree(process)
        self._reap()

    def kill(self) -> None:
        """End the process and all below it with SIGKILL."""
        process = self._find()
        if process is not None:
            process_tree.kill_tree(process)
        self._reap()

    def signal(self, number: int) -> None:
        """Send a signal to the process and to all below it."""
        process = self._find()
        if process is not None:
            process_tree.signal_tree(process, number)

    def _find(self) -> ProcessId | None:
        record = self._read()
        if not record:
            return None
        process = ProcessId(record["pid"], record["started"])
        return process if process.alive else None

    def _read(self) -> dict[str, int]:
        try:
            record: dict[str, int] = json.loads(self._record.read_text())
        except FileNotFoundError:
            return {}
        return record

    def _reap(self) -> None:
        if self._child is not None:
            self._child.wait(10)
            self._child = None

    def _log_end(self) -> str:
        """Return the last lines written since the start."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").split("\n")
        return " | ".join(line for line in lines[-9:] if line.strip()) or "nothing in its log"


class _Watcher:
    """A small process that ends our servers when this one is gone, however it went."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pipe: int | None = None

    def own(self, process: ProcessId) -> None:
        """Name a server that must not outlive this process."""
        with self._lock:
            if self._pipe is None:
                self._pipe = self._start()
            os.write(self._pipe, f"{process.pid} {process.started}\n".encode())

    @staticmethod
    def _start() -> int:
        """Return the pipe that only this process writes to: the watcher acts when it closes."""
        theirs, ours = os.pipe()
        try:
            watcher = subprocess.Popen(
                [sys.executable, "-I", "-S", process_tree.__file__],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        watcher.returncode = 0  # It outlives us by a moment: nothing here waits for it.
        return ours


_watcher = _Watcher()
