"""Runs the benchmarks: `python -m bench`, or `make bench`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import click

from anabranch_schemas.errors import AnabranchError
from bench import encoder, latency, report, sink, snapshot, source
from bench.figure import BenchError, Group, Result, Round, Size
from bench.ground import Ground
from bench.machine import describe, wait_idle

GROUPS: tuple[Group, ...] = (*encoder.GROUPS, *source.GROUPS, *snapshot.GROUPS, *sink.GROUPS, *latency.GROUPS)
_NAMES = [figure.name for group in GROUPS for figure in group.figures]
_ROWS = 1_000_000
_QUICK = Size(rows=100_000, warm_up_s=5.0, window_s=5.0)


@click.command()
@click.option("--only", multiple=True, type=click.Choice(_NAMES), help="This figure alone; may be given repeatedly.")
@click.option("--runs", default=3, show_default=True, type=click.IntRange(1), help="Rounds of each figure.")
@click.option("--rows", type=click.IntRange(1000), help=f"Rows of a narrow workload.  [default: {_ROWS}]")
@click.option("--quick", is_flag=True, help="A tenth of the rows, short windows: to try it, not to quote it.")
@click.option("--list", "listing", is_flag=True, help="Print the figures and leave.")
@click.option("--dir", "directory", type=click.Path(file_okay=False, path_type=Path), help="Keep data and logs here.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def main(
    only: tuple[str, ...],
    runs: int,
    rows: int | None,
    quick: bool,  # noqa: FBT001 - click passes flags so
    listing: bool,  # noqa: FBT001
    directory: Path | None,
    output: str,
) -> None:
    """Measure Anabranch beside its peers, round by round, on one embedded stack."""
    if listing:
        report.print_list(figure for group in GROUPS for figure in group.figures)
        return
    size = _QUICK if quick else Size(_ROWS)
    if rows is not None:
        size = Size(rows, size.warm_up_s, size.window_s)
    results: list[Result] = []
    try:
        with _directory(directory) as home, Ground(home) as ground:
            for result in measure(ground, size, only, runs):
                results.append(result)
                if output == "json":
                    report.print_json(result)
    except (BenchError, AnabranchError) as error:
        raise click.ClickException(str(error)) from error
    if output == "table":
        report.print_table(results, f"{describe()}, PostgreSQL {ground.postgres.version}, {size.rows:,} rows")


def measure(ground: Ground, size: Size, only: Sequence[str], runs: int) -> Iterator[Result]:
    """Measure the figures that are asked for (all if none is named) and yield each when it is done."""
    for group in GROUPS:
        wanted = [figure for figure in group.figures if not only or figure.name in only]
        if not wanted:
            continue
        rounds: dict[str, list[Round]] = {figure.name: [] for figure in wanted}
        foreign = 0.0
        with closing(group.rounds(ground, size)) as going:
            for number in range(1, runs + 1):
                foreign = max(foreign, wait_idle())
                began = time.monotonic()
                for name, found in next(going).items():
                    if name in rounds:
                        rounds[name].append(found)
                        _say(name, number, runs, found, time.monotonic() - began)
        yield from (Result(figure, rounds[figure.name], foreign) for figure in wanted)


def _say(name: str, number: int, runs: int, found: Round, seconds: float) -> None:
    notes = ", ".join(f"{key} {value:.2f}" for key, value in found.notes.items())
    click.echo(
        f"{name} {number}/{runs}: {found.ours:,.0f} against {found.peer:,.0f}, ratio {found.ratio:.2f} "
        f"({seconds:.0f} s; {notes})",
        err=True,
    )


@contextmanager
def _directory(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="anabranch-bench-", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)  # PostgreSQL may run as another user and has to pass through
        yield Path(name)


if __name__ == "__main__":
    main()
