"""What a broker that was killed needs before it may start again: to be fenced by its own controller.

A single KRaft node that comes back within its session finds itself the live leader of every partition. Its transaction
coordinator takes up transactions whose commit was acknowledged but whose markers are not written yet, cannot reach
the listener that is not open yet, and, at the moment when the old session ends, takes the leaderless partitions for
deleted ones: "these partitions are likely deleted already and hence can be skipped". The transaction is then complete
without a marker, and readers of committed data wait for ever (Kafka 4.3.1, three of seven restarts).

So after a crash the node first runs as a controller alone, which fences its former self at once. The start after that
finds no live leader, waits for no session, and is quicker on the whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["SETTINGS", "is_fenced"]

SETTINGS = {
    "process.roles": "controller",
    # Nobody sends heartbeats while the controller is alone.
    "broker.heartbeat.interval.ms": "50",
    "broker.session.timeout.ms": "100",
}

# What ClusterControlManager logs, at level info, for every registration record that it applies.
_REGISTERED = re.compile(r"Replayed .*RegisterBrokerRecord.*\bfenced=(true|false)")
_CHANGED = re.compile(r"Replayed BrokerRegistrationChangeRecord.*\bfenced=(-?1)\b")
_ACTIVE = "Performing controller activation"


def is_fenced(log: Iterable[str]) -> bool:
    """Tell from a lone controller's log whether it has read all metadata and the broker in it is fenced, or not there.

    The log and not the protocol, since the client library has no way to ask a controller.
    """
    active, fenced = False, True
    for line in log:
        if _ACTIVE in line:
            active = True
        elif match := _REGISTERED.search(line):
            fenced = match[1] == "true"
        elif match := _CHANGED.search(line):
            fenced = match[1] == "1"
    return active and fenced
