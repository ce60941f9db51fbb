"""The topics of a stream: created when first needed, named as Debezium names them."""

from __future__ import annotations

import re
from collections.abc import Callable

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from anabranch_source.errors import PublishError, TopicMissingError
from anabranch_source.settings import MAX_RECORD_BYTES, StreamSettings

_TIMEOUT_S = 30.0
_ILLEGAL = re.compile(r"[^a-zA-Z0-9._-]")


def table_topic(prefix: str, schema: str, table: str) -> str:
    """Return `P.<schema>.<table>`; what Kafka does not allow becomes an underscore, as in Debezium."""
    return _ILLEGAL.sub("_", f"{prefix}.{schema}.{table}")


class Topics:
    """Creates the topics of one stream, each once."""

    def __init__(self, settings: StreamSettings, admin: Callable[[], AdminClient]) -> None:
        self._settings = settings
        self._admin = admin
        self._known: set[str] = set()

    def ensure_table(self, topic: str, *, begun: bool) -> None:
        """Create a table's topic unless it exists.

        Raises:
            TopicMissingError: if it does not exist although the table's rows have been published (`begun`).
        """
        self._ensure(topic, self._settings.topics.partitions, begun=begun)

    def ensure_markers(self) -> None:
        """Create the marker topic (one partition) unless it exists."""
        self._ensure(self._settings.marker_topic, 1, begun=False)

    def _ensure(self, topic: str, partitions: int, *, begun: bool) -> None:
        if topic in self._known:
            return
        wanted = NewTopic(
            topic,
            num_partitions=partitions,
            replication_factor=self._settings.topics.replication_factor,
            config={"max.message.bytes": str(MAX_RECORD_BYTES), **self._settings.topics.config},
        )
        admin = self._admin()  # must outlive the future: a collected client drops what it was asked
        try:
            # Only asked whether it could be created, Kafka tells whether it exists.
            admin.create_topics([wanted], request_timeout=_TIMEOUT_S, validate_only=begun)[topic].result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise PublishError(
                    f"could not create a topic: {error.args[0].str()}",
                    where=topic,
                    advice="allow the principal to create topics with this prefix, or create the topic beforehand",
                ) from error
        else:
            if begun:
                raise TopicMissingError(
                    "the topic is gone, and with it what was published",
                    where=topic,
                    advice="run `anabranch bootstrap FILE --source NAME` to copy the tables anew",
                )
        self._known.add(topic)
