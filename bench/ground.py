"""The ground that all figures are measured on: one broker and two PostgreSQL servers in one directory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import psycopg
import yaml
from psycopg import sql

from anabranch.stack.kafka import KafkaBroker
from anabranch.stack.postgres import PostgresServer, find_postgres

# Durability stays as PostgreSQL ships it. What is changed keeps checkpoints, autovacuum and compilation out of the
# way of both sides alike, and lets slots keep the workloads' log.
_SETTINGS = {
    "shared_buffers": "1GB",
    "max_wal_size": "16GB",
    "checkpoint_timeout": "60min",
    "autovacuum": "off",
    "jit": "off",
    "max_replication_slots": "40",
    "wal_sender_timeout": "0",
}


class Ground:
    """The running servers. `eu` is the source, `us` the target."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.kafka = KafkaBroker(directory / "kafka")
        self.eu = PostgresServer(directory / "eu", name="postgres-eu", settings=_SETTINGS)
        self.us = PostgresServer(directory / "us", name="postgres-us", settings=_SETTINGS)
        self.postgres = find_postgres()
        self.made: dict[str, Any] = {}
        """What figures share, by name: workloads are made once."""

    def __enter__(self) -> Self:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda service: service.start(), (self.kafka, self.eu, self.us)))
        return self

    def __exit__(self, *_: object) -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda service: service.stop(), (self.kafka, self.eu, self.us)))

    def pipeline(self, name: str, source: dict[str, Any], sink: dict[str, Any] | None = None) -> Path:
        """Write a pipeline of one source at site eu and at most one sink at site us; return its file."""
        document = {
            "name": name,
            "kafka": {"bootstrap.servers": self.kafka.bootstrap},
            "sites": [{"id": 1, "name": "eu"}, {"id": 2, "name": "us"}],
            "sources": [{"site": "eu", "connector": "postgres", **source}],
            "sinks": [{"site": "us", "connector": "postgres", "mode": "mirror", **sink}] if sink else [],
        }
        directory = self.directory / "pipelines" / name
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / f"{name}.yaml"
        file.write_text(yaml.safe_dump(document, sort_keys=False))
        return file


def connect(dsn: str) -> psycopg.Connection:
    """Return an autocommit connection."""
    return psycopg.connect(dsn, autocommit=True)


def new_database(server: PostgresServer, name: str) -> str:
    """Make an empty database, dropping one of that name, and return its DSN."""
    with connect(server.dsn()) as admin:
        admin.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))
        admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    return server.dsn(name)
