"""What callers need of a data set's ledger, wherever it is kept.

One ledger per data set: what every run spent per unit, refused beyond a limit.  The rules are
here; a subclass says how rows are kept (``state.ledger.sqlite``, ``state.ledger.spanner``).
``state.ledger.answers`` and ``state.ledger.lineage`` build on the same rows: the answers that were
charged once, and which copy of a store goes on.

Every store remembers the end of the chain as it last saw it: a ledger that no longer holds that
entry (cut off, restored from a backup, another file) is refused by ``refuse_older``.
"""

import abc
import contextlib
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from dpstream.accounting.composition import epsilon_spent
from dpstream.accounting.errors import RunError
from dpstream.accounting.limits import BUSY_SECONDS
from dpstream.accounting.plan.unit import composed
from dpstream.state.ledger.charges import Book, Charge, Head

#: A steward's limit per unit: (epsilon, delta).
Limit = tuple[float, float]
Result = TypeVar("Result")
#: Longest pause before a transaction that another process overtook is done again.
_PAUSE_SECONDS = 0.2


class LedgerMovedError(Exception):
    """Another process has changed the ledger since the transaction began; nothing was written."""


class Asked(NamedTuple):
    """A request and, once it was answered, the receipt; ``digest`` binds it to its charge."""

    run_id: str
    request: str
    receipt: bytes | None
    digest: str | None


class Ledger(abc.ABC):
    """The ledger of one data set.

    A subclass promises: what a ``transaction`` changes is atomic, durable when it ends, and alone
    in the ledger; nothing is read that is not what was written (it is refused as damaged).

    Attributes:
        data_set: name of the data set.
    """

    data_set: str

    # --- how it is kept --------------------------------------------------------------------------

    @abc.abstractmethod
    def transaction(self) -> contextlib.AbstractContextManager[None]:
        """One atomic and durable change, alone in the ledger; what raises in it changes nothing.

        Raises:
            LedgerMovedError: at its end, where other processes are not kept out, but noticed.
            PolicyError: the ledger is damaged.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of it."""

    @abc.abstractmethod
    def book(self) -> Book:
        """Checked charges of the data set as they stand now; not to be changed by the caller."""

    @abc.abstractmethod
    def append(self, charge: Charge) -> None:
        """Add a charge to the end of the chain, in a transaction."""

    @abc.abstractmethod
    def head(self) -> Head:
        """The end of the chain (entry 0 with an empty digest in an empty ledger)."""

    @abc.abstractmethod
    def digest_at(self, seq: int) -> str | None:
        """Digest of the entry of a number, of whatever data set."""

    @abc.abstractmethod
    def digest_of(self, name: str) -> str | None:
        """Digest of the entry of a charge's name."""

    @abc.abstractmethod
    def tokens(self, run_id: str) -> dict[str, str | None]:
        """Tokens of a run (of whatever data set), each with the one it was to replace."""

    @abc.abstractmethod
    def add_token(self, run_id: str, token: str, previous: str | None) -> None:
        """Add a token, in a transaction."""

    @abc.abstractmethod
    def drop_token(self, run_id: str, token: str) -> None:
        """Remove a token that is there, in a transaction."""

    @abc.abstractmethod
    def asked(self, run_id: str) -> Asked | None:
        """The request that a run was charged for."""

    @abc.abstractmethod
    def asked_alike(self, request: str) -> list[Asked]:
        """All requests of a fingerprint, in the order of their charges."""

    @abc.abstractmethod
    def ask(self, run_id: str, request: str) -> None:
        """Add a request without a receipt, in a transaction."""

    @abc.abstractmethod
    def answer(self, run_id: str, receipt: bytes, digest: str) -> None:
        """Give a request that has none its receipt, in a transaction."""

    # --- what holds for every ledger -------------------------------------------------------------

    def transact(self, work: Callable[[], Result]) -> Result:
        """What ``work`` returns of a transaction of its own, begun again when another overtook it.

        Args:
            work: decides by what it reads in the transaction; whatever it did before, it is right
                when it is done again.

        Raises:
            RunError: others have been faster for ``limits.BUSY_SECONDS``; nothing was written.
        """
        begun, pause = time.monotonic(), 0.0
        while True:
            try:
                with self.transaction():
                    done = work()
                return done
            except LedgerMovedError:
                if time.monotonic() - begun > BUSY_SECONDS:
                    raise RunError(
                        "ledger.path",
                        f"the ledger is busy: other processes were faster for {BUSY_SECONDS:g} s",
                        "run again; nothing was charged",
                    ) from None
            time.sleep(pause)
            pause = min(2 * pause + 0.01, _PAUSE_SECONDS)

    def entries(self) -> list[Charge]:
        """Charges of this data set in order.

        Raises:
            PolicyError: the ledger is damaged.
        """
        return list(self.book().charges)

    def spent(self, delta: float) -> float:
        """Smallest epsilon that all runs together spend at delta, rounded up.

        Raises:
            PolicyError: their costs do not add up.
        """
        return epsilon_spent(composed(self.entries()).spends, delta)

    def charge(self, charge: Charge, epsilon: float, delta: float) -> bool:
        """Charge a run unless the data set's limit forbids it; atomic and durable.

        Args:
            charge: what the run spends.
            epsilon, delta: the steward's limit per unit, over all runs.

        Returns:
            False if this run was charged before (a restart), True if it is charged now.

        Raises:
            PolicyError: the composition of all runs would exceed the limit, or the runs protect
                units whose costs do not add up (`accounting.plan.unit`).
        """
        return self.transact(lambda: self.charge_within(charge, epsilon, delta))

    def charge_within(self, charge: Charge, epsilon: float, delta: float) -> bool:
        """``charge`` as a part of an open ``transaction``."""
        if self.book().find(charge.name) is not None:
            return False
        self.book().check([charge], epsilon, delta)
        self.append(charge)
        return True

    def refuse_older(self, seen: Head) -> None:
        """Refuse if this is not the ledger, as old or newer, whose end was ``seen``.

        Raises:
            PolicyError: it lacks that entry, or the run was charged to another data set.
        """
        seen.check(self.data_set, self.digest_at(seen.seq) if seen.seq else None)
