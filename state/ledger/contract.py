"""The account of a data set, on every kind of storage.

Each data set has one account, with the cost of every run per unit and with the limit; a charge
beyond the limit is refused.  This module has the rules; the log of the account
(``state.ledger.log``) is in a file or in a database (``state.ledger.sqlite``,
``state.ledger.spanner``).  ``state.ledger.answers`` (answers are charged once) and
``state.ledger.lineage`` (only one copy of a store may continue) use the same log.

Every store records the end of the chain that it last read: ``refuse_older`` refuses an account that
no longer has that entry (truncated, restored from a backup, another file).
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from dpstream.accounting.errors import RunError
from dpstream.accounting.limits import BUSY_SECONDS
from dpstream.state.ledger.events import (
    Charge,
    Head,
    Limit,
    LimitChanged,
    TableNamed,
    now_micros,
)
from dpstream.state.ledger.head import HeadFile, end_of
from dpstream.state.ledger.history import Accept
from dpstream.state.ledger.log import LedgerMovedError, Log

Result = TypeVar("Result")
#: Longest pause before a transaction that another process overtook is done again.
_PAUSE_SECONDS = 0.2


class Ledger(Log):
    """The account of one data set.

    Attributes:
        head_file: the head file of the account (`state.ledger.head`); ``None`` if it has none.
    """

    head_file: HeadFile | None = None

    def close(self) -> None:
        """Close the account and its head file."""
        super().close()
        if self.head_file is not None:
            self.head_file.close()

    def transact(
        self, work: Callable[[], Result], runs: Sequence[str] = (), show: bool = True
    ) -> Result:
        """Run ``work`` in a transaction, again if another process was faster; return its result.

        Args:
            work: decides only by what it reads in the transaction, so that it can be repeated.
            runs: the runs whose tokens it changes; they are written to the head file.
            show: whether the head file is advanced now, because something may be shown afterwards;
                otherwise the caller advances it before anything is shown (``keep_head``).

        Raises:
            PolicyError: the account lacks what the head file has; nothing was written.
            RunError: others have been faster for ``limits.BUSY_SECONDS``; nothing was written.
        """
        begun, pause = time.monotonic(), 0.0
        while True:
            head = None if self.head_file is None else self.head_file.head()
            try:
                with self.transaction():
                    if self.head_file is not None:
                        self.head_file.check(self.history(), head)
                    done = work()
                break
            except LedgerMovedError:
                if time.monotonic() - begun > BUSY_SECONDS:
                    raise RunError(
                        "account.path",
                        f"the account is busy: other processes were faster for {BUSY_SECONDS:g} s",
                        "run again; nothing was charged",
                    ) from None
            time.sleep(pause)
            pause = min(2 * pause + 0.01, _PAUSE_SECONDS)
        if show:
            self.keep_head(runs)
        return done

    def keep_head(self, runs: Sequence[str] = ()) -> None:
        """Write to the head file, durably, all entries that it lacks, before an answer is shown.

        Args:
            runs: the runs whose present tokens are written to the head file.

        Raises:
            PolicyError: the account lacks what the head file has.
            RunError: the head file cannot be written.
        """
        if self.head_file is not None:
            self.head_file.advance(
                lambda: (self.history(), {run: self.tokens(run) for run in runs})
            )

    @property
    def id(self) -> str:
        """The account's random id."""
        return self.history().created.id

    @property
    def data_set(self) -> str:
        """The data set's name."""
        return self.history().created.data_set

    def head(self) -> Head:
        """The end of the chain."""
        return end_of(self.history())

    def entries(self) -> list[Charge]:
        """Return the charges in order.

        Raises:
            PolicyError: the account is damaged.
        """
        return list(self.history().charges)

    def charge(self, charge: Charge) -> bool:
        """Charge a run unless it exceeds the account's limit; atomic and durable.

        Args:
            charge: what the run spends.

        Returns:
            False if this run was charged before (a restart), True if it is charged now.

        Raises:
            PolicyError: no filter of the limit accepts all charges with this one, or the run's cost
                to the account's unit has no bound (`accounting.plan.unit`).
        """
        return self.transact(lambda: self.charge_within(charge))

    def charge_within(self, charge: Charge, accept: Accept | None = None) -> bool:
        """Append ``charge`` as a part of an open ``transaction``; the limit is read in it.

        Args:
            accept: called before a new charge.
        """
        account = self.history()
        if account.find(charge.name) is not None:
            return False
        if accept is not None:
            accept(account)
        [charge] = account.check([charge])
        self.append_charge(charge)
        return True

    def append_charge(self, charge: Charge) -> Charge:
        """Append a charge, in a transaction that has checked it.

        Returns:
            The charge as it is in the account: a charge without an instant gets the present one.
        """
        if charge.instant is None:
            charge = msgspec.structs.replace(charge, at=now_micros())
        self.append(charge)
        return charge

    def set_limit(self, limit: Limit) -> Limit:
        """Change the limit by an entry of its own; return the limit before.

        Raises:
            PolicyError: each record of the account has its own budget.
        """

        def change() -> Limit:
            before = self.history().persons_limit()
            if limit != before:
                self.append(LimitChanged(limit))
            return before

        return self.transact(change)

    def name_table(self, id_: str) -> None:
        """Add a table to the account, by an entry of its own."""
        self.transact(lambda: self.append(TableNamed(id_)))

    def refuse_older(self, seen: Head) -> None:
        """Refuse an account that is another one, or older than the one whose end was ``seen``.

        Raises:
            PolicyError: the account lacks that entry, or the run was charged in another account.
        """
        seen.check(self.id, self.history().digest_at(seen.seq))
