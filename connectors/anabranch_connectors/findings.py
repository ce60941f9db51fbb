"""What a check of a system finds: each finding with the command or setting that repairs it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from anabranch_schemas.errors import AnabranchError


class Severity(Enum):
    """What a finding means for running the pipeline."""

    ERROR = "error"
    """It will fail, or lose rows."""
    WARNING = "warning"
    """It runs, but something should be changed."""
    INFO = "info"
    """Worth knowing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing found; `code` is stable and dotted, as with errors."""

    code: str
    severity: Severity
    where: str
    message: str
    repair: str = ""

    @classmethod
    def of(cls, error: AnabranchError, severity: Severity = Severity.ERROR) -> Finding:
        """Return what an error that was met during a check amounts to."""
        return cls(error.code, severity, error.where, error.message, error.advice)
