"""What can go wrong at a target, whatever system it is.

AnabranchError
└── TargetError                  sink.target               the target refused, for a reason of its own
├── TargetUnavailableError   sink.target_unavailable   it cannot be reached, or the connection broke
├── TargetBusyError          sink.target_busy          a deadlock or serialization failure; nothing was applied
├── SinkFencedError          sink.fenced               another driver of the same sink has started
├── StagingLostError         sink.staging_lost         staged rows are no longer there; nothing was applied
├── TableMissingError        sink.table_missing        a table of the cut does not exist
├── SchemaMismatchError      sink.schema_mismatch      a column is missing or cannot take the values
├── TargetConstraintError    sink.constraint           a constraint refuses a row
└── PartialRowMissingError   sink.partial_row_missing  a partial row has no row to complete it from
"""

from __future__ import annotations

from anabranch_schemas.errors import Action, AnabranchError


class TargetError(AnabranchError):
    """The target refused, for a reason of its own."""

    code = "sink.target"


class TargetUnavailableError(TargetError):
    """The target cannot be reached, or the connection broke; passes when it is back."""

    code = "sink.target_unavailable"
    action = Action.RETRY


class TargetBusyError(TargetError):
    """Another session was in the way (deadlock, serialization failure); nothing was applied."""

    code = "sink.target_busy"
    action = Action.RETRY


class SinkFencedError(TargetError):
    """Another driver of the same sink has started since; this one may write nothing more."""

    code = "sink.fenced"


class StagingLostError(TargetError):
    """Fewer rows are staged than the receipts say; the cut is staged again."""

    code = "sink.staging_lost"
    action = Action.RETRY


class TableMissingError(TargetError):
    """A table of the cut does not exist at the target."""

    code = "sink.table_missing"


class SchemaMismatchError(TargetError):
    """A column is missing at the target or its type cannot take the source's values."""

    code = "sink.schema_mismatch"


class TargetConstraintError(TargetError):
    """A constraint at the target refuses a row of the source."""

    code = "sink.constraint"
    action = Action.PARK

    def __init__(
        self, message: str, *, where: str = "", advice: str = "", constraint: str = "", sqlstate: str = ""
    ) -> None:
        super().__init__(message, where=where, advice=advice)
        self.constraint = constraint
        self.sqlstate = sqlstate


class PartialRowMissingError(TargetError):
    """A row travelled without its unchanged columns, and the target has no row to take them from."""

    code = "sink.partial_row_missing"
