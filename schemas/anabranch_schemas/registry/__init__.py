"""Where Avro schemas get their ids: a Confluent-compatible registry, or the same topic without a service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from anabranch_schemas.registry.service import ServiceRegistry
from anabranch_schemas.registry.topic import TopicRegistry

__all__ = ["SchemaRegistry", "ServiceRegistry", "TopicRegistry", "connect", "frame", "schema_id_of"]


class SchemaRegistry(Protocol):
    """Ids for schemas, schemas for ids.

    Called from one thread. When `register` returns, the schema is durable and every reader can find it.
    """

    def register(self, subject: str, schema: str) -> int:
        """Return the id of `schema` (Avro, JSON text) under `subject`, registering it if it is new."""

    def schema(self, schema_id: int) -> str:
        """Return the schema text of an id."""


def connect(kafka: Mapping[str, str], service: Mapping[str, Any] | None = None) -> SchemaRegistry:
    """Return the registry to use.

    Args:
        kafka: librdkafka properties of the cluster whose `_schemas` topic is used without a service.
        service: properties of confluent-kafka's registry client (`url`, `basic.auth.user.info`, …), if there is one.
    """
    return ServiceRegistry(service) if service else TopicRegistry(kafka)


def frame(schema_id: int) -> bytes:
    """Return Confluent's five-byte prefix: a zero byte and the id, big-endian."""
    return b"\0" + schema_id.to_bytes(4, "big")


def schema_id_of(data: bytes) -> int:
    """Return the schema id of framed data."""
    return int.from_bytes(data[1:5], "big")
