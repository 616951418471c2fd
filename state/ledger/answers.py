"""Answers in the ledger: charged before a row is read, committed before they are seen, paid once.

A request of any kind (a tuning of bounds, a SQL statement, a table) is an entry of the data set
like any run, plus a row here: the keyed fingerprint of what was asked of which input, and, once
drawn, the receipt, which is the answer's bytes.  The order is the guarantee:

1. *begin*: run id, charge and request are one transaction, before a row of data is read.  So
   there is no draw without a charge, and no charge whose run id is lost.
2. *draw*: the answer is computed from the data, with noise named by the run id.
3. *commit*: the receipt, bound to its charge, is one transaction; what stands first stays.
4. *read*: what anybody sees is what is read back.

Whoever is killed between 1 and 3 has released nothing: the same request goes on under the same
run id, which is the same noise, at no charge.  So does another asker of the same request who comes
before 3; both then read the one receipt that stands.  Behind 3 the same request is a
re-read of the old bytes, at no charge and without a look at the data.
"""

import hashlib
from collections.abc import Callable
from typing import NamedTuple

from dpstream.accounting.errors import InvariantError, PolicyError
from dpstream.state.ledger.charges import Charge, ChargeKind
from dpstream.state.ledger.contract import Asked, Ledger, Limit


class Answer(NamedTuple):
    """A committed answer.

    Attributes:
        run_id: of its charge.
        receipt: its bytes; digest: binds them to the charge.
        charged: the charge was made by this very call.
    """

    run_id: str
    receipt: bytes
    digest: str
    charged: bool


class Register:
    """The answers of one kind in the ledger of a data set.

    Args:
        ledger: the data set's ledger.
        kind: kind of the requests; a request of another kind is another request.
    """

    def __init__(self, ledger: Ledger, kind: ChargeKind) -> None:
        self._ledger, self._kind = ledger, kind

    def answered(
        self, charge: Charge, request: str, limit: Limit, draw: Callable[[str], bytes],
        fresh: bool = False,
    ) -> Answer:  # fmt: skip
        """The answer to a request: drawn if nobody has asked it before, else read again.

        Args:
            charge: what it costs, under a fresh run id.
            request: keyed fingerprint of question and input.
            limit: the steward's (epsilon, delta).
            draw: computes the receipt of a run id; the first that may read a row of data.
            fresh: charge it again if it was answered; the old receipt stays under its run id.

        Raises:
            PolicyError: beyond the limit, or of a unit whose costs do not add up with others.
        """
        run_id, charged = self.begin(charge, request, limit, fresh)
        return self.finish(run_id, draw)._replace(charged=charged)

    def begin(
        self, charge: Charge, request: str, limit: Limit, fresh: bool = False
    ) -> tuple[str, bool]:
        """Charge a request, unless it was charged before.

        Args:
            fresh: charge it again if it was answered: one that was cut off still goes on.

        Returns:
            (run id to go on with, whether it was charged now).

        Raises:
            PolicyError: beyond the limit, or of a unit whose costs do not add up with others.
        """
        if not (charge.kind == self._kind and (not charge.epoch)):
            raise InvariantError("the charge is of another kind")

        def pay() -> tuple[str, bool]:
            goes_on = self.goes_on(request, fresh)
            if goes_on is not None:
                return goes_on, False
            if not self._ledger.charge_within(charge, *limit):
                raise PolicyError("ledger.path", "has this run id already", "draw another one")
            self._ledger.ask(charge.run_id, request)
            return charge.run_id, True

        return self._ledger.transact(pay)

    def goes_on(self, request: str, fresh: bool = False) -> str | None:
        """Run id under which a request is answered at no charge; ``None``: it is charged.

        Args:
            fresh: it is asked anew if it was answered: one that was cut off still goes on.
        """
        run_id = self.find(request)
        return None if run_id and fresh and self.read(run_id) is not None else run_id

    def finish(self, run_id: str, draw: Callable[[str], bytes]) -> Answer:
        """The answer of a charged run: drawn and committed if it has none, then read."""
        answer = self.read(run_id)
        if answer is None:
            self.commit(run_id, draw(run_id))
            answer = self.read(run_id)
            if answer is None:
                raise InvariantError("answer is not None")
        return answer

    def find(self, request: str) -> str | None:
        """Run id that was charged for a request; ``None``: nobody has asked it.

        Older programs charged a request that was asked again: one without a receipt was paid for
        and comes first, else the last.
        """
        alike = [asked for asked in self._ledger.asked_alike(request) if self._mine(asked)]
        alike.sort(key=lambda asked: asked.receipt is None)  # stable: the order of charges
        return alike[-1].run_id if alike else None

    def resume(self, run_id: str, request: str) -> None:
        """Check that a run id was charged for this very request.

        Raises:
            PolicyError: it was not.
        """
        asked = self._ledger.asked(run_id)
        if asked is None or not self._mine(asked):
            raise PolicyError(
                "--resume",
                f"no {self._kind} with this run id is in the ledger",
                "omit it to ask anew",
            )
        if asked.request != request:
            raise PolicyError(
                "--resume",
                "that run was charged for another question, noise key or input",
                "ask exactly what was asked then, or omit it: another question is a new charge",
            )

    def commit(self, run_id: str, receipt: bytes) -> None:
        """Commit what a charged request is answered, unless another receipt stands already.

        Raises:
            PolicyError: nobody was charged for it.
        """

        def put() -> None:
            if self.read(run_id) is None:
                if self._ledger.asked(run_id) is None:
                    raise _uncharged()
                self._ledger.answer(run_id, receipt, self._digest(run_id, receipt))

        self._ledger.transact(put)

    def read(self, run_id: str) -> Answer | None:
        """The committed answer of a run, ``None`` if it has none yet.

        Raises:
            PolicyError: it does not fit its digest, or has no charge.
        """
        asked = self._ledger.asked(run_id)
        if asked is None or asked.receipt is None or not self._mine(asked):
            return None
        if asked.digest != self._digest(run_id, asked.receipt):
            raise PolicyError(
                "ledger.path", "a receipt was changed", "restore the ledger from a backup"
            )
        return Answer(run_id, asked.receipt, asked.digest, False)

    def _mine(self, asked: Asked) -> bool:
        """Whether a request is of this kind, or from before kinds were recorded."""
        charge = self._ledger.book().find(asked.run_id)
        if charge is None:
            raise _uncharged()
        return charge.kind in (self._kind, "run")

    def _digest(self, run_id: str, receipt: bytes) -> str:
        """Binds the receipt to its entry, and through it to the ledger's chain."""
        entry = self._ledger.digest_of(run_id)
        if entry is None:
            raise _uncharged()
        bound = b"\0".join((entry.encode(), run_id.encode(), receipt))
        return hashlib.blake2b(bound, digest_size=16, person=b"dpstream-choice").hexdigest()


def _uncharged() -> PolicyError:
    return PolicyError("ledger.path", "an answer has no charge", "restore it from a backup")
