"""Avro names out of database names: what is legal stays, everything else becomes `_`.

Debezium adjusts only the first character of a whole dotted name, so a table called `1st` gives it a schema that no
Avro parser reads. Here every part between dots is made valid.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from anabranch_schemas.errors import TypeMappingError

_ILLEGAL = re.compile(r"[^A-Za-z0-9_]")


def adjust(part: str) -> str:
    """Return one part of an Avro name: illegal characters become `_`, a leading digit gets a `_` before it."""
    legal = _ILLEGAL.sub("_", part)
    return f"_{legal}" if not legal or legal[0].isdigit() else legal


def namespace(prefix: str, schema: str, table: str) -> str:
    """Return the Avro namespace of a table's records; dots in `prefix` separate parts, dots in the others do not."""
    parts = [*prefix.split("."), schema, table] if schema else [*prefix.split("."), table]
    return ".".join(adjust(part) for part in parts)


def field_names(columns: Iterable[str], *, where: str) -> tuple[str, ...]:
    """Return the Avro field names of a table's columns.

    Raises:
        TypeMappingError: if two columns would share a name.
    """
    taken: dict[str, str] = {}
    for column in columns:
        name = adjust(column)
        if name in taken:
            raise TypeMappingError(
                f"columns {taken[name]!r} and {column!r} both become the Avro field {name!r}",
                where=where,
                advice="rename one of the columns or leave one out of the table's columns",
            )
        taken[name] = column
    return tuple(taken)
