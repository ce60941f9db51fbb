"""pgoutput frames to transactions: the hot loop of the source.

One pass over the bytes of the replication stream. Rows go from PostgreSQL's binary tuple to the Avro value in one
generated call each (`encode`); a transaction is held as a list of such rows until its commit is read, because only
the commit says its position, and is spilled to disk beyond `spill_bytes`.

Message layouts: PostgreSQL documentation, "Logical Replication Message Formats" and "Streaming Replication Protocol".
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from anabranch_connectors.change import Change, Transaction
from anabranch_connectors.postgres.encode import NeedsCells, RowEncoder
from anabranch_connectors.postgres.envelope import EnvelopeTail
from anabranch_connectors.postgres.errors import ProtocolError
from anabranch_connectors.postgres.replication import stream_error
from anabranch_connectors.postgres.spill import TransactionBuffer
from anabranch_schemas.marker import TableVersion
from anabranch_schemas.stamp import Flag

# Generated decoders read a few bytes past a tuple's end before they look; 30 fixed-width columns take 30 × 13 bytes.
PADDING = bytes(4096)
POSTGRES_EPOCH_US = 946_684_800_000_000  # 2000-01-01, where PostgreSQL's timestamps count from

_U32 = struct.Struct("!I").unpack_from
# CopyData's kind and length, XLogData's kind, start, (end, clock); then of a row change: its kind, the table
_HEAD = struct.Struct("!BIBQ16xBI").unpack_from
_CLOCK = struct.Struct("!q").unpack_from
_KEEPALIVE = struct.Struct("!QqB").unpack_from  # server's end of WAL, server's clock, reply wanted
_BEGIN = struct.Struct("!QqI").unpack_from  # commit record's LSN, commit time, xid
_COMMIT = struct.Struct("!BQQq").unpack_from  # flags, commit record's LSN, its end, commit time
_TYPE = struct.Struct("!Ii").unpack_from  # type oid, type modifier
_MESSAGE = struct.Struct("!BQ").unpack_from  # flags, LSN

_C, _U, _D, _T = b"cudt"
_FRAME_HEAD = 30  # 'd', length (4), 'w', start (8), end (8), clock (8)
_CLOCK_AT = 22


@dataclass(slots=True, eq=False)
class TableRoute:
    """One version of a table: where its rows go and how they are encoded. Implements `change.Route`."""

    topic: str
    version: TableVersion
    encoder: RowEncoder
    piece: bytes
    """The table's part of the envelope's source struct."""
    value_frame: bytes
    key_fields: Callable[[bytes], list[bytes]]
    """framed key → its columns in COPY's binary form"""


@dataclass(frozen=True, slots=True)
class Relation:
    """A table as the log describes it at this point."""

    oid: int
    schema: str
    name: str
    columns: tuple[tuple[str, int, int], ...]
    """(name, type oid, type modifier) of each column that travels"""


RelationLoader = Callable[[Relation], TableRoute | None]
"""Gives a relation its route, or None if its rows are not wanted."""


