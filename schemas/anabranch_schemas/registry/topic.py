"""The `_schemas` topic itself, in Confluent's record format, written by its users: no service needed.

Every writer uses one transactional id, so a new writer fences the one before, and reads the topic to its end before
it chooses an id. Two clients can therefore never give one id to two schemas, and a registry service that takes the
topic over finds what it would have written itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import orjson
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from anabranch_schemas.errors import RegistryError

TOPIC = "_schemas"
TRANSACTIONAL_ID = "anabranch-schemas"
_TIMEOUT_S = 15.0
_MISSING = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC}  # noqa: SLF001
_SETTLING = {KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE}
_SETTLING_WAIT_S = 0.05
_FENCED = {KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH}  # noqa: SLF001 - public by documentation


@dataclass(slots=True)
class _Contents:
    """What the topic says, as far as it was read."""

    texts: dict[int, str] = field(default_factory=dict)
    ids: dict[str, int] = field(default_factory=dict)
    versions: dict[str, dict[int, int]] = field(default_factory=dict)
    """subject → version → id"""

    def apply(self, key: bytes | None, value: bytes | None) -> None:
        """Take over one record. Records of other kinds, and deletions, are the service's business."""
        if key is None or value is None:
            return
        head = orjson.loads(key)
        if head.get("keytype") != "SCHEMA":
            return
        body: dict[str, Any] = orjson.loads(value)
        schema_id, text = int(body["id"]), str(body["schema"])
        self.texts[schema_id] = text
        self.ids.setdefault(text, schema_id)
        if not body.get("deleted"):
            self.versions.setdefault(str(body["subject"]), {})[int(body["version"])] = schema_id

    def find(self, subject: str, text: str) -> int | None:
        """Return the id if the subject has the schema."""
        schema_id = self.ids.get(text)
        return schema_id if schema_id in self.versions.get(subject, {}).values() else None


class TopicRegistry:
    """`SchemaRegistry` on the topic."""

    def __init__(self, kafka: Mapping[str, str], *, topic: str = TOPIC) -> None:
        self._kafka = dict(kafka)
        self._topic = topic
        self._contents = _Contents()
        self._consumer: Consumer | None = None
        self._exists = False
        self._read_to = 0
        self._known: dict[tuple[str, str], int] = {}

    def register(self, subject: str, schema: str) -> int:
        """Return the id of `schema` under `subject`, registering it if it is new."""
        known = self._known.get((subject, schema))
        if known is not None:
            return known
        self._create_topic()
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            self._catch_up()
            found = self._contents.find(subject, schema)
            if found is None:
                found = self._append(subject, schema)
            if found is not None:
                self._known[subject, schema] = found
                return found
            if time.monotonic() > deadline:
                raise self._failed("other writers kept taking the schemas topic over")

    def schema(self, schema_id: int) -> str:
        """Return the schema text of an id."""
        if schema_id not in self._contents.texts:
            self._catch_up()
        try:
            return self._contents.texts[schema_id]
        except KeyError:
            raise RegistryError(
                f"schema {schema_id} is not on the topic",
                where=self._topic,
                advice="the topic was deleted or belongs to another cluster; restore it before the sink goes on",
            ) from None

    def close(self) -> None:
        """Release the connection."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, subject: str, schema: str) -> int | None:
        """Write one record in a fenced transaction; None if another writer was quicker and it must be looked up."""
        producer = Producer({**self._kafka, "transactional.id": TRANSACTIONAL_ID, "linger.ms": 0})
        try:
            producer.init_transactions(_TIMEOUT_S)
            self._catch_up()
            found = self._contents.find(subject, schema)
            if found is not None:
                return found
            version = max(self._contents.versions.get(subject, {0: 0})) + 1
            schema_id = self._contents.ids.get(schema) or max(self._contents.texts, default=0) + 1
            key = {"keytype": "SCHEMA", "subject": subject, "version": version, "magic": 1}
            value = {"subject": subject, "version": version, "id": schema_id, "schema": schema, "deleted": False}
            producer.begin_transaction()
            producer.produce(self._topic, orjson.dumps(value), orjson.dumps(key), partition=0)
            producer.commit_transaction(_TIMEOUT_S)
        except KafkaException as error:
            if error.args[0].code() in _FENCED:
                return None
            raise self._failed(f"could not write to the schemas topic: {error.args[0].str()}") from error
        return schema_id

    def _catch_up(self) -> None:
        """Read the topic to its end as of now."""
        if self._consumer is None:
            self._consumer = Consumer(
                {
                    **self._kafka,
                    "group.id": "anabranch-schemas",
                    "enable.auto.commit": False,
                    "isolation.level": "read_committed",
                    "enable.partition.eof": True,
                    "fetch.wait.max.ms": 10,
                }
            )
            self._consumer.assign([TopicPartition(self._topic, 0, 0)])
        end = self._end()
        deadline = time.monotonic() + _TIMEOUT_S
        while self._read_to < end:
            if time.monotonic() > deadline:
                raise self._failed("the schemas topic could not be read to its end in time")
            message = self._consumer.poll(0.5)
            if message is None:
                continue
            error = message.error()
            if error is None:
                self._contents.apply(message.key(), message.value())
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001
                # The only trustworthy end: control records may lie behind the last record, and are not given out.
                self._read_to = message.offset() or 0
            else:
                raise self._failed(error.str())

    def _end(self) -> int:
        """Return the topic's end offset as of now; 0 if there is no topic."""
        assert self._consumer is not None
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            try:
                _, end = self._consumer.get_watermark_offsets(TopicPartition(self._topic, 0), timeout=_TIMEOUT_S)
            except KafkaException as error:
                code = error.args[0].code()
                if code in _MISSING and not self._exists:
                    return 0
                # One that was just created settles; to take it for empty would give an id out twice.
                if code not in _MISSING | _SETTLING or time.monotonic() > deadline:
                    raise self._failed(error.args[0].str()) from error
                time.sleep(_SETTLING_WAIT_S)
            else:
                return int(end)

    def _create_topic(self) -> None:
        admin = AdminClient(dict(self._kafka))
        topic = NewTopic(self._topic, num_partitions=1, replication_factor=-1, config={"cleanup.policy": "compact"})
        for created in admin.create_topics([topic], request_timeout=_TIMEOUT_S).values():
            try:
                created.result()
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise self._failed(f"could not create the schemas topic: {error.args[0].str()}") from error
        self._exists = True

    def _failed(self, what: str) -> RegistryError:
        return RegistryError(
            what, where=self._topic, advice="check that Kafka answers and that the principal may write the topic"
        )
