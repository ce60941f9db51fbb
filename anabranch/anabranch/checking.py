"""`anabranch check`: asks every part of a pipeline what would fail later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from anabranch import parts
from anabranch.pipeline import Pipeline, Sink, Source
from anabranch.stack import find_java
from anabranch_connectors.findings import Finding, Severity
from anabranch_connectors.postgres import catalog, control
from anabranch_connectors.postgres.check import CheckedSource, check_source
from anabranch_connectors.postgres.check_target import CheckedTarget, check_target
from anabranch_connectors.postgres.errors import SlotInUseError
from anabranch_connectors.postgres.options import PostgresOptions
from anabranch_connectors.postgres.preconditions import check_position
from anabranch_schemas.errors import AnabranchError
from anabranch_schemas.registry import ServiceRegistry
from anabranch_source.progress import newest_marker

_TIMEOUT_S = 10.0


def check_pipeline(pipeline: Pipeline) -> list[Finding]:
    """Return everything found, errors first."""
    findings = [*_kafka(pipeline), *_registry(pipeline), *_spark(pipeline), *_sources(pipeline), *_sinks(pipeline)]
    return sorted(findings, key=lambda finding: (finding.severity is not Severity.ERROR, finding.where))


def _kafka(pipeline: Pipeline) -> Iterator[Finding]:
    admin = AdminClient({**pipeline.kafka, "log_level": 0})
    try:
        admin.list_topics(timeout=_TIMEOUT_S)
    except KafkaException as error:
        yield Finding(
            "kafka.unreachable",
            Severity.ERROR,
            "kafka",
            error.args[0].str(),
            "check bootstrap.servers and the security settings",
        )


def _registry(pipeline: Pipeline) -> Iterator[Finding]:
    registry = parts.connect_registry(pipeline) if pipeline.registry is not None else None
    if isinstance(registry, ServiceRegistry):
        try:
            registry.probe()
        except AnabranchError as error:
            yield Finding.of(error)


def _spark(pipeline: Pipeline) -> Iterator[Finding]:
    if pipeline.sinks:
        try:
            find_java()
        except AnabranchError as error:
            yield Finding.of(error)


def _sources(pipeline: Pipeline) -> Iterator[Finding]:
    for source in pipeline.sources:
        options = parts.postgres_options(pipeline, source)
        checked = CheckedSource(
            patterns=options.tables,
            slot=options.slot,
            publication=options.publication,
            stream=options.stream,
            adopt=options.adopt,
            key_columns=options.key_columns,
        )
        for finding in [*check_source(options.dsn, checked), *_position(pipeline, source, options)]:
            yield replace(finding, where=f"sources.{source.name}: {finding.where}".rstrip(": "))


def _position(pipeline: Pipeline, source: Source, options: PostgresOptions) -> Iterator[Finding]:
    """Compare the stored position with slot and server, as the source will at its start."""
    try:
        marker = newest_marker(pipeline.kafka, f"{pipeline.prefix(source)}.markers")
        check_position(options, marker)
    except SlotInUseError:
        return  # it is running
    except AnabranchError as error:
        yield Finding.of(error)


def _sinks(pipeline: Pipeline) -> Iterator[Finding]:
    for sink in pipeline.sinks:
        target = CheckedTarget(f"sinks.{sink.name}", sink.create, _target_tables(pipeline, sink))
        yield from check_target(sink.dsn.get_secret_value(), target)


def _target_tables(pipeline: Pipeline, sink: Sink) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return the tables that a sink will write, with their keys.

    Sources that cannot be asked have findings of their own.
    """
    tables: dict[tuple[str, str], tuple[str, ...]] = {}
    for source in pipeline.sources:
        if pipeline.stream(source) not in sink.from_:
            continue
        try:
            with closing(control.connect(source.dsn.get_secret_value(), application_name="anabranch check")) as conn:
                for table in catalog.load_tables(conn, source.tables, source.key_columns):
                    schema, _, name = sink.tables.get(table.path, table.path).rpartition(".")
                    tables[schema or table.schema, name] = table.key
        except AnabranchError:
            continue
    return tables
