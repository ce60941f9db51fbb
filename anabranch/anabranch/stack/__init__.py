"""A real Kafka broker and real PostgreSQL servers, on this machine or in containers, for development and tests."""

from anabranch.stack.embedded import EmbeddedStack, SiteAddress, StackAddress, down, status, up
from anabranch.stack.errors import StackError
from anabranch.stack.jars import resolve
from anabranch.stack.java import JavaRuntime, find_java
from anabranch.stack.kafka import KafkaBroker
from anabranch.stack.postgres import PostgresBinaries, PostgresServer, find_postgres
from anabranch.stack.service import KafkaService, PostgresService, Service

__all__ = [
    "EmbeddedStack",
    "JavaRuntime",
    "KafkaBroker",
    "KafkaService",
    "PostgresBinaries",
    "PostgresServer",
    "PostgresService",
    "Service",
    "SiteAddress",
    "StackAddress",
    "StackError",
    "down",
    "find_java",
    "find_postgres",
    "resolve",
    "status",
    "up",
]
