"""The decoder on hand-made bytes of the replication stream, cut anywhere."""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch_connectors.change import Transaction
from anabranch_connectors.postgres.encode import compile_encoder
from anabranch_connectors.postgres.envelope import EnvelopeTail
from anabranch_connectors.postgres.errors import ProtocolError, ReplicationEndedError, ServerError
from anabranch_connectors.postgres.pgtable import PgColumn, PgTable, PgType
from anabranch_connectors.postgres.spill import TransactionBuffer
from anabranch_connectors.postgres.stream import POSTGRES_EPOCH_US, LogDecoder, Relation, TableRoute
from anabranch_schemas.marker import TableVersion

INT8, TEXT = PgType(20, "bigint"), PgType(25, "text")
TABLE = PgTable(7, "public", "t", (PgColumn("id", INT8, nullable=False), PgColumn("v", TEXT, nullable=True)), ("id",))
C, U, D, T = b"cudt"


class Harness:
    """A decoder and what it hands over."""

    def __init__(self, *, wanted: bool = True, tombstones: bool = True, now_us: int = 0) -> None:
        self.transactions: list[tuple[Transaction, list[tuple[int, bytes | None, bool]]]] = []
        self.relations: list[Relation] = []
        self.wanted = wanted
        tail = EnvelopeTail("0", "p", "db")
        encoder = compile_encoder(TABLE, key_frame=b"KKKKK", value_frame=b"VVVVV", as_text=lambda *_: "")
        self.route = TableRoute(
            "t", TableVersion("public.t", "t", 1, 2), encoder, tail.table("public", "t"), b"VVVVV", lambda _: []
        )
        self.decoder = LogDecoder(
            load_relation=self._load,
            transaction=self._take,
            tail=tail,
            buffer=TransactionBuffer(limit=1 << 20, directory=Path("/nonexistent")),
            now_us=lambda: now_us,
            widen_xid=lambda xid: xid + (1 << 32),
            tombstones=tombstones,
        )

    def _load(self, relation: Relation) -> TableRoute | None:
        self.relations.append(relation)
        return self.route if self.wanted else None

    def _take(self, transaction: Transaction, xid: int) -> None:
        assert xid == transaction.txid
        self.transactions.append(
            (transaction, [(op, key, value is None) for _, op, _, key, value, _ in transaction.changes])
        )

    @property
    def changes(self) -> list[list[tuple[int, bytes | None, bool]]]:
        """(op, key, whether it is a tombstone) of each change of each transaction."""
        return [changes for _, changes in self.transactions]


def copy_data(body: bytes) -> bytes:
    return b"d" + struct.pack("!I", len(body) + 4) + body


def xlog(message: bytes, lsn: int = 0x100, clock_us: int = 0) -> bytes:
    return copy_data(b"w" + struct.pack("!QQq", lsn, lsn, clock_us) + message)


def keepalive(lsn: int, *, clock_us: int = 0, reply: bool = False) -> bytes:
    return copy_data(b"k" + struct.pack("!QqB", lsn, clock_us, reply))


def begin(xid: int = 9, commit_us: int = 1_000_000) -> bytes:
    return xlog(b"B" + struct.pack("!QqI", 0x200, commit_us, xid))


def commit(end: int = 0x300, commit_us: int = 1_000_000, clock_us: int = 0) -> bytes:
    return xlog(b"C" + struct.pack("!BQQq", 0, end - 0x30, end, commit_us), clock_us=clock_us)


def relation(oid: int = 7) -> bytes:
    columns = b"".join(
        bytes((key,)) + name + b"\0" + struct.pack("!Ii", type_, -1)
        for key, name, type_ in ((1, b"id", 20), (0, b"v", 25))
    )
    return xlog(b"R" + struct.pack("!I", oid) + b"public\0t\0d" + struct.pack("!H", 2) + columns)


def row(number: int | None, text: str | None = "x") -> bytes:
    fields = [
        b"n" if field is None else b"b" + struct.pack("!I", len(field)) + field
        for field in (
            None if number is None else struct.pack("!q", number),
            None if text is None else text.encode(),
        )
    ]
    return struct.pack("!H", 2) + b"".join(fields)


def insert(number: int) -> bytes:
    return xlog(b"I" + struct.pack("!I", 7) + b"N" + row(number))


def update(number: int, old: tuple[bytes, int] | None = None) -> bytes:
    before = b"" if old is None else old[0] + row(old[1], "old" if old[0] == b"O" else None)
    return xlog(b"U" + struct.pack("!I", 7) + before + b"N" + row(number))


def delete(number: int, kind: bytes = b"K") -> bytes:
    return xlog(b"D" + struct.pack("!I", 7) + kind + row(number, None))


def truncate(*oids: int) -> bytes:
    return xlog(b"T" + struct.pack("!IB", len(oids), 0) + struct.pack(f"!{len(oids)}I", *oids))


def message(lsn: int, *, transactional: bool = False, prefix: bytes = b"p") -> bytes:
    return xlog(b"M" + struct.pack("!BQ", transactional, lsn) + prefix + b"\0" + struct.pack("!I", 2) + b"hi")


def key(number: int) -> bytes:
    return b"KKKKK" + bytes((number * 2,))


def test_a_transaction_is_handed_over_at_its_commit() -> None:
    harness = Harness()
    harness.decoder.feed(relation() + begin() + insert(1) + update(1))
    assert (harness.transactions, harness.decoder.in_transaction, harness.decoder.position) == ([], True, 0)
    harness.decoder.feed(delete(1) + commit(0x300, 2_000_000))
    assert harness.changes == [[(C, key(1), False), (U, key(1), False), (D, key(1), False), (D, key(1), True)]]
    (transaction, _) = harness.transactions[0]
    assert (transaction.seq, transaction.txid, transaction.spilled) == (0x300, (1 << 32) + 9, False)
    assert transaction.commit_us == 2_000_000 + POSTGRES_EPOCH_US
    assert harness.decoder.position == 0x300
    assert harness.decoder.last_commit_lsn == 0x2D0
    assert not harness.decoder.in_transaction


