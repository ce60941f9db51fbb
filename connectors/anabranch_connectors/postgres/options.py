"""What the pipeline file says about a PostgreSQL source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PostgresOptions:
    """The options of one source, with names and defaults filled in."""

    dsn: str
    stream: str
    prefix: str
    tables: tuple[str, ...]
    slot: str
    publication: str
    spill_dir: Path
    adopt: bool = False
    """Use a publication of that name that a user made."""
    key_columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unknown_types: str = "text"
    tombstones: bool = True
    heartbeat_s: float = 10.0
    """0: none. A heartbeat is a logical message: it needs no table and no rights beyond EXECUTE."""
    spill_bytes: int = 64 << 20

    @property
    def application_name(self) -> str:
        """What the server shows of our connections; also how a worker knows its own kind."""
        return f"anabranch {self.stream}"[:63]  # PostgreSQL cuts names at 63 bytes
