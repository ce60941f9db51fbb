"""Jars that are locked by checksum, fetched once into a cache and checked at every use.

They are fetched with the Ivy that PySpark ships: it needs only Java. Ivy's answers are not trusted; the lock is.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal
from xml.sax.saxutils import quoteattr

from anabranch.stack.errors import JarChecksumError, JarDownloadError
from anabranch.stack.java import find_java

__all__ = ["LockedJar", "cache_directory", "parse_lock", "resolve"]

# 46 jars, 45 MB: 9 s where the network is quick. Ten minutes is a slow line, not a hang.
_DOWNLOAD_TIMEOUT_S = 600

# Without POMs: the lock already names every jar, and reading the POMs of 46 of them takes 20 s more.
_SETTINGS = """<ivysettings>
  <settings defaultResolver="public"/>
  <resolvers><ibiblio name="public" m2compatible="true" usepoms="false"/></resolvers>
</ivysettings>
"""


@dataclass(frozen=True, slots=True)
class LockedJar:
    """One line of a lock: Maven coordinates and the SHA-256 of the file."""

    group: str
    artifact: str
    version: str
    sha256: str

    @property
    def file_name(self) -> str:
        """Return the name that Maven and Ivy give the file."""
        return f"{self.artifact}-{self.version}.jar"


def resolve(lock: Literal["kafka", "spark"]) -> tuple[Path, ...]:
    """Return the jars of a lock, in its order, downloading those that the cache lacks.

    Processes that ask at once take turns; each sees whole files only.
    Raises JarChecksumError (the wrong file is removed) and JarDownloadError.
    """
    text = resources.files("anabranch.stack").joinpath(f"jars-{lock}.lock").read_text(encoding="utf-8")
    return fetch(parse_lock(text), cache_directory() / "jars")


def cache_directory() -> Path:
    """Return $ANABRANCH_CACHE, or `anabranch` in the user's cache directory."""
    if chosen := os.environ.get("ANABRANCH_CACHE"):
        return Path(chosen).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anabranch"


def parse_lock(text: str) -> tuple[LockedJar, ...]:
    """Read the lines `group:artifact:version sha256`; empty lines and those that start with # are comments."""
    jars = []
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            coordinates, sha256 = line.split()
            group, artifact, version = coordinates.split(":")
            jars.append(LockedJar(group, artifact, version, sha256))
    return tuple(jars)


def fetch(jars: Sequence[LockedJar], directory: Path) -> tuple[Path, ...]:
    """Return the files of these jars in a directory, after downloading what is missing and checking all."""
    directory.mkdir(parents=True, exist_ok=True)
    if any(not (directory / jar.file_name).exists() for jar in jars):
        with exclusively(directory / ".lock"):
            missing = [jar for jar in jars if not (directory / jar.file_name).exists()]
            if missing:
                _download(missing, directory)
    return tuple(check(jar, directory / jar.file_name) for jar in jars)


def check(jar: LockedJar, path: Path) -> Path:
    """Return the path if its content is what the lock says; otherwise remove it and raise JarChecksumError."""
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != jar.sha256:
        path.unlink(missing_ok=True)
        raise JarChecksumError(
            f"{jar.file_name} has SHA-256 {actual}, the lock says {jar.sha256}; the file was removed",
            where=str(path),
            advice="run the command again; if it comes back wrong, what serves your jars alters them",
        )
    return path


@contextmanager
def exclusively(path: Path) -> Iterator[None]:
    """Hold a lock file against other processes; the kernel lets go of it when the holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(jars: Sequence[LockedJar], directory: Path) -> None:
    """Fetch jars beside the directory's files, check them, and only then move them in."""
    with tempfile.TemporaryDirectory(prefix=".download-", dir=directory) as name:
        work = Path(name)
        (work / "settings.xml").write_text(_SETTINGS, encoding="utf-8")
        (work / "ivy.xml").write_text(_ivy_module(jars), encoding="utf-8")
        settings = os.environ.get("ANABRANCH_IVY_SETTINGS") or str(work / "settings.xml")
        argv = [str(find_java().path), "-XX:TieredStopAtLevel=1", "-jar", str(_ivy_jar(jars, directory))]
        argv += ["-settings", settings, "-cache", str(work / "cache"), "-ivy", str(work / "ivy.xml")]
        argv += ["-retrieve", f"{work}/out/[artifact]-[revision].[ext]"]
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
            )
            output = done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            output = f"no end after {_DOWNLOAD_TIMEOUT_S} s"
        got = [jar for jar in jars if (work / "out" / jar.file_name).exists()]
        for jar in got:
            check(jar, work / "out" / jar.file_name).rename(directory / jar.file_name)
        if len(got) < len(jars):
            raise _not_fetched([jar for jar in jars if jar not in got], directory, _reasons(output))


def _ivy_module(jars: Sequence[LockedJar]) -> str:
    dependencies = "\n".join(
        f"<dependency org={quoteattr(jar.group)} name={quoteattr(jar.artifact)} rev={quoteattr(jar.version)} "
        f'transitive="false" conf="default-&gt;default">'
        f'<artifact name={quoteattr(jar.artifact)} type="jar" ext="jar"/></dependency>'
        for jar in jars
    )
    return (
        '<ivy-module version="2.0"><info organisation="anabranch" module="stack"/>'
        '<configurations><conf name="default"/></configurations>'
        f"<dependencies>{dependencies}</dependencies></ivy-module>"
    )


def _ivy_jar(jars: Sequence[LockedJar], directory: Path) -> Path:
    spec = importlib.util.find_spec("pyspark")
    for folder in spec.submodule_search_locations or [] if spec else []:
        for jar in sorted(Path(folder, "jars").glob("ivy-*.jar"), reverse=True):
            return jar
    raise _not_fetched(jars, directory, "the Ivy that PySpark ships was not found: is pyspark installed?")


def _reasons(output: str) -> str:
    """Return the lines of Ivy's output that tell why, a few of them."""
    telling = ("not found", "FAILED", "Exception", "no end after", "error", "timed out")
    lines = dict.fromkeys(line.strip(" :\t") for line in output.splitlines() if any(word in line for word in telling))
    return "; ".join(list(lines)[:4]) or "no reason given"


def _not_fetched(missing: Sequence[LockedJar], directory: Path, reason: str) -> JarDownloadError:
    names = ", ".join([jar.file_name for jar in missing[:3]] + ["…"] * (len(missing) > 3))
    return JarDownloadError(
        f"{len(missing)} jars could not be fetched ({names}): {reason}",
        where=str(directory),
        advice="without a network, copy that directory from a machine that has one; for a mirror of your own, set "
        "ANABRANCH_IVY_SETTINGS to an Ivy settings file",
    )
