"""What a DSN says, with libpq's defaults, environment variables and password file, host by host."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from psycopg import conninfo, pq

from anabranch_schemas.errors import ConfigError

_UNIX_DIRECTORIES = ("/var/run/postgresql", "/run/postgresql", "/tmp")  # noqa: S108  # where packages put the socket

# Text output must not depend on settings of the role or database: what the native subscription sets, UTC, and names
# of types that are qualified unless they are built in.
OUTPUT_SETTINGS: Mapping[str, str] = {
    "client_encoding": "UTF8",
    "datestyle": "ISO",
    "intervalstyle": "postgres",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "timezone": "UTC",
    "search_path": "pg_catalog",
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One host of a DSN; `host` is a directory for a Unix socket."""

    host: str
    port: int
    hostaddr: str = ""
    password: str | None = field(default=None, repr=False)

    @property
    def is_unix(self) -> bool:
        """Whether `host` is a socket's directory."""
        return self.host.startswith(("/", "@"))

    @property
    def where(self) -> str:
        """`host:port`, as it is shown to people."""
        return f"{self.host}:{self.port}"


def connection_options(dsn: str) -> dict[str, str]:
    """Return all options of a DSN (URI or key=value), completed from the environment and libpq's defaults.

    Raises:
        ConfigError: if the DSN cannot be parsed. Its text is not repeated: it may hold a password.
    """
    try:
        given = conninfo.conninfo_to_dict(dsn)
    except psycopg.Error as error:
        raise ConfigError(
            "the DSN cannot be parsed", where="dsn", advice="postgresql://user:password@host:port/database?sslmode=..."
        ) from error
    options = {
        option.keyword.decode(): option.val.decode() for option in pq.Conninfo.get_defaults() if option.val is not None
    }
    options.update({name: str(value) for name, value in given.items() if value is not None})
    options.setdefault("user", os.environ.get("USER", "postgres"))
    options.setdefault("dbname", options["user"])
    options.setdefault("sslmode", "prefer")
    options.setdefault("channel_binding", "prefer")
    return options


def endpoints(options: Mapping[str, str]) -> list[Endpoint]:
    """Return the hosts in the order in which they are tried.

    Raises:
        ConfigError: if the numbers of hosts and ports do not fit.
    """
    addresses = options.get("hostaddr", "").split(",")
    hosts = options.get("host", "").split(",")
    ports = options.get("port", "5432").split(",")
    count = max(len(hosts), len(addresses))
    hosts, addresses, ports = (_spread(values, count) for values in (hosts, addresses, ports))
    result = []
    for host, address, port in zip(hosts, addresses, ports, strict=True):
        name = host or address or _default_directory()
        password = options.get("password") or _password_from_file(options, name, port or "5432")
        result.append(Endpoint(name, int(port or "5432"), address, password))
    return result


def _spread(values: list[str], count: int) -> list[str]:
    if len(values) == 1:
        return values * count
    if len(values) != count:
        raise ConfigError("the DSN names different numbers of hosts and ports", where="dsn")
    return values


def _default_directory() -> str:
    return next((path for path in _UNIX_DIRECTORIES if Path(path).is_dir()), "localhost")


def _password_from_file(options: Mapping[str, str], host: str, port: str) -> str | None:
    path = Path(options.get("passfile") or Path.home() / ".pgpass")
    try:
        # libpq ignores a file that others can read.
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            return None
        lines = path.read_text("utf-8").splitlines()
    except OSError:
        return None
    wanted = ("localhost" if host.startswith("/") else host, port, options["dbname"], options["user"])
    for line in lines:
        fields = _split_passfile(line)
        if len(fields) == 5 and all(mine in ("*", want) for mine, want in zip(fields[:4], wanted, strict=True)):
            return fields[4]
    return None


def _split_passfile(line: str) -> list[str]:
    if line.startswith("#"):
        return []
    fields = [""]
    characters = iter(line)
    for character in characters:
        if character == "\\":
            fields[-1] += next(characters, "")
        elif character == ":" and len(fields) < 5:
            fields.append("")
        else:
            fields[-1] += character
    return fields