class LogDecoder:
    """Turns the bytes of a replication connection into transactions.

    `transaction` is called once for every committed transaction that has changes, in commit order, from within `feed`.
    """

    def __init__(
        self,
        *,
        load_relation: RelationLoader,
        transaction: Callable[[Transaction, int], None],
        tail: EnvelopeTail,
        buffer: TransactionBuffer,
        now_us: Callable[[], int],
        widen_xid: Callable[[int], int],
        tombstones: bool = True,
    ) -> None:
        self._load_relation = load_relation
        self._transaction = transaction
        self._tail = tail
        self._buffer = buffer
        self._now_us = now_us
        self._widen_xid = widen_xid
        self._tombstones = tombstones
        self._routes: dict[int, TableRoute | None] = {}
        self._rest = b""
        self._last_was_commit = False
        self._xid = 0
        self._now = 0
        self._read = self._before = 0  # bytes of the stream, in all and before the present call of `feed`
        self._began = 0  # where in them the open transaction began
        self.in_transaction = False
        self.last_commit_lsn = 0
        self.last_commit_us = 0
        self.position = 0
        """All transactions that end at or before this LSN have been handed over."""
        self.server_us = 0
        """The server's clock as of its last message, microseconds since 1970."""
        self.reply_wanted = False
        self.messages: list[tuple[str, int]] = []
        """(prefix, LSN) of the non-transactional messages read since the list was last emptied."""

    @property
    def backlog_us(self) -> int:
        """How old the last commit was when the server sent its last message: 0 if the log has been silent since."""
        return self.server_us - self.last_commit_us if self._last_was_commit else 0

    def forget_relations(self) -> None:
        """Load every relation anew when it is next named."""
        self._routes.clear()

    def feed(self, data: bytes) -> None:
        """Read all complete frames of `data` (with what was left over from the call before)."""
        rest = self._rest
        whole = rest + data if rest else data
        end = len(whole)
        b = whole + PADDING
        p = 0
        last = -1  # where the last XLogData frame began
        routes = self._routes
        add = self._buffer.add
        tail = self._tail.tail
        self._now = self._now_us()
        self._before = self._read
        while end - p >= 5:
            copy_data, size, kind, lsn, m, oid = _HEAD(b, p)
            after = p + 1 + size
            if after > end:
                break
            if copy_data != 0x64:
                raise stream_error(whole[p:after])
            if kind == 0x77:  # XLogData
                last = p
                if m == 0x49 or (m == 0x55 and b[p + 35] == 0x4E):  # Insert; Update with the new tuple alone
                    route = routes[oid]
                    if route is not None:
                        encoder = route.encoder
                        op = _C if m == 0x49 else _U
                        try:
                            value, key, _ = encoder.row(b, p + 36, encoder.insert_head, tail(route.piece, op, lsn))
                            add((route, op, 0, key, value, None))
                        except NeedsCells:
                            add(self._encoded(route, b, p + 36, encoder.insert_head, op, lsn))
                elif m == 0x42:
                    self._begin(b, p)
                elif m == 0x43:
                    self._commit(b, p, after)
                elif m == 0x55:
                    self._update_with_old(b, p, oid, lsn)
                else:
                    self._other(b, p, m)
            elif kind == 0x6B:
                self._keepalive(b, p + 6)
            else:
                raise ProtocolError(f"unexpected replication message {chr(kind)!r}")
            p = after
        if last >= 0:
            self._last_was_commit = b[last + _FRAME_HEAD] == 0x43
            self.server_us = _CLOCK(b, last + _CLOCK_AT)[0] + POSTGRES_EPOCH_US
        self._rest = whole[p:]
        self._read += p
        if self.in_transaction:
            self._buffer.relieve()

    # One name a message kind; the common ones stand in the loop itself.

    def _begin(self, b: bytes, p: int) -> None:
        _, commit_time, xid = _BEGIN(b, p + 31)
        self._xid = self._widen_xid(xid)
        self._tail.begin(commit_time + POSTGRES_EPOCH_US, self._xid, self._now, self.last_commit_lsn)
        self._began = self._before + p
        self.in_transaction = True

    def _commit(self, b: bytes, p: int, after: int) -> None:
        _, commit_lsn, end_lsn, commit_time = _COMMIT(b, p + 31)
        self.in_transaction = False
        self.last_commit_lsn = commit_lsn
        self.last_commit_us = commit_time + POSTGRES_EPOCH_US
        self.position = end_lsn
        changes, spilled = self._buffer.take()
        if len(changes):
            size = self._before + after - self._began
            self._transaction(Transaction(end_lsn, self.last_commit_us, self._xid, changes, size, spilled), self._xid)

    def _other(self, b: bytes, p: int, m: int) -> None:
        if m == 0x44:
            self._delete(b, p)
        elif m == 0x52:
            self._relation(b, p + 31)
        elif m == 0x54:
            self._truncate(b, p)
        elif m == 0x4D:
            self._message(b, p + 31)
        elif m not in (0x4F, 0x59):  # Origin and Type say nothing that is needed here
            raise ProtocolError(f"unexpected pgoutput message {chr(m)!r}")

    def _relation(self, b: bytes, o: int) -> None:
        oid = _U32(b, o)[0]
        schema_end = b.index(0, o + 4)
        name_end = b.index(0, schema_end + 1)
        count = int.from_bytes(b[name_end + 2 : name_end + 4], "big")  # past the replica identity
        at = name_end + 4
        columns = []
        for _ in range(count):
            end = b.index(0, at + 1)
            type_oid, typmod = _TYPE(b, end + 1)
            columns.append((b[at + 1 : end].decode(), type_oid, typmod))
            at = end + 9
        # An empty namespace stands for pg_catalog.
        schema = b[o + 4 : schema_end].decode() or "pg_catalog"
        relation = Relation(oid, schema, b[schema_end + 1 : name_end].decode(), tuple(columns))
        self._routes[oid] = self._load_relation(relation)

    def _delete(self, b: bytes, p: int) -> None:
        route = self._routes[_U32(b, p + 31)[0]]
        if route is not None:
            self._add_delete(route, b, p + 35, _U32(b, p + 6)[0] << 32 | _U32(b, p + 10)[0])

    def _add_delete(self, route: TableRoute, b: bytes, o: int, lsn: int) -> int:
        """Add the delete (and its tombstone) of the old tuple whose kind byte is at `o`; return the tuple's end."""
        old = route.encoder.old_row if b[o] == 0x4F else route.encoder.old_key
        image, key, end = old(b, o + 1)
        value = route.value_frame + b"\x02" + image + b"\x00" + self._tail.tail(route.piece, _D, lsn)
        self._buffer.add((route, _D, 0, key, value, None))
        if self._tombstones:
            self._buffer.add((route, _D, 0, key, None, None))
        return end

    def _update_with_old(self, b: bytes, p: int, oid: int, lsn: int) -> None:
        """Add an update that came with its old tuple: a changed key, or replica identity full."""
        route, o = self._routes[oid], p + 35
        if route is None:
            return
        encoder = route.encoder
        full = b[o] == 0x4F
        old = encoder.old_row if full else encoder.old_key
        image, old_key, end = old(b, o + 1)
        new = end + 1  # past 'N'
        filler = o + 1 if full else -1
        head = route.value_frame + b"\x02" + image + b"\x02"
        change = self._encoded(route, b, new, head, _U, lsn, filler)
        if change[3] == old_key:
            self._buffer.add(change)
            return
        # Debezium's form of a changed key: the old row goes, a new one comes.
        value = route.value_frame + b"\x02" + image + b"\x00" + self._tail.tail(route.piece, _D, lsn)
        self._buffer.add((route, _D, 0, old_key, value, None))
        if self._tombstones:
            self._buffer.add((route, _D, 0, old_key, None, None))
        self._buffer.add(self._encoded(route, b, new, encoder.insert_head, _C, lsn, filler))

    def _encoded(self, route: TableRoute, b: bytes, o: int, head: bytes, op: int, lsn: int, old: int = -1) -> Change:
        tail = self._tail.tail(route.piece, op, lsn)
        value, key, _, cells, missing = route.encoder.row_with_cells(b, o, head, tail, old)
        return route, op, Flag.PARTIAL if missing else 0, key, value, cells or None

    def _truncate(self, b: bytes, p: int) -> None:
        lsn = _U32(b, p + 6)[0] << 32 | _U32(b, p + 10)[0]
        count = _U32(b, p + 31)[0]
        for i in range(count):
            route = self._routes[_U32(b, p + 36 + 4 * i)[0]]
            if route is not None:
                value = route.value_frame + b"\x00\x00" + self._tail.tail(route.piece, _T, lsn)
                self._buffer.add((route, _T, 0, None, value, None))

    def _message(self, b: bytes, o: int) -> None:
        flags, lsn = _MESSAGE(b, o)
        prefix_end = b.index(0, o + 9)
        if not flags & 1:
            self.messages.append((b[o + 9 : prefix_end].decode(), lsn))
            if not self.in_transaction:
                self.position = max(self.position, lsn)

    def _keepalive(self, b: bytes, o: int) -> None:
        server_end, clock, reply = _KEEPALIVE(b, o)
        self.server_us = clock + POSTGRES_EPOCH_US
        self.reply_wanted = self.reply_wanted or bool(reply)
        if not self.in_transaction:
            # A keepalive's position is what the server has sent: nothing before it is still to come.
            self.position = max(self.position, server_end)
