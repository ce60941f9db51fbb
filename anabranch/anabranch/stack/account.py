"""Under which account a server that refuses root runs, and which directories that account can reach."""

from __future__ import annotations

import hashlib
import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path

from anabranch.stack.errors import StackError

__all__ = ["Account", "prepare_directory", "reachable_directory", "server_account", "shared_place"]

_SHARED = Path("/var/tmp") / f"anabranch-{os.geteuid()}"  # noqa: S108 - its owner is checked before it is used


@dataclass(frozen=True, slots=True)
class Account:
    """An operating system account."""

    name: str
    uid: int
    gid: int

    def can_traverse(self, directory: Path) -> bool:
        """Tell whether the account may enter a directory: the search bit of it and of every parent.

        Of a path that does not exist yet, the parts that do are looked at.
        """
        path = directory.absolute()
        return all(self._may_search(part.stat()) for part in (path, *path.parents) if part.exists())

    def _may_search(self, entry: os.stat_result) -> bool:
        if entry.st_uid == self.uid:
            return bool(entry.st_mode & stat.S_IXUSR)
        if entry.st_gid == self.gid:
            return bool(entry.st_mode & stat.S_IXGRP)
        return bool(entry.st_mode & stat.S_IXOTH)


def server_account() -> Account | None:
    """Return the account to switch to: `postgres` or `nobody` when we are root, None when we are not."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(name, entry.pw_uid, entry.pw_gid)
    raise StackError(
        "PostgreSQL refuses to run as root, and there is no account `postgres` or `nobody` to run it as",
        advice="run as an ordinary user, or create one of the two (useradd --system postgres)",
    )


def reachable_directory(wanted: Path, account: Account | None) -> Path:
    """Return `wanted`, or a stand-in for it that the account can reach.

    As root, homes and pytest's temporary directories are closed to everyone else; the stand-in has a name made from
    the wanted path, so that a later start finds the same data.
    """
    wanted = wanted.absolute()
    if account is None or account.can_traverse(wanted.parent):
        return wanted
    digest = hashlib.sha256(str(wanted).encode()).hexdigest()[:12]
    return _SHARED / f"{wanted.name}-{digest}"


def prepare_directory(directory: Path, account: Account | None) -> None:
    """Make a server's directory and hand it to the account."""
    if directory.parent == _SHARED:
        shared_place()
    directory.mkdir(parents=True, exist_ok=True)
    if account is not None:
        os.chown(directory, account.uid, account.gid)
        if not account.can_traverse(directory):
            raise StackError(
                f"the account {account.name}, which the server runs as, cannot reach its directory",
                where=str(directory),
                advice="name one whose parents all have the search bit (chmod o+x)",
            )


def shared_place() -> Path:
    """Return our directory under /var/tmp, which outlives a restart of the machine and is open to every account."""
    _SHARED.mkdir(mode=0o711, exist_ok=True)
    entry = _SHARED.lstat()
    if not stat.S_ISDIR(entry.st_mode) or entry.st_uid != os.geteuid():
        raise StackError("this name is taken by something that is not ours", where=str(_SHARED), advice="remove it")
    _SHARED.chmod(0o711)  # whatever the umask made of it
    return _SHARED
