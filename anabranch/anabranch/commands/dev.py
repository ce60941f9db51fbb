"""`anabranch dev`: the embedded stack alone."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import orjson
from rich.console import Console
from rich.table import Table

from anabranch.stack import embedded

__all__ = ["dev"]


def default_directory() -> Path:
    """Return $ANABRANCH_HOME, or the user's data directory."""
    if home := os.environ.get("ANABRANCH_HOME"):
        return Path(home)
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "anabranch" / "dev"


_output = click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True, help="How to print."
)
_directory = click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=default_directory,
    show_default="$ANABRANCH_HOME or ~/.local/share/anabranch/dev",
    help="Where the stack's data, logs and addresses are.",
)


@click.group()
def dev() -> None:
    """Run a real Kafka broker and PostgreSQL servers on this machine."""


@dev.command()
@_directory
@_output
def up(directory: Path, output: str) -> None:
    """Start the stack, or find it running, and leave it running."""
    address = embedded.up(directory)
    if output == "json":
        _print_json(address.as_dict())
        return
    rows = [("kafka", address.kafka), *((f"postgres-{site.site}", site.dsn) for site in address.postgres)]
    _print_table(("service", "address"), rows)
    click.echo(f"Data and logs: {address.dir}. `anabranch dev down` stops it.")


@dev.command()
@_directory
@_output
def down(directory: Path, output: str) -> None:
    """Stop the stack; its data stays."""
    stopped = embedded.down(directory)
    if output == "json":
        _print_json({"stopped": stopped, "dir": str(directory.absolute())})
    else:
        click.echo("Stopped." if stopped else "Nothing was running.")


@dev.command()
@_directory
@_output
@click.pass_context
def status(context: click.Context, directory: Path, output: str) -> None:
    """Show what runs. Exit status 1 if not everything does."""
    found = embedded.status(directory)
    if output == "json":
        _print_json(found)
    else:
        rows = [
            (row["name"], "running" if row["running"] else "stopped", str(row["pid"] or ""), row["address"])
            for row in found["services"]
        ]
        _print_table(("service", "state", "pid", "address"), rows)
    context.exit(0 if found["running"] else 1)


def _print_json(value: dict[str, Any]) -> None:
    click.echo(orjson.dumps(value).decode())


def _print_table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    table = Table(*columns, box=None)
    for row in rows:
        table.add_row(*row)
    Console(soft_wrap=True).print(table)
