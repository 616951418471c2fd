"""Answers in the account: charged once before a row is read, committed before they are shown.

A request of any kind (a tuning of bounds, a SQL statement, a table) is an entry of the data set
like any run, plus a row here: the keyed digest of the question, and, once drawn, the receipt,
which is the answer's bytes.  `pipelines.ask.sequence` describes the order in which they are written
and what follows from it; here each step is one transaction:

* *begin*: run id, charge and request;
* *commit*: the receipt, bound to its charge; of several the first one counts;
* *read*: the committed answer, once the account's head file has it (`state.ledger.head`);
* *delivered*: the command that asked ``fresh`` has written what it makes of the answer.  Until then
  the same command continues, so that a failure behind the commit costs no second charge.
"""

import contextlib
import hashlib
from collections.abc import Callable
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
        charged: whether this very call made the charge.
    """

    run_id: str
    receipt: bytes
    digest: str
    charged: bool


class Decision(NamedTuple):
    """The charge of a new request.

    Attributes:
        charge: the charge, with the run id that was given.
        receipt: the whole answer if nothing is drawn, committed with the charge; ``None``: it is
            drawn after the charge.
    """

    charge: Charge
    receipt: bytes | None = None


class Begun(NamedTuple):
    """A request that is charged.

    Attributes:
        run_id, charge: those of the request.
        charged: whether this very call charged it.
        receipt: the receipt, if it was answered.
    """

    run_id: str
    charge: Charge
    charged: bool
    receipt: bytes | None


class AnswerLog:
    """The answers of one kind in the account of a data set.

    Args:
        ledger: the data set's account.
        kind: kind of the requests; a request of another kind is another request.
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
            fresh: charge it again if it was answered and delivered; else it continues.

        Raises:
            PolicyError: the charge exceeds the limit, or its cost cannot be composed with the
            others
                of its unit.
        """

        def pay() -> Begun:
            account = self._ledger.history()
            goes_on = self.goes_on(request, fresh)
            if goes_on is not None:
                charge = _charged(account.find(goes_on))
                answer = self._committed(goes_on)
                return Begun(goes_on, charge, False, None if answer is None else answer.receipt)
            charge, receipt = decide(new_run_id(), account)
            if charge.kind != self._kind or charge.epoch:
                raise InvariantError("the charge is of the question's kind")
            if account.find(charge.name) is not None:
                raise PolicyError("account.path", "has this run id already", "draw another one")
            [charge] = account.check([charge])
            charge = self._ledger.append_charge(charge)
            self._ledger.ask(charge.run_id, request)
            if fresh:
                self._ledger.add_token(_undelivered(charge.run_id), "fresh", None)
            if receipt is not None:
                digest = self._digest(charge.run_id, receipt)
                self._ledger.answer(charge.run_id, receipt, digest)
            return Begun(charge.run_id, charge, True, receipt)

        return self._ledger.transact(pay, show=False)  # `read` comes before anything is shown

    def goes_on(self, request: str, fresh: bool = False) -> str | None:
        """Return the run id under which a request is answered at no charge; ``None``: it is
        charged.

        Args:
            fresh: ask again, at a new charge, if it was answered; one that was interrupted, or that
                was asked ``fresh`` and not delivered, continues.
        """
        run_id = self.find(request)
        if run_id is None or not fresh or self._ledger.tokens(_undelivered(run_id)):
            return run_id
        return run_id if self._committed(run_id) is None else None

    def deliver(self, run_id: str) -> None:
        """Record that an answer is where its command puts it: asked ``fresh``, it is asked anew.

        The command is done, so it does not fail where this cannot be written: ``fresh`` then
        continues the answer once more, at no charge.
        """
        name = _undelivered(run_id)

        def drop() -> None:
            for token in self._ledger.tokens(name):
                self._ledger.drop_token(name, token)

        with contextlib.suppress(DpstreamError):
            if self._ledger.tokens(name):
                self._ledger.transact(drop, show=False)

    def find(self, request: str) -> str | None:
        """Return the run id that was charged for a request; ``None``: it was never asked.

        Of several, which were asked ``fresh``: the one without a receipt, else the last.  A charge
        that a recovery closed is never answered.
        """
        closed, all_alike = self._ledger.history().closed, self._ledger.requests_alike(request)
        alike = [a for a in all_alike if a.run_id not in closed and self._is_of_kind(a)]
        alike.sort(key=lambda entry: entry.receipt is None)  # stable: the order of charges
        return alike[-1].run_id if alike else None

    def commit(self, run_id: str, receipt: bytes) -> None:
        """Commit the receipt of a charged request, unless it has another receipt already.

        Raises:
            PolicyError: there is no charge for it.
        """

        def put() -> None:
            if self._committed(run_id) is None:
                _charged(self._ledger.request_of(run_id))
                if run_id in self._ledger.history().closed:
                    raise PolicyError(
                        "account.path",
                        "this charge was closed by a recovery of the account while it was answered",
                        "ask again, at a new charge",
                    )
                self._ledger.answer(run_id, receipt, self._digest(run_id, receipt))

        self._ledger.transact(put)

    def read(self, run_id: str) -> Answer | None:
        """Return the committed answer of a run; ``None`` if it has none.

        It may be shown, because the account's head file has its receipt.

        Raises:
            PolicyError: it does not fit its digest, or has no charge; or the account is older than
                its head file.
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
                "account.path", "a receipt was changed", "restore the account from a backup"
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
    """Return the name under which the account has a token of an answer that is not delivered."""
    return f"{run_id}/fresh"


def _charged(part: Part | None) -> Part:
    """Return the entry of an answer's charge; refuse an account that has the answer without it."""
    if part is None:
        raise PolicyError("account.path", "an answer has no charge", "restore it from a backup")
    return part
