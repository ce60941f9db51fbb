"""A PostgreSQL server ready for logical decoding, from a Python wheel's binaries or the system's."""

from __future__ import annotations

import atexit
import os
import signal as signals
import subprocess
from collections.abc import Mapping
from pathlib import Path

import psycopg

from anabranch.stack.account import Account, prepare_directory, reachable_directory, server_account
from anabranch.stack.errors import ServiceStartError
from anabranch.stack.postgres_binaries import PostgresBinaries, find_postgres, reachable_binaries
from anabranch.stack.process import ServerProcess
from anabranch.stack.process_tree import kill_tree, users_of, wait_gone

__all__ = ["PostgresBinaries", "PostgresServer", "find_postgres"]

# The "C" locale is on every system and sorts alike on all of them. --no-sync concerns initdb's own files only.
_INITDB = ("--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync")
# A start takes half a second; replaying the log after a crash takes longer.
_START_TIMEOUT_S = 120
_STOP_TIMEOUT_S = 30
# A Unix socket's whole path must fit into 108 bytes; ".s.PGSQL.32768" and the zero take 16 of them.
_SOCKET_DIRECTORY_LIMIT = 90

# Durability settings (fsync, full_page_writes, synchronous_commit) stay as PostgreSQL ships them: a stack that loses
# commits in a crash cannot show that nothing is lost. With synchronous_commit off, decoding would see commits late.
SETTINGS: Mapping[str, str] = {
    "listen_addresses": "127.0.0.1",
    "wal_level": "logical",
    "max_replication_slots": "20",
    "max_wal_senders": "20",
    "shared_buffers": "256MB",
    "max_wal_size": "2GB",
    # Times in logs and in `timestamptz` output do not depend on the machine.
    "timezone": "UTC",
    "log_timezone": "UTC",
}


class PostgresServer:
    """A server whose data, socket and log live in one directory; superuser `postgres`, trusted on loopback.

    As root the server runs as `postgres` or `nobody`, in a stand-in directory when that account cannot reach the given
    one (`directory` is where it really is). A second object over the same directory drives the same server, also from
    another process. Unless `outlives_parent`, it ends with this process, even if that is killed.
    """

    def __init__(
        self,
        directory: Path,
        *,
        port: int | None = None,
        binaries: PostgresBinaries | None = None,
        settings: Mapping[str, str] | None = None,
        name: str = "postgres",
        outlives_parent: bool = False,
    ) -> None:
        self.name = name
        self._account: Account | None = server_account()
        self.directory = reachable_directory(directory, self._account)
        self._wanted_port = port
        self._wanted_binaries = binaries
        self._settings = {**SETTINGS, **(settings or {})}
        self._outlives_parent = outlives_parent
        self._process = ServerProcess(name, self.directory)

    @property
    def pid(self) -> int | None:
        """Return the number of the running postmaster."""
        return self._process.pid

    def dsn(self, database: str = "postgres") -> str:
        """Return the URL of a database; known once the server has been started."""
        port = self._process.port
        if port is None:
            raise ServiceStartError("the server has not been started", where=str(self.directory))
        return f"postgresql://postgres@127.0.0.1:{port}/{database}"

    def start(self) -> None:
        """Return when the server answers `select 1`; raise ServiceStartError with the end of its log."""
        # One that runs may be about to end, killed a moment ago: then it is started like any other that is gone.
        if not self._process.answers(self._answers, _START_TIMEOUT_S):
            self._spawn()
            self._process.wait_ready(self._answers, _START_TIMEOUT_S)

    def stop(self) -> None:
        """Shut down in PostgreSQL's fast mode: open transactions are rolled back, walsenders get everything."""
        self._process.stop(signals.SIGINT, _STOP_TIMEOUT_S)
        atexit.unregister(self.stop)

    def kill(self) -> None:
        """End the postmaster and every backend with SIGKILL."""
        self._process.kill()

    def signal(self, number: int) -> None:
        """Send a signal to the postmaster and to every backend."""
        self._process.signal(number)

    def _spawn(self) -> None:
        prepare_directory(self.directory, self._account)
        binaries = reachable_binaries(self._wanted_binaries or self._last_binaries(), self._account)
        data = self.directory / "data"
        if not (data / "PG_VERSION").exists():
            self._initialise(binaries, data)
        else:
            _clear_crash(data)
        port = self._process.choose_port(self._wanted_port)
        settings = self._settings | {"port": str(port), "unix_socket_directories": self._socket_directory()}
        argv = [str(binaries.program("postgres")), "-D", str(data)]
        for key, value in settings.items():
            argv += ["-c", f"{key}={value}"]
        user, group = (None, None) if self._account is None else (self._account.uid, self._account.gid)
        self._process.spawn(
            argv,
            port=port,
            env=_environment(),
            user=user,
            group=group,
            outlives_parent=self._outlives_parent,
        )
        if not self._outlives_parent:
            atexit.register(self.stop)

    def _last_binaries(self) -> PostgresBinaries:
        """Return the release that made the data, or the chosen one for a new directory."""
        made_by = self.directory / "data" / "PG_VERSION"
        return find_postgres(int(made_by.read_text()) if made_by.exists() else None)

    def _socket_directory(self) -> str:
        """Return the directory, or nothing (TCP alone) where its path is too long for a socket."""
        return str(self.directory) if len(os.fsencode(self.directory)) <= _SOCKET_DIRECTORY_LIMIT else ""

    def _initialise(self, binaries: PostgresBinaries, data: Path) -> None:
        done = subprocess.run(
            [str(binaries.program("initdb")), "-D", str(data), *_INITDB],
            capture_output=True,
            text=True,
            timeout=_START_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
            cwd="/",
            env=_environment(),
            user=None if self._account is None else self._account.uid,
            group=None if self._account is None else self._account.gid,
            extra_groups=None if self._account is None else [],
        )
        if done.returncode != 0:
            raise ServiceStartError(f"initdb failed: {(done.stdout + done.stderr).strip()[-500:]}", where=str(data))

    def _answers(self) -> bool:
        try:
            with psycopg.connect(self.dsn(), connect_timeout=2) as connection:
                return connection.execute("select 1").fetchone() == (1,)
        except psycopg.OperationalError:
            return False


def _clear_crash(data: Path) -> None:
    """Make a start after a crash possible at once; only to be called while no postmaster of ours runs.

    1. Backends notice the death of their postmaster by themselves; one that does not is killed.
    2. A dead postmaster that the init process has not reaped yet (in a container it may never do so) still has a
       process number, for which a new one takes the lock files to be valid: they go. What guards the data is the
       shared memory segment, which a new postmaster refuses to reuse while anything is attached.
    """
    for backend in users_of(data.resolve()):
        if not wait_gone(backend, 5.0):
            kill_tree(backend)
    for lock in (data / "postmaster.pid", *data.parent.glob(".s.PGSQL.*.lock")):
        lock.unlink(missing_ok=True)


def _environment() -> dict[str, str]:
    """Return our environment without the variables that would lead PostgreSQL elsewhere."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PG", "LC_", "LANG"))}
