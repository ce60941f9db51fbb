"""The bank: money moves between two tables, so a torn transaction shows as a wrong sum.

Every transfer takes an amount from `checking`, adds it to `savings` (or the other way round) and writes two entries
into `ledger`, one negative, one positive. So at every moment of the source

* the sum over both account tables is what it was in the beginning,
* every transfer has exactly two ledger entries, whose amounts sum to zero.

`pulse` gets a row now and then whose commit time is remembered: how long it takes to show at the target is the lag.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import psycopg

ACCOUNTS = 500
OPENING_BALANCE = 1_000
ENTRIES_PER_TRANSFER = 2
_PULSE_S = 0.05

_SCHEMA = """
CREATE SCHEMA bank;
CREATE TYPE bank.kind AS ENUM ('cash', 'wire', 'card, online');
CREATE TABLE bank.checking (
    id bigint PRIMARY KEY, owner text NOT NULL, balance numeric(14,2) NOT NULL, active boolean NOT NULL DEFAULT true,
    opened date, tags text[], profile jsonb, reference uuid
);
CREATE TABLE bank.savings (
    id bigint PRIMARY KEY, owner text NOT NULL, balance numeric(14,2) NOT NULL, rate real, changed timestamptz
);
CREATE TABLE bank.ledger (
    transfer bigint, entry smallint, account bigint NOT NULL, amount numeric(14,2) NOT NULL, kind bank.kind,
    at timestamptz NOT NULL DEFAULT clock_timestamp(), took interval, note text, proof bytea,
    PRIMARY KEY (transfer, entry)
);
CREATE TABLE bank.pulse (id bigint PRIMARY KEY, at timestamptz NOT NULL);
INSERT INTO bank.checking
    SELECT n, 'owner ' || n, {balance}, n % 7 <> 0, date '2020-01-01' + n::int,
           CASE WHEN n % 3 = 0 THEN NULL ELSE ARRAY['gold', NULL, 'n' || n] END,
           jsonb_build_object('level', n % 5, 'nothing', NULL), gen_random_uuid()
    FROM generate_series(1, {accounts}) n;
INSERT INTO bank.savings SELECT n, 'owner ' || n, {balance}, n / 7.0, now() FROM generate_series(1, {accounts}) n;
"""

_MOVE = """
WITH taken AS (UPDATE bank.checking SET balance = balance - %(amount)s WHERE id = %(from)s),
     given AS (UPDATE bank.savings SET balance = balance + %(amount)s, changed = now() WHERE id = %(to)s)
INSERT INTO bank.ledger (transfer, entry, account, amount, kind, took, note, proof) VALUES
    (%(transfer)s, 1, %(from)s, -%(amount)s, %(kind)s, %(took)s, %(note)s, %(proof)s),
    (%(transfer)s, 2, %(to)s, %(amount)s, %(kind)s, %(took)s, NULL, NULL)
"""
ROWS_PER_TRANSFER = 4


class Bank:
    """Writes the workload until told to stop."""

    def __init__(self, dsn: str, *, rate: float, writers: int = 2, seed: int = 1) -> None:
        self._dsn = dsn
        self._interval = writers / rate
        self._writers = writers
        self._seed = seed
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._gates = [threading.Lock() for _ in range(writers + 1)]
        self.transfers = 0
        self.pulses: dict[int, float] = {}
        """id → when its commit returned"""

    @staticmethod
    def create(dsn: str) -> None:
        """Create the bank's tables with their opening balances."""
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(_SCHEMA.format(accounts=ACCOUNTS, balance=OPENING_BALANCE).encode())

    def start(self) -> None:
        """Start the writers."""
        jobs: list[Callable[[], None]] = [self._pulse]
        jobs += [lambda number=number: self._write(number) for number in range(self._writers)]  # type: ignore[misc]
        for job in jobs:
            thread = threading.Thread(target=job, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Stop the writers and wait for their last commit."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let no transfer begin while the block runs; those that have begun are committed before it does."""
        with ExitStack() as stack:
            for gate in self._gates:
                stack.enter_context(gate)
            yield

    def _write(self, number: int) -> None:
        choose = random.Random(self._seed * 1000 + number)  # noqa: S311 - a workload, not a secret
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            transfer = number
            due = time.monotonic()
            while not self._stop.wait(max(0.0, due - time.monotonic())):
                with self._gates[number]:
                    connection.execute(_MOVE, _transfer(transfer, choose))
                transfer += self._writers
                with self._lock:
                    self.transfers += 1
                due = max(due + self._interval, time.monotonic() - 1)

    def _pulse(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            number = 0
            while not self._stop.wait(_PULSE_S):
                number += 1
                with self._gates[-1]:
                    connection.execute("INSERT INTO bank.pulse VALUES (%s, clock_timestamp())", [number])
                self.pulses[number] = time.monotonic()


def _transfer(number: int, choose: random.Random) -> dict[str, object]:
    """Return the parameters of one transfer."""
    return {
        "amount": choose.randrange(1, 10_000) / 100 * choose.choice((1, -1)),
        "from": choose.randrange(1, ACCOUNTS + 1),
        "to": choose.randrange(1, ACCOUNTS + 1),
        "transfer": number,
        "kind": choose.choice(("cash", "wire", "card, online")),
        "took": f"{choose.randrange(90)} seconds",
        "note": choose.choice(("", "rent", "Zürich → 東京", None)),
        "proof": choose.randbytes(16),
    }
