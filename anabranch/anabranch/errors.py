"""Errors of the front door.

AnabranchError
└── NotCaughtUpError   verify.not_caught_up   the target's safe time does not reach the source's present
"""

from __future__ import annotations

from anabranch_schemas.errors import AnabranchError


class NotCaughtUpError(AnabranchError):
    """The target has not applied what the source had when the comparison began."""

    code = "verify.not_caught_up"
