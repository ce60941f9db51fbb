"""Keys of rows: their position in a table, and whether one lies before another as PostgreSQL orders them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from psycopg import pq

from anabranch_connectors.postgres.control import Connection, check_result, fetch, quote_text
from anabranch_connectors.postgres.pgtable import PgColumn, PgTable, PgType


@dataclass(frozen=True, slots=True)
class KeyPosition:
    """The key of a row, as the texts of its columns in key order."""

    texts: tuple[str, ...]

    def encode(self) -> bytes:
        """Return the bytes that are kept as `CopyState.last_key`."""
        return json.dumps(self.texts, ensure_ascii=False, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> KeyPosition:
        """Return what `encode` wrote."""
        return cls(tuple(json.loads(data)))


def key_position(table: PgTable, fields: Sequence[bytes], as_text: Callable[[int, bytes], str]) -> KeyPosition:
    """Return the position of a row from its key fields in binary form.

    `fields` are in key order, each with its int32 length as in COPY's tuples (and pgoutput's, after the kind byte).
    `as_text` (a TextPrinter) is asked for types that are not printed here.
    """
    columns = _key_columns(table)
    texts = (_text(column.type, field[4:], as_text) for column, field in zip(columns, fields, strict=True))
    return KeyPosition(tuple(texts))


class KeyBound:
    """The last copied key of a table, compared with other keys as PostgreSQL orders them.

    Integers, uuid, bytea, booleans, dates, timestamps and text that compares by bytes are compared here; for any other
    column the server is asked, in one query for all keys of a batch.
    """

    def __init__(self, table: PgTable, position: KeyPosition, conn: Connection) -> None:
        self._conn = conn
        self._columns = _key_columns(table)
        self._table = table
        self._position = position
        self._orders = [_order(column) for column in self._columns]
        self._last = self._encoded() if self.is_local else ()
        self._query = b"" if self.is_local else self._server_query()
        self._arrays = [] if self.is_local else self._array_types()

    @property
    def is_local(self) -> bool:
        """Whether keys are compared without asking the server."""
        return all(order is not None for order in self._orders)

    def covers(self, fields: Sequence[bytes]) -> bool:
        """Return whether a key is at or before the last copied one; `fields` as in `key_position`."""
        if not self.is_local:
            return self.covers_many([fields])[0]
        return self._comparable([field[4:] for field in fields]) <= self._last

    def covers_many(self, keys: Sequence[Sequence[bytes]]) -> list[bool]:
        """Return `covers` for each key, with at most one query.

        Raises:
            ServerError, ConnectError: if the server cannot answer.
        """
        if self.is_local:
            return [self.covers(key) for key in keys]
        if not keys:
            return []
        parameters = [
            _binary_array([key[place] for key in keys], element)
            for place, element in enumerate(column.type.oid for column in self._columns)
        ]
        formats = [pq.Format.BINARY] * len(parameters)
        result = self._conn.pgconn.exec_params(self._query, parameters, self._arrays, formats, pq.Format.TEXT)
        check_result(result, self._table.path)
        return [result.get_value(row, 0) == b"t" for row in range(result.ntuples)]

    def _comparable(self, values: Sequence[bytes]) -> tuple[Any, ...]:
        return tuple(order(value) for order, value in zip(self._orders, values, strict=True) if order is not None)

    def _encoded(self) -> tuple[Any, ...]:
        """Let the server turn the position's texts into binary form once: no parser of ours can disagree with it."""
        result = self._conn.pgconn.exec_params(
            f"SELECT {key_literals(self._table, self._position)}".encode(), None, result_format=pq.Format.BINARY
        )
        check_result(result, self._table.path)
        return self._comparable([result.get_value(0, place) or b"" for place in range(len(self._columns))])

    def _server_query(self) -> bytes:
        collations: dict[str, str] = dict(
            fetch(
                self._conn,
                """
                SELECT a.attname::text, quote_ident(n.nspname) || '.' || quote_ident(c.collname)
                FROM pg_attribute a JOIN pg_collation c ON c.oid = a.attcollation
                JOIN pg_namespace n ON n.oid = c.collnamespace
                WHERE a.attrelid = %s AND c.collname <> 'default' AND a.attnum > 0
                """,
                (self._table.oid,),
            )
        )
        names = [f"k{place}" for place in range(len(self._columns))]
        compared = [
            f"{name} COLLATE {collations[column.name]}" if column.name in collations else name
            for name, column in zip(names, self._columns, strict=True)
        ]
        arrays = ", ".join(f"${place + 1}" for place in range(len(names)))
        # unnest keeps the order of its arrays, and WITH ORDINALITY makes that explicit.
        return (
            f"SELECT ({', '.join(compared)}) <= ({key_literals(self._table, self._position)}) "
            f"FROM unnest({arrays}) WITH ORDINALITY u({', '.join(names)}, place) ORDER BY place"
        ).encode()

    def _array_types(self) -> list[int]:
        oids = [column.type.oid for column in self._columns]
        arrays: dict[int, int] = dict(
            fetch(self._conn, "SELECT oid, typarray FROM pg_type WHERE oid = ANY(%s)", (oids,))
        )
        return [arrays[oid] for oid in oids]


