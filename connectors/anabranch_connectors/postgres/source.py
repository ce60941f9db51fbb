"""A PostgreSQL database as a `SourcePart`: slot, publication, log and chunks brought together."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping

from anabranch_connectors.change import Change, Chunk, LogPosition, Transaction
from anabranch_connectors.postgres import catalog, control, preconditions, publications, slots
from anabranch_connectors.postgres.chunks import ChunkReader, ChunkSnapshot, KeyBound, KeyPosition, key_position
from anabranch_connectors.postgres.copying import CopiedChunk, CopyProgress
from anabranch_connectors.postgres.encode import NeedsCells
from anabranch_connectors.postgres.envelope import EnvelopeTail
from anabranch_connectors.postgres.log_end import LogEnd
from anabranch_connectors.postgres.options import PostgresOptions
from anabranch_connectors.postgres.pgtable import PgTable
from anabranch_connectors.postgres.printer import TextPrinter
from anabranch_connectors.postgres.replication import ReplicationConnection
from anabranch_connectors.postgres.resume import Resume
from anabranch_connectors.postgres.routing import Routing
from anabranch_connectors.postgres.snapshot import StreamedTransactions, widen_xid
from anabranch_connectors.postgres.spill import TransactionBuffer
from anabranch_connectors.postgres.stream import PADDING, LogDecoder, TableRoute
from anabranch_connectors.source_part import HandOver, Router, StreamStart
from anabranch_schemas.marker import SnapshotMarker
from anabranch_schemas.stamp import Op

# A transaction that the server sends this long after its commit is one of a backlog. Well above what decoding and
# the network take when caught up (1 ms), well below what a person calls late.
_BEHIND_US = 50_000
_BOUNDS_MAX = 256  # parsed last keys kept; a chunk needs two
_RELIEVE_EVERY = 4096  # changes of a spilled transaction that are filtered before memory is looked at


class PostgresSource:
    """Implements `SourcePart`. Holds a walsender, a control connection, and one more while a chunk is copied."""

    def __init__(self, options: PostgresOptions, route: Router, *, version: str) -> None:
        self._options = options
        self._router = route
        self._version = version
        self._progress = CopyProgress()
        self._bounds: dict[tuple[str, bytes], KeyBound] = {}
        self._behind = True
        self._settled = False
        self._marked = False
        self._printer = TextPrinter(options.dsn)
        self._replication: ReplicationConnection | None = None
        self._control: control.Connection | None = None

    def start(self, stored: SnapshotMarker | None, hand_over: HandOver) -> StreamStart:
        """Take the stream up behind the stored marker (see `SourcePart.start`).

        1. Look at server, slot and publication against the stored position.
        2. Create what is missing, on a first start only.
        3. Take the copy phase up.
        4. Start streaming.
        """
        options = self._options
        self._hand_over = hand_over
        # 1.
        self._replication = ReplicationConnection.connect(options.dsn, application_name=options.application_name)
        self._identity = self._replication.identify_system()
        self._control = conn = control.connect(options.dsn, application_name=f"{options.application_name} control")
        preconditions.refuse_unfit(conn)
        slots.release(conn, options.slot, application_name=options.application_name)
        resume = preconditions.verify_position(conn, options, stored, self._identity)
        begun_anew = stored is not None and resume is None
        # 2.
        tables = {table.path: table for table in catalog.load_tables(conn, options.tables, options.key_columns)}
        preconditions.refuse_no_tables(options, tables)
        preconditions.refuse_unpublished(conn, options, stored, tables)
        publications.ensure_publication(
            conn,
            options.publication,
            options.stream,
            list(tables.values()),
            adopt=options.adopt,
            stored=resume is not None,
        )
        if resume is None:
            slot = slots.find_slot(conn, options.slot) or slots.create_slot(conn, options.slot)
            self._branch = f"{self._identity.system_id}-{self._identity.timeline}-{secrets.token_hex(4)}"
            resume = Resume(lsn=slot.confirmed_flush, commit_lsn=0, emptied_first=begun_anew)
        else:
            assert stored is not None
            self._branch = stored.branch
        # 3.
        self._take_up_copy(None if begun_anew else stored, resume, tables)
        # 4.
        self._end = LogEnd(conn, standby=catalog.is_standby(conn), heartbeat_s=options.heartbeat_s)
        self._end.look(resume.lsn, wanted=True)
        self._tail = EnvelopeTail(self._version, options.prefix, conn.info.dbname)
        self._copy_tail = EnvelopeTail(self._version, options.prefix, conn.info.dbname)
        self._routing = Routing(
            tables,
            connection=conn,
            prefix=options.prefix,
            router=self._router,
            tail=self._tail,
            as_text=self._printer,
            unknown_types=options.unknown_types,
        )
        self._buffer = TransactionBuffer(limit=options.spill_bytes, directory=options.spill_dir)
        self._kept = TransactionBuffer(limit=options.spill_bytes, directory=options.spill_dir)
        self._decoder = LogDecoder(
            load_relation=self._routing.relation,
            transaction=self._committed,
            tail=self._tail,
            buffer=self._buffer,
            now_us=_now_us,
            widen_xid=lambda xid: widen_xid(xid, self._end.next_xid),
            tombstones=options.tombstones,
        )
        self._decoder.position = resume.lsn
        self._decoder.last_commit_lsn = resume.commit_lsn
        self._seq = stored.last_seq if stored is not None else resume.lsn
        if begun_anew:
            self._seq = max(self._seq, resume.lsn)  # what was published at the stored position keeps its ordinals
        self._replication.start(
            options.slot,
            resume.lsn,
            {
                "proto_version": "1",
                "publication_names": control.quote_name(options.publication),
                "binary": "true",
                "messages": "true",
            },
        )
        return StreamStart(self._branch, self._position())

    def read(self, wait_s: float) -> LogPosition:
        """Hand over what the log has (see `SourcePart.read`)."""
        assert self._replication is not None
        decoder = self._decoder
        data = self._replication.receive(behind=self._behind, wait_s=wait_s)
        if data:
            decoder.feed(data)
            decoder.messages.clear()
            self._behind = decoder.in_transaction or decoder.backlog_us > _BEHIND_US
            if decoder.reply_wanted:
                decoder.reply_wanted = False
                self._replication.feedback(0)
        else:
            self._behind = False
        if not self._behind and self._end.look(decoder.position):
            self._replication.feedback(0, reply=True)
            if self._progress.outstanding and not self._progress.copying:
                self._end.push(decoder.position)  # the high marks may lie in what is not flushed yet
        return self._position()

    def copy_chunk(self, rows: int) -> Chunk | None:
        """Return the next chunk (see `SourcePart.copy_chunk`)."""
        name = self._progress.next_table()
        if name is None:
            return None
        reader = ChunkReader(self._options.dsn)
        try:
            opened = reader.open()
            if not self._xids.usable(opened.snapshot):
                # A transaction was streamed before snapshots see it; it will be visible in a moment.
                reader.close()
                return None
        except BaseException:
            reader.close()
            raise
        self._xids.prune(opened.snapshot)
        state, table = self._progress.tables[name], self._routing.tables[name]
        route = self._routing.table(table)
        return Chunk(
            route=route,
            changes=self._copied(reader, opened, route, table, state.last_key, rows),
            read_us=opened.snapshot_us,
            first_ordinal=self._first_ordinal(),
            position=self._position,
        )

    def acknowledge(self, durable: SnapshotMarker) -> None:
        """Move the slot behind a durable marker (see `SourcePart.acknowledge`)."""
        assert self._replication is not None
        assert self._control is not None
        resume = Resume.decode(durable.resume)
        if resume is not None:
            self._replication.feedback(resume.lsn)
        if not self._marked:
            # From now on a missing marker topic is a loss, not a beginning.
            publications.mark_branch(self._control, self._options.publication, self._options.stream, self._branch)
            self._marked = True

    def close(self) -> None:
        """Close all connections; the slot stays."""
        if self._replication is not None:
            self._replication.close()
        if self._control is not None:
            self._control.close()
        self._printer.close()

    # The log

    def _committed(self, transaction: Transaction, xid: int) -> None:
        """Take one committed transaction from the decoder, filter it while tables are being copied, hand it on."""
        progress = self._progress
        self._seq = transaction.seq
        if self._settled or progress.settled:
            self._ordinal = (transaction.seq, len(transaction.changes))
            self._hand_over(transaction)
            return
        rows = 0
        for at, change in enumerate(transaction.changes):
            if self._wanted(change, xid):
                self._kept.add(change)
                rows += change[4] is not None
            if transaction.spilled and not at % _RELIEVE_EVERY:
                self._kept.relieve()
        if progress.copying:  # also if a truncate has begun a copy again: the next chunk has to see it
            self._xids.add(xid)
        self._ordinal = (transaction.seq, rows)
        progress.passed(transaction.seq)
        kept, spilled = self._kept.take()
        if rows:
            self._hand_over(transaction._replace(changes=kept, spilled=spilled))

    def _wanted(self, change: Change, xid: int) -> bool:
        route, _, _, key, _, _ = change
        assert isinstance(route, TableRoute)
        if key is None:
            return self._progress.wants_truncate(route.version.table, xid)
        return self._progress.wants(route.version.table, route.key_fields(key), xid, self._bound)

    def _bound(self, table: str, last_key: bytes) -> KeyBound:
        bound = self._bounds.get((table, last_key))
        if bound is None:
            assert self._control is not None
            if len(self._bounds) > _BOUNDS_MAX:
                self._bounds.clear()
            bound = KeyBound(self._routing.tables[table], KeyPosition.decode(last_key), self._control)
            self._bounds[table, last_key] = bound
        return bound

    def _position(self) -> LogPosition:
        decoder, progress = self._decoder, self._progress
        if not progress.settled:
            progress.passed(decoder.position)
        # Asked once a read and not for every transaction: the answer takes a look at every table, and stays yes.
        self._settled = progress.settled
        seq, ordinal = self._ordinal
        resume = Resume(
            lsn=decoder.position,
            commit_lsn=decoder.last_commit_lsn,
            system_id=self._identity.system_id,
            timeline=self._identity.timeline,
            streamed_xids=tuple(self._xids.dump()) if progress.copying else (),
            last_seq=seq,
            next_ordinal=ordinal,
            chunks=tuple(progress.outstanding),
            emptied_first=self._emptied_first and progress.copying,
        )
        return LogPosition(
            seq=self._seq,
            resume=resume.encode(),
            safe_us=self._end.safe_us,
            behind=self._behind,
            copy=progress.states(),
            copying=progress.copying,
            consistent=self._settled,
        )

    # Copying

    def _take_up_copy(self, stored: SnapshotMarker | None, resume: Resume, tables: Mapping[str, PgTable]) -> None:
        progress = self._progress
        for state in stored.copy if stored is not None else ():
            # A table that is gone from the database, or from the patterns, is forgotten: when it comes back, it has
            # changed in the meantime and is copied like a new one.
            if state.table in tables:
                progress.take_up(state)
        for path in sorted(tables):
            progress.add(path)
        progress.outstanding = list(resume.chunks)
        self._xids = StreamedTransactions.load(resume.streamed_xids)
        self._ordinal = (resume.last_seq, resume.next_ordinal)
        self._emptied_first = resume.emptied_first

    def _copied(
        self,
        reader: ChunkReader,
        opened: ChunkSnapshot,
        route: TableRoute,
        table: PgTable,
        after: bytes | None,
        rows: int,
    ) -> Iterator[Change]:
        """Give the rows of one chunk; when they are consumed, the chunk is part of the position."""
        encoder = route.encoder
        row, head = encoder.copy_row, encoder.insert_head
        emptied = after is None and self._emptied_first
        if emptied:
            yield self._emptying(route, opened)
        self._copy_tail.begin_copy(opened.snapshot_us, _now_us(), self._decoder.last_commit_lsn)
        piece = route.piece
        begun = any(t.done or t.last_key is not None for t in self._progress.tables.values())
        first = "first" if not begun else "first_in_data_collection"
        usual = self._copy_tail.copy_tail(piece, self._seq, "true")
        tail = self._copy_tail.copy_tail(piece, self._seq, first) if after is None else usual
        count = 0
        held: Change | None = None  # one row is held back, because the last one of a table says so
        try:
            for block in reader.read(table, None if after is None else KeyPosition.decode(after), rows):
                b = block + PADDING
                o, end = 0, len(block)
                while o < end:
                    cells = None
                    try:
                        value, key, o = row(b, o, head, tail)
                    except NeedsCells:
                        value, key, o, cells, _ = encoder.copy_row_with_cells(b, o, head, tail)
                    tail = usual
                    count += 1
                    if held is not None:
                        yield held
                    held = (route, Op.READ, 0, key, value, cells or None)
        finally:
            reader.close()
        bound = None
        if held is not None:
            if count < rows:
                yield self._marked_last(held, piece, table, usual)
            else:
                assert held[3] is not None
                bound = key_position(table, route.key_fields(held[3]), self._printer).encode()
                yield held
        self._progress.copied(CopiedChunk(table.path, after, bound, opened.snapshot, opened.high_mark))
        self._ordinal = (self._seq, self._first_ordinal() + count + emptied)

    def _emptying(self, route: TableRoute, opened: ChunkSnapshot) -> Change:
        """Return a truncate: the table's rows at the target are of an earlier copy."""
        self._copy_tail.begin(opened.snapshot_us, 0, _now_us(), self._decoder.last_commit_lsn)
        tail = self._copy_tail.tail(route.piece, Op.TRUNCATE, self._seq)
        return route, Op.TRUNCATE, 0, None, route.value_frame + b"\x00\x00" + tail, None

    def _marked_last(self, change: Change, piece: bytes, table: PgTable, usual: bytes) -> Change:
        """Return the last row of a table with the mark that Debezium gives it."""
        route, op, flags, key, value, cells = change
        others = any(not t.done for name, t in self._progress.tables.items() if name != table.path)
        tail = self._copy_tail.copy_tail(piece, self._seq, "last_in_data_collection" if others else "last")
        if value is None or not value.endswith(usual):
            return change  # the only row: it already says that it is the first
        return route, op, flags, key, value[: -len(usual)] + tail, cells

    def _first_ordinal(self) -> int:
        """Return the next copied row's ordinal: at a transaction's position they count on behind its own."""
        seq, ordinal = self._ordinal
        return ordinal if seq == self._seq else 0


def _now_us() -> int:
    return time.time_ns() // 1000
