"""A part of a pipeline as the process that users run: `anabranch worker`, `anabranch sink`, `anabranch run`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

from bench.figure import BenchError

_STOP_S = 90.0
_LOG_TAIL = 2000


class PartProcess:
    """One process in a group of its own, with its log beside the pipeline file; ended on exit."""

    def __init__(self, *arguments: str, log: Path) -> None:
        self._arguments = arguments
        self._log = log

    def __enter__(self) -> Self:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "anabranch", *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "ANABRANCH_LOG": os.environ.get("ANABRANCH_LOG", "info")},
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Return the process number."""
        return self._process.pid

    def check(self) -> None:
        """Raise if the process has ended by itself, with the end of its log."""
        if self._process.poll() is not None:
            tail = self._log.read_text(errors="replace")[-_LOG_TAIL:]
            raise BenchError(f"{' '.join(self._arguments[:1])} ended with {self._process.returncode}:\n{tail}")

    def stop(self) -> None:
        """Ask the process to end, and kill what is left of its group."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def worker(file: Path, source: str) -> PartProcess:
    """Return the worker of a source."""
    return PartProcess("worker", str(file), "--source", source, log=file.with_name("worker.log"))


def sink(file: Path, name: str) -> PartProcess:
    """Return the Spark driver of a sink."""
    return PartProcess("sink", str(file), "--sink", name, log=file.with_name("sink.log"))


def run(file: Path) -> PartProcess:
    """Return a whole pipeline."""
    return PartProcess("run", str(file), log=file.with_name("run.log"))
