"""The account of a data set, on every kind of storage.

Each data set has one account, with the cost of every run per unit and with the limit; a charge
beyond the limit is refused.  This module has the rules; the log of the account
(``state.ledger.log``) is in a file or in a database (``state.ledger.sqlite``,
``state.ledger.spanner``); ``state.ledger.lineage`` (only one copy of a store may continue) too.

Every store records the end of the chain that it last read: ``refuse_older`` refuses an account that
no longer has that entry (truncated, restored from a backup, another file).

**Answers** are charged once before a row is read, and committed before they are shown.  A request
of any kind (a tuning of bounds, a SQL statement, a table) is charged like any run.  The account
also stores the keyed digest of the question and, after the draw, the receipt, which is the answer's
bytes.  `pipelines.ask.sequence` describes the order of the steps and the reason for it; each step
here is one transaction:

* *begin*: run id, charge and request;
* *commit*: the receipt, bound to its charge; if several are committed, the first one counts;
* *read*: the committed answer, once the account's head file has it (`state.ledger.head`);
* *deliver*: a command that asked with ``fresh`` has written and printed all its output.  Until then
  the same command continues its requests, so that a failure after a commit causes no second charge.
"""

import contextlib
import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from dpstream.accounting.errors import DpstreamError, InvariantError, PolicyError, RunError
from dpstream.accounting.limits import BUSY_SECONDS
from dpstream.state.ledger.events import (
    Charge,
    ChargeKind,
    Head,
    Limit,
    LimitChanged,
    TableNamed,
    new_run_id,
    now_micros,
)
from dpstream.state.ledger.head import HeadFile, end_of
from dpstream.state.ledger.history import Accept, History
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
    _in_transaction = False

    def close(self) -> None:
        """Close the account and its head file."""
        super().close()
        if self.head_file is not None:
            self.head_file.close()

    def transact(
        self, work: Callable[[], Result], runs: Sequence[str] = (), show: bool = True
    ) -> Result:
        """Run ``work`` in a transaction, again if another process was faster; return its result.

        Within the work of another ``transact`` it is a part of that one's transaction, which writes
        all or nothing.

        Args:
            work: decides only by what it reads in the transaction, so that it can be repeated.
            runs: the runs whose tokens it changes; they are written to the head file.
            show: whether the head file is advanced now, because something may be shown afterwards;
                otherwise the caller advances it before anything is shown (``keep_head``).

        Raises:
            PolicyError: the account lacks what the head file has; nothing was written.
            RunError: others have been faster for ``limits.BUSY_SECONDS``; nothing was written.
        """
        if self._in_transaction:
            return work()
        begun, pause = time.monotonic(), 0.0
        while True:
            head = None if self.head_file is None else self.head_file.head()
            try:
                with self.transaction():
                    if self.head_file is not None:
                        self.head_file.check(self.history(), head)
                    self._in_transaction = True
                    done = work()
                break
            except LedgerMovedError:
                if time.monotonic() - begun > BUSY_SECONDS:
                    raise RunError(
                        "account.path",
                        f"the account is busy: other processes were faster for {BUSY_SECONDS:g} s",
                        "run again; nothing was charged",
                    ) from None
            finally:
                self._in_transaction = False
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


Part = TypeVar("Part")


class Answer(NamedTuple):
    """A committed answer.

    Attributes:
        run_id: the run id of its charge.
        receipt: the receipt's bytes.
        digest: binds them to the charge.
        charged: whether this call made the charge.
    """

    run_id: str
    receipt: bytes
    digest: str
    charged: bool


class Decision(NamedTuple):
    """The charge of a new request.

    Attributes:
        charge: the charge, with the given run id.
        receipt: the complete answer if nothing is drawn, committed with the charge; ``None``: the
            answer is drawn after the charge.
    """

    charge: Charge
    receipt: bytes | None = None


class Begun(NamedTuple):
    """A request that was charged.

    Attributes:
        run_id, charge: run id and charge of the request.
        charged: whether this call charged it.
        receipt: the receipt; ``None`` if the request was not answered.
    """

    run_id: str
    charge: Charge
    charged: bool
    receipt: bytes | None


