"""`anabranch verify`: every table of a pipeline, source against target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import psycopg

from anabranch.pipeline import Pipeline, Sink, Source
from anabranch.verify import TableResult, VerifyResult, compare_table, prepare, safe_time_waiter
from anabranch_connectors.postgres import catalog, control
from anabranch_schemas.errors import ConfigError


def verify(pipeline: Pipeline, *, table: str | None = None, timeout_s: float = 60.0) -> VerifyResult:
    """Compare all tables of all sinks, or one (`schema.table` at the source).

    Raises:
        ConfigError: if no sink carries `table`.
        NotCaughtUpError: if a target does not reach the source's present within `timeout_s`.
    """
    results = tuple(_results(pipeline, table, timeout_s))
    if table is not None and not results:
        raise ConfigError(f"no sink of the pipeline carries the table {table!r}", where="--table")
    return VerifyResult(results)


def _results(pipeline: Pipeline, table: str | None, timeout_s: float) -> Iterator[TableResult]:
    streams = {pipeline.stream(source): source for source in pipeline.sources}
    for sink in pipeline.sinks:
        for stream in sink.from_:
            yield from _stream_results(sink, streams[stream], stream, table, timeout_s)


def _stream_results(
    sink: Sink, source: Source, stream: str, wanted: str | None, timeout_s: float
) -> Iterator[TableResult]:
    with (
        closing(control.connect(source.dsn.get_secret_value(), application_name="anabranch verify")) as here,
        closing(psycopg.connect(sink.dsn.get_secret_value(), autocommit=True)) as there,
    ):
        tables = catalog.load_tables(here, source.tables, source.key_columns)
        prepare(here)
        prepare(there)
        wait_for = safe_time_waiter(there, [stream], timeout_s=timeout_s)
        for table in tables:
            if wanted in (None, table.path):
                mapped = sink.tables.get(table.path, table.path).rpartition(".")
                yield compare_table(table, here, there, (mapped[0] or table.schema, mapped[2]), wait_for)
