"""`dpstream workload answer` on a job's records: by which noise, and the run of Gaussian noise.

**Choice of the family of noise**, before the charge.  Geometric noise answers once, with charge and
answer in the account (`registered`); Gaussian noise answers there or through a store.  A workload
that is asked again is the same question, and keeps the family that it was charged for, whatever has
been charged since.

**Two processes that ask at once** are charged for one family.  The families have different
identities, and their charges are in different places, so that no identity covers both.  A choice
therefore holds for the number of workloads that were charged before it.  `Choice.accept` compares
that number in the transaction that charges; if it has grown, `by_choice` chooses again, which gives
the family that was charged meanwhile.  A search for a strategy would be too slow for the
transaction itself.

**The run** follows the order of every run: store and run id, charge, draws, committed releases (the
job's sink gets them too).  Answers are post-processing of what the store has committed, so that the
same command continues after an interruption: the same noise, no further charge, the same bytes.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from dpstream.accounting.arrays import Float64
from dpstream.accounting.budget.calibration import calibrated
from dpstream.accounting.errors import DpstreamError, PolicyError, UsageError, required
from dpstream.accounting.query.plan import Family
from dpstream.accounting.strategies.cells.auto import Plan
from dpstream.accounting.strategies.cells.mixing import mixed
from dpstream.accounting.strategies.cells.strategy import CellStrategy
from dpstream.accounting.workloads.workload import Workload
from dpstream.pipelines.ask.acceptance import (
    Acceptance,
    job_acceptance,
    request_for,
    requests_acceptance,
    room_of,
)
from dpstream.pipelines.ask.folder import Output
from dpstream.pipelines.ask.question import ONCE, Asking
from dpstream.pipelines.connectors.run_manifest import committed_step
from dpstream.pipelines.jobs.charging import unfinished_fresh
from dpstream.pipelines.jobs.committed import unit_of
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.keys import CELL, domain_digest
from dpstream.pipelines.stream.run import Progress, Result, run_job
from dpstream.pipelines.workload.estimate import Estimate
from dpstream.pipelines.workload.lattice import Budget, families_of
from dpstream.pipelines.workload.planning import domain_text, planned, tables_of, way_of
from dpstream.pipelines.workload.registered import (
    Mechanism,
    WorkloadQuestion,
    asked_once,
    cells_job,
    pure_mechanism,
    table_mechanism,
    with_own_places,
)
from dpstream.pipelines.workload.release import (
    RECEIPT,
    Moment,
    Receipt,
    Released,
    answers,
    check_place,
    write_release,
)
from dpstream.state import open as stores
from dpstream.state.ledger.events import Charge, new_run_id
from dpstream.state.ledger.history import Accept, History
from dpstream.state.ledger.open import read_history
from dpstream.state.store import Store

Outcome = TypeVar("Outcome")


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


class Order(NamedTuple):
    """The parameters of a workload's answer.

    Attributes:
        strategy: the strategy of the cells.
        over_time: answer at every trigger time of the job.
        out: folder of the answers.
        form: format of the table in it; ``None``: that of the folder, else parquet.
        nonnegative: use consistent non-negative estimates instead of the linear ones.
        runner, beam_args, fresh, accept: as `run_job` takes them.
    """

    workload: Workload
    job: Job
    strategy: CellStrategy
    out: Path
    over_time: bool = False
    form: str | None = None
    nonnegative: bool = False
    runner: str = "DirectRunner"
    beam_args: Sequence[str] = ()
    fresh: bool = False
    accept: Accept | None = None


class Done(NamedTuple):
    """The receipt of what was written, and the result of the run."""

    receipt: Receipt
    result: Result


def execute(
    order: Order,
    progress: Progress | None = None,
    show: Callable[[Done], object] = lambda _: None,
) -> None:
    """Run the job, answer the workload, write the answers.

    Args:
        progress: as `run_job` takes it.
        show: shows what was written; if it fails, ``fresh`` continues this run.

    Raises:
        DpstreamError: refused before a charge, or failed.
    """
    job = job_of(order)
    check(order, job)

    def deliver(result: Result) -> None:
        try:
            receipt, estimate = _released(order, job, result.run_id)
        finally:
            stores.close_all()
        moments, nonnegative = receipt.moments, order.nonnegative
        table = answers(order.workload, estimate, moments, order.over_time, nonnegative)
        receipt = write_release(order.out, receipt, estimate, table, order.form, nonnegative)
        show(Done(receipt, result))

    run_job(
        job,
        order.runner,
        order.beam_args,
        progress,
        fresh=order.fresh,
        accept=order.accept,
        deliver=deliver,
    )


def job_of(order: Order) -> Job:
    """Return the job to run.

    Raises:
        UsageError: the job or the strategy cannot be used.
    """
    mixing = mixed(order.strategy, order.workload.aligned.sizes)
    job = with_own_places(order.job) if order.over_time else order.job
    return cells_job(job, order.workload.aligned, mixing, order.over_time)


def check(order: Order, job: Job, named: bool = True) -> None:
    """Refuse before the charge what would fail only after it.

    Args:
        named: whether ``out`` is given; a plan needs none.

    Raises:
        UsageError: OUT holds another answer, or the job has no end.
    """
    if named:
        new = order.fresh and unfinished_fresh(job) is None
        check_place(order.out, job.plan.hash, order.workload, new)
    if job.plan.timeline.end is None:
        raise UsageError(
            "end",
            "is required: answers are written when the run has ended",
            "give the job an end; a stream without end is answered by `--from` its releases",
        )


def _released(order: Order, job: Job, run_id: str) -> Released:
    """Return the receipt, and the estimates that the store has committed."""
    plan, workload = job.plan, order.workload.aligned
    store = stores.open_store(job.state.store or "", plan, run_id)
    budget = calibrated(plan, store.identity.calibration).budget
    [aggregate], own = plan.aggregates, required(job.cells, "the job has cells")
    timeline, cells, scale, moments = plan.timeline, [], [], []
    for window, last in sorted(store.completed(store.identity.shards).items()):
        for trigger in range(1, last + 1):
            cells.append(_cells(store, window, trigger, aggregate.name, workload.cells))
            scale.append(float(budget.values[0].sd[trigger - 1]) * aggregate.grid)
            instant = timeline.instant_of(timeline.base(window) + trigger)
            moments.append(Moment(*timeline.window_bounds(window), trigger, instant))
    receipt = Receipt(
        run_id=run_id,
        plan_hash=plan.hash,
        domain=domain_text(workload),
        domain_digest=domain_digest(workload.attributes),
        workload=order.workload.digest,
        strategy=order.strategy.name,
        mixing=own.mixing.digest,
        mechanism="gaussian",
        epsilon=budget.epsilon,
        delta=budget.delta,
        mu=budget.mu,
        contributions=plan.privacy.contributions,
        aggregate=(aggregate.name, aggregate.kind),
        insecure=job.insecure,
        moments=moments,
        files={},
    )
    return Released(receipt, Estimate(np.array(cells), np.array(scale), own.mixing.factors))


def _cells(store: Store, window: int, trigger: int, name: str, size: int) -> Float64:
    """Return (n,) estimates of a release, of all shards."""
    cells = np.full(size, np.nan)
    for shard in range(store.identity.shards):
        rows = committed_step(store, window, shard, trigger)
        cells[rows.column(CELL.column).to_numpy()] = rows.column(name).to_numpy()
    if np.isnan(cells).any():
        raise PolicyError("store", "lacks cells of a release", "restore it from a backup")
    return cells


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
        """Return the family of noise by the present account.

        Args:
            optimise: how families are compared (`lattice.families_of`).

        Raises:
            PolicyError: no noise can answer.
        """
        if self.mechanism != "auto" or self.measured is None:
            return Choice("geometric" if self.mechanism == "geometric" else "gaussian")
        workload, job, account = self.workload, self.job, History()
        try:
            asked_once(workload.aligned, job)
        except DpstreamError:
            return Choice("gaussian")
        with contextlib.suppress(DpstreamError):  # which the charge refuses with the reason
            account = read_history(required(job.ledger, "a job that is asked once has an account"))
        accept = functools.partial(_check_number, len(_workloads(account)))
        charged = self._charged(account, self.measured)
        if charged is not None:
            return Choice(charged, accept)
        room = None if optimise == "answer" else room_of(account, unit_of(job))
        privacy = job.plan.privacy
        budget = Budget(privacy.epsilon, privacy.delta, privacy.contributions)
        families = families_of(workload, self.measured.plan, budget, self.folder, room)
        return Choice(families.taken, accept)

    def _charged(self, account: History, measured: Measured) -> Family | None:
        """Return the family of the last charge for this workload that a new one would repeat.

        A fresh question is charged anew, except one that was interrupted: that keeps its family.
        """
        order, charges = measured.order, _workloads(account)
        if order.fresh:
            charges = [c for c in charges if self._unanswered(c, account, measured)]
        hashes: dict[str, Family] = {}
        if any(charge.mu is not None for charge in charges):
            with contextlib.suppress(DpstreamError):
                stored = None if measured.by_tables else job_of(order).plan.hash
                hashes[stored or self._question("gaussian").plan_hash] = "gaussian"
        if any(charge.mu is None for charge in charges):
            with contextlib.suppress(DpstreamError):
                hashes[self._question("geometric").plan_hash] = "geometric"
        families = [hashes[c.plan_hash] for c in charges if c.plan_hash in hashes]
        return families[-1] if families else None

    def _unanswered(self, charge: Charge, account: History, measured: Measured) -> bool:
        """Return whether a fresh question continues a charge, because it is not answered yet."""
        if charge.mu is not None and not measured.by_tables:
            run = unfinished_fresh(job_of(measured.order))
            return run is not None and run.run_id == charge.run_id
        return charge.run_id not in account.receipts and charge.run_id not in account.closed

    def _question(self, family: Family) -> WorkloadQuestion:
        return WorkloadQuestion(self.workload, self.job, self.drawn(family))

    def acceptance(self, choice: Choice, how: Asking = ONCE, out: Path | None = None) -> Acceptance:
        """Return whether `dpstream workload answer` would be accepted now, and its cost.

        Args:
            out: the folder that would be made; ``None``: a new one.

        Raises:
            DpstreamError: refused for another reason than the account.
        """
        order = self.run(choice)
        if order is not None:
            job = job_of(order)
            new = order.fresh and unfinished_fresh(job) is None
            return job_acceptance(job, new).unless(lambda: check(order, job, out is not None))
        question = self._question(choice.family)
        charge = question.decide(new_run_id(), History()).charge
        secret = self.job.secret
        request = request_for(charge, lambda: question.identity, secret, how.as_of)
        accepted = requests_acceptance(question.ledger, [request], how.fresh)
        if out is None:
            return accepted
        return accepted.unless(lambda: Output(out, RECEIPT, "--out").check(accepted.run_id))


def requested(
    workload: Workload,
    job: Job,
    folder: Path,
    mechanism: str = "auto",
    strategy: str = "auto",
    objective: str = "total",
    tables: bool = False,
    stored: bool = False,
    order_of: Callable[[CellStrategy], Order] | None = None,
) -> Request:
    """Return what the options of `dpstream workload answer` ask for.

    Args:
        folder: folder of solved strategies.
        tables: measure residual tables.
        stored: an option requires a store.
        order_of: returns the order of an answer by a strategy; ``None``: of one that is only
            planned.

    Raises:
        DpstreamError: an option excludes another, or no strategy can be solved.
    """
    if not job.plan.privacy.delta:
        if mechanism == "gaussian" or tables:
            raise UsageError(
                "--tables" if tables else "--mechanism",
                "needs Gaussian noise, and the job's delta is 0",
                "omit it, or write budget.delta = 1e-9",
            )
        mechanism = "geometric"
    elif mechanism == "auto":
        left_alone = (strategy, objective) == ("auto", "total") and not tables and not stored
        mechanism = "auto" if left_alone and job.ledger is not None else "gaussian"
    if mechanism == "geometric":
        return Request(workload, job, folder, mechanism, None)
    plan = planned(workload, folder, objective, strategy).plan
    measured = tables_of(workload.aligned, plan.strategy) if tables else plan.strategy
    by_tables = tables or way_of(workload.aligned, measured) == "tables"
    order = order_of(measured) if order_of else Order(workload, job, measured, Path())
    return Request(workload, job, folder, mechanism, Measured(order, plan, by_tables))


def by_choice(choose: Callable[[], Choice], ask: Callable[[Choice], Outcome]) -> Outcome:
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


def _check_number(number: int, account: History) -> None:
    """Refuse a charge if the number of charged workloads has changed."""
    if len(_workloads(account)) != number:
        raise OvertakenError(
            "account.path",
            "another workload was charged meanwhile",
            "ask again, nothing is charged",
        )


def _workloads(account: History) -> list[Charge]:
    return [charge for charge in account.charges if charge.kind == "workload"]
