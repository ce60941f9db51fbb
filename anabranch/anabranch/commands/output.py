"""How commands print: a table for people, JSON or YAML for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import click
import orjson
import yaml
from rich.console import Console
from rich.table import Table

output_option = click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json", "yaml"]),
    default="table",
    show_default=True,
    help="How to print.",
)
file_argument = click.argument("file", type=click.Path(exists=False, dir_okay=False))


def emit(value: Mapping[str, Any], output: str, as_tables: Callable[[], None]) -> None:
    """Print `value` in the format asked for."""
    if output == "json":
        click.echo(orjson.dumps(value, default=str).decode())
    elif output == "yaml":
        click.echo(yaml.safe_dump(orjson.loads(orjson.dumps(value, default=str)), sort_keys=False).rstrip())
    else:
        as_tables()


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print one table."""
    drawn = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        drawn.add_column(column, overflow="fold")
    for row in rows:
        drawn.add_row(*("–" if cell is None else str(cell) for cell in row))
    Console().print(drawn)
