"""Vector time: what a site had applied from every site, as a map site → seq, and its laws.

An absent entry is 0 (Eventuate's rule E1), so two vectors that differ only in zero entries are equal. `merge` is
commutative, associative and idempotent; `<=` is a partial order with `merge` as its least upper bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Self


class VectorTime(Mapping[int, int]):
    """An immutable map from site number (u16) to seq (u64). Zero entries are not kept."""

    __slots__ = ("_entries",)

    def __init__(self, entries: Mapping[int, int] | None = None) -> None:
        self._entries: dict[int, int] = {s: q for s, q in sorted((entries or {}).items()) if q}

    def __getitem__(self, site: int) -> int:
        return self._entries.get(site, 0)

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, site: object) -> bool:
        return site in self._entries

    def __hash__(self) -> int:
        return hash(tuple(self._entries.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VectorTime) and self._entries == other._entries

    def __le__(self, other: VectorTime) -> bool:
        return all(seq <= other[site] for site, seq in self._entries.items())

    def __lt__(self, other: VectorTime) -> bool:
        return self <= other and self != other

    def __ge__(self, other: VectorTime) -> bool:
        return other <= self

    def __gt__(self, other: VectorTime) -> bool:
        return other < self

    def __repr__(self) -> str:
        return f"VectorTime({self._entries})"

    def concurrent(self, other: VectorTime) -> bool:
        """Tell whether neither vector covers the other."""
        return not self <= other and not other <= self

    def merge(self, other: VectorTime) -> VectorTime:
        """Return the least upper bound of the two."""
        return VectorTime({site: max(self[site], other[site]) for site in {*self, *other}})

    def advance(self, site: int, seq: int) -> VectorTime:
        """Return a vector whose entry for `site` is at least `seq`."""
        return self if self[site] >= seq else VectorTime({**self._entries, site: seq})

    def covers(self, site: int, seq: int) -> bool:
        """Tell whether the change (site, seq) was applied when this vector was taken."""
        return self[site] >= seq

    def as_json(self) -> dict[str, int]:
        """Return the entries with their site numbers as strings, for JSON."""
        return {str(site): seq for site, seq in self._entries.items()}

    @classmethod
    def from_json(cls, value: Mapping[str, int]) -> Self:
        """Read what `as_json` wrote."""
        return cls({int(site): int(seq) for site, seq in value.items()})
