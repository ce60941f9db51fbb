"""A reader at the target that looks for torn transactions all the while, and measures the lag."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import psycopg

from anabranch.demo.bank import ACCOUNTS, ENTRIES_PER_TRANSFER, OPENING_BALANCE

_PAUSE_S = 0.02
# Transfers looked at again from the poll before: the writers number theirs independently, a slow one lags behind.
_WINDOW = 2_000

# Tables are created at the target one after another, as the copy phase reaches them.
_READY = """
SELECT bool_and(to_regclass(name) IS NOT NULL)
FROM unnest(ARRAY['anabranch.progress', 'bank.checking', 'bank.savings', 'bank.ledger', 'bank.pulse']) name
"""
# One statement, so one snapshot.
_LOOK = """
SELECT (SELECT sum(balance) FROM bank.checking) + (SELECT sum(balance) FROM bank.savings) AS money,
       (SELECT count(*) FROM (SELECT FROM bank.ledger WHERE transfer > %(from)s GROUP BY transfer
                              HAVING count(*) <> %(entries)s OR sum(amount) <> 0) torn) AS torn,
       (SELECT max(id) FROM bank.pulse) AS pulse,
       (SELECT max(transfer) FROM bank.ledger) AS newest,
       (SELECT bool_and(safe_time IS NOT NULL) FROM anabranch.progress) AS consistent
"""


class Reader:
    """Polls the target from the moment its safe time says that it may be trusted."""

    def __init__(self, dsn: str, pulses: Mapping[int, float]) -> None:
        self._dsn = dsn
        self._pulses = pulses
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._seen = 0
        self._failure: BaseException | None = None
        self.consistent = threading.Event()
        self.reads = 0
        self.torn = 0
        self.lags_ms: list[float] = []

    def start(self) -> None:
        """Start polling."""
        self._thread.start()

    def stop(self) -> None:
        """Stop polling; raises what went wrong in the meantime."""
        self._stop.set()
        self._thread.join()
        self.check()

    def check(self) -> None:
        """Raise what went wrong so far."""
        if self._failure is not None:
            raise self._failure

    def percentile(self, share: float) -> float | None:
        """Return a percentile of the lag so far, milliseconds."""
        lags = sorted(self.lags_ms)
        return round(lags[min(len(lags) - 1, int(share * len(lags)))], 1) if lags else None

    def _run(self) -> None:
        try:
            with psycopg.connect(self._dsn, autocommit=True) as connection:
                self._wait_for_tables(connection)
                while not self._stop.wait(_PAUSE_S):
                    self._look(connection)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that asks for the result
            self._failure = error
            self.consistent.set()

    def _wait_for_tables(self, connection: psycopg.Connection) -> None:
        while not self._stop.wait(_PAUSE_S):
            row = connection.execute(_READY).fetchone()
            if row and row[0]:
                return

    def _look(self, connection: psycopg.Connection) -> None:
        look = {"from": self._seen - _WINDOW, "entries": ENTRIES_PER_TRANSFER}
        row = connection.execute(_LOOK, look).fetchone()
        assert row is not None
        now = time.monotonic()
        money, torn, pulse, newest, consistent = row
        if not consistent:
            return
        self.consistent.set()
        self.reads += 1
        self._seen = newest or self._seen
        if torn or money != 2 * ACCOUNTS * OPENING_BALANCE:
            self.torn += 1
        if pulse:
            self._measure(pulse, now)

    def _measure(self, newest: int, now: float) -> None:
        last = getattr(self, "_last_pulse", 0)
        for number in range(last + 1, newest + 1):
            committed = self._pulses.get(number)
            if committed is not None:
                self.lags_ms.append(max(0.0, (now - committed) * 1e3))
        self._last_pulse = newest
