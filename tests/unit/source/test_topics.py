from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.cimpl import NewTopic

from anabranch_schemas.errors import Action
from anabranch_source.errors import PublishError, TopicMissingError
from anabranch_source.settings import StreamSettings, TopicSettings
from anabranch_source.topics import Topics, table_topic


class Admin:
    """A cluster with some topics; `refusal` is what it says to a new one."""

    def __init__(self, *names: str, refusal: int | None = None) -> None:
        self.topics = {name: NewTopic(name, 1) for name in names}
        self.refusal = refusal
        self.calls = 0

    def create_topics(self, topics: list[NewTopic], **options: Any) -> dict[str, Future[None]]:
        self.calls += 1
        (topic,) = topics
        answer: Future[None] = Future()
        code = KafkaError.TOPIC_ALREADY_EXISTS if topic.topic in self.topics else self.refusal
        if code is not None:
            answer.set_exception(KafkaException(KafkaError(code)))
        else:
            if not options.get("validate_only"):
                self.topics[topic.topic] = topic
            answer.set_result(None)
        return {topic.topic: answer}


def topics_of(admin: Admin) -> Topics:
    settings = StreamSettings(
        name="eu.orders", site=1, prefix="p", kafka={}, topics=TopicSettings(partitions=3, config={"retention.ms": "1"})
    )
    return Topics(settings, lambda: admin)  # type: ignore[arg-type,return-value]


def test_a_topic_is_named_as_debezium_names_it() -> None:
    assert table_topic("p", "public", "orders") == "p.public.orders"
    assert table_topic("p", "Schema", 'a "b"/ü') == "p.Schema.a__b___"


def test_a_topic_is_made_once_and_as_the_settings_say() -> None:
    admin = Admin()
    topics = topics_of(admin)
    for _ in range(3):
        topics.ensure_table("p.public.t", begun=False)
        topics.ensure_markers()
    assert admin.calls == 2
    table, markers = admin.topics["p.public.t"], admin.topics["p.markers"]
    assert (table.num_partitions, table.replication_factor) == (3, -1)
    assert {"retention.ms": "1"}.items() <= (table.config or {}).items()
    assert markers.num_partitions == 1


def test_topics_that_exist_are_taken_as_they_are() -> None:
    admin = Admin("p.public.t", "p.markers")
    topics_of(admin).ensure_table("p.public.t", begun=True)
    topics_of(admin).ensure_table("p.public.t", begun=False)
    topics_of(admin).ensure_markers()


def test_a_topic_that_was_written_and_is_gone_is_not_made_again() -> None:
    admin = Admin()
    with pytest.raises(TopicMissingError, match="what was published") as caught:
        topics_of(admin).ensure_table("p.public.t", begun=True)
    assert (caught.value.where, caught.value.action) == ("p.public.t", Action.STOP)
    assert admin.topics == {}


def test_a_refusal_says_what_to_allow() -> None:
    with pytest.raises(PublishError, match="could not create a topic") as caught:
        topics_of(Admin(refusal=KafkaError.TOPIC_AUTHORIZATION_FAILED)).ensure_table("p.public.t", begun=False)
    assert "allow the principal" in caught.value.advice
