"""Prints figures: a table for people, a line of JSON each for programs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import click
import orjson
from rich.console import Console
from rich.table import Table

from bench.figure import Figure, Result

_WIDTH = 110  # of a table that is not for a terminal


def print_json(result: Result) -> None:
    """Print one figure as one line."""
    click.echo(orjson.dumps(result.as_dict()).decode())


def print_table(results: Sequence[Result], title: str) -> None:
    """Print all figures, and under them what was noted beside them."""
    drawn = Table(title=title, title_justify="left", header_style="bold")
    for column in ("figure", "ratio", "spread", "goal", "", "ours", "peer", "unit", "runs"):
        drawn.add_column(column, no_wrap=True)
    for result in results:
        found = result.as_dict()
        drawn.add_row(
            found["name"],
            f"{found['ratio']:.2f}",
            f"{found['min']:.2f}-{found['max']:.2f}",
            f"{found['goal']:.2f}",
            "met" if result.met else "missed",
            f"{found['ours']:,.0f}",
            f"{found['peer']:,.0f}",
            found["unit"],
            str(found["runs"]),
        )
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(drawn)
    for result in results:
        if notes := result.notes():
            click.echo(f"{result.figure.name}: " + ", ".join(f"{name} {value:g}" for name, value in notes.items()))
    busiest = max((result.foreign for result in results), default=0.0)
    click.echo(f"used by others when a round began: at most {busiest:.0%} of the machine")


def print_list(figures: Iterable[Figure]) -> None:
    """Print what can be measured."""
    for figure in figures:
        click.echo(f"{figure.name:16} goal {figure.goal:4.2f}  {figure.what}")
