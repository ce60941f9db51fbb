"""The parts of a pipeline, built from its file: a source worker's settings, a sink's."""

from __future__ import annotations

import threading
from pathlib import Path

from anabranch import __version__
from anabranch.pipeline import Pipeline, Sink, Source
from anabranch.stack import resolve
from anabranch_connectors.postgres.options import PostgresOptions
from anabranch_connectors.postgres.source import PostgresSource
from anabranch_schemas import registry
from anabranch_schemas.registry import SchemaRegistry
from anabranch_sink.config import SinkConfig, StreamRef
from anabranch_source.settings import SnapshotSettings, StreamSettings, TopicSettings
from anabranch_source.worker import SourceWorker


def connect_registry(pipeline: Pipeline) -> SchemaRegistry:
    """Return the registry that the pipeline file names, or the built-in one on the same Kafka."""
    service = pipeline.registry.model_dump() if pipeline.registry is not None else None
    return registry.connect(pipeline.kafka, service)


def state_dir(pipeline: Pipeline) -> Path:
    """Return where the parts keep what may be lost: states, checkpoints, spill files."""
    assert pipeline.state_dir is not None  # `pipeline.load` sets it
    return pipeline.state_dir


def stream_settings(pipeline: Pipeline, source: Source) -> StreamSettings:
    """Return the settings of a source's stream."""
    snapshot, topics = source.snapshot, source.topics
    return StreamSettings(
        name=pipeline.stream(source),
        site=pipeline.site_id(source.site),
        prefix=pipeline.prefix(source),
        kafka=pipeline.kafka,
        snapshot=SnapshotSettings(
            quiet_ms=snapshot.quiet_ms,
            interval_ms=snapshot.interval_ms,
            max_bytes=snapshot.max_bytes,
            idle_ms=snapshot.idle_ms,
        ),
        topics=TopicSettings(topics.partitions, topics.replication_factor, topics.config),
        copy_chunk_rows=source.copy_chunk_rows,
    )


def postgres_options(pipeline: Pipeline, source: Source) -> PostgresOptions:
    """Return the options of a PostgreSQL source; slot and publication are named after pipeline and source."""
    default = f"anabranch_{pipeline.name}_{source.name}".replace("-", "_")[:63]
    return PostgresOptions(
        dsn=source.dsn.get_secret_value(),
        stream=pipeline.stream(source),
        prefix=pipeline.prefix(source),
        tables=source.tables,
        slot=source.slot_name or default,
        publication=source.publication_name or default,
        spill_dir=source.spill_dir or state_dir(pipeline) / "spill" / source.name,
        adopt=source.publication_adopt,
        key_columns=source.key_columns,
        unknown_types=source.unknown_types,
        tombstones=source.tombstones,
        heartbeat_s=source.heartbeat_ms / 1e3,
        spill_bytes=source.spill_bytes,
    )


def sink_config(pipeline: Pipeline, sink: Sink) -> SinkConfig:
    """Return the configuration of a sink; Spark's jars are fetched if the file names none."""
    streams = {pipeline.stream(source): source for source in pipeline.sources}
    jars = sink.spark.jars if sink.spark.jars is not None else resolve("spark")
    return SinkConfig(
        name=f"{pipeline.name}.{sink.name}",
        site=sink.site,
        target=sink.dsn.get_secret_value(),
        streams=tuple(
            StreamRef(name, f"{pipeline.prefix(streams[name])}.markers", pipeline.prefix(streams[name]))
            for name in sink.from_
        ),
        kafka=pipeline.kafka,
        checkpoint=sink.checkpoint or state_dir(pipeline) / "checkpoint" / sink.name,
        row_budget=sink.max_rows,
        create=sink.create,
        table_map=sink.tables,
        on_constraint=sink.on_constraint,
        spark=sink.spark.master,
        jars=tuple(jars),
        conf=sink.spark.conf,
    )


def run_source(pipeline: Pipeline, source: Source, stop: threading.Event) -> None:
    """Run a source's stream until `stop` is set."""
    worker = SourceWorker(stream_settings(pipeline, source), connect_registry(pipeline))
    part = PostgresSource(postgres_options(pipeline, source), worker.router, version=__version__)
    try:
        worker.run(part, stop)
    finally:
        part.close()


def run_sink_part(pipeline: Pipeline, sink: Sink, stop: threading.Event) -> None:
    """Run a sink until `stop` is set."""
    from anabranch_sink.query import run_sink  # noqa: PLC0415 - imports PySpark, which no other command needs

    run_sink(sink_config(pipeline, sink), connect_registry(pipeline), stop_event=stop)
