"""`anabranch check FILE`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import click

from anabranch import pipeline
from anabranch.checking import check_pipeline
from anabranch.commands.output import emit, file_argument, output_option
from anabranch_connectors.findings import Severity

_COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.INFO: "blue"}


@click.command()
@file_argument
@output_option
def check(file: str, output: str) -> None:
    """Find what would fail later: rights, settings, keys, versions. Each finding comes with its repair."""
    findings = check_pipeline(pipeline.load(Path(file)))
    errors = sum(finding.severity is Severity.ERROR for finding in findings)
    value = {"ok": errors == 0, "findings": [asdict(f) | {"severity": f.severity.value} for f in findings]}

    def show() -> None:
        if not findings:
            click.echo("Nothing found: the pipeline can run.")
            return
        for found in findings:
            click.secho(f"{found.severity.value:8}", fg=_COLOURS[found.severity], nl=False)
            click.echo(f"{found.code}  [{found.where}]\n    {found.message}")
            if found.repair:
                click.echo(f"    -> {found.repair}")

    emit(value, output, show)
    sys.exit(1 if errors else 0)
