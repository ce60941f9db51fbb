"""Parts die at the worst moments; nothing is lost, doubled or torn.

One pipeline lives through all of it, while a bank writes and a reader looks for torn transactions.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

pytestmark = pytest.mark.timeout(600)

SOURCE_PLACES = ["source.before_commit", "source.after_commit"]
SINK_PLACES = ["sink.mid_stage", "sink.after_stage", "sink.before_commit", "sink.after_commit"]


def _whole(live: Any) -> None:
    """Assert what must hold after every crash."""
    result = live.verify()
    assert result.equal, result
    live.reader.check()
    assert live.reader.torn == 0


@pytest.mark.parametrize("place", SOURCE_PLACES)
def test_a_source_worker_that_dies_publishes_each_change_once(live: Any, place: str) -> None:
    live.die_at("source", place)
    _whole(live)


def test_a_source_worker_that_dies_while_spilling_a_large_transaction_sends_it_whole(live: Any) -> None:
    def write() -> None:
        with psycopg.connect(live.source) as connection:
            connection.execute("UPDATE bank.checking SET owner = owner || repeat('x', 200)")

    live.die_at("source", "source.mid_spill", write)
    _whole(live)


@pytest.mark.parametrize("place", SINK_PLACES)
def test_a_spark_driver_that_dies_applies_each_transaction_once(live: Any, place: str) -> None:
    live.die_at("sink", place)
    _whole(live)


def test_a_task_that_fails_is_retried_and_its_first_attempt_does_not_count(live: Any) -> None:
    live.die_at("sink", "sink.task_retry")
    _whole(live)


def test_a_lost_checkpoint_changes_nothing(live: Any) -> None:
    live.kill("sink")
    shutil.rmtree(_checkpoint(live))
    live.advance()
    _whole(live)


def test_a_lost_last_commit_log_entry_changes_nothing(live: Any) -> None:
    live.wait(lambda: any(_commits(live)), "the query has no commit log")
    live.kill("sink")
    max(_commits(live), key=lambda entry: int(entry.name)).unlink()
    live.advance()
    _whole(live)


def test_a_source_and_a_sink_that_die_together_come_back(live: Any) -> None:
    live.kill("source")
    live.kill("sink")
    live.advance()
    _whole(live)


@pytest.mark.skipif(os.environ.get("ANABRANCH_CHAOS") != "long", reason="the long matrix is behind `make chaos`")
@pytest.mark.timeout(3600)
def test_an_hour_of_random_deaths_changes_nothing(live: Any) -> None:
    choose = random.Random(20)
    ends = time.monotonic() + float(os.environ.get("ANABRANCH_CHAOS_SECONDS", "600"))
    while time.monotonic() < ends:
        if choose.random() < 0.5:
            live.kill(choose.choice(["source", "sink"]))
        else:
            kind = choose.choice(["source", "sink"])
            live.die_at(kind, choose.choice(SOURCE_PLACES if kind == "source" else SINK_PLACES))
        live.advance()
    _whole(live)


def _checkpoint(live: Any) -> Path:
    return Path(live.directory / "state" / "checkpoint" / "bank-us")


def _commits(live: Any) -> list[Path]:
    return [entry for entry in (_checkpoint(live) / "commits").glob("*") if entry.name.isdigit()]
