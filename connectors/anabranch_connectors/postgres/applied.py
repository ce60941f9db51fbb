"""The progress that a target holds, looked at and moved from outside its sink."""

from __future__ import annotations

import psycopg


def applied_marker(dsn: str, stream: str) -> int:
    """Return the newest marker of a stream that a target has applied; 0 if there is none."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        if not _has_progress(connection):
            return 0
        row = connection.execute("SELECT marker FROM anabranch.progress WHERE stream = %s", [stream]).fetchone()
        return int(row[0]) if row else 0


def move_to(dsn: str, stream: str, *, marker: int, marker_offset: int) -> None:
    """Make the next marker of a stream the one behind `marker`, which lies at `marker_offset`.

    For a stream that begins anew: what was not applied before is copied again. The safe time is taken back.
    """
    with psycopg.connect(dsn, autocommit=True) as connection:
        if _has_progress(connection):
            connection.execute(
                "UPDATE anabranch.progress SET marker = %s, marker_offset = %s, safe_time = NULL, safe_hlc = 0 "
                "WHERE stream = %s",
                [marker, marker_offset, stream],
            )


def _has_progress(connection: psycopg.Connection) -> bool:
    row = connection.execute("SELECT to_regclass('anabranch.progress') IS NOT NULL").fetchone()
    return bool(row and row[0])
