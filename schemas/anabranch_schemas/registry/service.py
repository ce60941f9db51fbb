"""A Confluent-compatible registry over HTTP, by confluent-kafka's own client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.error import SchemaRegistryError

from anabranch_schemas.errors import ConfigError, RegistryError


class ServiceRegistry:
    """`SchemaRegistry` on a service. The client caches both ways and retries by itself."""

    def __init__(self, properties: Mapping[str, Any]) -> None:
        self._url = properties["url"]
        try:
            self._client = SchemaRegistryClient(dict(properties))
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error), where="registry") from error

    def register(self, subject: str, schema: str) -> int:
        """Return the id of `schema` under `subject`, registering it if it is new."""
        try:
            return int(self._client.register_schema(subject, Schema(schema, "AVRO")))
        except Exception as error:  # its HTTP library, and so its errors, change with the client's version
            raise self._failed(f"could not register a schema under {subject}", error) from error

    def schema(self, schema_id: int) -> str:
        """Return the schema text of an id."""
        try:
            text = self._client.get_schema(schema_id).schema_str
        except Exception as error:  # its HTTP library, and so its errors, change with the client's version
            raise self._failed(f"could not read schema {schema_id}", error) from error
        if text is None:
            raise RegistryError(f"the registry has no text for schema {schema_id}", where=self._url)
        return text

    def probe(self) -> None:
        """Raise unless the registry answers."""
        try:
            self._client.get_subjects()
        except Exception as error:  # its HTTP library, and so its errors, change with the client's version
            raise self._failed("the registry does not answer as one", error) from error

    def _failed(self, what: str, error: Exception) -> RegistryError:
        detail = str(error) if isinstance(error, SchemaRegistryError) else type(error).__name__
        return RegistryError(
            f"{what}: {detail}",
            where=self._url,
            advice="check that the registry answers at registry.url; the worker retries by itself",
        )
