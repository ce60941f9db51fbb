"""The command line: one group, a module a command, errors as one clear message and an exit status.

Exit status: 0 done, 1 found a difference or a failed state, 2 usage, 3 could not reach something.
"""

from __future__ import annotations

import sys

import click
import psycopg

from anabranch import __version__
from anabranch.commands.bootstrap import bootstrap
from anabranch.commands.check import check
from anabranch.commands.demo import demo
from anabranch.commands.dev import dev
from anabranch.commands.run import run, sink, worker
from anabranch.commands.status import status
from anabranch.commands.verify import verify
from anabranch_schemas.errors import Action, AnabranchError, ConfigError

FAILED, USAGE, UNREACHABLE = 1, 2, 3


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="anabranch")
def cli() -> None:
    """Carry the changes of a database through Kafka and Spark into others, whole transactions at a time."""


for command in (demo, dev, check, run, status, verify, bootstrap, worker, sink):
    cli.add_command(command)


def main() -> None:
    """Run the command line and leave with its exit status."""
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(FAILED)
    except click.exceptions.Exit as leave:
        sys.exit(leave.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except ConfigError as error:
        click.echo(str(error), err=True)
        sys.exit(USAGE)
    except AnabranchError as error:
        click.echo(str(error), err=True)
        sys.exit(UNREACHABLE if error.action is Action.RETRY else FAILED)
    except psycopg.Error as error:
        # libpq's first line names host, port or object, never the password or a row's values.
        code, left = ("connect.refused", UNREACHABLE) if error.sqlstate is None else ("postgres.server", FAILED)
        click.echo(f"{code}: {str(error).splitlines()[0]}", err=True)
        sys.exit(left)
