"""Where tables go, and how Spark reaches the brokers that librdkafka properties describe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from anabranch_sink.config import SinkConfig, parallelism, spark_kafka_options


def test_tables_keep_their_names_unless_mapped() -> None:
    config = replace(SinkConfig("s", "us", "", (), {}, Path()), table_map={"public.a": "copy.b", "public.c": "d"})
    assert config.target_of("public", "a") == ("copy", "b")
    assert config.target_of("public", "c") == ("public", "d")
    assert config.target_of("public", "e") == ("public", "e")


def test_sasl_becomes_a_login_module_with_quoted_secrets() -> None:
    options = spark_kafka_options(
        {
            "bootstrap.servers": "b:9092",
            "security.protocol": "SASL_SSL",
            "sasl.mechanisms": "SCRAM-SHA-512",
            "sasl.username": "me",
            "sasl.password": 'a"b\\c',
            "ssl.ca.location": "/ca.pem",
            "queue.buffering.max.ms": "5",
        }
    )
    assert options == {
        "kafka.bootstrap.servers": "b:9092",
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": "SCRAM-SHA-512",
        "kafka.ssl.truststore.type": "PEM",
        "kafka.ssl.truststore.location": "/ca.pem",
        "kafka.sasl.jaas.config": "org.apache.kafka.common.security.scram.ScramLoginModule required "
        'username="me" password="a\\"b\\\\c";',
    }


def test_a_local_master_says_how_many_tasks_run_at_once() -> None:
    assert parallelism("local[2,4]") == 2
    assert parallelism("local") == 1
    assert parallelism("spark://host:7077") >= 1
