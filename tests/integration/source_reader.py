"""What a stream looks like to a read_committed consumer: markers, records, and the tables that they fold into."""

from __future__ import annotations

import io
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import fastavro
import orjson
import psycopg
from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from anabranch_connectors.postgres.lsn import lsn_int
from anabranch_connectors.postgres.resume import Resume
from anabranch_schemas import marker, stamp
from anabranch_schemas.envelope import cells
from anabranch_schemas.marker import DIGEST_MASK, MarkerKind, SnapshotMarker
from anabranch_schemas.registry import TopicRegistry, schema_id_of
from anabranch_schemas.stamp import Flag, Op, Stamp

WAIT_S = 60.0
Row = dict[str, Any]
Tables = dict[str, dict[tuple[Any, ...], Row]]


@dataclass(frozen=True, slots=True)
class Record:
    """One change record, decoded."""

    topic: str
    partition: int
    offset: int
    stamp: Stamp
    key: Row | None
    value: Row | None
    """The envelope; None for a tombstone."""
    missing: tuple[str, ...]
    """Columns that the `ab.cells` header says are not in the record."""
    crc: int

    @property
    def order(self) -> tuple[int, int, bool]:
        """Place within a marker."""
        return self.stamp.seq, self.stamp.ordinal, self.value is None


