"""When a lone controller has fenced the broker that crashed."""

from __future__ import annotations

import pytest

from anabranch.stack.kafka_recovery import is_fenced

REGISTERED = (
    "INFO [QuorumController id=1] Replayed initial RegisterBrokerRecord for broker 1: (brokerId=1, fenced=true)"
)
UNFENCED = (
    "INFO Replayed BrokerRegistrationChangeRecord modifying the registration for broker 1: (brokerId=1, fenced=-1)"
)
UNCHANGED = (
    "INFO Replayed BrokerRegistrationChangeRecord modifying the registration for broker 1: (brokerId=1, fenced=0)"
)
FENCED = "INFO Replayed BrokerRegistrationChangeRecord modifying the registration for broker 1: (brokerId=1, fenced=1)"
ACTIVE = "WARN [QuorumController id=1] Performing controller activation."


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        pytest.param([], False, id="nothing is known yet"),
        pytest.param([REGISTERED, UNFENCED, FENCED], False, id="a fence of the past, more may follow"),
        pytest.param([REGISTERED, UNFENCED, ACTIVE], False, id="the former self is still alive"),
        pytest.param([REGISTERED, UNFENCED, UNCHANGED, ACTIVE, FENCED], True, id="fenced by the lone controller"),
        pytest.param([REGISTERED, UNFENCED, FENCED, ACTIVE], True, id="fenced before the crash"),
        pytest.param([REGISTERED, UNFENCED, FENCED, UNFENCED, ACTIVE], False, id="fenced once, and back since"),
        pytest.param([ACTIVE], True, id="crashed before it was ever registered"),
    ],
)
def test_the_last_word_after_activation_counts(log: list[str], *, expected: bool) -> None:
    assert is_fenced(log) is expected
