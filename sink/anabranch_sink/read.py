"""Reads exactly the ranges of a cut as one batch Kafka DataFrame, and says what is wrong when that fails."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from confluent_kafka import Consumer, KafkaException, TopicPartition
from pyspark.sql import DataFrame, SparkSession

from anabranch_schemas import stamp
from anabranch_schemas.errors import AnabranchError
from anabranch_sink.errors import KafkaReadError, RangeExpiredError, TopicMissingError, bootstrap_advice
from anabranch_sink.ranges import MarkedRange, extents

_TIMEOUT_S = 15.0
# The stamp is the first header of a record and nearly always the only one; the list goes to Python only when it is
# not, and as JSON (binary in base64): Arrow's writer sizes a nested column anew for every row, which made 180,000 rows
# take 4.3 s instead of 1.5. crc32 is computed by the JVM: 0.1 s a million records.
COLUMNS = (
    "topic",
    "partition",
    "offset",
    "key",
    "value",
    f"CASE WHEN headers[0].key = '{stamp.HEADER}' THEN headers[0].value END AS stamp",
    f"CASE WHEN size(headers) > 1 OR headers[0].key <> '{stamp.HEADER}' THEN to_json(headers) END AS more",
    "coalesce(crc32(value), 0L) AS crc",
)


def read(
    spark: SparkSession, kafka_options: Mapping[str, str], ranges: Sequence[MarkedRange], *, group: str, tasks: int
) -> DataFrame:
    """Return the records of the ranges (and what lies between a partition's ranges), with `COLUMNS`.

    At most `tasks` tasks, each with whole partitions: a Python worker costs some 30 ms a task. `group` names the
    consumers that executors keep for the next cut; no offsets are committed to it.
    """
    places = extents(ranges)
    partitions = sum(len(found) for found in places.values())
    frame = (
        spark.read.format("kafka")
        .options(**kafka_options)
        .option("assign", json.dumps({topic: sorted(found) for topic, found in places.items()}))
        .option("startingOffsets", _offsets(places, 0))
        .option("endingOffsets", _offsets(places, 1))
        .option("includeHeaders", "true")
        .option("failOnDataLoss", "true")
        .option("kafka.isolation.level", "read_committed")
        .option("kafka.group.id", group)
        # A task otherwise waits out a long poll at the log's tail: 680 ms instead of 101 for 260 rows.
        .option("kafka.fetch.max.wait.ms", "5")
        # 500 by default: each poll has a fixed price.
        .option("kafka.max.poll.records", "2000")
        .option("kafkaConsumer.pollTimeoutMs", "30000")
        .load()
        .selectExpr(*COLUMNS)
    )
    return frame.coalesce(tasks) if partitions > tasks else frame


def _offsets(places: Mapping[str, Mapping[int, tuple[int, int]]], end: int) -> str:
    return json.dumps({topic: {str(p): found[p][end] for p in found} for topic, found in places.items()})


def diagnose(kafka: Mapping[str, str], ranges: Sequence[MarkedRange]) -> AnabranchError | None:
    """Ask Kafka whether the ranges are still there; return what is wrong, or None if nothing is."""
    consumer = Consumer({**kafka, "group.id": "anabranch-diagnosis", "enable.auto.commit": False})
    try:
        return next((found for marked in ranges if (found := _diagnose_one(consumer, marked)) is not None), None)
    except KafkaException as error:
        return KafkaReadError(
            f"Kafka did not answer: {error.args[0].str()}", where=ranges[0].range.topic, advice="check the brokers"
        )
    finally:
        consumer.close()


def _diagnose_one(consumer: Consumer, marked: MarkedRange) -> AnabranchError | None:
    r = marked.range
    listed = consumer.list_topics(r.topic, timeout=_TIMEOUT_S).topics[r.topic]
    if listed.error is not None or r.partition not in listed.partitions:
        return TopicMissingError(
            "the topic or partition that the marker names does not exist",
            where=marked.where,
            advice=bootstrap_advice(marked.stream),
        )
    low, high = consumer.get_watermark_offsets(TopicPartition(r.topic, r.partition), timeout=_TIMEOUT_S)
    if low > r.first_offset:
        return RangeExpiredError(
            f"the partition now begins at offset {low}: retention has deleted records that were not applied",
            where=marked.where,
            advice=f"give the topic a longer retention, then {bootstrap_advice(marked.stream)}",
        )
    if high < r.end_offset:
        return RangeExpiredError(
            f"the partition ends at offset {high}: the topic was made anew or has lost records",
            where=marked.where,
            advice=bootstrap_advice(marked.stream),
        )
    return None