STREAM = (
    relation()
    + begin(1)
    + insert(1)
    + update(1, (b"K", 2))
    + commit(0x300)
    + keepalive(0x310)
    + begin(2)
    + truncate(7)
    + message(0x320)
    + delete(3)
    + commit(0x400)
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
@settings(max_examples=200)
def test_cuts_do_not_matter(cuts: list[int]) -> None:
    whole, cut = Harness(), Harness()
    whole.decoder.feed(STREAM)
    edges = [0, *sorted(cuts), len(STREAM)]
    for start, end in pairwise(edges):
        cut.decoder.feed(STREAM[start:end])
    assert cut.changes == whole.changes
    assert [t.size for t, _ in cut.transactions] == [t.size for t, _ in whole.transactions]
    assert cut.decoder.position == whole.decoder.position == 0x400
    assert cut.decoder.messages == whole.decoder.messages


def test_a_changed_key_is_a_delete_a_tombstone_and_a_create() -> None:
    harness = Harness()
    harness.decoder.feed(relation() + begin() + update(2, (b"K", 1)) + update(3, (b"O", 2)) + commit())
    one, two, three = key(1), key(2), key(3)
    assert harness.changes == [
        [(D, one, False), (D, one, True), (C, two, False), (D, two, False), (D, two, True), (C, three, False)]
    ]


def test_a_full_old_row_with_the_same_key_is_an_update() -> None:
    harness = Harness()
    harness.decoder.feed(relation() + begin() + update(2, (b"O", 2)) + commit())
    assert harness.changes == [[(U, key(2), False)]]


def test_without_tombstones_deletes_stand_alone() -> None:
    harness = Harness(tombstones=False)
    harness.decoder.feed(relation() + begin() + delete(1, b"O") + update(2, (b"K", 1)) + commit())
    assert harness.changes == [[(D, key(1), False), (D, key(1), False), (C, key(2), False)]]


def test_rows_of_unwanted_tables_leave_no_trace() -> None:
    harness = Harness(wanted=False)
    rows = insert(1) + update(1) + update(1, (b"K", 2)) + delete(1) + truncate(7)
    harness.decoder.feed(relation() + begin() + rows + commit(0x300))
    assert harness.transactions == []
    assert harness.decoder.position == 0x300


def test_a_truncate_names_each_wanted_table() -> None:
    harness = Harness()
    harness.decoder.feed(relation(7) + relation(8) + begin() + truncate(7, 8) + commit())
    assert harness.changes == [[(T, None, False)] * 2]


def test_a_relation_is_described_as_the_log_has_it() -> None:
    harness = Harness()
    harness.decoder.feed(relation() + relation())
    assert harness.relations == [Relation(7, "public", "t", (("id", 20, -1), ("v", 25, -1)))] * 2


def test_only_messages_outside_of_transactions_are_noted_and_move_the_position() -> None:
    harness = Harness()
    harness.decoder.feed(message(0x500, prefix=b"a") + begin() + message(0x600, transactional=True) + commit(0x610))
    assert harness.decoder.messages == [("a", 0x500)]
    harness.decoder.feed(message(0x700))
    assert harness.decoder.position == 0x700
    harness.decoder.feed(message(0x650))
    assert harness.decoder.position == 0x700


def test_a_keepalive_moves_the_position_only_between_transactions() -> None:
    harness = Harness()
    harness.decoder.feed(keepalive(0x100, clock_us=5))
    assert (harness.decoder.position, harness.decoder.server_us) == (0x100, 5 + POSTGRES_EPOCH_US)
    harness.decoder.feed(begin() + keepalive(0x900, reply=True))
    assert harness.decoder.position == 0x100
    assert harness.decoder.reply_wanted
    harness.decoder.feed(keepalive(0x900))
    assert harness.decoder.reply_wanted, "until it is answered"


def test_the_backlog_is_how_late_the_last_commit_was_sent() -> None:
    harness = Harness()
    harness.decoder.feed(begin() + commit(commit_us=1_000_000, clock_us=1_250_000))
    assert harness.decoder.backlog_us == 250_000
    harness.decoder.feed(begin())
    assert harness.decoder.backlog_us == 0


def test_what_says_nothing_is_passed_over() -> None:
    harness = Harness()
    harness.decoder.feed(begin() + xlog(b"O" + bytes(8) + b"origin\0") + xlog(b"Y" + bytes(4) + b"a\0b\0") + commit())
    assert harness.decoder.position == 0x300


def test_foreign_messages_end_the_stream_loudly() -> None:
    for frame, error in (
        (xlog(b"Q"), ProtocolError),
        (copy_data(b"x" + bytes(30)), ProtocolError),
        (b"c\0\0\0\4", ReplicationEndedError),
        (
            b"E\0\0\0\x14C42P01\0Mgone away\0\0"[:1] + struct.pack("!I", 4 + 18) + b"C42P01\0Mgone away\0"[:18],
            ServerError,
        ),
    ):
        with pytest.raises(error):
            Harness().decoder.feed(frame)


def test_relations_can_be_forgotten() -> None:
    harness = Harness()
    harness.decoder.feed(relation())
    harness.decoder.forget_relations()
    with pytest.raises(KeyError):
        harness.decoder.feed(begin() + insert(1))
