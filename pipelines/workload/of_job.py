"""The job that answers a workload: a job's records, C and account, with cells as public keys.

Queries on the cells are post-processing, so that they do not enter the plan; the domain and the mix
of noise do.  Hence a store, an account's entry and all noise belong to a domain and a strategy:
another workload is answered from the release, or by another run.
"""

import os

import msgspec

from dpstream.accounting.errors import UsageError
from dpstream.accounting.mixing import Mixing, cells_of
from dpstream.accounting.workloads.workload import Workload
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.keys import CELL, CellDomain, JobCells, cell_key
from dpstream.pipelines.project.copying import place_beside

_KINDS = ("count", "sum")
#: What the names of places of answers over time end with.
OVER_TIME = "over-time"


def cells_job(job: Job, workload: Workload, mixing: Mixing, over_time: bool) -> Job:
    """Return a job whose releases are estimates of a workload's cells.

    Args:
        over_time: release at every trigger time of the job; otherwise once, at its end.

    Raises:
        UsageError, PolicyError: the job's key, aggregates or privacy do not fit.
    """
    check_job(job)
    domain = domain_of_job(job, workload)
    replace, plan = msgspec.structs.replace, job.plan
    # Weights choose among keys by units: with all cells public there is nothing to choose.
    privacy = replace(plan.privacy, weights=None) if job.privacy.weights == "auto" else plan.privacy
    timeline = plan.timeline
    if not over_time:
        timeline = timeline.once()
        privacy = replace(privacy, strategy="dense", refresh_every=None, select_every=None)
    plan = replace(
        plan,
        key=(CELL,),
        public_keys=domain.digest,
        cells=cells_of(mixing),
        timeline=timeline,
        privacy=privacy,
        remember=None,
    ).check()
    return replace(job, plan=plan, cells=JobCells(domain, mixing))


def with_own_places(job: Job) -> Job:
    """Return the job with a store, releases and dead letters beside its own, for answers over time.

    Answers at the end of the job's time are another run, which has the job's own places.  A store
    in a database stays as it is: it holds one run and refuses another one.
    """
    replace, state, sink = msgspec.structs.replace, job.state, job.sink
    if state.path is not None:
        file = state.path.with_name(f"{state.path.stem}-{OVER_TIME}{state.path.suffix}")
        state = replace(state, store=f"sqlite:{file}")
    if sink.table:
        sink = replace(sink, table=place_beside(sink.table, OVER_TIME, "."))
    if sink.topic:
        sink = replace(sink, topic=place_beside(sink.topic, OVER_TIME))
    if sink.path:
        sink = replace(sink, path=_folder_beside(job, sink.path))
    if sink.dead_letter is not None:
        sink = replace(sink, dead_letter=_folder_beside(job, sink.dead_letter))
    return replace(job, state=state, sink=sink)


def _folder_beside(job: Job, path: str) -> str:
    """Return another folder; in the project's folder if the path is that."""
    folder = job.path.parent
    return os.path.normpath(folder / place_beside(os.path.relpath(path, folder), OVER_TIME))


def one_shot_job(job: Job) -> Job:
    """Return the job with its whole time as one window with one trigger time, before cells replace
    its key.

    Raises:
        UsageError, PolicyError: it has no end, or a budget for every period.
    """
    return msgspec.structs.replace(job, plan=job.plan.once().check())


def domain_of_job(job: Job, workload: Workload) -> CellDomain:
    """Return the domain of an aligned workload, with its input columns.

    Raises:
        UsageError: the columns do not fit the domain.
    """
    key = cell_key(workload.attributes, job.plan.key)
    if CELL.column in set(job.columns) - {field.column for field in key}:
        raise UsageError(
            "table", f"reads a column '{CELL.column}', as the cells are called", "rename it"
        )
    return CellDomain(workload.attributes, key)


def check_job(job: Job) -> None:
    """Refuse a job that cannot answer a workload.

    Raises:
        UsageError: it has a list of keys, or another aggregate than one count or sum.
    """
    if job.keys.public is not None:
        raise UsageError("public_keys", "is not for a workload: its cells are the keys", "omit it")
    aggregates = job.plan.aggregates
    if len(aggregates) != 1 or aggregates[0].kind not in _KINDS:
        raise UsageError(
            "aggregate",
            "a workload is asked of one count or one sum",
            'keep one, such as aggregate.records = { kind = "count" }',
        )
