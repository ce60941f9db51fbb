"""The copy phase against a raw COPY.

Ours is the worker from START_REPLICATION (the copy begins right after) until the marker of the last chunk can be read
from Kafka. The peer is `COPY t TO STDOUT` in text form, drained by one Python process that only counts bytes, in the
largest reads the socket gives.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from itertools import count

from anabranch import parts, pipeline
from anabranch_connectors.postgres import slots
from anabranch_connectors.postgres.dial import dial
from anabranch_connectors.postgres.messages import frame
from bench import part
from bench.figure import BenchError, Figure, Group, Round, Size
from bench.ground import Ground, connect, new_database
from bench.machine import cpu_s
from bench.markers import MarkerFollower
from bench.walsender import await_walsender
from bench.workloads import INSERT_10, NARROW, drop_slot, fill

_NAME = "snapshot"
_READ_BYTES = 1 << 20
_READY = b"Z\0\0\0\x05I"  # the whole ReadyForQuery outside of a transaction: what the server sends last


def _rounds(ground: Ground, size: Size) -> Generator[Mapping[str, Round], None, None]:
    dsn = new_database(ground.eu, _NAME)
    with connect(dsn) as conn:
        conn.execute(NARROW)
        fill(conn, INSERT_10, size.rows)
    for number in count():
        peer = size.rows / drain(dsn)
        ours, worker_us = copy(ground, dsn, size.rows, f"{_NAME}_{number}")
        yield {_NAME: Round.of_rates(ours, peer, worker_cpu_us_per_row=worker_us)}


def drain(dsn: str) -> float:
    """Read the table by a raw COPY; return the seconds."""
    link = dial(dsn, {"application_name": "bench"})
    try:
        link.socket.settimeout(None)
        began = time.perf_counter()
        link.socket.sendall(frame(b"Q", b"COPY t TO STDOUT\0"))
        tail = b""
        while not tail.endswith(_READY):
            data = link.socket.recv(_READ_BYTES)
            if not data:
                raise BenchError("the server closed the connection during a copy")
            tail = (tail + data[-len(_READY) :])[-len(_READY) :]
        return time.perf_counter() - began
    finally:
        link.close()


def copy(ground: Ground, dsn: str, rows: int, name: str) -> tuple[float, float]:
    """Copy the table by a new stream; return rows/s and CPU µs/row of the worker."""
    file = ground.pipeline(name, {"name": name, "dsn": dsn, "tables": ["public.t"]})
    loaded = pipeline.load(file)
    source = loaded.sources[0]
    options = parts.postgres_options(loaded, source)
    topic = parts.stream_settings(loaded, source).marker_topic
    with MarkerFollower(ground.kafka.bootstrap, topic) as follower, part.worker(file, name) as process:
        server = await_walsender(dsn, options.slot, process.check)
        worker_cpu = cpu_s(process.pid)
        _, ended = follower.until(lambda m: bool(m.copy) and not m.copying, process.check)
        worker_cpu = cpu_s(process.pid) - worker_cpu
    with connect(dsn) as conn:
        if slots.find_slot(conn, options.slot) is not None:
            drop_slot(conn, options.slot)
    return rows / (ended - server.began), worker_cpu / rows * 1e6


GROUPS = (Group((Figure(_NAME, 0.15, "rows/s", "a table copied to Kafka / raw COPY to nothing"),), _rounds),)
