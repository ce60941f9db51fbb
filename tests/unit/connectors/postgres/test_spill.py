from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch_connectors.change import Change
from anabranch_connectors.postgres.spill import SpillError, TransactionBuffer
from anabranch_schemas.marker import TableVersion


@dataclass(frozen=True, eq=False)
class Route:
    topic: str
    version: TableVersion


T, U = (Route(name, TableVersion(name, name, 1, 2)) for name in "tu")
MAYBE = st.none() | st.binary(max_size=300)
CHANGES = st.lists(
    st.tuples(st.sampled_from([T, U]), st.integers(0, 255), st.integers(0, 65535), MAYBE, MAYBE, MAYBE), max_size=30
)


def change(size: int = 100) -> Change:
    return T, 99, 0, b"k", b"x" * size, None


@given(changes=CHANGES, limit=st.integers(0, 20_000), every=st.integers(1, 7))
@settings(max_examples=50)
def test_what_goes_in_comes_out_in_order_wherever_it_was_held(
    tmp_path_factory: pytest.TempPathFactory, changes: list[Change], limit: int, every: int
) -> None:
    directory = tmp_path_factory.mktemp("spill")
    buffer = TransactionBuffer(limit=limit, directory=directory)
    for _ in range(2):  # the second transaction must not see anything of the first
        for at, one in enumerate(changes):
            buffer.add(one)
            if at % every == 0:
                buffer.relieve()
        taken, spilled = buffer.take()
        assert len(taken) == len(changes)
        assert list(taken) == changes
        assert spilled or sum(200 + len(c[3] or b"") for c in changes[:-every]) <= limit + 200 * every + 20_000
    assert list(directory.iterdir()) == []


def test_memory_is_relieved_beyond_the_limit(tmp_path: Path) -> None:
    buffer = TransactionBuffer(limit=1000, directory=tmp_path)
    for _ in range(3):
        buffer.add(change())
    buffer.relieve()
    assert len(buffer._changes) == 3
    buffer.add(change())
    buffer.relieve()
    assert buffer._changes == []
    taken, spilled = buffer.take()
    assert (len(list(taken)), spilled) == (4, True)


def test_a_change_is_measured_once(tmp_path: Path) -> None:
    buffer = TransactionBuffer(limit=1000, directory=tmp_path)
    buffer.add(change())
    for _ in range(100):
        buffer.relieve()
    assert buffer.take()[1] is False


def test_the_file_has_no_name_and_goes_with_its_reader(tmp_path: Path) -> None:
    buffer = TransactionBuffer(limit=0, directory=tmp_path / "below")
    buffer.add(change())
    buffer.relieve()
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert list((tmp_path / "below").iterdir()) == []
    taken, _ = buffer.take()
    assert len(list(taken)) == 1
    assert len(list(Path("/proc/self/fd").iterdir())) == before - 1


def test_a_discarded_transaction_leaves_nothing(tmp_path: Path) -> None:
    buffer = TransactionBuffer(limit=0, directory=tmp_path)
    buffer.add(change())
    buffer.relieve()
    buffer.add(change())
    buffer.discard()
    buffer.add(change(5))
    assert list(buffer.take()[0]) == [change(5)]


@pytest.mark.parametrize(
    ("number", "advice"), [(errno.ENOSPC, "free space"), (errno.EDQUOT, "free space"), (errno.EACCES, "writable")]
)
def test_a_disk_that_does_not_take_it_is_said_with_its_repair(tmp_path: Path, number: int, advice: str) -> None:
    buffer = TransactionBuffer(limit=0, directory=tmp_path)
    buffer.add(change())
    refused = OSError(number, os.strerror(number))
    with mock.patch("tempfile.TemporaryFile", side_effect=refused), pytest.raises(SpillError) as caught:
        buffer.relieve()
    assert caught.value.code == "source.spill_full"
    assert caught.value.where == str(tmp_path)
    assert advice in caught.value.advice
