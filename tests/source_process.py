"""A source worker from arguments: on a thread, or as a process that can be killed."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from anabranch_connectors.postgres.options import PostgresOptions
from anabranch_connectors.postgres.source import PostgresSource
from anabranch_schemas.errors import AnabranchError
from anabranch_schemas.registry import SchemaRegistry, TopicRegistry, connect
from anabranch_source.settings import SnapshotSettings, StreamSettings, TopicSettings
from anabranch_source.worker import SourceWorker

ROOT = Path(__file__).resolve().parent.parent
END_S = 60.0
"""How long a worker may take to end."""


@dataclass(frozen=True, slots=True)
class SourceRun:
    """What a worker is told, flat."""

    dsn: str
    bootstrap: str
    prefix: str
    spill_dir: str
    tables: tuple[str, ...] = ("public.*",)
    partitions: int = 1
    chunk_rows: int = 50_000
    spill_bytes: int = 64 << 20
    heartbeat_s: float = 10.0
    idle_ms: float = 100.0
    interval_ms: float = 200.0
    tombstones: bool = True
    registry_url: str = ""
    message_timeout_ms: int = 30_000

    @property
    def kafka(self) -> dict[str, str]:
        """librdkafka's properties."""
        return {
            "bootstrap.servers": self.bootstrap,
            "log_level": "0",
            "topic.metadata.propagation.max.ms": "1000",
            "message.timeout.ms": str(self.message_timeout_ms),
        }

    @property
    def consumer_kafka(self) -> dict[str, str | int | float | bool]:
        """librdkafka's properties without those of producers."""
        return {"bootstrap.servers": self.bootstrap, "log_level": "0"}

    def settings(self) -> StreamSettings:
        """Return the stream's settings."""
        return StreamSettings(
            name="eu.orders",
            site=1,
            prefix=self.prefix,
            kafka=self.kafka,
            snapshot=SnapshotSettings(idle_ms=self.idle_ms, interval_ms=self.interval_ms),
            topics=TopicSettings(partitions=self.partitions),
            copy_chunk_rows=self.chunk_rows,
        )

    def options(self) -> PostgresOptions:
        """Return the connector's options; slot and publication are named after the prefix."""
        return PostgresOptions(
            dsn=self.dsn,
            stream="eu.orders",
            prefix=self.prefix,
            tables=tuple(self.tables),
            slot=self.prefix,
            publication=self.prefix,
            spill_dir=Path(self.spill_dir),
            spill_bytes=self.spill_bytes,
            heartbeat_s=self.heartbeat_s,
            tombstones=self.tombstones,
        )

    def registry(self) -> SchemaRegistry:
        """Return the registry: the topic, or a service."""
        return connect(self.kafka, {"url": self.registry_url} if self.registry_url else None)

    def run(self, stop: threading.Event) -> None:
        """Run the worker until `stop` is set."""
        registry = self.registry()
        worker = SourceWorker(self.settings(), registry)
        part = PostgresSource(self.options(), worker.router, version="0")
        try:
            worker.run(part, stop)
        finally:
            part.close()
            if isinstance(registry, TopicRegistry):
                registry.close()


class SourceThread:
    """A worker on a thread of its own; leaving the block stops it."""

    def __init__(self, run: SourceRun) -> None:
        self._stop = threading.Event()
        self._run = run
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="source", daemon=True)

    def _main(self) -> None:
        try:
            self._run.run(self._stop)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            self._error = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(END_S)
        if error is not None and self._error is not None:
            error.add_note(f"the worker had ended: {self._error!r}")
        if kind is None:
            assert not self._thread.is_alive()
            if self._error is not None:
                raise self._error

    def failure(self) -> AnabranchError:
        """Wait until the worker has ended by itself and return its error."""
        self._thread.join(END_S)
        assert not self._thread.is_alive(), "the worker goes on"
        error, self._error = self._error, None
        assert isinstance(error, AnabranchError), repr(error)
        return error


class SourceProcess:
    """A worker in a process of its own; leaving the block kills it if it still runs."""

    def __init__(self, run: SourceRun, failpoint: str = "", *, environment: Mapping[str, str] | None = None) -> None:
        env = {**os.environ, "ANABRANCH_FAILPOINT": failpoint, **(environment or {})}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.source_process", json.dumps(asdict(run))],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(END_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def killed(self) -> bool:
        """Wait until the process has ended and tell whether a failpoint killed it."""
        return self.process.wait(END_S) == -signal.SIGKILL

    def outcome(self) -> dict[str, Any]:
        """Wait until the process has ended by itself and return what it says about that."""
        out, _ = self.process.communicate(timeout=END_S)
        result: dict[str, Any] = json.loads(out.splitlines()[-1])
        return result


def main() -> int:
    """Run a worker; the last line of stdout is its end as JSON."""
    arguments = SourceRun(**json.loads(sys.argv[1]))
    limit = os.environ.get("TEST_FILE_LIMIT")
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        arguments.run(stop)
    except AnabranchError as error:
        print(json.dumps({"code": error.code, "action": error.action.value, "where": error.where}))  # noqa: T201
        return 1
    print(json.dumps({"code": ""}))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
