"""The resume token of a PostgreSQL stream: what a marker carries so that a restart goes on exactly behind it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from anabranch_connectors.postgres.copying import CopiedChunk
from anabranch_connectors.postgres.lsn import lsn_int, lsn_text
from anabranch_connectors.postgres.slots import StoredPosition
from anabranch_connectors.postgres.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Resume:
    """A point between two transactions of the log, and the copy phase's traces as long as there are any."""

    lsn: int
    """Every transaction that ends at or before it has been published."""
    commit_lsn: int
    """The last transaction's commit record; it shows in the next one's envelope."""
    system_id: str = ""
    timeline: int = 0
    streamed_xids: tuple[int, ...] = ()
    """Published transactions that a snapshot might not see yet."""
    last_seq: int = 0
    next_ordinal: int = 0
    """No row published at the position `last_seq` has this ordinal or a greater one: a copied row can have it."""
    chunks: tuple[CopiedChunk, ...] = field(default=())
    """Copied chunks whose high mark the log has not passed."""
    emptied_first: bool = False
    """Begun anew: each table is emptied at the targets before it is copied."""

    @property
    def stored(self) -> StoredPosition:
        """The part that slot and server are compared with."""
        return StoredPosition(self.lsn, self.system_id, self.timeline)

    def encode(self) -> bytes:
        """Return the token."""
        token: dict[str, object] = {
            "lsn": lsn_text(self.lsn),
            "commit": lsn_text(self.commit_lsn),
            "system_id": self.system_id,
            "timeline": self.timeline,
        }
        if self.next_ordinal:
            token["ordinal"] = [self.last_seq, self.next_ordinal]
        if self.streamed_xids or self.chunks:
            token |= {"xids": self.streamed_xids, "chunks": [_dump(chunk) for chunk in self.chunks]}
        if self.emptied_first:
            token["emptied_first"] = True
        return orjson.dumps(token)

    @classmethod
    def decode(cls, data: bytes) -> Resume | None:
        """Read a token; None if it says that the stream begins anew."""
        token = orjson.loads(data)
        if token.get("bootstrap"):
            return None
        seq, ordinal = token.get("ordinal", (0, 0))
        return cls(
            lsn=lsn_int(token["lsn"]),
            commit_lsn=lsn_int(token["commit"]),
            system_id=token["system_id"],
            timeline=token["timeline"],
            streamed_xids=tuple(token.get("xids", ())),
            last_seq=seq,
            next_ordinal=ordinal,
            chunks=tuple(_load(chunk) for chunk in token.get("chunks", ())),
            emptied_first=token.get("emptied_first", False),
        )


def _dump(chunk: CopiedChunk) -> dict[str, object]:
    return {
        "table": chunk.table,
        "after": None if chunk.after is None else chunk.after.decode(),
        "bound": None if chunk.bound is None else chunk.bound.decode(),
        "snapshot": str(chunk.snapshot),
        "high_mark": lsn_text(chunk.high_mark),
    }


def _load(value: dict[str, Any]) -> CopiedChunk:
    return CopiedChunk(
        value["table"],
        value["after"].encode() if value["after"] is not None else None,
        value["bound"].encode() if value["bound"] is not None else None,
        Snapshot.parse(value["snapshot"]),
        lsn_int(value["high_mark"]),
    )
