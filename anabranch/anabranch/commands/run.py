"""`anabranch run FILE`, and the two parts it is made of: `worker` and `sink`."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import click

from anabranch import child, logs, parts, pipeline
from anabranch.commands.output import file_argument
from anabranch.live import show_while
from anabranch.running import pipeline_parts
from anabranch.states import StateFiles
from anabranch.supervise import Supervisor


@click.command()
@file_argument
def run(file: str) -> None:
    """Run every source and sink of FILE on this machine, and keep them running.

    A part that dies is started again with backoff and goes on where it was. SIGTERM drains and leaves with 0.
    """
    path = Path(file)
    loaded = pipeline.load(path)
    states = StateFiles(parts.state_dir(loaded))
    stop = child.stop_on_signals()
    live = sys.stderr.isatty()
    log_dir = parts.state_dir(loaded) / "logs" if live else None
    if not live:
        logs.configure()
    supervisor = Supervisor(pipeline_parts(loaded, path.resolve()), states, log_dir=log_dir)
    if not live:
        sys.exit(0 if supervisor.run(stop) else 1)
    finished = threading.Event()
    with show_while(loaded, finished):
        fine = supervisor.run(stop)
        finished.set()
    sys.exit(0 if fine else 1)


@click.command()
@file_argument
@click.option("--source", "name", required=True, help="Which source of FILE.")
def worker(file: str, name: str) -> None:
    """Run one source of FILE: the worker that `run` starts, for a cluster."""
    logs.configure()
    loaded = pipeline.load(Path(file))
    source = loaded.source(name)
    states = StateFiles(parts.state_dir(loaded))
    child.run_part("source", source.name, states, lambda stop: parts.run_source(loaded, source, stop))


@click.command()
@file_argument
@click.option("--sink", "name", required=True, help="Which sink of FILE.")
def sink(file: str, name: str) -> None:
    """Run one sink of FILE: the Spark driver that `run` starts, for a cluster."""
    logs.configure()
    loaded = pipeline.load(Path(file))
    chosen = loaded.sink(name)
    states = StateFiles(parts.state_dir(loaded))
    child.run_part("sink", chosen.name, states, lambda stop: parts.run_sink_part(loaded, chosen, stop))
