"""Workloads in PostgreSQL's log, each made once and read many times through copies of one slot."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path

import psycopg
from psycopg import sql

from anabranch import parts, pipeline
from anabranch_connectors.postgres.lsn import lsn_int, lsn_text
from anabranch_connectors.postgres.resume import Resume
from anabranch_schemas.marker import SnapshotMarker
from anabranch_schemas.vector import VectorTime
from anabranch_source.progress import newest_marker
from anabranch_source.settings import StreamSettings
from bench import part
from bench.figure import BenchError
from bench.ground import Ground, connect, new_database
from bench.markers import MarkerFollower, rewound, write_marker

NARROW = "CREATE TABLE t (id bigint PRIMARY KEY, bid int, abalance int, filler text, ts timestamptz)"
NARROW_ROW = "g, (g % 97)::int, (g * 7919 % 1000003)::int, repeat('x', 32) || md5(g::text), now()"
_WIDE_COLUMNS = [
    "id bigint PRIMARY KEY",
    *(f"i{n} int" for n in range(1, 7)),
    *(f"b{n} bigint" for n in range(1, 6)),
    *(f"t{n} text" for n in range(1, 11)),
    *(f"ts{n} timestamptz" for n in range(1, 4)),
    *(f"d{n} double precision" for n in range(1, 3)),
    *(f"m{n} numeric(14,2)" for n in range(1, 3)),
    "flag bool",
]
WIDE = f"CREATE TABLE t ({', '.join(_WIDE_COLUMNS)})"
WIDE_ROW = """
    g, g % 7, g % 11, g % 13, g % 1009, g % 10007, g % 100003, g * 3, g * 5, g * 7, g * 11, g * 13,
    'name-' || g, md5(g::text), 'status', 'some street ' || g % 1000, 'city', 'zz', md5((g + 1)::text), NULL, '',
    'note text of a row', now(), now(), NULL, g * 0.37, sqrt(g), (g % 100000) / 100.0, (g % 77777) / 100.0, g % 2 = 0
"""
_INSERT = "INSERT INTO t SELECT {row} FROM generate_series($1, $2) g"
_UPDATE = "UPDATE t SET abalance = abalance + 1, ts = now() WHERE id BETWEEN $1 AND $2"
_LOOP = """
CREATE PROCEDURE work(rows bigint, step bigint) LANGUAGE plpgsql AS $work$
DECLARE x bigint := 1;
BEGIN
    WHILE x <= rows LOOP
        EXECUTE {statement} USING x, least(x + step - 1, rows);
        COMMIT;
        x := x + step;
    END LOOP;
END $work$
"""
_SETTLE_S = 30.0


@dataclass(frozen=True, slots=True)
class Kind:
    """How a workload is made: `filled` says that its rows are there before it begins."""

    name: str
    table: str
    row: str
    statement: str
    step: int
    filled: bool = False


INSERT_10 = Kind("insert_10", NARROW, NARROW_ROW, _INSERT.format(row=NARROW_ROW), 10)
UPDATE_1 = Kind("update_1", NARROW, NARROW_ROW, _UPDATE, 1, filled=True)
UPDATE_10 = Kind("update_10", NARROW, NARROW_ROW, _UPDATE, 10, filled=True)
WIDE_10 = Kind("wide_10", WIDE, WIDE_ROW, _INSERT.format(row=WIDE_ROW), 10)


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload that lies in the log, and the stream that reads it."""

    kind: Kind
    rows: int
    dsn: str
    file: Path
    """A pipeline of the source alone."""
    settings: StreamSettings
    slot: str
    """The slot that the stream reads: a copy of `base_slot`."""
    base_slot: str
    publication: str
    end: int
    """LSN behind the last transaction."""
    base: SnapshotMarker
    """The stream's position at the workload's start, in the phase replicate."""


def workload(ground: Ground, kind: Kind, rows: int) -> Workload:
    """Return the workload, made on first use."""
    if kind.name not in ground.made:
        ground.made[kind.name] = _make(ground, kind, rows)
    made: Workload = ground.made[kind.name]
    return made


def rewind(found: Workload, settings: StreamSettings | None = None) -> None:
    """Put a stream (the workload's own, or another prefix) back to the workload's start, with a fresh slot."""
    to = settings or found.settings
    copy_slot(found, found.slot)
    newest = newest_marker(to.kafka, to.marker_topic) if settings is None else None
    write_marker(to, rewound(newest, found.base) if newest else dataclasses.replace(found.base, number=1))


