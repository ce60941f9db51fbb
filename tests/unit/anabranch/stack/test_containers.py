"""Where services run."""

from __future__ import annotations

import docker
import pytest
from docker.errors import DockerException

from anabranch.stack import containers
from anabranch.stack.containers import choose_backend, docker_answers
from anabranch.stack.errors import StackError


class FakeEngine:
    """A client whose engine answers, refuses, or is cut off."""

    def __init__(self, *, answer: bool | Exception) -> None:
        self.answer = answer
        self.closed = False

    def ping(self) -> bool:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("answer", "expected"), [(True, True), (DockerException("no"), False), (ConnectionError("cut"), False)]
)
def test_an_engine_counts_only_if_it_answers(
    monkeypatch: pytest.MonkeyPatch, *, answer: bool | Exception, expected: bool
) -> None:
    engine = FakeEngine(answer=answer)
    monkeypatch.setattr(docker, "from_env", lambda **_: engine)
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    assert docker_answers() is expected
    assert engine.closed


def test_no_engine_at_all_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent.sock")
    assert docker_answers() is False


@pytest.mark.parametrize(
    ("environ", "answers", "expected"),
    [
        ({}, True, "local"),
        ({"ANABRANCH_SERVICES": "local"}, True, "local"),
        ({"ANABRANCH_SERVICES": "docker"}, True, "docker"),
        ({"ANABRANCH_SERVICES": "auto"}, True, "docker"),
        ({"ANABRANCH_SERVICES": "auto"}, False, "local"),
    ],
)
def test_the_environment_chooses(
    environ: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch, *, answers: bool
) -> None:
    monkeypatch.setattr(containers, "docker_answers", lambda: answers)
    assert choose_backend(environ) == expected


def test_docker_without_an_engine_is_an_error_and_not_a_silent_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "docker_answers", lambda: False)
    with pytest.raises(StackError, match="no container engine answers"):
        choose_backend({"ANABRANCH_SERVICES": "docker"})


def test_another_word_is_refused() -> None:
    with pytest.raises(StackError, match="'podman' is no place"):
        choose_backend({"ANABRANCH_SERVICES": "podman"})
