"""What the parts of a running pipeline last said of themselves: one small file a part, replaced whole."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson


class PartState(StrEnum):
    """What a part is doing. Set by the supervisor, except FAILED, whose error the part itself leaves behind."""

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class PartStatus:
    """A part's state with what explains it."""

    state: PartState
    pid: int | None = None
    restarts: int = 0
    error: dict[str, Any] | None = None


class StateFiles:
    """The states of one pipeline's parts, by (kind, name): `source`/`orders`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "parts"

    def path(self, kind: str, name: str) -> Path:
        """Return the file of a part."""
        return self._directory / f"{kind}-{name}.json"

    def write(self, kind: str, name: str, status: PartStatus) -> None:
        """Replace a part's state."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self.path(kind, name)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_bytes(orjson.dumps(asdict(status)))
        draft.replace(path)

    def read(self, kind: str, name: str) -> PartStatus | None:
        """Return a part's last state; RUNNING only if the process is there."""
        try:
            raw = orjson.loads(self.path(kind, name).read_bytes())
        except (FileNotFoundError, orjson.JSONDecodeError):
            return None
        status = PartStatus(PartState(raw["state"]), raw["pid"], raw["restarts"], raw["error"])
        alive = status.pid is not None and Path(f"/proc/{status.pid}").exists()
        if status.state in (PartState.RUNNING, PartState.STARTING) and not alive:
            return replace(status, state=PartState.STOPPED, pid=None)
        return status
