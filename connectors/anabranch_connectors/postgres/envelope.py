"""Everything of a PostgreSQL change record behind the after-image: source, transaction, op and times.

Most of it is the same for every row of a transaction, and the LSN's high bits are the same for every row of a WAL
page: a row adds the LSN's digits and low bits, the table and the op, in one formatting call.
"""

from __future__ import annotations

from typing import Any

from anabranch_schemas.envelope.varint import MORE, PLAIN, SMALL, sized, unsigned

_SNAPSHOT = "true,first,first_in_data_collection,last_in_data_collection,last,false,incremental"


def _optional(name: str, branch: str) -> dict[str, Any]:
    return {"name": name, "type": ["null", branch], "default": None}


SOURCE_SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "Source",
    "namespace": "io.debezium.connector.postgresql",
    "fields": [
        {"name": "version", "type": "string"},
        {"name": "connector", "type": "string"},
        {"name": "name", "type": "string"},
        {"name": "ts_ms", "type": "long"},
        {
            "name": "snapshot",
            "type": [
                {
                    "type": "string",
                    "connect.version": 1,
                    "connect.parameters": {"allowed": _SNAPSHOT},
                    "connect.default": "false",
                    "connect.name": "io.debezium.data.Enum",
                },
                "null",
            ],
            "default": "false",
        },
        {"name": "db", "type": "string"},
        _optional("sequence", "string"),
        _optional("ts_us", "long"),
        _optional("ts_ns", "long"),
        {"name": "schema", "type": "string"},
        {"name": "table", "type": "string"},
        _optional("txId", "long"),
        _optional("lsn", "long"),
        _optional("xmin", "long"),
        _optional("origin", "string"),
        _optional("origin_lsn", "long"),
    ],
    "connect.version": 1,
    "connect.name": "io.debezium.connector.postgresql.Source",
}
"""Debezium's source struct of version 3.7."""

_PRESENT = b"\x02"
_NOT_COPIED = b"\x00" + sized(b"false")
# xmin, origin, origin_lsn and the envelope's transaction are null; then the op.
_OPS = [b"\x00\x00\x00\x00" + sized(bytes((op,))) for op in range(128)]
_READ = ord("r")
_PAGE_BITS = 13
_PAGE_LAST = (1 << _PAGE_BITS) - 1
# A varint's first two bytes hold 14 bits of the zigzag number: 13 of an LSN (never below the first segment, 16 MiB).
_FUSED_SINCE_US = 1 << 46  # March 1972: from then on the nanoseconds of a time, doubled, have more than 56 bits
_LOW = [MORE[low << 1] for low in range(1 << _PAGE_BITS)]


class EnvelopeTail:
    """Builds tails for the rows of one stream; not for several threads at once.

    `version` is what `source.version` shows, `name` the topic prefix, `db` the database. Times are microseconds
    since 1970.
    """

    def __init__(self, version: str, name: str, db: str) -> None:
        self._who = sized(version.encode()) + sized(b"postgresql") + sized(name.encode())
        self._db = sized(db.encode()) + _PRESENT
        self._before = self._sequence = self._times = self._transaction = self._now = b""
        self._now_us = self._ts_ms = -1
        self._page = -1
        self._digits = 0  # of the LSNs on the page
        self._lead = self._high = b""

    def table(self, schema: str, name: str) -> bytes:
        """Return the piece of a table, for `tail` and `copy_tail`."""
        return sized(schema.encode()) + sized(name.encode())

    def begin(self, commit_us: int, txid: int, now_us: int, last_commit_lsn: int) -> None:
        """Start a transaction; `last_commit_lsn` is the commit of the one before, 0 if there was none."""
        self._start(commit_us, now_us, last_commit_lsn)
        self._transaction = _PRESENT + unsigned(txid * 2) + _PRESENT

    def begin_copy(self, snapshot_us: int, now_us: int, last_lsn: int) -> None:
        """Start a chunk of copied rows, read in a snapshot taken at `snapshot_us`."""
        self._start(snapshot_us, now_us, last_lsn)
        self._transaction = b"\x00" + _PRESENT

    def tail(self, table_piece: bytes, op: int, lsn: int) -> bytes:
        """Return what follows `after` in the value of a logged row; `op` is the code of Debezium's letter."""
        if lsn >> _PAGE_BITS != self._page:
            self._turn_page(lsn)
        return b'%b%d"]%b%b%b%b%b%b%b' % (
            self._lead,
            lsn,
            self._times,
            table_piece,
            self._transaction,
            _LOW[lsn & _PAGE_LAST],
            self._high,
            _OPS[op],
            self._now,
        )

    def copy_tail(self, table_piece: bytes, lsn: int, snapshot: str) -> bytes:
        """Return what follows `after` in the value of a copied row; `snapshot` is Debezium's marker of its place."""
        return b"".join(
            (
                self._before,
                b"\x00",
                sized(snapshot.encode()),
                self._db,
                sized(self._sequence + b'%d"]' % lsn),
                self._times,
                table_piece,
                self._transaction,
                unsigned(lsn * 2),
                _OPS[_READ],
                self._now,
            )
        )

    def _start(self, ts_us: int, now_us: int, last_lsn: int) -> None:
        # Times are positive: doubling is their zigzag.
        ts_ms = ts_us // 1000
        if ts_ms != self._ts_ms:
            self._ts_ms = ts_ms
            self._before = self._who + unsigned(ts_ms * 2)
        self._sequence = b'["%d","' % last_lsn if last_lsn else b'[null,"'
        self._times = _instant(ts_us) if ts_us >= _FUSED_SINCE_US else _any_instant(ts_us)
        if now_us != self._now_us:
            self._now_us = now_us
            self._now = _PRESENT + unsigned(now_us // 1000 * 2) + _any_instant(now_us)
        self._begin_rows()

    def _begin_rows(self) -> None:
        """Make what comes before the LSN's digits, as long as their number is what it is on this page."""
        length = SMALL[len(self._sequence) + self._digits + 2]
        self._lead = b"".join((self._before, _NOT_COPIED, self._db, length, self._sequence))

    def _turn_page(self, lsn: int) -> None:
        """Make what the rows on the WAL page of `lsn` share: the LSN's digits count, its high bits."""
        page = lsn >> _PAGE_BITS
        self._high = unsigned(page)
        digits = len(b"%d" % lsn)
        if digits != self._digits:
            self._digits = digits
            self._begin_rows()
        # On a page where the LSN gains a digit this holds for one row only.
        first = page << _PAGE_BITS
        self._page = page if len(b"%d" % first) == len(b"%d" % (first | _PAGE_LAST)) else -1


def _any_instant(us: int) -> bytes:
    """Return ts_us and ts_ns of a time, both nullable."""
    return _PRESENT + unsigned(us * 2) + _PRESENT + unsigned(us * 2000)


def _instant(us: int) -> bytes:
    """Return the same for times whose microseconds take 7 bytes or 8 and nanoseconds 9: those from 1971 to 2262."""
    a, b = us * 2, us * 2000
    return b"\2%b%b%b%b\2%b%b%b%b%b" % (
        MORE[a & 0x3FFF],
        MORE[a >> 14 & 0x3FFF],
        MORE[a >> 28 & 0x3FFF],
        PLAIN[a >> 42],
        MORE[b & 0x3FFF],
        MORE[b >> 14 & 0x3FFF],
        MORE[b >> 28 & 0x3FFF],
        MORE[b >> 42 & 0x3FFF],
        PLAIN[b >> 56],
    )