class StreamReader:
    """Reads one stream from its first offset on."""

    def __init__(self, bootstrap: str, prefix: str) -> None:
        self.prefix = prefix
        self._kafka = {"bootstrap.servers": bootstrap, "log_level": 0}
        self._consumer = self._make_consumer()
        self._consumer.assign([TopicPartition(f"{prefix}.markers", 0, 0)])
        self._registry = TopicRegistry({"bootstrap.servers": bootstrap})
        self._schemas: dict[int, Any] = {}
        self.markers: list[SnapshotMarker] = []

    def _make_consumer(self) -> Consumer:
        return Consumer(
            {
                **self._kafka,
                "group.id": f"{self.prefix}-test",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 10,
                "topic.metadata.refresh.interval.ms": 1000,
            }
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()
        self._registry.close()

    def wait(self, condition: Callable[[SnapshotMarker], bool]) -> SnapshotMarker:
        """Read markers until one of those not yet waited for fulfils the condition, and return it."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            message = self._consumer.poll(0.5)
            if message is None:
                continue
            error = message.error()
            if error is None:
                read = marker.decode(_bytes(message.value())[5:])
                self.markers.append(read)
                if condition(read):
                    return read
            elif error.code() != KafkaError._PARTITION_EOF and error.code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise AssertionError(error.str())
        raise AssertionError(f"no such marker among {len(self.markers)}; the last: {self.markers[-1:]}")

    def wait_for(self, lsn: int) -> SnapshotMarker:
        """Wait until the log is published up to `lsn` and all tables are copied."""
        return self.wait(lambda m: m.safe_hlc != 0 and resume_of(m).lsn >= lsn)

    def records(self) -> list[Record]:
        """Return all committed records of the tables' topics, in the order of markers and then of the stream."""
        consumer = self._make_consumer()
        try:
            topics = consumer.list_topics(timeout=WAIT_S).topics
            places = [
                TopicPartition(topic, partition, 0)
                for topic, data in topics.items()
                if topic.startswith(f"{self.prefix}.") and topic != f"{self.prefix}.markers"
                for partition in data.partitions
            ]
            consumer.assign(places)
            found, left = [], len(places)
            while left:
                message = consumer.poll(WAIT_S)
                assert message is not None
                error = message.error()
                if error is None:
                    found.append(self._record(message))
                else:
                    assert error.code() == KafkaError._PARTITION_EOF, error.str()
                    left -= 1
        finally:
            consumer.close()
        numbers = {id(record): owner(self.markers, record).number for record in found}
        return sorted(found, key=lambda record: (numbers[id(record)], record.order))

    def _record(self, message: Message) -> Record:
        headers = dict(message.headers() or [])
        key, value = message.key(), message.value()
        header = headers[stamp.HEADER]
        assert isinstance(header, bytes)
        listed = headers.get(cells.HEADER)
        image: Any = None
        missing: tuple[str, ...] = ()
        if value is not None:
            schema = self._schema(_bytes(value))
            image = fastavro.schemaless_reader(io.BytesIO(_bytes(value)[5:]), schema, None)
            if listed is not None:
                assert isinstance(listed, bytes)
                names = _columns(schema)
                kinds = [c for c in cells.decode(listed) if c.kind is cells.CellKind.MISSING]
                missing = tuple(names[c.column] for c in kinds)
        return Record(
            message.topic() or "",
            message.partition() or 0,
            message.offset() or 0,
            stamp.decode(header),
            None
            if key is None
            else fastavro.schemaless_reader(io.BytesIO(_bytes(key)[5:]), self._schema(_bytes(key)), None),  # type: ignore[arg-type]
            image,
            missing,
            0 if value is None else zlib.crc32(_bytes(value)),
        )

    def _schema(self, data: bytes) -> Any:
        number = schema_id_of(data)
        if number not in self._schemas:
            self._schemas[number] = fastavro.parse_schema(orjson.loads(self._registry.schema(number)))
        return self._schemas[number]


def _bytes(value: str | bytes | None) -> bytes:
    assert isinstance(value, bytes)
    return value


def _columns(schema: Mapping[str, Any]) -> list[str]:
    """Return the names of the row's columns in an envelope's schema."""
    before = next(field for field in schema["fields"] if field["name"] == "before")
    record = next(branch for branch in before["type"] if isinstance(branch, dict))
    return [field["name"] for field in record["fields"]]


def resume_of(found: SnapshotMarker) -> Resume:
    """Return the resume token of a marker."""
    resume = Resume.decode(found.resume)
    assert resume is not None
    return resume


def owner(markers: Iterable[SnapshotMarker], record: Record) -> SnapshotMarker:
    """Return the one marker that a record belongs to."""
    owners = [
        m
        for m in markers
        for r in m.ranges
        if (r.topic, r.partition) == (record.topic, record.partition) and r.first_offset <= record.offset < r.end_offset
    ]
    assert len(owners) == 1, (
        record.topic,
        record.partition,
        record.offset,
        [m.number for m in owners],
        [(m.number, m.ranges) for m in markers][:4],
    )
    return owners[0]


def log_end(dsn: str) -> int:
    """Return a position behind everything that has committed, which the stream will reach even if nothing follows."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        row = conn.execute("select pg_current_wal_insert_lsn()::text").fetchone()
        conn.execute("select pg_logical_emit_message(false, 'test', '')")
        # A message is not flushed by itself; a transaction's commit takes it along.
        conn.execute("select pg_logical_emit_message(true, 'test', '')")
    assert row
    return lsn_int(row[0])


def check_markers(markers: Sequence[SnapshotMarker], records: Sequence[Record]) -> None:
    """Assert all that markers promise about themselves and about their records."""
    assert [m.number for m in markers] == list(range(1, len(markers) + 1))
    for before, after in pairwise(markers):
        assert before.epoch <= after.epoch
        assert before.last_seq <= after.first_seq or before.last_seq <= after.last_seq
        assert before.last_hlc <= after.last_hlc
        assert before.vector <= after.vector
        assert not after.safe_hlc or before.safe_hlc <= after.safe_hlc
        assert before.closed_us <= after.closed_us
    by_marker: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        by_marker[owner(markers, record).number].append(record)
    hlc = 0
    identities = set()
    for m in markers:
        own = by_marker[m.number]
        _check_ranges(m, own)
        hlc = _check_transactions(m, own, hlc)
        for record in own:
            identity = (record.stamp.seq, record.stamp.ordinal, record.value is None)
            assert identity not in identities, f"{identity} comes twice"
            identities.add(identity)
    _check_partitions(markers, records)


def _check_ranges(m: SnapshotMarker, own: Sequence[Record]) -> None:
    assert all(record.stamp.epoch == m.epoch and record.stamp.site == m.site for record in own)
    assert sum(record.value is not None for record in own) == m.rows
    for r in m.ranges:
        inside = [record for record in own if (record.topic, record.partition) == (r.topic, r.partition)]
        assert len(inside) == r.rows
        assert min(record.offset for record in inside) == r.first_offset
        assert max(record.offset for record in inside) == r.end_offset - 1
        assert sum(record.crc for record in inside) & DIGEST_MASK == r.digest
    named = {v.topic for v in m.schemas}
    assert named >= {record.topic for record in own}
    assert m.kind is MarkerKind.COPY or len(named) == len({record.topic for record in own})
    assert (m.kind is MarkerKind.IDLE) <= (not own)


def _check_transactions(m: SnapshotMarker, own: Sequence[Record], hlc: int) -> int:
    """Check order, ordinals, LAST and hlc of a marker's transactions; return its greatest hlc."""
    copied = m.kind is MarkerKind.COPY
    by_seq: dict[int, list[Record]] = defaultdict(list)
    for record in own:
        assert bool(record.stamp.flags & Flag.COPIED) == copied
        by_seq[record.stamp.seq].append(record)
    if not copied:
        assert len(by_seq) == m.transactions
    for seq, members in sorted(by_seq.items()):
        assert m.first_seq <= seq <= m.last_seq
        times = {(r.stamp.hlc, r.stamp.txid) for r in members}
        assert len(times) == 1
        assert members[0].stamp.hlc > hlc
        hlc = members[0].stamp.hlc
        rows = [r for r in members if r.value is not None]
        ordinals = [r.stamp.ordinal for r in rows]
        first = ordinals[0] if copied else 0
        assert ordinals == list(range(first, first + len(rows)))
        assert [bool(r.stamp.flags & Flag.LAST) for r in rows] == [False] * (len(rows) - 1) + [True]
        for tombstone in (r for r in members if r.value is None):
            delete = rows[tombstone.stamp.ordinal - first]
            assert (delete.stamp, delete.key, delete.stamp.op) == (tombstone.stamp, tombstone.key, Op.DELETE)
            assert delete.offset < tombstone.offset
    if m.safe_hlc:
        assert hlc <= m.safe_hlc
    return max(hlc, m.safe_hlc, m.last_hlc if not own else 0)


def _check_partitions(markers: Sequence[SnapshotMarker], records: Sequence[Record]) -> None:
    """Assert that each key has one partition, and that offsets follow the stream's order there."""
    homes: dict[tuple[str, str], int] = {}
    places: dict[tuple[str, int], list[Record]] = defaultdict(list)
    for record in records:
        places[record.topic, record.partition].append(record)
        if record.key is not None:
            assert homes.setdefault((record.topic, repr(record.key)), record.partition) == record.partition
    for members in places.values():
        assert [r.offset for r in members] == sorted(r.offset for r in members)
    del markers


def fold(records: Iterable[Record]) -> Tables:
    """Apply records in order onto empty tables, asserting that each fits: nothing is missing, nothing comes twice."""
    tables: Tables = defaultdict(dict)
    for record in records:
        table = tables[record.topic.split(".", 1)[1]]
        op = record.stamp.op
        if record.value is None:
            continue
        assert record.value["op"] == chr(op)
        if op is Op.TRUNCATE:
            assert record.key is None
            table.clear()
            continue
        assert record.key is not None
        key = tuple(record.key.values())
        if op is Op.DELETE:
            assert record.value["after"] is None
            del table[key]
            continue
        assert (key in table) == (op is Op.UPDATE), f"{op.name} of {record.topic} {key}"
        row = dict(record.value["after"])
        if record.stamp.flags & Flag.PARTIAL:
            assert record.missing
            row |= {name: table[key][name] for name in record.missing}
        table[key] = row
    return tables


def in_database(dsn: str, table: str, columns: str = "*") -> list[Row]:
    """Return a table's rows."""
    with psycopg.connect(dsn) as conn:
        cursor = conn.execute(f"select {columns} from {table}")
        names = [column.name for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in cursor]


def check_same(dsn: str, tables: Tables, *names: str) -> None:
    """Assert that the folded tables are what the database holds."""
    for name in names:
        folded = sorted(tables[name].values(), key=repr)
        assert folded == sorted(in_database(dsn, name), key=repr)


def check_stream(reader: StreamReader, dsn: str, *names: str) -> list[Record]:
    """Assert that the whole stream is right and folds into what the database holds; return its records."""
    records = reader.records()
    check_markers(reader.markers, records)
    check_same(dsn, fold(records), *names)
    return records
