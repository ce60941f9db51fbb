"""The sink against PostgreSQL's own subscription: the same transactions into the same table on the same server.

Ours is `anabranch sink` over a backlog that the source has published. Its rate is counted from the commit of the first
cut, when Spark is warm, to the last one's; `whole_rows_per_s` counts from the start of the process. The peer is
CREATE SUBSCRIPTION with binary = true on a copy of the slot, from START_REPLICATION to the last transaction's commit.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from functools import partial
from itertools import count

import psycopg
from psycopg import sql

from anabranch import parts, pipeline
from anabranch_connectors.postgres.lsn import lsn_int
from bench import part
from bench.figure import BenchError, Figure, Group, Round, Size
from bench.ground import Ground, connect, new_database
from bench.markers import MarkerFollower
from bench.source import RowCount
from bench.walsender import await_walsender
from bench.workloads import INSERT_10, UPDATE_10, Kind, Workload, copy_slot, drop_slot, fill, rewind, workload

_LOOK_S = 0.02
_TIMEOUT_S = 300.0
_CUTS_MIN = 5  # one to warm up, four to measure
_SLOT = "bench_subscription"


def _rounds(name: str, kind: Kind, ground: Ground, size: Size) -> Generator[Mapping[str, Round], None, None]:
    made = workload(ground, kind, size.rows)
    prefix = _backlog(ground, made)
    for _ in count():
        peer = subscription(ground, made)
        ours, whole = apply(ground, made, prefix)
        yield {name: Round.of_rates(ours, peer, whole_rows_per_s=whole)}


def _backlog(ground: Ground, made: Workload) -> str:
    """Publish the workload under a prefix of its own, which holds it once; return the prefix."""
    prefix = f"backlog.{made.kind.name}"
    file = ground.pipeline(f"backlog_{made.kind.name}", _source(made, prefix))
    loaded = pipeline.load(file)
    settings = parts.stream_settings(loaded, loaded.sources[0])
    rewind(made, settings)
    with (
        MarkerFollower(ground.kafka.bootstrap, settings.marker_topic) as follower,
        part.worker(file, made.kind.name) as process,
    ):
        follower.until(RowCount(made.rows), process.check)
    return prefix


def _source(made: Workload, prefix: str) -> dict[str, object]:
    return {
        "name": made.kind.name,
        "dsn": made.dsn,
        "tables": ["public.t"],
        "prefix": prefix,
        "slot.name": made.slot,
        "publication.name": made.publication,
    }


def apply(ground: Ground, made: Workload, prefix: str) -> tuple[float, float]:
    """Apply the backlog to a new table; return rows/s from the first cut on, and from the start of the process."""
    target = _target(ground, made)
    name = f"sink_{made.kind.name}"
    sink = {
        "name": "us",
        "dsn": target,
        "from": [f"eu.{made.kind.name}"],
        "create": True,
        "cut.max.rows": min(200_000, made.rows // _CUTS_MIN),
    }
    file = ground.pipeline(f"{name}_{time.monotonic_ns()}", _source(made, prefix), sink)
    began = time.monotonic()
    with part.sink(file, "us") as process, connect(target) as conn:
        first = last = (0, began)
        while last[0] < made.rows:
            process.check()
            if time.monotonic() - began > _TIMEOUT_S:
                raise BenchError(f"the sink applied {last[0]} of {made.rows} rows within {_TIMEOUT_S:.0f} s")
            rows = _applied(conn)
            now = time.monotonic()
            if rows > last[0]:
                last = (rows, now)
                first = last if first[0] == 0 else first
            time.sleep(_LOOK_S)
    _compare(made, target)
    return (last[0] - first[0]) / (last[1] - first[1]), last[0] / (last[1] - began)


def subscription(ground: Ground, made: Workload) -> float:
    """Apply the workload by a subscription to a new table; return rows/s."""
    target = _target(ground, made)
    copy_slot(made, _SLOT)
    options = sql.SQL("create_slot = false, slot_name = {}, copy_data = false, enabled = false, binary = true").format(
        sql.Identifier(_SLOT)
    )
    with connect(target) as conn:
        conn.execute(
            sql.SQL("CREATE SUBSCRIPTION s CONNECTION {} PUBLICATION {} WITH ({})").format(
                sql.Literal(made.dsn), sql.Identifier(made.publication), options
            )
        )
        conn.execute("ALTER SUBSCRIPTION s ENABLE")
        server = await_walsender(made.dsn, _SLOT, lambda: None)
        deadline = time.monotonic() + _TIMEOUT_S
        while _origin(conn) < made.end:
            if time.monotonic() > deadline:
                raise BenchError(f"the subscription did not end within {_TIMEOUT_S:.0f} s")
            time.sleep(_LOOK_S)
        ended = time.time()
        for step in ("DISABLE", "SET (slot_name = NONE)"):
            conn.execute(f"ALTER SUBSCRIPTION s {step}".encode())
        conn.execute("DROP SUBSCRIPTION s")
    with connect(made.dsn) as source:
        drop_slot(source, _SLOT)
    _compare(made, target)
    return made.rows / (ended - server.began)


def _target(ground: Ground, made: Workload) -> str:
    """Make the table that is applied to, with the rows that the workload begins with."""
    dsn = new_database(ground.us, "bench_target")
    with connect(dsn) as conn:
        conn.execute(made.kind.table.encode())
        if made.kind.filled:
            fill(conn, made.kind, made.rows)
        conn.execute("CHECKPOINT")
    return dsn


def _applied(conn: psycopg.Connection) -> int:
    try:
        row = conn.execute("SELECT coalesce(sum(rows), 0)::int8 FROM anabranch.progress").fetchone()
    except psycopg.errors.UndefinedTable:
        return 0
    assert row is not None
    return int(row[0])


def _origin(conn: psycopg.Connection) -> int:
    row = conn.execute(
        "SELECT coalesce(pg_replication_origin_progress('pg_' || oid, false), '0/0')::text FROM pg_subscription "
        "WHERE subdbid = (SELECT oid FROM pg_database WHERE datname = current_database())"
    ).fetchone()
    assert row is not None
    return lsn_int(row[0])


def _compare(made: Workload, target: str) -> None:
    """Compare both tables by count and sums."""
    look = "SELECT count(*), sum(id), sum(abalance::int8) FROM t"
    with connect(made.dsn) as here, connect(target) as there:
        source, applied = (conn.execute(look.encode()).fetchone() for conn in (here, there))
    if source != applied:
        raise BenchError(f"source and target differ: {source}, {applied}")


def _group(name: str, kind: Kind, what: str) -> Group:
    figure = Figure(name, 0.5, "rows/s", f"sink / PostgreSQL's own subscription: {what}")
    return Group((figure,), partial(_rounds, name, kind))


GROUPS = (
    _group("sink", INSERT_10, "inserts, 10 rows a transaction"),
    _group("sink-update", UPDATE_10, "updates, 10 rows a transaction"),
)
