"""Processes, their descendants, and the watcher that outlives their owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import wait_until

from anabranch.stack import process_tree
from anabranch.stack.process_tree import ProcessId, descendants, identify, kill_tree, signal_tree, users_of, wait_gone

# Prints the number of a child that leads a session of its own, as a PostgreSQL backend does, then waits for ever.
FAMILY = """
import subprocess, sys
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def family(tmp_path: Path) -> Iterator[tuple[ProcessId, ProcessId]]:
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", FAMILY], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as parent:
        assert parent.stdout is not None
        root, child = identify(parent.pid), identify(int(parent.stdout.readline()))
        assert root is not None
        assert child is not None
        yield root, child
        kill_tree(root)


def test_a_child_in_another_session_is_a_descendant(family: tuple[ProcessId, ProcessId]) -> None:
    root, child = family
    assert descendants(root.pid) == (child.pid,)


def test_killing_a_tree_leaves_nothing(family: tuple[ProcessId, ProcessId]) -> None:
    root, child = family
    kill_tree(root)
    assert not root.alive
    assert not child.alive


def test_a_stopped_tree_stands_still_and_goes_on(family: tuple[ProcessId, ProcessId]) -> None:
    root, child = family
    signal_tree(root, signal.SIGSTOP)
    os.waitid(os.P_PID, root.pid, os.WSTOPPED)
    wait_until(lambda: _state(root) == _state(child) == "T")  # the child is nobody's to wait for but its parent's
    signal_tree(root, signal.SIGCONT)
    os.waitid(os.P_PID, root.pid, os.WCONTINUED)
    assert root.alive


def _state(process: ProcessId) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_later_process_with_the_same_number_is_another_process() -> None:
    me = identify(os.getpid())
    assert me is not None
    assert me.alive
    assert not ProcessId(me.pid, me.started - 1).alive
    assert wait_gone(ProcessId(me.pid, me.started - 1), 60)


def test_waiting_for_a_live_process_ends_with_the_timeout() -> None:
    me = identify(os.getpid())
    assert me is not None
    assert not wait_gone(me, 0.01)


def test_the_users_of_a_directory_are_found(family: tuple[ProcessId, ProcessId], tmp_path: Path) -> None:
    assert set(users_of(tmp_path.resolve())) == set(family)


def test_the_watcher_ends_what_it_was_told_of_when_its_owner_is_gone(family: tuple[ProcessId, ProcessId]) -> None:
    root, child = family
    with subprocess.Popen(
        [sys.executable, "-I", "-S", process_tree.__file__], stdin=subprocess.PIPE, text=True
    ) as watcher:
        assert watcher.stdin is not None
        watcher.stdin.write(f"{root.pid} {root.started}\n")
        watcher.stdin.flush()
        assert {identify(root.pid), identify(child.pid)} == {root, child}
        watcher.stdin.close()
        assert watcher.wait(30) == 0
    assert not root.alive
    assert not child.alive
