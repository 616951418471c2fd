"""Choice of the family of noise for a workload over a job's records, before the charge.

Geometric noise answers once, with charge and answer in the account (`registered`); Gaussian noise
answers there or through a store.  A workload that is asked again is the same question, and keeps
the family that it was charged for, whatever has been charged since.

**Two processes that ask at once** are charged for one family.  The families have different
identities, and their charges are in different places, so that no identity covers both.  A choice
therefore holds for the number of workloads that were charged before it.  `Choice.accept` compares
that number in the transaction that charges; if it has grown, `by_choice` chooses again, which gives
the family that was charged meanwhile.  A search for a strategy would be too slow for the
transaction itself.
"""

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from dpstream.accounting.errors import DpstreamError, PolicyError, UsageError
from dpstream.accounting.query.plan import Family
from dpstream.accounting.strategies.cells.auto import Plan
from dpstream.accounting.workloads.workload import Workload
from dpstream.pipelines.ask.acceptance import Acceptance, job_acceptance, room_of
from dpstream.pipelines.ask.question import ONCE, Asking
from dpstream.pipelines.jobs.charging import unfinished_fresh
from dpstream.pipelines.jobs.committed import unit_of
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.workload.execute import Order, check, job_of
from dpstream.pipelines.workload.families import Budget, families_of
from dpstream.pipelines.workload.files import solved
from dpstream.pipelines.workload.planning import tables_of, way_of
from dpstream.pipelines.workload.registered import (
    Mechanism,
    WorkloadQuestion,
    check_once,
    pure_mechanism,
    table_mechanism,
)
from dpstream.pipelines.workload.registered import acceptance as acceptance_once
from dpstream.state.ledger.events import Charge
from dpstream.state.ledger.history import Accept, History
from dpstream.state.ledger.open import read_history
from dpstream.state.store import RunIdentity

Result = TypeVar("Result")


class OvertakenError(PolicyError):
    """Signals that another workload was charged between a choice and its charge.

    `by_choice` chooses again.
    """


class Choice(NamedTuple):
    """The chosen family.

    Attributes:
        accept: refuses a new charge by `OvertakenError` if the choice may have changed;
            ``None``: there is no other family.
    """

    family: Family
    accept: Accept | None = None


class Gaussian(NamedTuple):
    """The charge of Gaussian noise.

    Attributes:
        plan_hash: returns the plan hash of the charge.
        registered: whether charge and answer are in the account; otherwise a run has a store.
        unfinished: returns the run with a store that ``--fresh`` began and did not finish.
    """

    plan_hash: Callable[[], str]
    registered: bool
    unfinished: Callable[[], RunIdentity | None]


class Measured(NamedTuple):
    """The answer of a workload with Gaussian noise.

    Attributes:
        plan: the strategy and its proof.
        by_tables: of residual tables, committed in the account; otherwise a run with a store.
    """

    order: Order
    plan: Plan
    by_tables: bool


class Request(NamedTuple):
    """A workload that is asked of a job's records.

    Attributes:
        folder: folder of solved strategies.
        mechanism: ``gaussian``, ``geometric``, or ``auto``: the one with the smaller error.
        measured: the answer with Gaussian noise; ``None``: there is none.
    """

    workload: Workload
    job: Job
    folder: Path
    mechanism: str
    measured: Measured | None

    def run(self, choice: Choice) -> Order | None:
        """Return the run with a store that answers; ``None``: the account has the answer."""
        if self.measured is None or self.measured.by_tables or choice.family == "geometric":
            return None
        return self.measured.order._replace(accept=choice.accept)

    def drawn(self, family: Family) -> Mechanism:
        """Return the mechanism of an answer in the account."""
        if self.measured is None or family == "geometric":
            return pure_mechanism(self.workload, self.job, self.folder)
        return table_mechanism(self.workload, self.measured.order.strategy, self.job)

    def choose(self, optimise: str = "limit") -> Choice:
        """Return the family of noise by the present account; see `chosen`."""
        if self.mechanism != "auto" or self.measured is None:
            return Choice("geometric" if self.mechanism == "geometric" else "gaussian")
        order, plan, by_tables = self.measured

        def plan_hash() -> str:
            if not by_tables:
                return job_of(order).plan.hash
            return WorkloadQuestion(self.workload, self.job, self.drawn("gaussian")).plan_hash

        charge = Gaussian(plan_hash, by_tables, lambda: unfinished_fresh(job_of(order)))
        where = self.workload, self.job, plan, self.folder
        return chosen(*where, charge, optimise, order.fresh)


def requested(
    workload: Workload,
    job: Job,
    folder: Path,
    mechanism: str = "auto",
    strategy: str = "auto",
    objective: str = "total",
    tables: bool = False,
    stored: bool = False,
    given: tuple[Any, ...] = (Path(),),
) -> Request:
    """Return what the options of `dpstream workload answer` ask for.

    Args:
        folder: folder of solved strategies.
        tables: measure residual tables.
        stored: an option requires a store.
        given: the fields of `Order` from ``out`` on.

    Raises:
        DpstreamError: an option excludes another, or no strategy can be solved.
    """
    left_alone = (strategy, objective) == ("auto", "total") and not tables and not stored
    mechanism = _possible(mechanism, job, tables, left_alone)
    if mechanism == "geometric":
        return Request(workload, job, folder, mechanism, None)
    plan = solved(workload, folder, objective, strategy)[0]
    measured = tables_of(workload.aligned, plan.strategy) if tables else plan.strategy
    by_tables = tables or way_of(workload.aligned, measured) == "tables"
    order = Order(workload, job, measured, *given)
    return Request(workload, job, folder, mechanism, Measured(order, plan, by_tables))


