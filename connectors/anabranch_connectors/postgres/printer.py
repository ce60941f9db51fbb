"""Texts of binary values, printed by the server that knows the type."""

from __future__ import annotations

from collections import OrderedDict

from psycopg import pq

from anabranch_connectors.postgres.control import Connection, check_result, connect, fetch
from anabranch_connectors.postgres.errors import ConnectError

TYPES_WITHOUT_BINARY_FORM = "SELECT oid FROM pg_type WHERE typsend = 0"

# Enough for the distinct values of the rare types that land here; one entry costs about 200 bytes beside its texts.
_CACHE_BYTES = 8 << 20
_ENTRY_BYTES = 200
# A value larger than this would push out hundreds of others and is not likely to come again.
_LARGEST_CACHED = 64 << 10


class TextPrinter:
    """Prints a value in PostgreSQL's binary form as the type's own output function does. Used by one thread.

    A type without a binary form travels as text already (pgoutput falls back to it, and so does a chunk); its bytes
    are the text.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._conn: Connection | None = None
        self._text_only: frozenset[int] = frozenset()
        self._cache: OrderedDict[tuple[int, bytes], str] = OrderedDict()
        self._held = 0

    def __call__(self, oid: int, data: bytes) -> str:
        """Return the text of `data`, a value of type `oid` in binary form.

        Raises:
            ConnectError: if the server cannot be reached.
            ServerError: if the server refuses the value or does not know the type.
        """
        key = (oid, data)
        text = self._cache.get(key)
        if text is not None:
            self._cache.move_to_end(key)
            return text
        text = self._ask(oid, data)
        self._remember(key, text)
        return text

    def close(self) -> None:
        """Close the connection; it is opened again when it is needed."""
        if self._conn is not None:
            self._conn.close()
            self._conn = None

    def _ask(self, oid: int, data: bytes) -> str:
        conn = self._connected()
        if oid in self._text_only:
            return data.decode()
        # Not `$1::text`: a cast is not the output function (bpchar loses its blanks, inet gains a netmask).
        result = conn.pgconn.exec_params(b"SELECT $1", [data], [oid], [pq.Format.BINARY], pq.Format.TEXT)
        try:
            check_result(result, f"type {oid}")
        except ConnectError:
            self.close()
            raise
        return (result.get_value(0, 0) or b"").decode()

    def _connected(self) -> Connection:
        if self._conn is None or self._conn.closed:
            self._conn = connect(self._dsn, application_name="anabranch printer")
            self._text_only = frozenset(oid for (oid,) in fetch(self._conn, TYPES_WITHOUT_BINARY_FORM))
        return self._conn

    def _remember(self, key: tuple[int, bytes], text: str) -> None:
        size = len(key[1]) + len(text) + _ENTRY_BYTES
        if size > _LARGEST_CACHED:
            return
        self._cache[key] = text
        self._held += size
        while self._held > _CACHE_BYTES:
            (_, data), old = self._cache.popitem(last=False)
            self._held -= len(data) + len(old) + _ENTRY_BYTES
