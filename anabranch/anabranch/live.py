"""A live table of a running pipeline, on a terminal."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from anabranch.pipeline import Pipeline
from anabranch.status import pipeline_status

_EVERY_S = 1.0


@contextmanager
def show_while(pipeline: Pipeline, finished: threading.Event) -> Iterator[None]:
    """Draw the pipeline's status anew every second until the block ends."""
    console = Console(stderr=True)
    with Live(console=console, auto_refresh=False) as live:

        def draw() -> None:
            while not finished.wait(_EVERY_S):
                live.update(draw_status(pipeline_status(pipeline)), refresh=True)

        thread = threading.Thread(target=draw, daemon=True)
        thread.start()
        try:
            yield
        finally:
            finished.set()
            thread.join()


def draw_status(status: dict[str, Any]) -> Group:
    """Return the tables of a status."""
    streams = _table("streams", ("name", "state", "phase", "position", "safe_time", "epoch", "marker"))
    for stream in status["streams"]:
        streams.add_row(*_cells(stream, ("name", "state", "phase", "position", "safe_time", "epoch", "marker")))
    columns = ("name", "state", "safe_time", "lag_ms", "transactions", "rows", "quarantined")
    sinks = _table("sinks", columns)
    for sink in status["sinks"]:
        sinks.add_row(*_cells(sink, columns))
    errors = [
        f"[red]{part['name']}[/red] {part['error'].get('code')}: {part['error'].get('message')}"
        for part in (*status["streams"], *status["sinks"])
        if part["error"]
    ]
    return Group(streams, sinks, *errors)


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column)
    return table


def _cells(entry: dict[str, Any], columns: tuple[str, ...]) -> list[str]:
    return ["–" if entry[column] is None else str(entry[column]) for column in columns]
