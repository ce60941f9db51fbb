"""Compares source and target at one safe time, down to rows.

Both sides reduce every row to the MD5 of its text and every key to one of 1,024 buckets; a bucket is compared by its
row count and the sum of its rows' digests, and only buckets that differ are looked into. Each round reads the source,
waits until the target's safe time has passed that moment, and reads the target: on a source at rest that is one state
of both. On one that is being written, a row may differ because a later change has arrived already or is on its way.
So a row that differed is looked at again, until the target shows an image that the source was seen to have (equal),
or does not show the source's image although that has stayed the same from one round to the next (different).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import psycopg
from psycopg import sql

from anabranch.errors import NotCaughtUpError
from anabranch_connectors.postgres.pgtable import PgTable

_BUCKETS = 1024
_ROUNDS = 30  # a row that is written twice a second settles within a few
_SAMPLES = 10
_POLL_S = 0.05
# Text must not depend on what a role or database sets.
_SESSION = (
    "SET datestyle = 'ISO'; SET intervalstyle = 'postgres'; SET extra_float_digits = 3; SET timezone = 'UTC'; "
    "SET bytea_output = 'hex'; SET search_path = pg_catalog"
)


@dataclass(frozen=True, slots=True)
class TableResult:
    """What one table's comparison found."""

    table: str
    rows: int
    """Rows at the source."""
    missing: int = 0
    """Rows of the source that the target lacks."""
    extra: int = 0
    """Rows of the target that the source lacks."""
    different: int = 0
    unsettled: int = 0
    """Rows that kept changing at the source while they were compared."""
    samples: tuple[str, ...] = ()
    """Keys of some rows that differ, each with what is wrong."""

    @property
    def equal(self) -> bool:
        """Tell whether source and target hold the same rows."""
        return not (self.missing or self.extra or self.different or self.unsettled)


@dataclass(frozen=True, slots=True)
class _Side:
    """One table at one database."""

    connection: psycopg.Connection
    schema: str
    name: str
    columns: Sequence[str]
    key: Sequence[str]

    def buckets(self) -> dict[int, tuple[int, int]]:
        """Return bucket → (rows, sum of digests)."""
        query = sql.SQL("SELECT {bucket}, count(*), sum({digest}) FROM {table} GROUP BY 1").format(**self._parts())
        return {b: (n, int(d)) for b, n, d in self.connection.execute(query)}

    def rows(self, buckets: Sequence[int]) -> dict[str, str]:
        """Return key text → MD5 of the row, for all rows of some buckets."""
        query = sql.SQL("SELECT {key}::text, {md5} FROM {table} WHERE {bucket} = ANY(%s)").format(**self._parts())
        return dict(self.connection.execute(query, [list(buckets)]).fetchall())

    def _parts(self) -> dict[str, sql.Composable]:
        row = sql.SQL("ROW({})").format(sql.SQL(", ").join(map(sql.Identifier, self.columns)))
        key = sql.SQL("ROW({})").format(sql.SQL(", ").join(map(sql.Identifier, self.key)))
        md5 = sql.SQL("md5({}::text)").format(row)
        return {
            "table": sql.SQL("{}.{}").format(sql.Identifier(self.schema), sql.Identifier(self.name)),
            "key": key,
            "md5": md5,
            # 60 of the 128 bits, so that the sum of billions of rows stays a numeric of modest size
            "digest": sql.SQL("('x' || left({}, 15))::bit(60)::bigint").format(md5),
            "bucket": sql.SQL("('x' || left(md5({}::text), 8))::bit(32)::bigint & {}").format(
                key, sql.Literal(_BUCKETS - 1)
            ),
        }


