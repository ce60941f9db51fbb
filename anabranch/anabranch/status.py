"""What a pipeline looks like right now: streams from their newest markers, sinks from their targets."""

from __future__ import annotations

import time
from typing import Any

import psycopg
from psycopg.rows import dict_row

from anabranch import parts
from anabranch.pipeline import Pipeline, Sink, Source
from anabranch.states import PartState, PartStatus, StateFiles
from anabranch_connectors.postgres.lsn import lsn_text
from anabranch_schemas.clock import to_datetime
from anabranch_schemas.errors import AnabranchError
from anabranch_source.phases import phase_at
from anabranch_source.progress import newest_marker

_CONNECT_TIMEOUT_S = 5


def pipeline_status(pipeline: Pipeline) -> dict[str, Any]:
    """Return the status of every stream and sink, as `anabranch status -o json` prints it.

    What cannot be reached is shown as such in its own entry; the others are not held up by it.
    """
    states = StateFiles(parts.state_dir(pipeline))
    return {
        "streams": [_stream(pipeline, source, states.read("source", source.name)) for source in pipeline.sources],
        "sinks": [_sink(sink, states.read("sink", sink.name)) for sink in pipeline.sinks],
    }


def _stream(pipeline: Pipeline, source: Source, part: PartStatus | None) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": pipeline.stream(source),
        "state": part.state.value if part else PartState.STOPPED.value,
        "phase": None,
        "position": None,
        "safe_time": None,
        "epoch": None,
        "marker": None,
        "restarts": part.restarts if part else 0,
        "error": part.error if part else None,
    }
    try:
        marker = newest_marker(pipeline.kafka, f"{pipeline.prefix(source)}.markers")
    except AnabranchError as error:
        return entry | {"state": "unreachable", "error": error.as_dict()}
    if marker is None:
        return entry
    return entry | {
        "phase": phase_at(marker).value,
        "position": lsn_text(marker.last_seq),
        "safe_time": to_datetime(marker.safe_hlc).isoformat() if marker.safe_hlc else None,
        "epoch": marker.epoch,
        "marker": marker.number,
    }


def _sink(sink: Sink, part: PartStatus | None) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": sink.name,
        "state": part.state.value if part else PartState.STOPPED.value,
        "applied": {},
        "safe_time": None,
        "lag_ms": None,
        "transactions": 0,
        "rows": 0,
        "quarantined": 0,
        "restarts": part.restarts if part else 0,
        "error": part.error if part else None,
    }
    dsn = sink.dsn.get_secret_value()
    try:
        with psycopg.connect(dsn, connect_timeout=_CONNECT_TIMEOUT_S, row_factory=dict_row) as connection:
            exists = connection.execute("SELECT to_regclass('anabranch.progress') IS NOT NULL AS is").fetchone()
            if not exists or not exists["is"]:
                return entry
            progress = connection.execute(
                "SELECT stream, marker, safe_time, transactions, rows FROM anabranch.progress WHERE stream = ANY(%s)",
                [list(sink.from_)],
            ).fetchall()
            parked = connection.execute(
                "SELECT count(*) AS n FROM anabranch.quarantine WHERE stream = ANY(%s)", [list(sink.from_)]
            ).fetchone()
    except psycopg.Error as error:
        refused = "connect.refused" if error.sqlstate is None else "postgres.server"
        cause = {"code": refused, "message": str(error).splitlines()[0], "where": f"sinks.{sink.name}", "advice": ""}
        return entry | {"state": "unreachable", "error": cause}
    times = [row["safe_time"] for row in progress]
    # The target is complete up to the time of its slowest stream, and only once all have one.
    safe = min(times) if len(times) == len(sink.from_) and all(times) else None
    return entry | {
        "applied": {row["stream"]: row["marker"] for row in progress},
        "safe_time": safe.isoformat() if safe else None,
        "lag_ms": round((time.time() - safe.timestamp()) * 1e3) if safe else None,
        "transactions": sum(int(row["transactions"]) for row in progress),
        "rows": sum(int(row["rows"]) for row in progress),
        "quarantined": parked["n"] if parked else 0,
    }
