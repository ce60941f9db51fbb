"""`anabranch status FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console

from anabranch import pipeline
from anabranch.commands.output import emit, file_argument, output_option
from anabranch.live import draw_status
from anabranch.status import pipeline_status

_BAD = {"failed": 1, "unreachable": 3}


@click.command()
@file_argument
@output_option
def status(file: str, output: str) -> None:
    """Show streams (position, phase, safe time) and sinks (applied markers, safe time, lag, quarantine)."""
    value = pipeline_status(pipeline.load(Path(file)))
    emit(value, output, lambda: Console().print(draw_status(value)))
    sys.exit(max((_BAD.get(part["state"], 0) for part in (*value["streams"], *value["sinks"])), default=0))
