"""What a sink is told: where from, where to, within which bounds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class StreamRef:
    """A stream to follow."""

    name: str
    """`site.source`, as the markers name it."""
    marker_topic: str
    prefix: str


@dataclass(frozen=True, slots=True)
class SinkConfig:
    """One sink of mode `mirror`."""

    name: str
    site: str
    target: str
    """Connection string of the target database."""
    streams: tuple[StreamRef, ...]
    kafka: Mapping[str, str]
    """librdkafka properties."""
    checkpoint: Path
    row_budget: int = 200_000
    """Records per cut. 200,000 rows of 150 bytes are 30 MB in the executors, twice while one cut follows another, and
    some 0.6 s in the target's transaction; smaller cuts pay the fixed 50 ms of a Spark job more often."""
    create: bool = False
    """Create schemas, enum types and tables that the target lacks."""
    table_map: Mapping[str, str] = field(default_factory=dict)
    """Source `schema.table` → target `schema.table`; what is not named keeps its name."""
    on_constraint: Literal["stop", "park"] = "stop"
    spark: str = "local[*,4]"
    """Spark master; 4 in the local one is how often a task may fail."""
    jars: tuple[Path, ...] = ()
    conf: Mapping[str, str] = field(default_factory=dict)
    """Further Spark settings."""
    trigger_s: float = 0.0
    """Pause between micro-batches; 0 starts the next at once."""
    linger_s: float = 1.0
    """How long a micro-batch waits for a further marker. Starting one costs two fsynced log files and a plan, 60 to
    115 ms; a marker that arrives within a batch pays nothing of that."""
    batch_s: float = 30.0
    """The longest a micro-batch lasts while markers keep coming, so that the checkpoint follows."""

    def target_of(self, schema: str, table: str) -> tuple[str, str]:
        """Return the target (schema, table) of a source table."""
        mapped = self.table_map.get(f"{schema}.{table}")
        if mapped is None:
            return schema, table
        left, _, right = mapped.rpartition(".")
        return left or schema, right


# librdkafka's name → the Java client's, where they differ and both are about reaching the cluster.
_JAVA_NAMES = {"sasl.mechanisms": "sasl.mechanism"}
_SHARED = {
    "bootstrap.servers",
    "security.protocol",
    "sasl.mechanism",
    "client.id",
    "client.dns.lookup",
    "client.rack",
    "ssl.endpoint.identification.algorithm",
}


def spark_kafka_options(properties: Mapping[str, str]) -> dict[str, str]:
    """Return Spark's `kafka.*` options for librdkafka properties: servers, TLS by PEM files, SASL PLAIN and SCRAM.

    Properties that only tune librdkafka are left out.
    """
    java: dict[str, str] = {}
    for name, value in properties.items():
        renamed = _JAVA_NAMES.get(name, name)
        if renamed in _SHARED:
            java[renamed] = value
    if authority := properties.get("ssl.ca.location"):
        java |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": authority}
    if certificate := properties.get("ssl.certificate.location"):
        # The Java client reads a PEM keystore as one file or as two strings; librdkafka names two files.
        java |= {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.certificate.chain": Path(certificate).read_text(encoding="utf-8"),
            "ssl.keystore.key": Path(properties["ssl.key.location"]).read_text(encoding="utf-8"),
        }
        if password := properties.get("ssl.key.password"):
            java["ssl.key.password"] = password
    if user := properties.get("sasl.username"):
        java["sasl.jaas.config"] = _jaas(java.get("sasl.mechanism", "PLAIN"), user, properties.get("sasl.password", ""))
    return {f"kafka.{name}": value for name, value in java.items()}


def _jaas(mechanism: str, user: str, password: str) -> str:
    module = "scram.ScramLoginModule" if mechanism.startswith("SCRAM") else "plain.PlainLoginModule"
    return (
        f'org.apache.kafka.common.security.{module} required username="{_quoted(user)}" password="{_quoted(password)}";'
    )


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def parallelism(master: str) -> int:
    """Return how many tasks a local master runs at once; for a cluster, this machine's processors."""
    threads = master.removeprefix("local[").partition("]")[0].partition(",")[0] if master.startswith("local[") else ""
    if threads.isdigit():
        return int(threads)
    return 1 if master == "local" else os.cpu_count() or 1
