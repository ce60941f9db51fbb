"""`anabranch verify FILE`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import click

from anabranch import pipeline, verification
from anabranch.commands.output import emit, file_argument, output_option, table


@click.command()
@file_argument
@click.option("--table", "wanted", help="Only this table, by its name at the source: schema.table.")
@click.option("--timeout", default=60.0, show_default=True, help="Seconds to wait for the target's safe time.")
@output_option
def verify(file: str, wanted: str | None, timeout: float, output: str) -> None:
    """Compare source and target at one safe time, down to rows; exit 0 only if they are equal."""
    result = verification.verify(pipeline.load(Path(file)), table=wanted, timeout_s=timeout)
    value = {"equal": result.equal, "tables": [asdict(t) | {"equal": t.equal} for t in result.tables]}

    def show() -> None:
        columns = ("table", "rows", "equal", "missing", "extra", "different", "unsettled")
        table("verify", columns, [[getattr(t, column) for column in columns] for t in result.tables])
        for compared in result.tables:
            for sample in compared.samples:
                click.echo(f"  {compared.table} {sample}")

    emit(value, output, show)
    sys.exit(0 if result.equal else 1)
