"""`dpstream workload answer` on a job's records: the run, and the answers from its releases.

The run follows the order of every run: store and run id, charge, draws, committed releases (the
job's sink gets them too).  Answers are post-processing of what the store has committed, so that the
same command continues after an interruption: the same noise, no further charge, the same bytes.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dpstream.accounting.arrays import Float64
from dpstream.accounting.budget.calibration import calibrated
from dpstream.accounting.errors import PolicyError, UsageError, required
from dpstream.accounting.plan.timeline import Timeline
from dpstream.accounting.strategies.cells.mixing import mixed
from dpstream.accounting.strategies.cells.strategy import CellStrategy
from dpstream.accounting.workloads.workload import Workload
from dpstream.pipelines.jobs.charging import unfinished_fresh
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.keys import CELL, domain_digest
from dpstream.pipelines.stream.run import Progress, Result, run_job
from dpstream.pipelines.workload.estimate import Estimate
from dpstream.pipelines.workload.files import domain_text
from dpstream.pipelines.workload.of_job import cells_job, with_own_places
from dpstream.pipelines.workload.release import Moment, Receipt, answers, check_place, write_release
from dpstream.state import open as stores
from dpstream.state.ledger.history import Accept
from dpstream.state.store import Store


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
) -> Done:
    """Run the job, answer the workload, write the answers.

    Args:
        progress: as `run_job` takes it.
        show: shows what was written; if it fails, ``fresh`` continues this run.

    Raises:
        DpstreamError: refused before a charge, or failed.
    """
    job = job_of(order)
    check(order, job)
    results = list[Done]()

    def deliver(result: Result) -> None:
        results.append(Done(_written(order, job, result.run_id), result))
        show(results[0])

    run_job(
        job,
        order.runner,
        order.beam_args,
        progress,
        fresh=order.fresh,
        accept=order.accept,
        deliver=deliver,
    )
    return results[0]


def _written(order: Order, job: Job, run_id: str) -> Receipt:
    """Write the answers of a finished run; return their receipt."""
    try:
        estimate, moments, receipt = _released(order, job, run_id)
    finally:
        stores.close_all()
    table = answers(order.workload, estimate, moments, order.over_time, order.nonnegative)
    options = order.form, order.nonnegative
    return write_release(order.out, receipt, estimate, table, *options)


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


def _released(order: Order, job: Job, run_id: str) -> tuple[Estimate, list[Moment], Receipt]:
    """Return the estimates that the store has committed, their moments, and the receipt."""
    plan, workload = job.plan, order.workload.aligned
    store = stores.open_store(job.state.store or "", plan, run_id)
    budget = calibrated(plan, store.identity.calibration).budget
    [aggregate], own = plan.aggregates, required(job.cells, "the job has cells")
    timeline, cells, scale, moments = plan.timeline, [], [], []
    for window, last in sorted(store.completed(store.identity.shards).items()):
        for trigger in range(1, last + 1):
            cells.append(_cells(store, window, trigger, aggregate.name, workload.cells))
            scale.append(float(budget.values[0].sd[trigger - 1]) * aggregate.grid)
            moments.append(moment_of(timeline, window, trigger))
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
    estimate = Estimate(np.array(cells), np.array(scale), own.mixing.factors)
    return estimate, moments, receipt


def _cells(store: Store, window: int, trigger: int, name: str, size: int) -> Float64:
    """Return (n,) estimates of a release, of all shards."""
    cells = np.full(size, np.nan)
    for shard in range(store.identity.shards):
        rows = store.committed_releases(window, shard, trigger)
        if rows is None:
            raise PolicyError(
                "store", "lost a step it says is committed", "restore it from a backup"
            )
        cells[rows.column(CELL.column).to_numpy()] = rows.column(name).to_numpy()
    if np.isnan(cells).any():
        raise PolicyError("store", "lacks cells of a release", "restore it from a backup")
    return cells


def moment_of(timeline: Timeline, window: int, trigger: int) -> Moment:
    """Return window and trigger time as they are shown."""
    begin, end = timeline.window_bounds(window)
    return Moment(begin, end, trigger, timeline.instant_of(timeline.base(window) + trigger))
