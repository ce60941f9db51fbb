"""Waiting for what another process or thread brings about."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["wait_until"]


def wait_until(condition: Callable[[], bool], failure: str = "it did not happen", timeout_s: float = 120.0) -> None:
    """Return as soon as the condition holds; fail when it still does not after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, failure
        time.sleep(0.02)
