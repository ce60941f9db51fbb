"""A server process: found again through its record, and reported with its log when it fails."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.stack.errors import ServiceStartError
from anabranch.stack.process import ServerProcess, free_port, port_is_free
from anabranch.stack.process_tree import identify, wait_gone


@pytest.fixture
def server(tmp_path: Path) -> ServerProcess:
    return ServerProcess("server", tmp_path)


def test_a_free_port_can_be_bound_and_a_taken_one_is_seen() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        assert not port_is_free(port)


def test_another_object_over_the_directory_drives_the_same_process(server: ServerProcess, tmp_path: Path) -> None:
    server.spawn(["sleep", "600"], port=1234, env=os.environ)
    other = ServerProcess("server", tmp_path)
    assert (other.pid, other.port) == (server.pid, 1234)
    other.stop(signal.SIGTERM, 30)
    assert server.pid is None
    server.stop(signal.SIGTERM, 30)


def test_the_port_is_remembered_after_a_kill(server: ServerProcess) -> None:
    server.spawn(["sleep", "600"], port=1234, env=os.environ)
    server.kill()
    assert server.pid is None
    assert server.port == 1234


def test_a_server_that_ends_while_starting_is_reported_with_its_log(server: ServerProcess) -> None:
    server.log.write_text("a line of an earlier start\n")
    server.spawn(["sh", "-c", "echo the disk is full; exit 1"], port=1, env=os.environ)
    with pytest.raises(ServiceStartError, match="ended while starting: the disk is full") as caught:
        server.wait_ready(lambda: False, 60)
    assert "earlier" not in caught.value.message
    server.stop(signal.SIGTERM, 1)


def test_a_server_that_does_not_answer_is_reported_and_can_be_stopped(server: ServerProcess) -> None:
    server.spawn(["sleep", "600"], port=1, env=os.environ)
    with pytest.raises(ServiceStartError, match="did not answer within 0 s"):
        server.wait_ready(lambda: False, 0.05)
    server.stop(signal.SIGTERM, 30)


def test_a_server_that_is_killed_while_it_is_waited_for_does_not_answer(server: ServerProcess) -> None:
    server.spawn(["sleep", "600"], port=1, env=os.environ)

    def killed() -> bool:
        os.kill(server.pid or 0, signal.SIGKILL)
        return False

    assert not server.answers(killed, 30)
    assert not server.answers(lambda: True, 30)
    server.stop(signal.SIGTERM, 1)


def test_a_stopped_server_still_shuts_down_gracefully(server: ServerProcess) -> None:
    ready = server.log.parent / "ready"
    script = f"trap 'echo bye; exit 0' TERM; touch {ready}; while :; do sleep 0.1; done"
    server.spawn(["sh", "-c", script], port=1, env=os.environ)
    server.wait_ready(ready.exists, 30)
    server.signal(signal.SIGSTOP)
    server.stop(signal.SIGTERM, 30)
    assert server.log.read_text() == "bye\n"


@pytest.mark.parametrize(("outlives", "alive_after"), [(False, False), (True, True)])
def test_a_server_ends_with_a_killed_parent_unless_it_is_meant_to_outlive_it(
    tmp_path: Path, *, outlives: bool, alive_after: bool
) -> None:
    script = f"""
import os, signal
from pathlib import Path
from anabranch.stack.process import ServerProcess
server = ServerProcess("server", Path({str(tmp_path)!r}))
server.spawn(["sleep", "600"], port=1, env=os.environ, outlives_parent={outlives})
print(server.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=False)
    process = identify(int(done.stdout))
    if alive_after:
        assert process is not None
        assert process.alive
        ServerProcess("server", tmp_path).kill()
    else:
        assert process is None or wait_gone(process, 30)
