"""Control connections: psycopg in autocommit, with fixed output settings and our errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import pq, sql
from psycopg.pq.abc import PGresult
from psycopg.rows import TupleRow

from anabranch_connectors.postgres.conninfo import OUTPUT_SETTINGS, connection_options
from anabranch_connectors.postgres.dial import dial
from anabranch_connectors.postgres.errors import ConnectError, server_error

Connection = psycopg.Connection[TupleRow]


def connect(dsn: str, *, application_name: str = "anabranch") -> Connection:
    """Open a control connection: autocommit, ISO dates, UTC, `search_path = pg_catalog`.

    Raises:
        ConnectError: if no host of the DSN can be reached.
        AuthenticationError: if the server refuses us.
        ConfigError: if the DSN cannot be parsed.
    """
    options = connection_options(dsn)  # the error for a DSN that cannot be parsed
    try:
        conn = psycopg.connect(dsn, autocommit=True, application_name=application_name, client_encoding="UTF8")
    except psycopg.OperationalError as error:
        # libpq gives a text only, in the server's language. Our own attempt gives the SQLSTATE.
        dial(dsn, {"application_name": application_name}).close()
        raise ConnectError(
            "the connection failed, and a second attempt went through", where=options.get("host", "")
        ) from error
    for name, value in OUTPUT_SETTINGS.items():
        conn.execute("SELECT pg_catalog.set_config(%s, %s, false)", (name, value))
    return conn


@contextmanager
def translated(where: str = "") -> Iterator[None]:
    """Turn psycopg's errors into ours: SQLSTATE and primary message, never the detail."""
    try:
        yield
    except psycopg.Error as error:
        if error.sqlstate is None:
            raise ConnectError("the control connection broke", where=where) from error
        fields = {"C": error.sqlstate, "M": error.diag.message_primary or type(error).__name__}
        raise server_error(fields, where=where) from error


def statement(text: str) -> sql.SQL:
    """Return SQL that this package has put together itself, names and literals already quoted."""
    return sql.SQL(text)


def fetch(
    conn: Connection, query: str, parameters: Mapping[str, Any] | tuple[Any, ...] | None = None, *, where: str = ""
) -> list[TupleRow]:
    """Run a query and return its rows, with our errors."""
    with translated(where):
        return conn.execute(statement(query), parameters).fetchall()


def run(conn: Connection, command: str, *, where: str = "") -> None:
    """Run a command whose names and literals are already quoted, with our errors."""
    with translated(where):
        conn.execute(statement(command))


def check_result(result: PGresult, where: str) -> None:
    """Raise our error unless a result of libpq's own functions is a success."""
    if result.status in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
        return
    state = result.error_field(pq.DiagnosticField.SQLSTATE)
    if state is None:
        raise ConnectError("the connection broke during a query", where=where)
    message = result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b""
    raise server_error({"C": state.decode(), "M": message.decode("utf-8", "replace")}, where=where)


def quote_name(*parts: str) -> str:
    """Return a quoted, dotted identifier: `"public"."orders"`."""
    return ".".join('"' + part.replace('"', '""') + '"' for part in parts)


def quote_text(value: str) -> str:
    """Return a quoted literal; safe whatever `standard_conforming_strings` is."""
    escaped = value.replace("'", "''")
    return " E'" + escaped.replace("\\", "\\\\") + "'" if "\\" in value else "'" + escaped + "'"
