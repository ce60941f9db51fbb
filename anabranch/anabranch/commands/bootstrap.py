"""`anabranch bootstrap FILE --source NAME`: the repair for a stream that cannot go on from its position."""

from __future__ import annotations

from pathlib import Path

import click

from anabranch import parts, pipeline
from anabranch.commands.output import file_argument
from anabranch.pipeline import Pipeline, Source
from anabranch.states import PartState, PartStatus, StateFiles
from anabranch_connectors.postgres import control
from anabranch_connectors.postgres.applied import applied_marker, move_to
from anabranch_connectors.postgres.preconditions import forget
from anabranch_source.bootstrap import begin_anew


@click.command()
@file_argument
@click.option("--source", "name", required=True, help="Which source of FILE.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def bootstrap(file: str, name: str, yes: bool) -> None:  # noqa: FBT001 - click passes flags so
    """Copy a source's tables anew, because the log behind its stored position is gone.

    Drops the slot and the publication that Anabranch made, and marks the stream as begun anew. When the source runs
    next, each table is emptied and copied again at the targets; until that is done their safe time is not set.
    """
    loaded = pipeline.load(Path(file))
    source = loaded.source(name)
    stream = loaded.stream(source)
    if not yes:
        click.confirm(f"Copy all tables of {stream} again, emptying them at the targets first?", abort=True)
    applied = _applied(loaded, stream)
    settings = parts.stream_settings(loaded, source)
    anew, offset = begin_anew(settings, parts.connect_registry(loaded), applied=max(applied.values(), default=0))
    _forget(loaded, source)
    for sink in loaded.sinks:
        if stream in sink.from_:
            move_to(sink.dsn.get_secret_value(), stream, marker=anew.number - 1, marker_offset=offset - 1)
    StateFiles(parts.state_dir(loaded)).write("source", source.name, PartStatus(PartState.STOPPED))
    click.echo(f"{stream} begins anew at marker {anew.number}; `anabranch run {file}` copies its tables")


def _forget(loaded: Pipeline, source: Source) -> None:
    options = parts.postgres_options(loaded, source)
    connection = control.connect(options.dsn, application_name="anabranch bootstrap")
    try:
        forget(connection, options)
    finally:
        connection.close()


def _applied(loaded: Pipeline, stream: str) -> dict[str, int]:
    """Return sink → newest marker of the stream that its target has applied."""
    return {
        sink.name: applied_marker(sink.dsn.get_secret_value(), stream) for sink in loaded.sinks if stream in sink.from_
    }
