"""Acceptance of a run or a question now, and the spending of its account after it.

Plans apply the rules of the commands that charge (`jobs.charging.check_begin`, ``History.check``)
without a charge.  Nothing is written.  The secret is read, because the command would need it;
the result is public.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dpstream.accounting.composition import Limit, epsilon_spent, left_within
from dpstream.accounting.errors import DpstreamError, PolicyError
from dpstream.accounting.plan.unit import composed
from dpstream.accounting.strength import limit_weaknesses
from dpstream.state.ledger.answers import AnswerLog
from dpstream.state.ledger.events import Charge
from dpstream.state.ledger.history import History
from dpstream.state.ledger.open import AccountPlace, open_ledger, read_history

if TYPE_CHECKING:
    from dpstream.dp_transforms.noise.secret_source import SecretSource
    from dpstream.pipelines.jobs.job import Job


class Request(NamedTuple):
    """A question as the account would receive it (`state.ledger.answers`).

    Attributes:
        charge: what the question costs, if it was not charged before.
        fingerprint: computes the keyed digest by which the account recognises the question; so
            the secret is read, and one that cannot be read is a refusal, as it is for the command;
            ``None``: the question is never free.
    """

    charge: Charge
    fingerprint: Callable[[], str] | None = None


def request_for(
    charge: Charge,
    identity: Callable[[], Sequence[bytes]],
    secret: "SecretSource | None",
    as_of: str,
) -> Request:
    """Return a question as the account would receive it.

    Args:
        identity: returns the question's identity (`ask.question.Question`).
        secret: of the data set; ``None``, or one that is not given: a refusal.
        as_of: the label of the state of the data.
    """

    def fingerprint() -> str:
        from dpstream.pipelines.ask.sequence import request_of  # loads cryptography

        parts, source = identity(), given_secret(secret)
        with source.ring() as ring:
            return request_of(charge.kind, parts, ring, as_of)

    return Request(charge, fingerprint)


def given_secret(secret: "SecretSource | None") -> "SecretSource":
    """Return the secret of a data set.

    Raises:
        UsageError: there is none.
    """
    from dpstream.dp_transforms.noise.secret_source import SecretSource

    return (secret or SecretSource()).required("secret", "is required: all noise comes from it")


class Acceptance(NamedTuple):
    """The result that a command that charges would get now.

    Attributes:
        refusal: why it would be refused; ``None``: it would be accepted.
        cost: (epsilon, delta) that would be charged; ``None``: nothing more.
        run_id: the run that continues; ``None``: a new one begins, or it is no run.
        account: ``data_set``, ``charges`` so far, ``limit``, and epsilon at the limit's delta
            that is ``spent`` now and ``with_this`` charge; ``None``: there is no account, or it
            cannot be read.
        warnings: about the account's limit, for the ``warnings`` of the command's JSON.
        answered: whether it was answered before, so that the same answer is given again.
    """

    refusal: DpstreamError | None
    cost: tuple[float, float] | None
    run_id: str | None
    account: dict[str, Any] | None
    warnings: Sequence[str] = ()
    answered: bool = False

    @property
    def exit_code(self) -> int:
        """The exit code of the command, as far as public files and the secret determine it."""
        return 0 if self.refusal is None else self.refusal.exit_code

    def unless(self, check: Callable[[], object]) -> "Acceptance":
        """Return the same result, or a refusal if the command's own check raises an error."""
        try:
            check()
        except DpstreamError as error:
            return self._replace(refusal=error, cost=None, answered=False)
        return self

    def as_dict(self) -> dict[str, Any]:
        """Return the result as values for JSON."""
        return {
            "accepted": self.refusal is None,
            "refusal": None if self.refusal is None else self.refusal.as_dict(),
            "charged": None
            if self.cost is None
            else {"epsilon": self.cost[0], "delta": self.cost[1]},
            "run_id": self.run_id,
            "answered": self.answered,
            "account": self.account,
        }


def job_acceptance(job: "Job", fresh: bool = False) -> Acceptance:
    """Return whether `dpstream run` of a job would be accepted.

    Args:
        fresh: with ``--fresh``: a new run at a new charge.
    """
    from dpstream.pipelines.jobs.charging import check_begin  # with solvers
    from dpstream.pipelines.jobs.secret import secret_source
    from dpstream.state.open import refuse_other_secret

    expected, refusal = None, None
    try:
        expected = check_begin(job, fresh)
        if expected.identity is None:
            secret_source(job).check_readable()
        else:
            with secret_source(job).ring() as ring:
                refuse_other_secret(expected.identity, ring.fingerprint)
    except DpstreamError as error:
        refusal = error
    more = [] if expected is None or expected.charged else [expected.charge]
    cost = (more[0].epsilon, more[0].delta) if more and refusal is None else None
    goes_on = None if expected is None or refusal is not None else expected.identity
    run_id = None if goes_on is None else goes_on.run_id
    if job.ledger is None:
        return Acceptance(refusal, cost, run_id, None)
    return Acceptance(refusal, cost, run_id, *_account(job.ledger, more))


