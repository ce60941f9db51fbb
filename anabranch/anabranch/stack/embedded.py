"""The embedded stack: a Kafka broker and one PostgreSQL server a site, in one directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from anabranch.stack.errors import StackError
from anabranch.stack.jars import exclusively
from anabranch.stack.kafka import KafkaBroker
from anabranch.stack.postgres import PostgresServer

__all__ = ["SITES", "EmbeddedStack", "SiteAddress", "StackAddress", "down", "status", "up"]

SITES = ("eu", "us")


@dataclass(frozen=True, slots=True)
class SiteAddress:
    """Where a site's database is."""

    site: str
    dsn: str


@dataclass(frozen=True, slots=True)
class StackAddress:
    """Where everything in a running stack is; its fields are the JSON of `anabranch dev up`."""

    kafka: str
    registry: str | None
    """None: the stack runs no registry server."""
    postgres: tuple[SiteAddress, ...]
    dir: str

    def as_dict(self) -> dict[str, Any]:
        """Return the address as JSON-able values."""
        return asdict(self)


class EmbeddedStack:
    """The services of one directory, started side by side.

    As a context manager it starts on entry and stops on exit. Unless `outlives_parent`, the services end with this
    process. Services that already run in this directory are taken over.
    """

    def __init__(self, directory: Path, sites: Sequence[str] = SITES, *, outlives_parent: bool = False) -> None:
        self.directory = directory.absolute()
        self.brokers = (KafkaBroker(self.directory / "kafka", outlives_parent=outlives_parent),)
        self.postgres = {
            site: PostgresServer(
                self.directory / f"postgres-{site}", name=f"postgres-{site}", outlives_parent=outlives_parent
            )
            for site in sites
        }

    @property
    def services(self) -> tuple[KafkaBroker | PostgresServer, ...]:
        """Return every service."""
        return (*self.brokers, *self.postgres.values())

    def start(self) -> StackAddress:
        """Return the addresses when every service answers; on an error stop what was started and raise it."""
        stopped = [service for service in self.services if service.pid is None]
        try:
            with ThreadPoolExecutor(len(self.services)) as pool:
                list(pool.map(lambda service: service.start(), self.services))
        except BaseException:
            for service in stopped:
                service.stop()
            raise
        return StackAddress(
            kafka=",".join(broker.bootstrap for broker in self.brokers),
            registry=None,
            postgres=tuple(SiteAddress(site, server.dsn()) for site, server in self.postgres.items()),
            dir=str(self.directory),
        )

    def stop(self) -> None:
        """Stop every service gracefully."""
        with ThreadPoolExecutor(len(self.services)) as pool:
            list(pool.map(lambda service: service.stop(), self.services))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def up(directory: Path, sites: Sequence[str] = SITES) -> StackAddress:
    """Start a stack that goes on after this process, or find it running; return the same address either way.

    Addresses and process numbers are left in `stack.json`. Data of an earlier `up` is there again, whether that stack
    was stopped or killed.
    """
    directory = directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    with exclusively(directory / ".lock"):
        last = _recorded_sites(directory)
        if last is not None and set(last) - set(sites):
            raise StackError(
                f"this directory holds the sites {', '.join(last)}",
                where=str(directory),
                advice=f"use another directory for {', '.join(sites)}",
            )
        stack = EmbeddedStack(directory, sites, outlives_parent=True)
        address = stack.start()
        record = {
            "sites": list(sites),
            "address": address.as_dict(),
            "pids": {service.name: service.pid for service in stack.services},
        }
        partial = directory / "stack.json.partial"
        partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        partial.replace(directory / "stack.json")
    return address


def down(directory: Path) -> bool:
    """Stop the stack of a directory, keeping its data; return whether anything was running."""
    if not directory.exists():
        return False
    with exclusively(directory / ".lock"):
        stack = EmbeddedStack(directory, _recorded_sites(directory) or SITES)
        running = any(service.pid is not None for service in stack.services)
        stack.stop()
    return running


def status(directory: Path) -> dict[str, Any]:
    """Return what runs, as JSON-able values: `dir`, `running`, `services`, each with `name, pid, running, address`.

    The stack's `running` is true when all services run.
    """
    directory = directory.absolute()
    sites = _recorded_sites(directory)
    if sites is None:
        return {"dir": str(directory), "running": False, "services": []}
    services = [
        {
            "name": service.name,
            "pid": service.pid,
            "running": service.pid is not None,
            "address": service.bootstrap if isinstance(service, KafkaBroker) else service.dsn(),
        }
        for service in EmbeddedStack(directory, sites).services
    ]
    return {"dir": str(directory), "running": all(service["running"] for service in services), "services": services}


def _recorded_sites(directory: Path) -> list[str] | None:
    try:
        record: dict[str, list[str]] = json.loads((directory / "stack.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return record["sites"]
