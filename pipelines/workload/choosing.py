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
from typing import NamedTuple, TypeVar

from dpstream.accounting.errors import DpstreamError, PolicyError
from dpstream.accounting.query.plan import Family
from dpstream.accounting.strategies.cells.auto import Plan
from dpstream.accounting.workloads.workload import Workload
from dpstream.pipelines.ask.acceptance import limit_of
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.workload.families import Budget, families_of
from dpstream.pipelines.workload.registered import (
    WorkloadQuestion,
    check_once,
    pure_mechanism,
)
from dpstream.state.ledger.events import Charge
from dpstream.state.ledger.history import Accept, History
from dpstream.state.ledger.open import read_history

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
        registered: with charge and answer in the account; otherwise by a run with a store.
    """

    plan_hash: Callable[[], str]
    registered: bool


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
    charged = _charged(workload, job, folder, charges, gaussian)
    if charged is not None:
        return Choice(charged, accept)
    limit = None if optimise == "answer" else limit_of(account)
    return Choice(families_of(workload, plan, budget, folder, limit).taken, accept)


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
    """Return whether a fresh question continues a charge, because the account has no answer to it.

    A store has no receipts: a fresh run is a new one.
    """
    registered = charge.mu is None or gaussian.registered
    return (
        registered and charge.run_id not in account.receipts and charge.run_id not in account.closed
    )


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
