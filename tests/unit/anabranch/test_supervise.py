"""The supervisor restarts what dies and leaves down what gave up."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from tests.waiting import wait_until

from anabranch.states import PartState, PartStatus, StateFiles
from anabranch.supervise import Part, Supervisor

SLEEPS = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); time.sleep(60)"


@pytest.fixture
def states(tmp_path: Path) -> StateFiles:
    return StateFiles(tmp_path)


@pytest.fixture
def supervise(states: StateFiles, tmp_path: Path) -> Iterator[Callable[[str], tuple[Supervisor, Part]]]:
    started = []

    def start(code: str) -> tuple[Supervisor, Part]:
        part = Part("source", "orders", [sys.executable, "-c", code])
        supervisor = Supervisor([part], states, log_dir=tmp_path / "logs")
        supervisor.start()
        started.append(supervisor)
        return supervisor, part

    yield start
    for supervisor in started:
        supervisor.drain()


def _read(states: StateFiles) -> PartStatus:
    status = states.read("source", "orders")
    assert status is not None
    return status


def test_a_killed_part_is_started_again(supervise: Callable[..., tuple[Supervisor, Part]], states: StateFiles) -> None:
    supervisor, part = supervise(SLEEPS)
    assert part.process is not None
    first = part.process.pid
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: supervisor.look() and part.restarts == 1 and part.process is not None)
    assert part.process.pid != first
    assert _read(states).state is PartState.RUNNING
    assert _read(states).restarts == 1


def test_a_part_that_gave_up_stays_down(supervise: Callable[..., tuple[Supervisor, Part]]) -> None:
    supervisor, part = supervise("raise SystemExit(1)")
    wait_until(lambda: not supervisor.look())
    assert part.ended
    assert part.restarts == 0
    assert part.exit_status == 1


def test_an_error_that_passes_is_tried_again_with_growing_pauses(
    supervise: Callable[..., tuple[Supervisor, Part]],
) -> None:
    supervisor, part = supervise("raise SystemExit(75)")
    pauses: list[float] = []

    def look() -> bool:
        supervisor.look()
        if part.process is None and (not pauses or pauses[-1] != part.next_start):
            pauses.append(part.next_start)
        return part.restarts >= 3

    wait_until(look)
    gaps = [later - earlier for earlier, later in pairwise(pauses)]
    assert gaps[1] > gaps[0]


def test_drain_asks_first_and_the_state_is_stopped(
    supervise: Callable[..., tuple[Supervisor, Part]], states: StateFiles
) -> None:
    ready = SLEEPS.replace("time.sleep", "print('up', flush=True); time.sleep")
    supervisor, part = supervise(ready)
    log = states.path("source", "orders").parent.parent / "logs" / "source-orders.log"
    wait_until(lambda: "up" in log.read_text())
    supervisor.drain()
    assert part.exit_status == 0
    assert _read(states).state is PartState.STOPPED


def test_what_an_earlier_supervisor_left_running_is_ended_first(
    supervise: Callable[..., tuple[Supervisor, Part]], states: StateFiles
) -> None:
    _, part = supervise(SLEEPS)
    assert part.process is not None
    left = part.process
    supervise(SLEEPS)
    assert left.wait(30) == -signal.SIGKILL


def test_a_state_of_a_process_that_is_gone_reads_as_stopped(states: StateFiles) -> None:
    states.write("sink", "orders-us", PartStatus(PartState.RUNNING, pid=2**22 + 1))
    status = states.read("sink", "orders-us")
    assert status is not None
    assert status.state is PartState.STOPPED
