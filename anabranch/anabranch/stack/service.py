"""What every service of the stack can do, wherever it runs: as a local process or in a container."""

from __future__ import annotations

from typing import Protocol

__all__ = ["KafkaService", "PostgresService", "Service"]


class Service(Protocol):
    """One server that a stack starts, stops and, in fault tests, hurts.

    A service is driven by one thread at a time. Its data outlives every method here: `start` after `stop` or `kill`
    continues with what was durable.
    """

    name: str

    def start(self) -> None:
        """Return when the service answers its own protocol; at once when it already runs."""
        ...

    def stop(self) -> None:
        """Shut down gracefully and return when nothing is left; nothing to do when it is not running."""
        ...

    def kill(self) -> None:
        """End every process of the service with SIGKILL, as a crash would."""
        ...

    def signal(self, number: int) -> None:
        """Send a signal to every process of the service, such as SIGSTOP and SIGCONT."""
        ...


class KafkaService(Service, Protocol):
    """A Kafka broker."""

    @property
    def bootstrap(self) -> str:
        """Return `host:port`."""
        ...


class PostgresService(Service, Protocol):
    """A PostgreSQL server."""

    def dsn(self, database: str = "postgres") -> str:
        """Return the URL of a database for its superuser."""
        ...
