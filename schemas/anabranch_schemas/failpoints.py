"""Named places where a process can be made to die, so that tests can prove what a crash there leaves behind.

    ANABRANCH_FAILPOINT       name[:count]   die at the count-th pass of this place (default: the first)
    ANABRANCH_FAILPOINT_ONCE  path           create this file when it fires; while it exists nothing fires again,
                                             so that the restarted process passes
    ANABRANCH_FAILPOINT_FILE  path           a file that says what ANABRANCH_FAILPOINT would; it is read at every pass,
                                             so a running process can be armed, and deleted when it fires

Dying is SIGKILL: no handler, no flush, no rollback, as when the machine is lost.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

VARIABLE = "ANABRANCH_FAILPOINT"
ONCE_VARIABLE = "ANABRANCH_FAILPOINT_ONCE"
FILE_VARIABLE = "ANABRANCH_FAILPOINT_FILE"
_passes: dict[str, int] = {}


def hit(name: str) -> None:
    """Kill this process if `name` is the armed place and its count is reached."""
    if armed(name):
        os.kill(os.getpid(), signal.SIGKILL)


def armed(name: str) -> bool:
    """Count a pass of the place and tell whether it fires now; for places that fail in a milder way than dying."""
    wanted, _, count = _wanted().partition(":")
    if wanted != name:
        return False
    _passes[name] = _passes.get(name, 0) + 1
    if _passes[name] != int(count or 1):
        return False
    return _first_time()


def _wanted() -> str:
    file = os.environ.get(FILE_VARIABLE)
    if not file:
        return os.environ.get(VARIABLE, "")
    try:
        return Path(file).read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def _first_time() -> bool:
    if file := os.environ.get(FILE_VARIABLE):
        _passes.clear()
        try:
            Path(file).unlink()
        except FileNotFoundError:
            return False
        return True
    once = os.environ.get(ONCE_VARIABLE)
    if not once:
        return True
    try:
        Path(once).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
