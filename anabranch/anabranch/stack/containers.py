"""The same services in containers, and the choice between them and local processes.

testcontainers builds its Docker client in the constructor of every container object, so it is imported and used only
after an engine has answered.
"""

from __future__ import annotations

import os
import signal as signals
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import docker
from docker.errors import DockerException

from anabranch.stack.errors import StackError
from anabranch.stack.postgres import SETTINGS
from anabranch.stack.process import free_port

if TYPE_CHECKING:
    from testcontainers.core.container import DockerContainer

__all__ = ["Backend", "ContainerKafka", "ContainerPostgres", "choose_backend", "docker_answers"]

Backend = Literal["local", "docker"]

KAFKA_IMAGE = "confluentinc/cp-kafka:8.0.0"
POSTGRES_IMAGE = "postgres:18"


def docker_answers() -> bool:
    """Tell whether a container engine answers within two seconds; without one the answer takes 2 ms."""
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if host.startswith("unix://") and not Path(host.removeprefix("unix://")).exists():
        return False  # The client would leave the socket that failed to connect to the garbage collector.
    try:
        client = docker.from_env(timeout=2)
    except DockerException:
        return False
    try:
        return bool(client.ping())
    except (DockerException, OSError):
        return False
    finally:
        client.close()


def choose_backend(environ: Mapping[str, str] = os.environ) -> Backend:
    """Return where services run, by $ANABRANCH_SERVICES: `local` (default), `docker`, or `auto`.

    `auto` takes containers where an engine answers. `docker` without an engine is an error, never a silent change.
    """
    match environ.get("ANABRANCH_SERVICES", "local"):
        case "local":
            return "local"
        case "docker":
            if docker_answers():
                return "docker"
            raise StackError(
                "no container engine answers",
                where="ANABRANCH_SERVICES",
                advice="start one (docker info must work), or set it to local",
            )
        case "auto":
            return "docker" if docker_answers() else "local"
        case other:
            raise StackError(
                f"{other!r} is no place for services", where="ANABRANCH_SERVICES", advice="local, docker or auto"
            )


class _ContainerService:
    """A container with a fixed host port, so that clients find it again after a restart."""

    name: str

    def __init__(self, container: DockerContainer, container_port: int) -> None:
        self.port = free_port()
        self._container = container.with_bind_ports(container_port, self.port)
        self._made = False

    def start(self) -> None:
        """Start the container, or the same one again after `stop` or `kill`."""
        if not self._made:
            self._container.start()  # waits until the service answers
            self._made = True
        else:
            self._container.get_wrapped_container().start()

    def stop(self) -> None:
        """Stop the container gracefully; it is removed when testcontainers' reaper sees this process end."""
        if self._made:
            self._container.get_wrapped_container().stop()

    def kill(self) -> None:
        """End every process in the container with SIGKILL."""
        if self._made:
            self._container.get_wrapped_container().kill("SIGKILL")

    def signal(self, number: int) -> None:
        """Send a signal; SIGSTOP and SIGCONT freeze and thaw the container, since PID 1 ignores the former."""
        container = self._container.get_wrapped_container()
        if number == signals.SIGSTOP:
            container.pause()
        elif number == signals.SIGCONT:
            container.unpause()
        else:
            container.kill(number)


class ContainerKafka(_ContainerService):
    """A KRaft broker in a container."""

    name = "kafka"

    def __init__(self) -> None:
        from testcontainers.community.kafka import KafkaContainer  # noqa: PLC0415 - see the module's docstring

        container = cast("DockerContainer", KafkaContainer(KAFKA_IMAGE).with_kraft())
        container.with_env("KAFKA_AUTO_CREATE_TOPICS_ENABLE", "false")
        container.with_env("KAFKA_TRANSACTION_STATE_LOG_REPLICATION_FACTOR", "1")
        container.with_env("KAFKA_TRANSACTION_STATE_LOG_MIN_ISR", "1")
        container.with_env("KAFKA_TRANSACTION_ABORT_TIMED_OUT_TRANSACTION_CLEANUP_INTERVAL_MS", "1000")
        super().__init__(container, 9093)

    @property
    def bootstrap(self) -> str:
        """Return `host:port`."""
        return f"{self._container.get_container_host_ip()}:{self.port}"


class ContainerPostgres(_ContainerService):
    """A PostgreSQL server in a container, with the settings of the local one."""

    def __init__(self, name: str = "postgres") -> None:
        from testcontainers.community.postgres import PostgresContainer  # noqa: PLC0415 - see the module's docstring

        self.name = name
        container = PostgresContainer(POSTGRES_IMAGE, username="postgres", password="postgres", dbname="postgres")  # noqa: S106
        container.with_env("POSTGRES_HOST_AUTH_METHOD", "trust")
        settings = {**SETTINGS, "listen_addresses": "*"}
        container.with_command(["postgres", *(word for item in settings.items() for word in ("-c", "=".join(item)))])
        super().__init__(container, 5432)

    def dsn(self, database: str = "postgres") -> str:
        """Return the URL of a database for its superuser."""
        return f"postgresql://postgres@{self._container.get_container_host_ip()}:{self.port}/{database}"