def compare_table(
    table: PgTable,
    source: psycopg.Connection,
    target: psycopg.Connection,
    target_name: tuple[str, str],
    wait_for: Callable[[datetime], None],
) -> TableResult:
    """Compare one table; both connections are in autocommit.

    `wait_for(T)` returns when the target's safe time is T or later.

    Raises:
        NotCaughtUpError: by `wait_for`, if the target does not get there.
    """
    columns = [column.name for column in table.published_columns]
    here = _Side(source, table.schema, table.name, columns, table.key)
    there = _Side(target, *target_name, columns, table.key)
    left = here.buckets()
    rows = sum(n for n, _ in left.values())
    wait_for(_now_at(source))
    right = there.buckets()
    buckets = [bucket for bucket in {*left, *right} if left.get(bucket) != right.get(bucket)]
    suspects = _Suspects()
    for _ in range(_ROUNDS if buckets else 0):
        source_rows = here.rows(buckets)
        wait_for(_now_at(source))
        if suspects.settle(source_rows, there.rows(buckets)):
            break
    kinds = list(suspects.wrong.values())
    return TableResult(
        table.path,
        rows,
        missing=kinds.count("missing"),
        extra=kinds.count("extra"),
        different=kinds.count("different"),
        unsettled=len(suspects.open),
        samples=tuple(f"{key}: {kind}" for key, kind in sorted((suspects.wrong | suspects.open).items())[:_SAMPLES]),
    )


@dataclass(slots=True)
class _Suspects:
    """Rows that differed when they were first looked at, and what became of them. Images are digests, None: no row."""

    open: dict[str, str] = field(default_factory=dict)
    """Key → what is wrong, not decided yet."""
    wrong: dict[str, str] = field(default_factory=dict)
    """Key → what is wrong for good."""
    _seen: dict[str, set[str | None]] = field(default_factory=dict)
    _last: dict[str, str | None] | None = None

    def settle(self, source: dict[str, str], target: dict[str, str]) -> bool:
        """Take one round's rows; the target's were read when it had what the source's show. True: all is decided."""
        found = _differences(source, target)
        if self._last is None:
            self.open = found
        for key in list(self.open):
            image = source.get(key)
            self._seen.setdefault(key, set()).add(image)
            if target.get(key) in self._seen[key]:
                del self.open[key]
            elif self._last is not None and self._last.get(key) == image:
                self.wrong[key] = self.open.pop(key)
            else:
                self.open[key] = found[key]
        self._last = {key: source.get(key) for key in self.open}
        return not self.open


def _differences(left: dict[str, str], right: dict[str, str]) -> dict[str, str]:
    found = {}
    for key in {*left, *right}:
        if key not in right:
            found[key] = "missing"
        elif key not in left:
            found[key] = "extra"
        elif left[key] != right[key]:
            found[key] = "different"
    return found


def prepare(connection: psycopg.Connection) -> None:
    """Make a session print values as the other side's does."""
    connection.execute(_SESSION)


def safe_time_waiter(
    target: psycopg.Connection, streams: Sequence[str], *, timeout_s: float
) -> Callable[[datetime], None]:
    """Return a function that waits until the target is complete up to a time from all `streams`."""

    def wait(moment: datetime) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            row = _safe_time(target, streams)
            if row[0] == len(streams) and row[1] is not None and row[1] >= moment:
                return
            if time.monotonic() > deadline:
                raise NotCaughtUpError(
                    f"the target's safe time is {row[1] or 'not set'}, the source was read at {moment}",
                    where=", ".join(streams),
                    advice="see `anabranch status FILE`: is the sink running, is the stream still being copied? "
                    "--timeout gives it longer",
                )
            time.sleep(_POLL_S)

    return wait


def _safe_time(target: psycopg.Connection, streams: Sequence[str]) -> tuple[int, datetime | None]:
    """Return how many of the streams have a safe time, and the earliest of them."""
    exists = target.execute("SELECT to_regclass('anabranch.progress') IS NOT NULL").fetchone()
    if exists is None or not exists[0]:
        return 0, None
    row = target.execute(
        "SELECT count(safe_time), min(safe_time) FROM anabranch.progress WHERE stream = ANY(%s)", [list(streams)]
    ).fetchone()
    assert row is not None
    return row[0], row[1]


def _now_at(source: psycopg.Connection) -> datetime:
    row = source.execute("SELECT clock_timestamp()").fetchone()
    assert row is not None
    moment: datetime = row[0]
    return moment


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The comparison of a whole pipeline."""

    tables: tuple[TableResult, ...] = field(default=())

    @property
    def equal(self) -> bool:
        """Tell whether all tables are equal."""
        return all(table.equal for table in self.tables)
