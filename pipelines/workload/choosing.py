"""The family of noise that answers a workload from a job's records, fixed before the charge.

Geometric noise answers once, through the register of an account (`registered`); Gaussian noise
there or through a store.  What is asked again is the same question: a family that was charged for
it stays, whatever the account holds by then.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

from dpstream.accounting.composition import epsilon_left, mu_left
from dpstream.accounting.errors import DpstreamError
from dpstream.accounting.strategies.cells.auto import Plan
from dpstream.accounting.workloads.workload import Workload
from dpstream.pipelines.ask.limit import limit_of
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.workload.families import Budget, Family, Left, families_of
from dpstream.pipelines.workload.registered import (
    WorkloadQuestion,
    check_once,
    pure_mechanism,
)
from dpstream.state.ledger.book import Book
from dpstream.state.ledger.open import read_book


def chosen(
    workload: Workload,
    job: Job,
    plan: Plan,
    folder: Path,
    gaussian_hash: Callable[[], str],
    optimise: str = "limit",
    fresh: bool = False,
) -> Family:
    """The family that is taken.

    Args:
        plan: for Gaussian noise; folder: of solved strategies.
        gaussian_hash: the plan hash of the charge with Gaussian noise.
        optimise: what the choice goes by (`families`).
        fresh: at a new charge, whatever was charged before.

    Raises:
        PolicyError: no noise can answer.
    """
    privacy = job.plan.privacy
    budget = Budget(privacy.epsilon, privacy.delta, privacy.contributions)
    try:
        check_once(workload, job)
    except DpstreamError:
        return "gaussian"
    book = _book(job)
    if book is not None and not fresh:
        charged = _charged(workload, job, folder, book, gaussian_hash)
        if charged is not None:
            return charged
    left = None if book is None or optimise == "answer" else left_of(book)
    return families_of(workload, plan, budget, folder, left).taken


def left_of(book: Book) -> Left | None:
    """What an account has left for one more charge; ``None`` without a limit, or where costs do
    not add up (the charge is then refused)."""
    limit = limit_of(book)
    if limit is None:
        return None
    promise = limit.epsilon, limit.delta
    return Left(mu_left(limit.total, *promise), epsilon_left(limit.total, *promise))


def _book(job: Job) -> Book | None:
    """The account, ``None`` where it cannot be read: the charge says why."""
    if job.ledger is None:
        return None
    with contextlib.suppress(DpstreamError):
        return read_book(job.ledger)
    return None


def _charged(
    workload: Workload, job: Job, folder: Path, book: Book, gaussian_hash: Callable[[], str]
) -> Family | None:
    """The family of the last charge for this workload, ``None`` if there is none."""
    before = [charge for charge in book.charges if charge.kind == "workload"]
    if not before:
        return None
    hashes: dict[str, Family] = {}
    with contextlib.suppress(DpstreamError):
        hashes[gaussian_hash()] = "gaussian"
    if any(charge.mu is None for charge in before):
        with contextlib.suppress(DpstreamError):
            mechanism = pure_mechanism(workload, job, folder)
            hashes[WorkloadQuestion(workload, job, mechanism).plan_hash] = "geometric"
    families = [hashes[c.plan_hash] for c in before if c.plan_hash in hashes]
    return families[-1] if families else None
