from __future__ import annotations

import time
from unittest import mock

import orjson
import pytest
from confluent_kafka import KafkaError, KafkaException

from anabranch_schemas.errors import Action, RegistryError
from anabranch_schemas.registry import frame, schema_id_of, topic
from anabranch_schemas.registry.topic import TopicRegistry, _Contents


def record(subject: str, version: int, schema_id: int, schema: str, *, deleted: bool = False) -> tuple[bytes, bytes]:
    """Return a record as Confluent's registry writes it."""
    key = {"keytype": "SCHEMA", "subject": subject, "version": version, "magic": 1}
    value = {"subject": subject, "version": version, "id": schema_id, "schema": schema, "deleted": deleted}
    return orjson.dumps(key), orjson.dumps(value)


def test_the_frame_is_confluents() -> None:
    assert frame(0x01020304) == b"\0\1\2\3\4"
    assert schema_id_of(frame(77) + b"body") == 77


def test_a_schema_is_found_under_its_subject_only() -> None:
    contents = _Contents()
    contents.apply(*record("a-value", 1, 1, "{}"))
    assert contents.find("a-value", "{}") == 1
    assert contents.find("b-value", "{}") is None
    assert contents.find("a-value", "[]") is None


def test_one_schema_has_one_id_under_many_subjects() -> None:
    contents = _Contents()
    contents.apply(*record("a-value", 1, 1, "{}"))
    contents.apply(*record("b-value", 1, 1, "{}"))
    assert contents.find("b-value", "{}") == 1
    assert contents.texts == {1: "{}"}


def test_records_of_a_service_that_are_no_schemas_are_passed_over() -> None:
    contents = _Contents()
    contents.apply(orjson.dumps({"keytype": "NOOP", "magic": 0}), None)
    contents.apply(orjson.dumps({"keytype": "CONFIG", "subject": None, "magic": 0}), b'{"compatibilityLevel":"NONE"}')
    contents.apply(orjson.dumps({"keytype": "SCHEMA", "subject": "a", "version": 1, "magic": 1}), None)
    contents.apply(None, b"{}")
    assert contents == _Contents()


def test_the_text_of_a_deleted_schema_stays_readable() -> None:
    contents = _Contents()
    contents.apply(*record("a-value", 1, 1, "{}", deleted=True))
    assert contents.texts == {1: "{}"}
    assert contents.find("a-value", "{}") is None


def test_a_cluster_that_does_not_answer_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic, "_TIMEOUT_S", 0.3)
    began = time.monotonic()
    with (
        TopicRegistry({"bootstrap.servers": "127.0.0.1:1", "log_level": "0"}) as registry,
        pytest.raises(RegistryError) as caught,
    ):
        registry.register("a-value", "{}")
    assert caught.value.action is Action.RETRY
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("code", [KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.UNKNOWN_TOPIC_OR_PART])
def test_a_topic_that_was_just_created_is_waited_for(code: int) -> None:
    registry = TopicRegistry({})
    answers: list[object] = [KafkaException(KafkaError(code)), KafkaException(KafkaError(code)), (0, 7)]
    registry._exists = True
    registry._consumer = mock.Mock(get_watermark_offsets=mock.Mock(side_effect=answers))
    assert registry._end() == 7


def test_a_topic_that_nobody_has_created_is_empty() -> None:
    registry = TopicRegistry({})
    missing = KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
    registry._consumer = mock.Mock(get_watermark_offsets=mock.Mock(side_effect=missing))
    assert registry._end() == 0


def test_an_unknown_id_says_what_may_have_happened() -> None:
    registry = TopicRegistry({})
    with mock.patch.object(registry, "_catch_up"), pytest.raises(RegistryError, match="schema 7 is not on the topic"):
        registry.schema(7)
