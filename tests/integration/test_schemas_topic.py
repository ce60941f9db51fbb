"""Schemas on a real broker's topic: several writers agree on every id."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from anabranch.stack.service import KafkaService
from anabranch_schemas.errors import RegistryError
from anabranch_schemas.registry.topic import TopicRegistry


@pytest.fixture
def connect(kafka: KafkaService, topic_prefix: str) -> Iterator[Callable[[], TopicRegistry]]:
    """Return a maker of registries on a topic of this test's own."""
    made: list[TopicRegistry] = []

    def connect() -> TopicRegistry:
        made.append(
            TopicRegistry({"bootstrap.servers": kafka.bootstrap, "log_level": "0"}, topic=f"{topic_prefix}.schemas")
        )
        return made[-1]

    yield connect
    for registry in made:
        registry.close()


def test_a_schema_has_one_id_for_everybody(connect: Callable[[], TopicRegistry]) -> None:
    first, second = connect(), connect()
    ids = [first.register("a-value", '"long"'), first.register("b-value", '"string"')]
    assert ids == [1, 2]
    assert second.register("a-value", '"long"') == 1
    assert second.register("c-value", '"long"') == 1, "the same schema under another subject"
    assert second.register("c-value", '"int"') == 3
    assert first.schema(3) == '"int"'


def test_it_outlives_its_writer(connect: Callable[[], TopicRegistry]) -> None:
    with connect() as writer:
        assert writer.register("a-value", '"long"') == 1
    assert connect().schema(1) == '"long"'
    with pytest.raises(RegistryError, match="schema 2 is not on the topic"):
        connect().schema(2)


def test_writers_that_race_never_give_one_id_to_two_schemas(connect: Callable[[], TopicRegistry]) -> None:
    found: list[dict[str, int]] = [{}, {}, {}]
    barrier = threading.Barrier(len(found))

    def write(own: dict[str, int], names: list[str]) -> None:
        registry = connect()
        barrier.wait(30)
        for name in names:
            own[name] = registry.register(f"{name}-value", f'{{"type":"fixed","name":"{name}","size":1}}')

    names = [f"n{number}" for number in range(6)]
    threads = [threading.Thread(target=write, args=(own, names[at:] + names[:at])) for at, own in enumerate(found)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] == found[2]
    assert sorted(found[0].values()) == [1, 2, 3, 4, 5, 6]


def test_its_topic_is_kept_whole_and_readable_by_a_service(
    connect: Callable[[], TopicRegistry], kafka: KafkaService, topic_prefix: str
) -> None:
    connect().register("a-value", '"long"')
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
    assert len(admin.list_topics(timeout=30).topics[f"{topic_prefix}.schemas"].partitions) == 1
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": topic_prefix, "log_level": 0})
    try:
        consumer.assign([TopicPartition(f"{topic_prefix}.schemas", 0, 0)])
        message = consumer.poll(30)
        assert message is not None
        assert message.key() == b'{"keytype":"SCHEMA","subject":"a-value","version":1,"magic":1}'
        assert message.value() == b'{"subject":"a-value","version":1,"id":1,"schema":"\\"long\\"","deleted":false}'
    finally:
        consumer.close()