def _key_columns(table: PgTable) -> tuple[PgColumn, ...]:
    by_name = {column.name: column for column in table.columns}
    return tuple(by_name[name] for name in table.key)


def key_literals(table: PgTable, position: KeyPosition) -> str:
    """Return a position as typed SQL literals, in key order."""
    return ", ".join(
        f"{quote_text(text)}::{column.type.name}"
        for text, column in zip(position.texts, _key_columns(table), strict=True)
    )


def _base(kind: PgType) -> PgType:
    while kind.base is not None:
        kind = kind.base
    return kind


def _signed(value: bytes) -> int:
    return int.from_bytes(value, "big", signed=True)


def _unsigned(value: bytes) -> int:
    return int.from_bytes(value, "big")


def _bytes(value: bytes) -> bytes:
    return value


_BOOL, _BYTEA, _INT8, _INT2, _INT4, _TEXT, _OID, _VARCHAR = 16, 17, 20, 21, 23, 25, 26, 1043
_DATE, _TIMESTAMP, _TIMESTAMPTZ, _UUID = 1082, 1114, 1184, 2950
# From binary form to a value that Python orders as PostgreSQL does. Dates and timestamps are signed counts, and their
# infinities the smallest and largest of them.
_ORDERS: dict[int, Callable[[bytes], Any]] = {
    _BOOL: _bytes,
    _BYTEA: _bytes,
    _UUID: _bytes,
    _OID: _unsigned,
    **dict.fromkeys((_INT2, _INT4, _INT8, _DATE, _TIMESTAMP, _TIMESTAMPTZ), _signed),
}


def _order(column: PgColumn) -> Callable[[bytes], Any] | None:
    oid = _base(column.type).oid
    if oid in (_TEXT, _VARCHAR):
        return _bytes if column.collation_is_c else None
    return _ORDERS.get(oid)


def _text(kind: PgType, value: bytes, as_text: Callable[[int, bytes], str]) -> str:
    match _base(kind).oid:
        case 20 | 21 | 23:  # int8, int2, int4
            return str(_signed(value))
        case 25 | 1043 | 1042:  # text, varchar, bpchar (its blanks included)
            return value.decode()
        case 2950:  # uuid
            return str(UUID(bytes=value))
        case 17:  # bytea
            return "\\x" + value.hex()
        case 16:  # bool
            return "t" if value == b"\x01" else "f"
    return as_text(kind.oid, value)


def _binary_array(fields: Sequence[bytes], element: int) -> bytes:
    """Return a one-dimensional array in binary form: dimensions, has-null flag, element type, size, lower bound."""
    head = b"".join(number.to_bytes(4, "big") for number in (1, 0, element, len(fields), 1))
    return head + b"".join(fields)
