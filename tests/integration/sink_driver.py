"""A sink's driver without its query: the tables it writes, and its markers applied as a test says."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from tests.integration.sink_stream import Change, SyntheticStream, insert

from anabranch_schemas.table import Column, TableSchema
from anabranch_schemas.types import Decimal as DecimalType
from anabranch_schemas.types import Scalar
from anabranch_sink.apply import Applier

PYSPARK_SOCKETS = [
    # PySpark leaves the sockets that answers came over to the garbage collector.
    pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]
Sink = Callable[..., Applier]
"""Starts a driver; settings of its `SinkConfig` by keyword."""


def table(name: str, *columns: Column, key: tuple[str, ...] = ("id",)) -> TableSchema:
    """Return a table of schema public with a bigint `id`."""
    return TableSchema(
        "public", name, (Column("id", Scalar.INT64, nullable=False, source_type="bigint"), *columns), key
    )


def text(name: str) -> Column:
    """Return a column that holds text."""
    return Column(name, Scalar.TEXT, nullable=True, source_type="text")


ACCOUNT = table("account", text("owner"), Column("balance", DecimalType(12, 2), True, "numeric(12,2)"))
NOTE = table("note", text("body"))


def create_tables(target: psycopg.Connection) -> None:
    """Make both tables."""
    target.execute("create table account (id bigint primary key, owner text, balance numeric(12,2))")
    target.execute("create table note (id bigint primary key, body text)")


def account(number: int, owner: str = "ann", balance: str = "1.00") -> Change:
    """Return the insert of an account."""
    return insert(ACCOUNT, id=number, owner=owner, balance=Decimal(balance))


def apply_all(applier: Applier, stream: SyntheticStream) -> None:
    """Apply until the stream's newest marker is applied; a marker is visible a moment after its commit."""
    for _ in range(200):
        applier.run(lambda: False)
        if stream.name in applier.applied and applier.applied[stream.name].marker == stream.number:
            return
        applier.markers.poll(0.05)
    raise AssertionError(f"marker {stream.number} was not applied: {applier.applied}")


def rows(target: psycopg.Connection, query: str) -> list[tuple[Any, ...]]:
    """Return what a query finds."""
    return target.execute(query).fetchall()
