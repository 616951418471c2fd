"""Begin a run: store, run id, charge and manifest, in the order that gives the guarantee.

A job's run is begun by `begin`; a plan without a job is run by `DPStream` or `begin_run` with a
`frames.project_file`, which charges by the same functions.
"""

import contextlib
from collections.abc import Iterator, Sequence

import pyarrow as pa

from dpstream.accounting.budget.calibration import calibrated
from dpstream.accounting.errors import RunError
from dpstream.accounting.places import refuse_far
from dpstream.dp_transforms.ingest.records import canonical_public_keys
from dpstream.dp_transforms.run import Run, begin_run
from dpstream.pipelines.connectors.dead_letters import check_dead_letters
from dpstream.pipelines.connectors.files.types import check_types
from dpstream.pipelines.connectors.input_files import refuse_changed
from dpstream.pipelines.connectors.registry import input_of, sink_of
from dpstream.pipelines.connectors.run_manifest import (
    check_sink,
    published_epoch,
    refuse_emptied,
    refuse_lost_store,
    write_manifest,
)
from dpstream.pipelines.connectors.write import dead_letter_folder
from dpstream.pipelines.jobs.charging import check_begin, spend_of, unnamed_ledger
from dpstream.pipelines.jobs.committed import HasAccount, check_tuning
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.keys import read_public_keys
from dpstream.pipelines.jobs.secret import secret_source
from dpstream.state import open as stores
from dpstream.state.durable import sweep
from dpstream.state.ledger import lineage as tokens
from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.history import Accept
from dpstream.state.ledger.open import open_ledger
from dpstream.state.store import FRESH, RunIdentity


def begin(
    job: Job,
    source: Sequence[bytes] | None = None,
    public: pa.Table | None = None,
    accept: Accept | None = None,
    *,
    reads: bool = True,
    fresh: bool = False,
) -> tuple[Run, bool]:
    """Begin or resume the run of a job: store, run id and charge, before any draw.

    The order gives the guarantee.  The store commits the run id before the account charges it.  So
    a begin that is interrupted has charged nothing (no run id yet), or its run id is found and not
    charged again; a charge that would be refused is refused before the store is made.  The sink is
    checked before the charge and gets its manifest after it: a refused store costs nothing, and a
    manifest without a store means that the store was lost.

    Args:
        source: parts that identify the input, if it is not the job's own source.
        public: canonical public keys of the plan, if they are not in the job's own list.
        accept: may refuse a run that is not charged yet, by the charges before it.
        reads: whether the input must be the one that the run was begun with; if not, the input is
            not opened.
        fresh: record in the store, before the charge, that ``--fresh`` began the run, so that the
            same command continues it.

    Returns:
        (run, whether it continues from an existing store).

    Raises:
        PolicyError: the store, the input, the sink or the account does not allow the run.
    """
    run, resumed, caught_up = prepare(job, source, public, accept, reads)
    if fresh:
        run.open().set_metadata(FRESH, "begun")
    charge(job, run, accept)
    if run.open().restoring:
        tokens.restored(run.open(), caught_up)
    with contextlib.closing(sink_of(job)) as sink:
        write_manifest(run, sink)
    return run, resumed


def prepare(
    job: Job,
    source: Sequence[bytes] | None = None,
    public: pa.Table | None = None,
    accept: Accept | None = None,
    reads: bool = True,
) -> tuple[Run, bool, bool]:
    """Do the part of ``begin`` before the charge: make the store and commit its run id.

    Returns:
        (run, whether the store existed, whether it has committed all that is published).
    """
    keys, plan = secret_source(job), job.plan
    _refuse_far_places(job)
    check_tuning(job)
    refuse_changed(job)
    check_begin(job, accept=accept)  # a refused charge leaves no store behind
    sweep(dead_letter_folder(job))
    check_dead_letters(dead_letter_folder(job))
    own = input_of(job) if source is None and reads else None
    parts = own.identity() if own is not None else (source or ()) if reads else None
    url = job.state.store or ""
    sink = sink_of(job)
    if not stores.check_new(url, lambda: refuse_lost_store(sink)) and own is not None:
        check_types(job)
    if plan.public_keys is not None and public is None:
        public = canonical_public_keys(plan, read_public_keys(job))
    run, resumed = begin_run(
        plan,
        keys,
        url,
        job.state.shards,
        source=parts,
        run_id=job.test_run_id,
        public=public,
        mixing=None if job.cells is None else job.cells.mixing,
    )
    try:
        caught_up = check_sink(run, sink, replaying=run.open().restoring)
        if source is None and job.source.unbounded:  # files are read from their first row again
            refuse_emptied(run, sink)
    finally:
        run.destroy_keys()  # those of the comparison; workers make their own
        sink.close()
    return run, resumed, caught_up


def _refuse_far_places(job: Job) -> None:
    """Refuse a store, releases or dead letters whose folders would be made on another disk."""
    store, releases = job.state.path, job.sink.folder
    places = {
        "store": None if store is None else store.parent,
        "sink.path": releases,
        "dead_letter": dead_letter_folder(job),
    }
    for field, folder in places.items():
        if folder is not None:
            refuse_far(folder, job.path.parent, field)


def charge(job: HasAccount, run: Run, accept: Accept | None = None) -> None:
    """Charge a begun run in the data set's account, once for each run id and epoch.

    This also makes its store the one copy that may continue; see ``state.ledger.lineage``.
    """
    store = run.open()
    if job.ledger is None and tokens.remembered(store) is not None:
        raise unnamed_ledger()
    with opened_ledger(job) as ledger:
        if job.ledger is not None and ledger is not None:
            identity = store.identity
            spend = spend_of(job, run.budget(), identity.run_id, identity.epoch)
            tokens.enter(ledger, store, spend, accept)


def charge_restored(job: Job, identity: RunIdentity) -> None:
    """Charge a further epoch of a run before its store exists; `begin` then finds it charged."""
    with opened_ledger(job) as ledger:
        if job.ledger is not None and ledger is not None:
            budget = calibrated(job.plan, identity.calibration).budget
            spend = spend_of(job, budget, identity.run_id, identity.epoch)
            tokens.promise(ledger, spend)


def begun_epoch(job: Job, run_id: str) -> int:
    """Return the last epoch of a run that the job's account or sink has begun; -1: none."""
    begun = [published_epoch(sink_of(job), run_id)]
    with opened_ledger(job) as ledger:
        if ledger is not None:
            begun.append(tokens.begun_epoch(ledger, run_id))
    return max(begun)


def leave(job: Job, run: Run) -> None:
    """Record in the account that a run has ended, so that copies taken while it ran are refused.

    If the account cannot be reached now, only such copies are not refused.

    Raises:
        PolicyError: another copy of the store has continued meanwhile.
    """
    with contextlib.suppress(RunError), opened_ledger(job) as ledger:
        if ledger is not None:
            tokens.leave(ledger, run.open())


@contextlib.contextmanager
def opened_ledger(job: HasAccount) -> Iterator[Ledger | None]:
    """Yield the job's account, if it names one."""
    if job.ledger is None:
        yield None
        return
    with contextlib.closing(open_ledger(job.ledger)) as ledger:
        yield ledger