def _possible(mechanism: str, job: Job, tables: bool, left_alone: bool) -> str:
    """Return the mechanism; ``auto`` only if both are possible.

    Args:
        left_alone: no option requires Gaussian noise.

    Raises:
        UsageError: an option requires Gaussian noise, and the job's delta is 0.
    """
    if job.plan.privacy.delta:
        only_gaussian = mechanism == "auto" and not (left_alone and job.ledger is not None)
        return "gaussian" if only_gaussian else mechanism
    if mechanism == "gaussian" or tables:
        raise UsageError(
            "--tables" if tables else "--mechanism",
            "needs Gaussian noise, and the job's delta is 0",
            "omit it, or write budget.delta = 1e-9",
        )
    return "geometric"


def acceptance(
    request: Request, choice: Choice, how: Asking = ONCE, out: Path | None = None
) -> Acceptance:
    """Return whether `dpstream workload answer` would be accepted now, and its cost.

    Args:
        out: the folder that would be made; ``None``: a new one.

    Raises:
        DpstreamError: refused for another reason than the account.
    """
    order = request.run(choice)
    if order is None:
        return acceptance_once(
            request.workload, request.job, request.drawn(choice.family), how, out
        )
    job = job_of(order)
    new = order.fresh and unfinished_fresh(job) is None
    return job_acceptance(job, new).unless(lambda: check(order, job, out is not None))


def by_choice(choose: Callable[[], Choice], ask: Callable[[Choice], Result]) -> Result:
    """Return the result of ``ask`` for a choice that still holds when it is charged.

    Each repetition follows another charge of the account, whose limit ends them.

    Args:
        choose: makes a choice by the present account.
        ask: charges, with ``Choice.accept`` in the transaction.

    Raises:
        DpstreamError: as ``choose`` and ``ask``.
    """
    while True:
        choice = choose()
        with contextlib.suppress(OvertakenError):
            return ask(choice)


def chosen(
    workload: Workload,
    job: Job,
    plan: Plan,
    folder: Path,
    gaussian: Gaussian,
    optimise: str = "limit",
    fresh: bool = False,
) -> Choice:
    """Return the family to use by the present account.

    Args:
        plan: strategy for Gaussian noise.
        folder: folder of solved strategies.
        gaussian: how Gaussian noise would be charged.
        optimise: how families are compared (`families`).
        fresh: ask again, at a new charge, a question that was answered; one that was interrupted
            keeps its family.

    Raises:
        PolicyError: no noise can answer.
    """
    privacy = job.plan.privacy
    budget = Budget(privacy.epsilon, privacy.delta, privacy.contributions)
    try:
        check_once(workload, job)
    except DpstreamError:
        return Choice("gaussian")
    account = _history(job)
    before = _workloads(account)
    accept = functools.partial(_check, len(before))
    charges = [c for c in before if not fresh or _unanswered(c, account, gaussian)]
    workload = workload.aligned
    charged = _charged(workload, job, folder, charges, gaussian)
    if charged is not None:
        return Choice(charged, accept)
    room = None if optimise == "answer" else room_of(account, unit_of(job))
    return Choice(families_of(workload, plan, budget, folder, room).taken, accept)


def _check(number: int, account: History) -> None:
    """Refuse a charge if the number of charged workloads has changed."""
    if len(_workloads(account)) != number:
        raise OvertakenError(
            "account.path",
            "another workload was charged meanwhile",
            "ask again, nothing is charged",
        )


def _workloads(account: History) -> list[Charge]:
    return [charge for charge in account.charges if charge.kind == "workload"]


def _history(job: Job) -> History:
    """Return the account; an empty one if it cannot be read, which the charge refuses with the
    reason.
    """
    if job.ledger is not None:
        with contextlib.suppress(DpstreamError):
            return read_history(job.ledger)
    return History()


def _unanswered(charge: Charge, account: History, gaussian: Gaussian) -> bool:
    """Return whether a fresh question continues a charge, because it is not answered yet."""
    if charge.mu is not None and not gaussian.registered:
        run = gaussian.unfinished()
        return run is not None and run.run_id == charge.run_id
    return charge.run_id not in account.receipts and charge.run_id not in account.closed


def _charged(
    workload: Workload, job: Job, folder: Path, charges: list[Charge], gaussian: Gaussian
) -> Family | None:
    """Return the family of the last of some charges for this workload; ``None``: none is."""
    hashes: dict[str, Family] = {}
    if any(charge.mu is not None for charge in charges):
        with contextlib.suppress(DpstreamError):
            hashes[gaussian.plan_hash()] = "gaussian"
    if any(charge.mu is None for charge in charges):
        with contextlib.suppress(DpstreamError):
            mechanism = pure_mechanism(workload, job, folder)
            hashes[WorkloadQuestion(workload, job, mechanism).plan_hash] = "geometric"
    families = [hashes[c.plan_hash] for c in charges if c.plan_hash in hashes]
    return families[-1] if families else None
