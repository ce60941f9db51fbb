"""`anabranch demo`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from anabranch import demo as bank_demo
from anabranch import logs
from anabranch.commands.output import emit, output_option, table


@click.command()
@click.option("--seconds", default=20.0, show_default=True, help="How long the bank works.")
@click.option("--rate", default=500.0, show_default=True, help="Transfers a second.")
@click.option("--chaos", is_flag=True, help="Kill -9 the source worker and the Spark driver in turn.")
@click.option("--dir", "directory", type=click.Path(file_okay=False, path_type=Path), help="Keep everything here.")
@output_option
def demo(seconds: float, rate: float, chaos: bool, directory: Path | None, output: str) -> None:  # noqa: FBT001 - click passes flags so
    """Run a bank through the whole pipeline on an embedded stack and prove that no transaction was torn.

    Exit 0 only if no read was torn, nothing was lost or duplicated, and source and target are equal row by row.
    """
    logs.configure()
    with _display() as show:
        result = bank_demo.run_demo(seconds=seconds, rate=rate, chaos=chaos, show=show, directory=directory)
    value = result.as_dict()
    emit(value, output, lambda: table("demo", ("figure", "value"), [(k, _plain(v)) for k, v in value.items()]))
    sys.exit(0 if result.passed else 1)


@contextmanager
def _display() -> Iterator[Callable[[str, dict[str, Any]], None]]:
    """Show progress: a live table on a terminal, else a line whenever something new is going on."""
    console = Console(stderr=True)
    if not console.is_terminal:
        said: list[str] = []

        def say(doing: str, _figures: dict[str, Any]) -> None:
            if doing not in said:
                said.append(doing)
                click.echo(doing, err=True)

        yield say
        return
    with Live(console=console, auto_refresh=False) as live:

        def draw(doing: str, figures: dict[str, Any]) -> None:
            drawn = Table(title=doing, title_justify="left", show_header=False)
            for name, value in figures.items():
                drawn.add_row(name, _plain(value))
            live.update(drawn, refresh=True)

        yield draw


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return "–" if value is None else str(value)
