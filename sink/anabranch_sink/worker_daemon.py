"""The daemon that forks Spark's Python workers, without archives on its path.

Every task calls `importlib.invalidate_caches`, and before Python 3.13 that reads the directory of each archive on the
path again: 70 ms a task for pyspark.zip, 50 ms for spark-core's jar, which Spark puts there too. Where PySpark is
installed as a package they are not needed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def _without_archives() -> None:
    kept = [entry for entry in sys.path if not entry.endswith((".zip", ".jar"))]
    found = sys.path[:]
    sys.path[:] = kept
    sys.path_importer_cache.clear()
    if any(importlib.util.find_spec(name) is None for name in ("pyspark", "py4j", "anabranch_sink")):
        sys.path[:] = found


def _leave_quietly(daemon: ModuleType) -> None:
    """End a worker without a traceback when the driver has gone: there is nobody left to answer."""
    work: Callable[..., int] = daemon.worker

    def worker(*arguments: Any) -> int:
        try:
            return work(*arguments)
        except BrokenPipeError:
            return 1  # not 0: a worker that is well is asked for more work, and would be for ever

    daemon.worker = worker  # type: ignore[attr-defined]


if __name__ == "__main__":
    _without_archives()
    from pyspark import daemon

    _leave_quietly(daemon)
    daemon.manager()  # type: ignore[no-untyped-call]  # PySpark's own
