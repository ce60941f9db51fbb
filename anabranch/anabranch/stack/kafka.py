"""A Kafka broker from its jars alone: one KRaft node on loopback, for development, demos and tests."""

from __future__ import annotations

import atexit
import base64
import os
import signal as signals
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from anabranch.stack import kafka_recovery
from anabranch.stack.errors import ServiceStartError
from anabranch.stack.jars import resolve
from anabranch.stack.java import find_java
from anabranch.stack.process import ServerProcess, free_port, port_is_free

__all__ = ["KafkaBroker"]

# A start takes 3 s on an idle machine; a loaded test machine has been seen to take ten times as long.
_START_TIMEOUT_S = 120
_STOP_TIMEOUT_S = 20

# Serial GC and half a gigabyte: 335 MB resident, and the quickest start.
_JVM = ("-Xms128m", "-Xmx512m", "-XX:+UseSerialGC", "-Djava.awt.headless=true")
_LOGGING = (
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd'T'HH:mm:ss.SSS",
)

_SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    # One node: every internal topic has one replica, and few partitions so that the first use is quick.
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "4",
    "group.initial.rebalance.delay.ms": "0",
    # A topic is made on purpose, with the right number of partitions, or not at all.
    "auto.create.topics.enable": "false",
    # A dead writer's transaction ends within a second of its timeout (default: within ten).
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
    # Nobody takes over from a single node: it gains nothing by being fenced when it is stopped for a while.
    "broker.session.timeout.ms": "60000",
    # The cleaner's map is 128 MB by default, a quarter of this heap.
    "log.cleaner.dedupe.buffer.size": "16777216",
    "num.network.threads": "2",
    "num.io.threads": "4",
}


class KafkaBroker:
    """A broker whose data, log and settings live in one directory.

    A second object over the same directory drives the same broker, also from another process. The port is kept over
    restarts while it is free. Unless `outlives_parent`, the broker ends with this process, even if that is killed.
    """

    name = "kafka"

    def __init__(self, directory: Path, *, port: int | None = None, outlives_parent: bool = False) -> None:
        self.directory = directory.absolute()
        self._wanted_port = port
        self._outlives_parent = outlives_parent
        self._process = ServerProcess(self.name, self.directory)

    @property
    def bootstrap(self) -> str:
        """Return `127.0.0.1:PORT`; known once the broker has been started."""
        port = self._process.port
        if port is None:
            raise ServiceStartError("the broker has not been started", where=str(self.directory))
        return f"127.0.0.1:{port}"

    @property
    def pid(self) -> int | None:
        """Return the number of the running process."""
        return self._process.pid

    def start(self) -> None:
        """Return when the broker answers a metadata request; raise ServiceStartError with the end of its log."""
        # One that runs may be about to end, killed a moment ago: then it is started like any other that is gone.
        if not self._process.answers(self._answers, _START_TIMEOUT_S):
            self._spawn()
            self._process.wait_ready(self._answers, _START_TIMEOUT_S)

    def stop(self) -> None:
        """Shut down gracefully."""
        self._process.stop(signals.SIGTERM, _STOP_TIMEOUT_S)
        atexit.unregister(self.stop)

    def kill(self) -> None:
        """End the broker with SIGKILL."""
        self._process.kill()

    def signal(self, number: int) -> None:
        """Send a signal to the broker."""
        self._process.signal(number)

    def _spawn(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        data = self.directory / "data"
        port, controller_port = self._process.choose_port(self._wanted_port), free_port()
        settings = self.directory / "server.properties"
        settings.write_text(_lines(_properties(data, port, controller_port)), encoding="utf-8")
        java = [str(find_java().path), *_LOGGING, "-cp", os.pathsep.join(map(str, resolve("kafka")))]
        if not (data / "meta.properties").exists():
            self._format([java[0], "-XX:TieredStopAtLevel=1", *java[1:]], settings)
        elif not (data / ".kafka_cleanshutdown").exists():
            self._recover(java, controller_port)
        argv = [java[0], *_JVM, *java[1:], "kafka.Kafka", str(settings)]
        self._process.spawn(argv, port=port, env=os.environ, outlives_parent=self._outlives_parent)
        if not self._outlives_parent:
            atexit.register(self.stop)

    def _recover(self, java: list[str], controller_port: int) -> None:
        """Run the node as a controller alone until it has fenced the broker that it was before the crash."""
        settings = self.directory / "recovery.properties"
        properties = _properties(self.directory / "data", None, controller_port) | kafka_recovery.SETTINGS
        settings.write_text(_lines(properties), encoding="utf-8")
        controller = ServerProcess("kafka-recovery", self.directory)
        controller.log.unlink(missing_ok=True)
        level = "-Dorg.slf4j.simpleLogger.log.org.apache.kafka.controller.ClusterControlManager=info"
        argv = [java[0], "-XX:TieredStopAtLevel=1", *_JVM, level, *java[1:], "kafka.Kafka", str(settings)]
        controller.spawn(argv, port=self._process.port or 0, env=os.environ)
        try:
            with controller.log.open(encoding="utf-8", errors="replace") as log:
                text: list[str] = []

                def fenced() -> bool:
                    text.append(log.read())
                    return kafka_recovery.is_fenced("".join(text).splitlines())

                controller.wait_ready(fenced, _START_TIMEOUT_S)
        finally:
            controller.stop(signals.SIGTERM, _STOP_TIMEOUT_S)

    def _format(self, java: list[str], settings: Path) -> None:
        # It may begin with a dash: as a word of its own it would be taken for an option, once in 64 times.
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        done = subprocess.run(
            [*java, "kafka.tools.StorageTool", "format", f"--cluster-id={cluster}", "--config", str(settings)],
            capture_output=True,
            text=True,
            timeout=_START_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode != 0:
            raise ServiceStartError(
                f"the broker's storage could not be formatted: {(done.stdout + done.stderr).strip()[-500:]}",
                where=str(self.directory),
            )

    def _answers(self) -> bool:
        """Ask for metadata: a broker lists itself once it is registered and unfenced."""
        port = self._process.port
        if port is None or port_is_free(port):
            return False  # Nobody listens yet: a client would only back off.
        client = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0, "socket.timeout.ms": 2000})
        try:
            return bool(client.list_topics(timeout=2).brokers)
        except KafkaException:
            return False


def _properties(data: Path, port: int | None, controller_port: int) -> dict[str, str]:
    """Return the settings of a node; without a port those of a controller alone."""
    listeners = [] if port is None else [f"PLAINTEXT://127.0.0.1:{port}"]
    addresses = {
        "listeners": ",".join([*listeners, f"CONTROLLER://127.0.0.1:{controller_port}"]),
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "log.dirs": str(data),
    }
    return _SETTINGS | addresses


def _lines(properties: Mapping[str, str]) -> str:
    return "".join(f"{key}={value}\n" for key, value in properties.items())
