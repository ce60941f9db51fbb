"""How a part ends: signals become a stop, errors become an exit status and a line that says why."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

import structlog

from anabranch.states import PartState, PartStatus, StateFiles
from anabranch.supervise import STOPPED_BY_ERROR
from anabranch_schemas.errors import Action, AnabranchError

log = structlog.get_logger("anabranch")
_TRY_AGAIN = 75  # EX_TEMPFAIL


def stop_on_signals() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set."""
    stop = threading.Event()

    def set_stop(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, set_stop)
    signal.signal(signal.SIGINT, set_stop)
    return stop


def run_part(kind: str, name: str, states: StateFiles, run: Callable[[threading.Event], None]) -> None:
    """Run one part in this process and leave with the status that its supervisor understands.

    0: stopped as asked. 1: an error that an operator has to act on. 75: an error that passes.
    """
    try:
        run(stop_on_signals())
    except AnabranchError as error:
        log.error("the part ends", part=f"{kind} {name}", action=error.action.value, **error.as_dict())
        previous = states.read(kind, name)
        restarts = previous.restarts if previous else 0
        failed = error.action is not Action.RETRY
        state = PartState.FAILED if failed else PartState.RESTARTING
        states.write(kind, name, PartStatus(state, os.getpid(), restarts, error.as_dict()))
        sys.stderr.flush()
        # Threads of Spark or librdkafka may still run; nothing that they hold matters.
        os._exit(STOPPED_BY_ERROR if failed else _TRY_AGAIN)