class AnswerLog:
    """The answers of one kind in the account of a data set.

    Args:
        ledger: the data set's account.
        kind: kind of the requests; requests of other kinds are ignored.
    """

    def __init__(self, ledger: Ledger, kind: ChargeKind) -> None:
        self._ledger, self.kind = ledger, kind

    def begin(
        self,
        request: str,
        decide: Callable[[str, History], Decision],
        fresh: bool = False,
        alike: Sequence[str] = (),
    ) -> Begun:
        """Charge a request in one transaction, unless it was charged before.

        Args:
            request: keyed digest of the question.
            alike: keyed digests of what it shares with other questions.
            decide: returns the charge of a new run id, given all charges before it; called in the
                transaction, perhaps several times.
            fresh: charge it again if it was answered and delivered; otherwise it continues.

        Raises:
            PolicyError: the charge exceeds the limit, or has no cost to the account's unit.
        """

        def pay() -> Begun:
            account = self._ledger.history()
            run_id = self.continued(request, fresh)
            if run_id is not None:
                charge = _charged(account.find(run_id))
                answer = self._committed(run_id)
                return Begun(run_id, charge, False, None if answer is None else answer.receipt)
            charge, receipt = decide(new_run_id(), account)
            if charge.kind != self.kind or charge.epoch:
                raise InvariantError("the charge must be of the question's kind")
            if account.find(charge.name) is not None:
                raise PolicyError(
                    "account.path", "already has this run id", "run the same command again"
                )
            [charge] = account.check([charge])
            charge = self._ledger.append_charge(charge)
            self._ledger.add_request(charge.run_id, request, alike)
            if fresh:
                self._ledger.add_token(_undelivered(charge.run_id), "fresh", None)
            if receipt is not None:
                digest = self._digest(charge.run_id, receipt)
                self._ledger.add_receipt(charge.run_id, receipt, digest)
            return Begun(charge.run_id, charge, True, receipt)

        return self._ledger.transact(pay, show=False)  # `read` comes before anything is shown

    def continued(self, request: str, fresh: bool = False) -> str | None:
        """Return the run id under which a request is answered at no charge; ``None``: it is
        charged.

        Args:
            fresh: charge a request that was answered again.  A request that was interrupted, or
                that was asked with ``fresh`` and not delivered, continues.
        """
        with self._ledger.moment():
            run_id = self.find(request)
            if run_id is None or not fresh or self._ledger.tokens(_undelivered(run_id)):
                return run_id
            return run_id if self._committed(run_id) is None else None

    def deliver(self, run_ids: Collection[str]) -> None:
        """Record that a command has written its output, so that ``fresh`` asks at a new charge.

        It is one transaction for all answers of the command.  The command has finished, so it does
        not fail if this cannot be recorded: the next ``fresh`` then continues the same answers once
        more, at no charge.
        """

        def undelivered() -> list[tuple[str, str]]:
            names = map(_undelivered, run_ids)
            return [(name, token) for name in names for token in self._ledger.tokens(name)]

        def drop() -> None:
            for name, token in undelivered():
                self._ledger.drop_token(name, token)

        with contextlib.suppress(DpstreamError):
            if undelivered():
                self._ledger.transact(drop, show=False)

    def find(self, request: str) -> str | None:
        """Return the run id that was charged for a request; ``None``: it was never charged.

        If ``fresh`` charged it several times: the run without a receipt, or else the last one.
        Charges that a recovery closed are ignored.
        """
        usable = self._usable(request)
        runs = sorted(usable, key=lambda run: not usable[run])  # stable: the order of charges
        return runs[-1] if runs else None

    def alike(self, name: str) -> list[tuple[Charge, bytes]]:
        """Return charge and receipt of each answered question that shares what a digest names, in
        the order of the charges.
        """
        answers = [self._committed(run) for run, answered in self._usable(name).items() if answered]
        history = self._ledger.history()
        return [(_charged(history.find(a.run_id)), a.receipt) for a in answers if a is not None]

    def _usable(self, request: str) -> dict[str, bool]:
        """Return the runs of a request that are not closed, and whether each has a receipt."""
        closed, runs = self._ledger.history().closed, self._ledger.requests_alike(request)
        return {r: runs[r] for r in runs if r not in closed and self._is_of_kind(r)}

    def commit(self, run_id: str, receipt: bytes) -> None:
        """Commit the receipt of a charged request, unless it already has one.

        Raises:
            PolicyError: there is no charge for it.
        """

        def put() -> None:
            if self._committed(run_id) is None:
                _charged(self._ledger.request_of(run_id))
                if run_id in self._ledger.history().closed:
                    raise PolicyError(
                        "account.path",
                        "this charge was closed by a recovery of the account before its answer was "
                        "committed",
                        "run the same command again, at a new charge",
                    )
                self._ledger.add_receipt(run_id, receipt, self._digest(run_id, receipt))

        self._ledger.transact(put)

    def read(self, run_id: str) -> Answer | None:
        """Return the committed answer of a run, which may be shown; ``None`` if it has none.

        On return the account's head file has the receipt.

        Raises:
            PolicyError: the receipt does not fit its digest, or has no charge; or the account is
                older than its head file.
        """
        with self._ledger.moment():
            answer = self._committed(run_id)
        if answer is not None:
            self._ledger.keep_head()
        return answer

    def _committed(self, run_id: str) -> Answer | None:
        entry = self._ledger.request_of(run_id)
        if entry is None or not self._is_of_kind(run_id) or run_id in self._ledger.history().closed:
            return None
        digest, receipt = self._ledger.history().receipts.get(run_id), entry.receipt
        if receipt is None and digest is None:
            return None
        intact = isinstance(receipt, bytes) and entry.digest == digest
        if not intact or receipt is None or digest != self._digest(run_id, receipt):
            raise PolicyError(
                "account.path", "has a damaged receipt", "restore the account from a backup"
            )
        return Answer(run_id, receipt, digest, False)

    def _is_of_kind(self, run_id: str) -> bool:
        """Return whether a run was charged for a request of this kind."""
        return _charged(self._ledger.history().find(run_id)).kind == self.kind

    def _digest(self, run_id: str, content: bytes) -> str:
        """Return a digest that binds a receipt to its entry, and so to the chain."""
        entry = _charged(self._ledger.history().digest_of(run_id))
        bound = b"\0".join((entry.encode(), run_id.encode(), content))
        return hashlib.blake2b(bound, digest_size=16, person=b"dpstream-choice").hexdigest()


def _undelivered(run_id: str) -> str:
    """Return the name of the account's token for an answer that was not delivered."""
    return f"{run_id}/fresh"


def _charged(part: Part | None) -> Part:
    """Return the entry of an answer's charge; refuse an account that has the answer without it."""
    if part is None:
        raise PolicyError(
            "account.path", "has an answer without a charge", "restore the account from a backup"
        )
    return part
