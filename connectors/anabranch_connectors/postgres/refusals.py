"""What a target's SQLSTATE means for the sink. Messages with values of rows are not repeated."""

from __future__ import annotations

from typing import overload

import psycopg

from anabranch_connectors.target_errors import (
    SchemaMismatchError,
    TargetBusyError,
    TargetConstraintError,
    TargetError,
    TargetUnavailableError,
)

_BUSY = {"40P01", "40001", "55P03"}
# Undefined or ambiguous column, table, function or object; types that do not fit; no cast between them.
_MISMATCH = {"42703", "42P01", "42704", "42804", "42846", "42883", "42P10", "428C9"}


@overload
def translated(error: psycopg.errors.IntegrityError, where: str) -> TargetConstraintError: ...
@overload
def translated(error: psycopg.Error, where: str) -> TargetError: ...
def translated(error: psycopg.Error, where: str) -> TargetError:
    """Return the error of ours that a psycopg error stands for."""
    diag = error.diag
    state = error.sqlstate or ""
    table = f"{diag.schema_name}.{diag.table_name}" if diag.table_name else where
    if isinstance(error, psycopg.errors.IntegrityError):
        name = diag.constraint_name or (f"NOT NULL of {diag.column_name}" if diag.column_name else "")
        return TargetConstraintError(
            f"the constraint {name} refuses a row (SQLSTATE {state})",
            where=table,
            advice="drop or correct the constraint at the target (the source has no such rule, or somebody else wrote "
            "the table), or set `on_constraint: park`",
            constraint=name,
            sqlstate=state,
        )
    if state in _BUSY:
        return TargetBusyError(f"another session was in the way (SQLSTATE {state})", where=table)
    if state in _MISMATCH:
        return SchemaMismatchError(
            f"{diag.message_primary} (SQLSTATE {state})",
            where=table,
            advice="make the target's table take the source's columns and types",
        )
    if state.startswith("22"):
        return SchemaMismatchError(
            f"a value of the source does not fit the column's type at the target (SQLSTATE {state})",
            where=table,
            advice="give the target's columns the source's types",
        )
    if isinstance(error, psycopg.OperationalError) or error.sqlstate is None:
        return TargetUnavailableError(
            f"the target cannot be reached or broke off ({state or type(error).__name__})",
            where=where,
            advice="check the target server; the sink tries again",
        )
    return TargetError(f"{diag.message_primary} (SQLSTATE {state})", where=table)