def copy_slot(found: Workload, name: str) -> None:
    """Make `name` a copy of the workload's slot."""
    with connect(found.dsn) as conn:
        drop_slot(conn, name)
        conn.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", (found.base_slot, name))


def drop_slot(conn: psycopg.Connection, name: str) -> None:
    """Drop a slot if there is one, waiting for its reader to go."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        try:
            conn.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s", (name,)
            )
        except psycopg.errors.ObjectInUse:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def _make(ground: Ground, kind: Kind, rows: int) -> Workload:
    """Make a workload.

    1. Run the stream on an empty table, until it has nothing to copy: now its publication, topics, schemas and a first
       marker are there.
    2. Fill the table where the workload updates, and make the base slot.
    3. Work. A commit need not reach the disk at once: the log is read later, and by both sides alike.
    """
    dsn = new_database(ground.eu, kind.name)
    source = {
        "name": kind.name,
        "dsn": dsn,
        "tables": ["public.t"],
        "prefix": f"bench.{kind.name}",
        "slot.name": f"bench_{kind.name}",
        "publication.name": f"bench_{kind.name}",
    }
    file = ground.pipeline(kind.name, source)
    loaded = pipeline.load(file)
    settings = parts.stream_settings(loaded, loaded.sources[0])
    base_slot = f"base_{kind.name}"
    with connect(dsn) as conn:
        conn.execute(kind.table.encode())
        # 1.
        first = _first_marker(ground, file, kind.name, settings)
        # 2.
        conn.execute("SET synchronous_commit = off")
        if kind.filled:
            fill(conn, kind, rows)
        drop_slot(conn, f"bench_{kind.name}")
        start = _one(conn, "SELECT lsn::text FROM pg_create_logical_replication_slot(%s, 'pgoutput')", base_slot)
        # 3.
        conn.execute(sql.SQL(_LOOP).format(statement=sql.Literal(kind.statement)))
        conn.execute("CALL work(%s, %s)", (rows, kind.step))
        end = _one(conn, "SELECT pg_current_wal_insert_lsn()::text")
        conn.execute("SET synchronous_commit = on")
        conn.execute("SELECT pg_logical_emit_message(true, 'bench', '')")  # flushes the log up to its commit
        conn.execute("CHECKPOINT")
    return Workload(
        kind,
        rows,
        dsn,
        file,
        settings,
        slot=f"bench_{kind.name}",
        base_slot=base_slot,
        publication=f"bench_{kind.name}",
        end=lsn_int(end),
        base=_at(first, lsn_int(start)),
    )


def fill(conn: psycopg.Connection, kind: Kind, rows: int) -> None:
    """Insert the rows that a workload begins with."""
    conn.execute(f"INSERT INTO t SELECT {kind.row} FROM generate_series(1::int8, {rows:d}) g".encode())
    conn.execute("VACUUM ANALYZE t")


def _first_marker(ground: Ground, file: Path, source: str, settings: StreamSettings) -> SnapshotMarker:
    with (
        MarkerFollower(ground.kafka.bootstrap, settings.marker_topic) as follower,
        part.worker(file, source) as process,
    ):
        follower.until(lambda m: not m.copying and bool(m.safe_hlc), process.check)
    newest = newest_marker(settings.kafka, settings.marker_topic)
    if newest is None:
        raise BenchError("the stream left no marker")
    return newest


def _at(first: SnapshotMarker, lsn: int) -> SnapshotMarker:
    """Return the first marker moved to another position of the same log."""
    resume = Resume.decode(first.resume)
    assert resume is not None
    token = Resume(lsn=lsn, commit_lsn=lsn, system_id=resume.system_id, timeline=resume.timeline)
    vector = VectorTime({first.site: lsn})
    return dataclasses.replace(
        first, resume=token.encode(), first_seq=lsn, last_seq=lsn, vector=vector, rows=0, ranges=(), schemas=()
    )


def _one(conn: psycopg.Connection, query: str, *parameters: object) -> str:
    row = conn.execute(query.encode(), parameters).fetchone()
    assert row is not None
    return str(row[0])


def end_text(found: Workload) -> str:
    """Return the workload's end as PostgreSQL writes it."""
    return lsn_text(found.end)
