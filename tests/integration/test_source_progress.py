"""The newest marker is found behind whatever Kafka puts at a topic's end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from anabranch.stack.service import KafkaService
from anabranch_schemas import marker
from anabranch_schemas.errors import Action
from anabranch_schemas.marker import MarkerKind, SnapshotMarker
from anabranch_schemas.vector import VectorTime
from anabranch_source import progress
from anabranch_source.errors import PublishError
from anabranch_source.progress import newest_marker

MARKER = SnapshotMarker(
    stream="eu.orders",
    site=1,
    branch="b",
    epoch=1,
    number=1,
    kind=MarkerKind.IDLE,
    first_seq=1,
    last_seq=1,
    safe_hlc=1,
    vector=VectorTime(),
    transactions=0,
    rows=0,
)


class Writer:
    """Writes markers in transactions that are committed, aborted or left open."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.kafka: dict[str, Any] = {"bootstrap.servers": bootstrap, "log_level": "0"}
        self.topic = topic
        admin = AdminClient(dict(self.kafka))
        admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(30)
        self._producer = self._make()

    def _make(self) -> Producer:
        producer = Producer({**self.kafka, "transactional.id": self.topic})
        producer.init_transactions(30)
        return producer

    def write(self, *numbers: int, end: str = "commit") -> None:
        self._producer.begin_transaction()
        for number in numbers:
            self._producer.produce(self.topic, b"\0\0\0\0\1" + marker.encode(replace(MARKER, number=number)))
        self._producer.flush()
        if end == "commit":
            self._producer.commit_transaction(30)
        elif end == "abort":
            self._producer.abort_transaction(30)

    def newest(self) -> int | None:
        found = newest_marker(self.kafka, self.topic)
        return None if found is None else found.number


@pytest.fixture
def writer(kafka: KafkaService, topic_prefix: str) -> Writer:
    return Writer(kafka.bootstrap, topic_prefix)


def test_an_empty_topic_has_none(writer: Writer) -> None:
    assert writer.newest() is None


def test_the_last_committed_one_is_found(writer: Writer) -> None:
    writer.write(1, 2)
    writer.write(3)
    assert writer.newest() == 3


def test_it_is_found_behind_many_aborted_ones(writer: Writer) -> None:
    writer.write(1)
    for number in range(2, 42):
        writer.write(number, end="abort")
    assert writer.newest() == 1


def test_a_topic_of_aborted_ones_has_none(writer: Writer) -> None:
    writer.write(1, end="abort")
    assert writer.newest() is None


def test_one_that_is_not_committed_yet_does_not_count(writer: Writer) -> None:
    writer.write(1)
    writer.write(2, end="nothing")
    assert writer.newest() == 1
    writer._make()  # a successor ends the open transaction
    assert writer.newest() == 1


@pytest.mark.parametrize("code", [KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.UNKNOWN_TOPIC_OR_PART])
def test_a_topic_that_was_just_created_is_not_taken_for_empty(code: int) -> None:
    refused = KafkaException(KafkaError(code))
    consumer = mock.Mock(get_watermark_offsets=mock.Mock(side_effect=[refused, refused, (0, 7)]))
    assert progress._bounds(consumer, "p.markers", exists=True) == (0, 7)


def test_a_topic_that_is_not_there_has_none(kafka: KafkaService, topic_prefix: str) -> None:
    assert newest_marker({"bootstrap.servers": kafka.bootstrap}, topic_prefix) is None


def test_brokers_that_do_not_answer_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_TIMEOUT_S", 0.3)
    with pytest.raises(PublishError) as caught:
        newest_marker({"bootstrap.servers": "127.0.0.1:1", "log_level": "0"}, "p.markers")
    assert (caught.value.where, caught.value.action) == ("p.markers", Action.RETRY)
