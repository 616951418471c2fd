"""Answers in the account: charged once before a row is read, committed before they are shown.

A request of any kind (a tuning of bounds, a SQL statement, a table) is charged like any run.  The
account also stores the keyed digest of the question and, after the draw, the receipt, which is the
answer's bytes.  `pipelines.ask.sequence` describes the order of the steps and the reason for it;
each step here is one transaction:

* *begin*: run id, charge and request;
* *commit*: the receipt, bound to its charge; if several are committed, the first one counts;
* *read*: the committed answer, once the account's head file has it (`state.ledger.head`);
* *deliver*: a command that asked with ``fresh`` has written and printed all its output.  Until then
  the same command continues its requests, so that a failure after a commit causes no second charge.
"""

import contextlib
import hashlib
from collections.abc import Callable, Collection
from typing import NamedTuple, TypeVar

from dpstream.accounting.errors import DpstreamError, InvariantError, PolicyError
from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.events import Charge, ChargeKind, new_run_id
from dpstream.state.ledger.history import History
from dpstream.state.ledger.log import StoredRequest

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
        self._ledger, self._kind = ledger, kind

    def begin(
        self,
        request: str,
        decide: Callable[[str, History], Decision],
        fresh: bool = False,
    ) -> Begun:
        """Charge a request in one transaction, unless it was charged before.

        Args:
            request: keyed digest of the question.
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
            if charge.kind != self._kind or charge.epoch:
                raise InvariantError("the charge must be of the question's kind")
            if account.find(charge.name) is not None:
                raise PolicyError(
                    "account.path", "already has this run id", "run the same command again"
                )
            [charge] = account.check([charge])
            charge = self._ledger.append_charge(charge)
            self._ledger.add_request(charge.run_id, request)
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
        closed, stored = self._ledger.history().closed, self._ledger.requests_alike(request)
        usable = [each for each in stored if each.run_id not in closed and self._is_of_kind(each)]
        usable.sort(key=lambda entry: entry.receipt is None)  # stable: the order of charges
        return usable[-1].run_id if usable else None

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
        answer = self._committed(run_id)
        if answer is not None:
            self._ledger.keep_head()
        return answer

    def _committed(self, run_id: str) -> Answer | None:
        entry = self._ledger.request_of(run_id)
        if entry is None or not self._is_of_kind(entry) or run_id in self._ledger.history().closed:
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

    def _is_of_kind(self, entry: StoredRequest) -> bool:
        """Return whether a request is of this kind."""
        return _charged(self._ledger.history().find(entry.run_id)).kind == self._kind

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
