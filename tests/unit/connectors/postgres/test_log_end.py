from __future__ import annotations

from typing import Any

import pytest

from anabranch_connectors.postgres import log_end
from anabranch_connectors.postgres.log_end import LogEnd
from anabranch_connectors.postgres.lsn import lsn_text


class Server:
    """Answers what `LogEnd` asks."""

    def __init__(self) -> None:
        self.lsn, self.us, self.xid = 1000, 5_000_000, 700
        self.asked: list[str] = []
        self.beats = 0

    def fetch(self, _connection: Any, query: str, *_: Any) -> list[tuple[Any, ...]]:
        if "pg_logical_emit_message" in query:
            self.beats += 1
            return [("0/0",)]
        self.asked.append(query)
        return [(self.us, lsn_text(self.lsn), self.xid)]


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    monkeypatch.setattr(log_end, "fetch", server.fetch)
    return server


@pytest.fixture
def time() -> Time:
    return Time()


def make(time: Time, *, standby: bool = False, heartbeat_s: float = 0) -> LogEnd:
    return LogEnd(None, standby=standby, heartbeat_s=heartbeat_s, monotonic=time)  # type: ignore[arg-type]


def test_the_server_is_asked_twice_a_second_at_most(server: Server, time: Time) -> None:
    end = make(time)
    answers = []
    for time.now in (100.0, 100.4, 100.5, 100.9, 101.0):
        answers.append(end.look(0))
    assert answers == [True, False, True, False, True]
    assert end.look(0, wanted=True)
    assert len(server.asked) == 4
    assert end.next_xid == 700


def test_what_was_read_up_to_the_looks_end_is_safe_up_to_its_time(server: Server, time: Time) -> None:
    end = make(time)
    end.look(999)
    assert end.safe_us == 0, "the look comes before what it tells of is read"
    end.look(999)
    assert end.safe_us == 0
    end.look(1000)
    assert end.safe_us == 5_000_000


def test_the_safe_time_never_goes_back(server: Server, time: Time) -> None:
    end = make(time)
    end.look(1000)
    end.look(1000)
    server.us = 4_000_000  # somebody set the clock
    time.now += 1
    end.look(1000)
    end.look(1000)
    assert end.safe_us == 5_000_000


def test_a_silent_log_is_safe_in_spite_of_the_padding_behind_it(server: Server, time: Time) -> None:
    end = make(time)
    for us in (1, 2, 3):
        server.us = us * 1_000_000
        end.look(1000 - 100)
        time.now += 1
    assert end.safe_us == 2_000_000


@pytest.mark.parametrize("moving", ["the log", "the reader", "more than a page"])
def test_a_log_that_is_not_silent_is_not(server: Server, time: Time, moving: str) -> None:
    server.lsn = 100_000
    end = make(time)
    position = 99_900 if moving != "more than a page" else 91_000
    for _ in range(3):
        end.look(position)
        time.now += 1
        server.lsn += 10 if moving == "the log" else 0
        position += 10 if moving == "the reader" else 0
    assert end.safe_us == 0


def test_a_heartbeat_is_sent_at_its_interval(server: Server, time: Time) -> None:
    end = make(time, heartbeat_s=10)
    for _ in range(51):
        end.look(0)
        time.now += 0.5
    assert server.beats == 2


def test_a_log_that_was_read_to_its_end_can_be_made_to_grow(server: Server, time: Time) -> None:
    end = make(time)
    end.look(999)
    end.push(999)
    assert server.beats == 0, "there is more to read"
    end.push(1000)
    assert server.beats == 1
    standby = make(time, standby=True)
    standby.look(1000)
    standby.push(1000)
    assert server.beats == 1


def test_no_heartbeat_when_it_is_off_or_the_server_cannot_write(server: Server, time: Time) -> None:
    for end in (make(time), make(time, standby=True, heartbeat_s=1)):
        for _ in range(10):
            time.now += 1
            end.look(0)
    assert server.beats == 0
    assert "replay" in server.asked[-1]
