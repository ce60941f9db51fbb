"""What is measured: figures, rounds of ours beside a peer's, and their ratio."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.ground import Ground


class BenchError(Exception):
    """Something that has to be there for a measurement is not, or a result is not what it must be."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure; `goal` is the least ratio of ours to the peer's that is wanted."""

    name: str
    goal: float
    unit: str
    what: str


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    rows: int
    """Of narrow workloads; wide ones have half of it."""
    warm_up_s: float = 15.0
    """Of the latency figures, under load."""
    window_s: float = 20.0
    """Of one round of the latency figures."""


@dataclass(frozen=True, slots=True)
class Round:
    """One round: both sides right after each other. `ratio` is above 1 where ours is better."""

    ours: float
    peer: float
    ratio: float
    notes: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of_rates(cls, ours: float, peer: float, **notes: float) -> Round:
        """Return a round of two rates: more is better."""
        return cls(ours, peer, ours / peer, notes)


@dataclass(frozen=True, slots=True)
class Group:
    """Figures that are measured together; `rounds` yields their rounds by name for as long as it is asked."""

    figures: tuple[Figure, ...]
    rounds: Callable[[Ground, Size], Generator[Mapping[str, Round], None, None]]


@dataclass(frozen=True, slots=True)
class Result:
    """A measured figure."""

    figure: Figure
    rounds: Sequence[Round]
    foreign: float
    """Share of the machine that others used when its rounds began, at most."""

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(found.ratio for found in self.rounds)

    @property
    def met(self) -> bool:
        """Tell whether the goal is reached."""
        return self.ratio >= self.figure.goal

    def notes(self) -> dict[str, float]:
        """Return the median of each note."""
        names = self.rounds[0].notes
        return {name: round(statistics.median(r.notes[name] for r in self.rounds), 2) for name in names}

    def as_dict(self) -> dict[str, Any]:
        """Return the figure as one JSON object."""
        ratios = [found.ratio for found in self.rounds]
        return {
            "name": self.figure.name,
            "ratio": round(self.ratio, 3),
            "goal": self.figure.goal,
            "min": round(min(ratios), 3),
            "max": round(max(ratios), 3),
            "runs": len(ratios),
            "ours": round(statistics.median(found.ours for found in self.rounds), 1),
            "peer": round(statistics.median(found.peer for found in self.rounds), 1),
            "unit": self.figure.unit,
            "foreign": round(self.foreign, 2),
            "notes": self.notes(),
        }
