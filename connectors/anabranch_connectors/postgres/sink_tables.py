"""The sink's own tables at a PostgreSQL target: who drives it, how far each stream is, what was set aside."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import psycopg

from anabranch_connectors.api import Applied, Unit
from anabranch_connectors.target_errors import SinkFencedError, TargetConstraintError
from anabranch_schemas import clock
from anabranch_schemas.vector import VectorTime

# A source that reads this database's log takes a write to `progress` as the sign of a replicated transaction.
_DDL = """
CREATE SCHEMA IF NOT EXISTS anabranch;
CREATE TABLE IF NOT EXISTS anabranch.sink (
    name text PRIMARY KEY,
    epoch bigint NOT NULL,
    state text NOT NULL,
    error jsonb,
    quarantined bigint NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS anabranch.progress (
    stream text PRIMARY KEY,
    site integer NOT NULL,
    marker bigint NOT NULL,
    marker_offset bigint NOT NULL,
    seq numeric(20,0) NOT NULL,
    branch text NOT NULL,
    epoch bigint NOT NULL,
    safe_time timestamptz,
    safe_hlc numeric(20,0) NOT NULL,
    vector jsonb NOT NULL,
    transactions bigint NOT NULL,
    rows bigint NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE IF NOT EXISTS anabranch.quarantine (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    sink text NOT NULL,
    stream text NOT NULL,
    marker bigint NOT NULL,
    seq numeric(20,0) NOT NULL,
    ordinal bigint,
    txid numeric(20,0) NOT NULL,
    places jsonb NOT NULL,
    code text NOT NULL,
    sqlstate text NOT NULL,
    constraint_name text NOT NULL,
    at timestamptz NOT NULL DEFAULT now()
);
"""
_EXISTING = "SELECT to_regclass('anabranch.quarantine') IS NOT NULL"
_ADVANCE = """
INSERT INTO anabranch.progress AS p (stream, site, marker, marker_offset, seq, branch, epoch, safe_time, safe_hlc,
    vector, transactions, rows, applied_at)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, clock_timestamp())
ON CONFLICT (stream) DO UPDATE SET site = excluded.site, marker = excluded.marker,
    marker_offset = excluded.marker_offset, seq = excluded.seq, branch = excluded.branch, epoch = excluded.epoch,
    safe_time = excluded.safe_time, safe_hlc = excluded.safe_hlc, vector = excluded.vector,
    transactions = excluded.transactions, rows = excluded.rows, applied_at = excluded.applied_at
WHERE p.marker < excluded.marker
"""
_APPLIED = """
SELECT stream, site, marker, marker_offset, seq, branch, epoch, safe_hlc, vector, transactions, rows
FROM anabranch.progress WHERE stream = ANY(%s)
"""


def create(connection: psycopg.Connection) -> None:
    """Make the tables unless they exist."""
    if connection.execute(_EXISTING).fetchone() != (True,):
        connection.execute(_DDL)


def take_epoch(connection: psycopg.Connection, sink: str) -> int:
    """Raise the sink's epoch, which fences every driver before us, and return it."""
    row = connection.execute(
        "INSERT INTO anabranch.sink (name, epoch, state) VALUES (%s, 1, 'running') ON CONFLICT (name) "
        "DO UPDATE SET epoch = anabranch.sink.epoch + 1, state = 'running', error = NULL RETURNING epoch",
        (sink,),
    ).fetchone()
    assert row is not None
    return int(row[0])


def fence(connection: psycopg.Connection, sink: str, epoch: int) -> None:
    """Lock the sink's row for this transaction and check that it is still ours.

    Raises:
        SinkFencedError: if another driver has taken it.
    """
    row = connection.execute("SELECT epoch FROM anabranch.sink WHERE name = %s FOR UPDATE", (sink,)).fetchone()
    if row is None or row[0] != epoch:
        now = "gone" if row is None else f"{row[0]}"
        raise SinkFencedError(
            f"this driver has epoch {epoch}, the sink's epoch is now {now}; nothing was written",
            where=sink,
            advice="nothing to repair: let the other driver run, or stop it before starting this one again",
        )


def applied(connection: psycopg.Connection, streams: Sequence[str]) -> dict[str, Applied]:
    """Return the progress of these streams, as far as there is any."""
    rows = connection.execute(_APPLIED, (list(streams),)).fetchall()
    return {row[0]: _applied(row) for row in rows}


def _applied(row: tuple[Any, ...]) -> Applied:
    _, site, marker, marker_offset, seq, branch, epoch, safe_hlc, vector, transactions, rows = row
    return Applied(
        site=site,
        marker=marker,
        marker_offset=marker_offset,
        seq=int(seq),
        branch=branch,
        epoch=epoch,
        safe_hlc=int(safe_hlc),
        vector=VectorTime.from_json(vector),
        transactions=transactions,
        rows=rows,
    )


def advance(connection: psycopg.Connection, sink: str, progress: Mapping[str, Applied]) -> None:
    """Write the new progress of streams.

    Raises:
        SinkFencedError: if a stream is already at that marker or beyond, so that somebody else has applied it.
    """
    for stream, new in progress.items():
        written = connection.execute(
            _ADVANCE,
            (
                stream,
                new.site,
                new.marker,
                new.marker_offset,
                new.seq,
                new.branch,
                new.epoch,
                clock.to_datetime(new.safe_hlc) if new.safe_hlc else None,
                new.safe_hlc,
                json.dumps(new.vector.as_json()),
                new.transactions,
                new.rows,
            ),
        )
        if written.rowcount != 1:
            raise SinkFencedError(
                f"marker {new.marker} of the stream is applied already, by another sink; nothing was written",
                where=f"{sink}: {stream}",
                advice="a stream can feed a target through one sink only: take it out of one of them",
            )


def quarantine(connection: psycopg.Connection, sink: str, unit: Unit, refusal: TargetConstraintError) -> None:
    """Record a unit that was set aside: where it is on Kafka and why, no values."""
    connection.execute(
        "INSERT INTO anabranch.quarantine (sink, stream, marker, seq, ordinal, txid, places, code, sqlstate, "
        "constraint_name) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)",
        (
            sink,
            unit.stream,
            unit.marker,
            unit.seq,
            unit.ordinal,
            unit.txid,
            json.dumps(
                [
                    {"topic": topic, "partition": partition, "first_offset": first, "last_offset": last}
                    for topic, partition, first, last in unit.places
                ]
            ),
            refusal.code,
            refusal.sqlstate,
            refusal.constraint,
        ),
    )
    connection.execute("UPDATE anabranch.sink SET quarantined = quarantined + 1 WHERE name = %s", (sink,))


def record_end(connection: psycopg.Connection, sink: str, epoch: int, error: Mapping[str, Any] | None) -> None:
    """Record how the driver of this epoch ended."""
    connection.execute(
        "UPDATE anabranch.sink SET state = %s, error = %s WHERE name = %s AND epoch = %s",
        ("failed" if error else "stopped", json.dumps(error) if error else None, sink, epoch),
    )
