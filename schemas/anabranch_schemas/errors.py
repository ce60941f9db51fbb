"""The errors of Anabranch: one base, a stable dotted code each, and what to do about every code.

    AnabranchError
    ├── ConfigError              config.*     what the user wrote cannot be run
    ├── StampError               stamp.*      a change record's header is not one of ours
    ├── MarkerError              marker.*     a marker contradicts its stream
    ├── TypeMappingError         type.*       a value or column that cannot travel
    └── RegistryError            registry.*   schemas cannot be written or read

Rooms derive their own classes from the base, beside the code that raises them.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, ClassVar


class Action(Enum):
    """What a supervisor does when a part ends with an error."""

    RETRY = "retry"
    """Start the part again, with backoff: the cause is expected to pass."""
    PARK = "park"
    """Set the transaction aside, visibly, and go on, where the policy allows it."""
    STOP = "stop"
    """Stay down until an operator has acted on the advice."""


class AnabranchError(Exception):
    """The base of every error that Anabranch raises on purpose.

    `code` is stable and dotted, `where` is the failing path (a configuration key, a topic, a table), `advice`
    says what the operator can do, with the command where there is one. Row values and secrets appear in none of them.
    """

    code: ClassVar[str] = "anabranch.failed"
    action: ClassVar[Action] = Action.STOP

    def __init__(self, message: str, *, where: str = "", advice: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.advice = advice

    def __str__(self) -> str:
        where = f" [{self.where}]" if self.where else ""
        advice = f"\n  -> {self.advice}" if self.advice else ""
        return f"{self.code}{where}: {self.message}{advice}"

    def as_dict(self) -> dict[str, Any]:
        """Return the error as it is shown in status, logs and `-o json`."""
        return {"code": self.code, "where": self.where, "message": self.message, "advice": self.advice}


class ConfigError(AnabranchError):
    """What the user wrote cannot be run."""

    code = "config.invalid"


class StampError(AnabranchError):
    """A change record's `ab.stamp` header is missing or not one that this version reads."""

    code = "stamp.invalid"


class MarkerError(AnabranchError):
    """A marker cannot be read or contradicts the markers before it."""

    code = "marker.invalid"


class TypeMappingError(AnabranchError):
    """A column or value that cannot travel without loss."""

    code = "type.unsupported"


class RegistryError(AnabranchError):
    """Schemas cannot be written or read; passes when the registry is back."""

    code = "registry.unavailable"
    action = Action.RETRY
