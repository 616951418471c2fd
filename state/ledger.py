"""One ledger per data set: what every run spent per unit, chained and refused beyond a limit.

A run is charged when it begins, before its first draw, and once: the charge is named by the
run id that its store committed.  Another run on the same data (a corrected input, the same
statement on a grown table) is fresh noise and a new charge.  Entries form a hash chain, so an
edited one, or one removed from the middle, is noticed (not the removal of the last ones).
"""

import hashlib
import math
import sqlite3
from pathlib import Path

import msgspec

from accounting.errors import PolicyError, RunError
from accounting.gaussian import delta_of

_DDL = """
CREATE TABLE IF NOT EXISTS entries (
  seq INTEGER PRIMARY KEY, data_set TEXT NOT NULL, run_id TEXT NOT NULL,
  entry TEXT NOT NULL, digest TEXT NOT NULL, UNIQUE (data_set, run_id))
"""


class Charge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one run spends per unit of a data set.

    Attributes:
        run_id, plan_hash: the run and its public plan.
        unit: the privacy unit in words.
        epsilon, delta: the run's own guarantee.
        mu: Gaussian-DP parameter of its noise.
        threshold_delta: part of delta its thresholds use (C b).
    """

    run_id: str
    plan_hash: str
    unit: str
    epsilon: float
    delta: float
    mu: float
    threshold_delta: float


class Ledger:
    """The ledger of one data set.

    Args:
        path: SQLite file, shared by all jobs on the data set.
        data_set: name of the data set.
    """

    def __init__(self, path: str | Path, data_set: str) -> None:
        self._data_set = data_set
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, isolation_level=None, timeout=60)
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute(_DDL)
        except (sqlite3.Error, OSError) as error:
            raise _failed(error) from None

    def charge(self, charge: Charge, epsilon: float, delta: float) -> bool:
        """Charge a run unless the data set's limit forbids it; atomic and durable.

        Args:
            charge: what the run spends.
            epsilon, delta: the steward's limit per unit, over all runs.

        Returns:
            False if this run was charged before (a restart), True if it is charged now.

        Raises:
            PolicyError: the composition of all runs would exceed the limit.
        """
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                fresh = self._charge(charge, epsilon, delta)
                self._db.execute("COMMIT")
                return fresh
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise _failed(error) from None

    def _charge(self, charge: Charge, epsilon: float, delta: float) -> bool:
        entries = self.entries()
        if any(e.run_id == charge.run_id for e in entries):
            return False
        self._refuse(entries, charge, epsilon, delta)
        text = msgspec.json.encode(charge, order="sorted").decode()
        row = self._db.execute("SELECT digest FROM entries ORDER BY seq DESC LIMIT 1").fetchone()
        digest = _digest(row[0] if row else "", self._data_set, text)
        self._db.execute(
            "INSERT INTO entries (data_set, run_id, entry, digest) VALUES (?, ?, ?, ?)",
            (self._data_set, charge.run_id, text, digest),
        )
        return True

    def check(self, charge: Charge, epsilon: float, delta: float) -> None:
        """Refuse a charge that ``charge`` would refuse now; writes nothing."""
        self._refuse(self.entries(), charge, epsilon, delta)

    def _refuse(self, entries: list[Charge], charge: Charge, epsilon: float, delta: float) -> None:
        if any(e.unit != charge.unit for e in entries):
            # A run per user is no mu-GDP run per (user, period): the costs do not add up.
            raise PolicyError(
                "ledger.data_set",
                "its runs protect another privacy unit or period, and such costs do not add up",
                "use the same unit and period in all jobs on this data set",
            )
        if not within([*entries, charge], epsilon, delta):
            raise PolicyError(
                "ledger.limit",
                f"the runs on this data set would together spend more than epsilon {epsilon:g}"
                f" at delta {delta:g} per unit ({len(entries)} runs are charged already)",
                "continue a run on its own store, or ask the data steward for a larger limit",
            )

    def entries(self) -> list[Charge]:
        """Charges of this data set in order, after a check of the chain.

        Raises:
            PolicyError: the chain does not hold.
        """
        previous, charges = "", []
        rows = self._db.execute("SELECT data_set, entry, digest FROM entries ORDER BY seq")
        for data_set, text, digest in rows:
            if digest != _digest(previous, data_set, text):
                raise PolicyError(
                    "ledger.path", "its hash chain is broken", "restore the ledger from a backup"
                )
            previous = digest
            if data_set == self._data_set:
                charges.append(msgspec.json.decode(text, type=Charge))
        return charges

    def close(self) -> None:
        """Close the file."""
        self._db.close()


def within(charges: list[Charge], epsilon: float, delta: float) -> bool:
    """Whether the charges together satisfy (epsilon, delta) per unit.

    One run alone satisfies its own guarantee.  Several are one Gaussian-DP mechanism with
    mu^2 = sum of mu_i^2 (adaptive composition), plus the deltas of their thresholds.
    """
    if len(charges) == 1 and charges[0].epsilon <= epsilon and charges[0].delta <= delta:
        return True
    mu = math.sqrt(math.fsum(c.mu**2 for c in charges)) * (1 + 1e-12)
    spent = delta_of(epsilon, mu) + math.fsum(c.threshold_delta for c in charges)
    return spent <= delta


def _digest(previous: str, data_set: str, text: str) -> str:
    chained = "\0".join((previous, data_set, text)).encode()
    return hashlib.blake2b(chained, digest_size=16).hexdigest()


def _failed(error: Exception) -> RunError:
    code = getattr(error, "sqlite_errorname", None) or type(error).__name__
    return RunError("ledger.path", f"the ledger cannot be used ({code})", "check path and rights")