def requests_acceptance(
    place: AccountPlace,
    requests: Sequence[Request],
    fresh: bool = False,
    check: Callable[[History], None] | None = None,
) -> Acceptance:
    """Return whether questions would be answered, if they were asked one after the other.

    Args:
        place: the account.
        fresh: with ``--fresh``: each at a new charge.
        check: a rule of the command's own, which is checked first if something is charged.
    """
    refusal, free = None, _Free()
    more = [request.charge for request in requests]
    try:
        account_state = read_history(place)
        more, free = _unpaid(place, account_state, requests, fresh)
        if more:  # what is free is never refused, whatever the limit is now
            if check is not None:
                check(account_state)
            account_state.check(more)
    except DpstreamError as error:
        refusal = error
    charged = refusal is None and len(more) > 0
    cost = (sum(c.epsilon for c in more), sum(c.delta for c in more)) if charged else None
    account, weak = _account(place, more)
    return Acceptance(refusal, cost, free.run_id, account, weak, free.answered)


class _Free(NamedTuple):
    """The part that costs nothing: a run that continues, and whether all is answered already."""

    run_id: str | None = None
    answered: bool = False


def _unpaid(
    place: AccountPlace, account_state: History, requests: Sequence[Request], fresh: bool
) -> tuple[list[Charge], _Free]:
    """Return the charges that would be made; if there are none, what continues."""
    charged = {charge.plan_hash for charge in account_state.charges}
    more, run_id, answered = dict[str, Charge](), None, len(requests) > 0
    for number, (charge, fingerprint) in enumerate(requests):
        run, digest = None, None if fingerprint is None else fingerprint()
        if digest is not None and charge.plan_hash in charged:
            opened = open_ledger(place, looking=True)
            with contextlib.closing(opened) as ledger:
                register = AnswerLog(ledger, charge.kind)
                run = register.goes_on(digest, fresh)
                answered &= run is not None and register.read(run) is not None
        run_id = run or run_id
        if run is None:  # the same question twice is charged once, unless it is asked with `fresh`
            more.setdefault(f"{charge.plan_hash} {number if fresh else 0}", charge)
    return list(more.values()), _Free() if more else _Free(run_id, answered)


def _account(
    place: AccountPlace, more: Sequence[Charge]
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the account, and warnings about its limit."""
    try:
        account_state = read_history(place)
        epsilon, delta = account_state.persons_limit()
    except DpstreamError:  # which is the refusal
        return None, []
    charges = account_state.charges
    account = {
        "data_set": place.data_set,
        "id": place.id,
        "charges": len(charges),
        "limit": {"epsilon": epsilon, "delta": delta},
        "spent": _spent(charges, delta) or 0.0,
        "with_this": _spent([*charges, *more], delta) if more else None,
    }
    return account, limit_weaknesses((epsilon, delta))


def left_of(charges: Sequence[Charge], limit: tuple[float, float]) -> dict[str, float]:
    """Return the budget that is left within a limit.

    Returns:
        As `composition.left_within`.

    Raises:
        PolicyError: the costs of the charges cannot be composed.
    """
    return left_within(composed(charges).spends if charges else [], limit)


def _spent(charges: Sequence[Charge], delta: float) -> float | None:
    """Return epsilon of all charges at a delta; ``None`` if their costs cannot be composed."""
    try:
        return epsilon_spent(composed(charges).spends, delta) if charges else 0.0
    except PolicyError:
        return None


def limit_of(account: History, more: Sequence[Charge] = ()) -> Limit | None:
    """Return the limit of an account, and the joint cost of its charges; both are public.

    Args:
        more: charges of the account's unit that come before the one that is decided.

    Returns:
        ``None`` without a limit, or if costs cannot be composed (`History.check` then refuses).
    """
    if account.limit is None:
        return None
    try:
        total = account.account.total()
    except PolicyError:
        return None
    for charge in more:
        total = total.plus(charge)
    return Limit(total, *account.limit)
