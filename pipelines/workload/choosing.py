"""Chooses the family of noise for a workload over a job's records, before the charge.

Geometric noise answers once, through the register of an account (`registered`); Gaussian noise
answers there or through a store.  A workload that is asked again is the same question, and keeps
the family that it was charged for, whatever has been charged since.
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
        plan: strategy for Gaussian noise.
        folder: where solved strategies are kept.
        gaussian_hash: gives the plan hash of the charge with Gaussian noise.
        optimise: how families are compared (`families`).
        fresh: whether the question is charged anew, whatever was charged before.

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
    remaining = None if book is None or optimise == "answer" else left_of(book)
    return families_of(workload, plan, budget, folder, remaining).taken


def left_of(book: Book) -> Left | None:
    """What is left of an account's limit for one more charge; ``None`` without a limit, or where
    costs do not add up (the charge is then refused)."""
    limit = limit_of(book)
    if limit is None:
        return None
    promise = limit.epsilon, limit.delta
    return Left(mu_left(limit.total, *promise), epsilon_left(limit.total, *promise))


def _book(job: Job) -> Book | None:
    """The account; ``None`` where it cannot be read, which the charge refuses with the reason."""
    if job.ledger is None:
        return None
    with contextlib.suppress(DpstreamError):
        return read_book(job.ledger)
    return None


def _charged(
    workload: Workload, job: Job, folder: Path, book: Book, gaussian_hash: Callable[[], str]
) -> Family | None:
    """The family of the last charge for this workload; ``None`` without such a charge."""
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
