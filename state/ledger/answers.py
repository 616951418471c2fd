"""Private choices in the ledger: charged before the first draw, answered once.

A choice is an entry of the data set like any run, plus a row here: the keyed fingerprint of
what was asked of which input, and, once drawn, the receipt.  Run id, charge and row are one
transaction, so there is no draw without a charge and no charge whose run id is lost.  A row
without a receipt released nothing: asking the same again goes on with it, same run id, same
noise.  A row with a receipt is never drawn again: it is re-read on request.
"""

import hashlib
from pathlib import Path

from dpstream.accounting.composition import within
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.figures import exact
from dpstream.accounting.plan.unit import composed
from dpstream.state.ledger.charges import Charge, Ledger

_DDL = """
CREATE TABLE IF NOT EXISTS choices (
  run_id TEXT PRIMARY KEY, data_set TEXT NOT NULL, request TEXT NOT NULL,
  receipt TEXT, digest TEXT)
"""


class ChoiceLedger(Ledger):
    """The ledger of a data set with its private choices; see `state.ledger.charges.Ledger`."""

    def __init__(self, path: str | Path, data_set: str) -> None:
        super().__init__(path, data_set)
        with self.transaction() as db:
            db.execute(_DDL)

    def begin(
        self, spend: Charge, stream: Charge, request: str, limit: tuple[float, float]
    ) -> tuple[str, bool]:
        """Charge a choice, or go on with one of the same request that has no receipt yet.

        Args:
            spend: what the choice costs, under a fresh run id.
            stream: what the stream it is for will cost; only checked, so that nobody pays for
                a choice that cannot be used.
            request: keyed fingerprint of question and input.
            limit: the steward's (epsilon, delta).

        Returns:
            (run id, whether it was charged before).

        Raises:
            PolicyError: beyond the limit, or of a unit whose costs do not add up with others.
        """
        with self.transaction():
            row = self._db.execute(
                "SELECT run_id FROM choices WHERE data_set = ? AND request = ? AND receipt IS NULL",
                (self.data_set, request),
            ).fetchone()
            if row is not None:
                return str(row[0]), True
            if not within(composed([*self.entries(), spend, stream]).spends, *limit):
                raise PolicyError(
                    "ledger.limit",
                    "the choice and the stream it is for would together spend more than epsilon "
                    f"{exact(limit[0])} at delta {exact(limit[1])} per unit",
                    "lower --epsilon or privacy.epsilon, or ask the data steward for more",
                )
            self.charge_within(spend, *limit)
            self._db.execute(
                "INSERT INTO choices (run_id, data_set, request) VALUES (?, ?, ?)",
                (spend.run_id, self.data_set, request),
            )
        return spend.run_id, False

    def resume(self, run_id: str, request: str) -> None:
        """Check that a run id was charged for this very request.

        Raises:
            PolicyError: it was not.
        """
        row = self._row(run_id)
        if row is None:
            raise PolicyError(
                "--resume", "no choice with this run id is in the ledger", "omit it to choose anew"
            )
        if row[0] != request:
            raise PolicyError(
                "--resume",
                "that run was charged for another question, noise key or input",
                "ask exactly what was asked then, or omit it: a new choice is a new charge",
            )

    def commit(self, run_id: str, text: str) -> str:
        """Commit what a charged choice released, once; returns what stands (text)."""
        with self.transaction():
            found = self.receipt(run_id)
            if found is not None:
                return found[0]
            self._db.execute(
                "UPDATE choices SET receipt = ?, digest = ? WHERE run_id = ?",
                (text, self._digest(run_id, text), run_id),
            )
        return text

    def receipt(self, run_id: str) -> tuple[str, str] | None:
        """(text, digest) of what a choice released, ``None`` if it has not yet.

        Raises:
            PolicyError: it does not fit its digest, or has no charge.
        """
        row = self._row(run_id)
        if row is None or row[1] is None:
            return None
        if row[2] != self._digest(run_id, row[1]):
            raise PolicyError(
                "ledger.path", "a receipt was changed", "restore the ledger from a backup"
            )
        return row[1], row[2]

    def _row(self, run_id: str) -> tuple[str, str | None, str | None] | None:
        row: tuple[str, str | None, str | None] | None = self._db.execute(
            "SELECT request, receipt, digest FROM choices WHERE data_set = ? AND run_id = ?",
            (self.data_set, run_id),
        ).fetchone()
        return row

    def _digest(self, run_id: str, text: str) -> str:
        """Binds the receipt to its entry, and through it to the ledger's chain."""
        row = self._db.execute(
            "SELECT digest FROM entries WHERE data_set = ? AND run_id = ?",
            (self.data_set, run_id),
        ).fetchone()
        if row is None:
            raise PolicyError("ledger.path", "a choice has no charge", "restore it from a backup")
        bound = "\0".join((row[0], run_id, text)).encode()
        return hashlib.blake2b(bound, digest_size=16, person=b"dpstream-choice").hexdigest()
