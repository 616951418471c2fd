"""Acceptance of a run or a question now, and the spending of its account after it.

Plans apply the rules of the commands that charge (`jobs.charging.check_begin`, ``History.check``)
without a charge.  Nothing is written.  The secret is read, because the command would need it;
the result is public.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dpstream.accounting.errors import DpstreamError, PolicyError
from dpstream.accounting.periods import Room, person_spent
from dpstream.accounting.plan.unit import UnitIdentity, cost_to
from dpstream.accounting.strength import limit_weaknesses
from dpstream.state.ledger.contract import AnswerLog
from dpstream.state.ledger.events import Charge
from dpstream.state.ledger.history import History
from dpstream.state.ledger.open import AccountPlace, open_ledger, read_history

if TYPE_CHECKING:
    from dpstream.dp_transforms.noise.secret_source import SecretSource
    from dpstream.pipelines.ask.question import Covering
    from dpstream.pipelines.ask.sequence import Keys
    from dpstream.pipelines.jobs.job import Job


class Request(NamedTuple):
    """A question as the account would receive it (`state.ledger.contract`).

    Attributes:
        charge: what the question costs, if it was not charged before.
        keys: computes the digests by which the account recognises the question; so the secret is
            read, and one that cannot be read is a refusal, as it is for the command; ``None``: the
            question is never free.
        covering: decides which other answers have its figures; ``None``: none has.
    """

    charge: Charge
    keys: "Callable[[], Keys] | None" = None
    covering: "Covering | None" = None


def request_for(
    charge: Charge,
    identity: Callable[[], Sequence[bytes]],
    secret: "SecretSource | None",
    as_of: str,
    covering: "Covering | None" = None,
) -> Request:
    """Return a question as the account would receive it.

    Args:
        identity: returns the question's identity (`ask.question.Question`).
        secret: of the data set; ``None``, or one that is not given: a refusal.
        as_of: the label of the state of the data.
        covering: see `Request`.
    """

    def keys() -> "Keys":
        from dpstream.pipelines.ask.sequence import keys_of  # loads cryptography

        parts, source = identity(), given_secret(secret)
        with source.ring() as ring:
            return keys_of(charge.kind, parts, ring, as_of, covering)

    return Request(charge, keys, covering)


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
        account: ``data_set``, number of ``charges``, ``limit``, the share of the limit that is
            ``used`` in the periods that this charge counts in, and the share ``with_this`` charge;
            the ``filter`` that accepts it (``first``: accepted only by its own guarantee, so that
            every later charge is refused), how often it is ``counted_as`` a charge of the account's
            unit, and how many ``more`` charges like it are accepted then;
            for an account per period the ``period``, and (epsilon, delta) of a ``person`` over all
            periods with this charge, for charges fixed beforehand; ``None``: there is no account,
            or it cannot be read.
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
            check_first_file(job)
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


def check_first_file(job: "Job") -> None:
    """Refuse a job without a file, or whose first has other columns or types than the job reads.

    Files that are not there yet in a folder that grows, or are elsewhere, are not looked at.

    Raises:
        UsageError: as a run would before its charge.
    """
    path = job.source.first_file()
    if path is not None:
        from dpstream.pipelines.connectors.files.types import check_file  # with Arrow

        check_file(job, path)


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
    refusal, run_id, answered = None, None, False
    more = [request.charge for request in requests]
    try:
        account_state = read_history(place)
        charged = {charge.plan_hash for charge in account_state.charges}
        unpaid, continued, committed = dict[str, Charge](), None, len(requests) > 0
        for charge, keys_of_request, covering in requests:
            run, keys = None, None if keys_of_request is None else keys_of_request()
            if keys is not None and (charge.plan_hash in charged or (covering and charged)):
                from dpstream.pipelines.ask.sequence import free_run  # loads cryptography

                with contextlib.closing(open_ledger(place, looking=True)) as ledger:
                    register = AnswerLog(ledger, charge.kind)
                    run = free_run(register, keys, fresh, covering)
                    committed &= run is not None and register.read(run) is not None
            continued = run or continued
            if run is None:  # the same question twice in a command is charged once
                unpaid.setdefault(charge.plan_hash, charge)
        more = list(unpaid.values())
        if more:  # what is free is never refused, whatever the limit is now
            if check is not None:
                check(account_state)
            account_state.check(more)
        else:
            run_id, answered = continued, committed
    except DpstreamError as error:
        refusal = error
    pays = refusal is None and len(more) > 0
    cost = (sum(c.epsilon for c in more), sum(c.delta for c in more)) if pays else None
    account, weak = _account(place, more)
    return Acceptance(refusal, cost, run_id, account, weak, answered)


def _account(
    place: AccountPlace, more: Sequence[Charge]
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the account, and warnings about its limit."""
    try:
        history = read_history(place)
        epsilon, delta = history.persons_limit()
    except DpstreamError:  # which is the refusal
        return None, []
    unit = history.created.unit
    account = {
        "data_set": place.data_set,
        "id": place.id,
        "charges": len(history.charges),
        "limit": {"epsilon": epsilon, "delta": delta},
        **_spending(history, more),
        "period": unit.covers,
        "person": person_spent(unit, [*history.charges, *more], delta),
    }
    return account, limit_weaknesses((epsilon, delta))


def _spending(history: History, more: Sequence[Charge]) -> dict[str, Any]:
    """Return the shares of the limit that are used before and after some charges.

    They are those of the periods that the charges count in; see `Acceptance`.
    """
    filters, spent, verdict = history.filters, history.spent, None
    used, counted = filters.used(spent.fullest(filters).total), 1
    try:
        if more:
            used = filters.used(spent.fullest(filters, spent.pieces_of(more[-1])).total)
        for charge in more:
            verdict = spent.verdict(filters, charge)
            spent = spent.plus(charge, takes=verdict.reason == "first")
            counted = max(counted, cost_to(spent.unit, charge).units)
        times = spent.further_charges(filters, more[-1]) if more else None
    except PolicyError:  # which is the refusal
        verdict, times = None, None
    return {
        "used": used,
        "counted_as": counted,
        "with_this": None if verdict is None else verdict.used,
        "filter": verdict.reason if verdict is not None and verdict.accepted else None,
        "more": times,
    }


def room_of(account: History, identity: UnitIdentity, more: Sequence[Charge] = ()) -> Room | None:
    """Return the public figures of an account for a choice between families of noise.

    Args:
        identity: unit that the question protects.
        more: charges that count before the one that is decided.

    Returns:
        The figures; ``None`` without a limit, or for a unit that `History.check` refuses.
    """
    if account.limit is None:
        return None
    unit, spent = account.created.unit, account.spent
    if (unit.name, unit.type) != (identity.name, identity.type):
        return None
    for charge in more:
        spent = spent.plus(charge)
    return Room(account.filters, spent, identity)
