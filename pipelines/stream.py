"""Run a job: check and charge, build the pipeline, write what is committed."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import apache_beam as beam

from accounting.budget import Budget, allocate
from accounting.errors import DpstreamError, PolicyError, RunError, UsageError
from accounting.plan import Plan
from dp_transforms.batches import HAND_OVER
from dp_transforms.flow import DPStream
from dp_transforms.records import canonical_public_keys
from dp_transforms.run import KeySource, Performance, Run, begin_run
from dp_transforms.telemetry import operator_totals, watch_steps
from pipelines.choice_check import check_choice, unit_in_words
from pipelines.job import Job
from pipelines.keys import read_public_keys
from pipelines.manifest import fingerprint_parts, stamps
from pipelines.restored import catch_up, diverged
from pipelines.runners import make_runner
from pipelines.sink import sink_of
from pipelines.sink_manifest import (
    check_sink,
    published_epoch,
    refuse_lost_store,
    write_manifest,
)
from pipelines.sinks import WriteDeadLetters, WriteReleases
from pipelines.sources import ReadFiles
from state import open as stores
from state import tokens
from state.ledger import Charge, Ledger
from state.store import RunIdentity

#: Told (steps done, steps in all); both are public.
Progress = Callable[[int, int], None]


class Result(NamedTuple):
    """What a finished run can tell about itself; ``operator_only`` counts records exactly and is
    private, all else is public."""

    run_id: str
    plan_hash: str
    steps: int
    releases: str
    resumed: bool
    operator_only: dict[str, int]


def key_source(job: Job) -> KeySource:
    """Where the job's noise key is."""
    if job.privacy.reference is None and job.privacy.insecure_test_key is None:
        raise UsageError(
            "privacy.key", "is required to run", "make one with `dpstream key new FILE`"
        )
    return KeySource(job.privacy.reference, job.privacy.insecure_test_key)


def begin(job: Job) -> tuple[Run, bool]:
    """Begin or resume the run of a job: store, run id and charge, before any draw.

    The order is the guarantee.  The store commits the run id before the ledger charges it, so
    a begin that is cut off charges nothing (no run id yet) or is found by its run id and not
    charged again; what a charge would refuse is refused before the store is made.  The sink is
    checked before the charge and named after it: a refused store costs nothing, and a manifest
    without a store means that the store was lost.

    Returns:
        (run, whether it goes on from an existing store).

    Raises:
        PolicyError: the store, the input, the sink or the ledger forbids it.
    """
    run, resumed, caught_up = prepare(job)
    charge(job, run)
    if run.open().restoring:
        tokens.restored(run.open(), caught_up)
    write_manifest(run, sink_of(job))
    return run, resumed


def prepare(job: Job) -> tuple[Run, bool, bool]:
    """``begin`` up to the charge: the store exists and its run id is committed.

    Returns:
        (run, whether the store existed, whether it has committed all that is published).
    """
    keys, plan = key_source(job), job.plan
    check_choice(job)
    _refuse_private_in_sink(job)
    parts = [f"{n}\0{size}\0{digest}".encode() for n, size, digest in fingerprint_parts(job)]
    url = job.state.store or ""
    sink = sink_of(job)
    if not stores.exists(url):
        refuse_lost_store(sink)
        _check_charge(job)  # a refused charge leaves no store behind
    public = None
    if plan.public_keys is not None:
        public = canonical_public_keys(plan, read_public_keys(job))
    run, resumed = begin_run(
        plan,
        keys,
        url,
        job.state.shards,
        source=parts,
        run_id=job.privacy.insecure_test_run_id,
        public=public,
        performance=Performance(job.performance.batch_rows, job.performance.look_ahead),
    )
    try:
        caught_up = check_sink(run, sink, replaying=run.open().restoring)
    finally:
        run.destroy_keys()  # those of the comparison; workers make their own
    return run, resumed, caught_up


def _refuse_private_in_sink(job: Job) -> None:
    """What is published must not lie in one folder with what must never be."""
    folder = job.sink.folder
    private = {
        "privacy.key_file": job.privacy.key_file,
        "state.store": job.state.path and str(job.state.path),
        "ledger.path": job.ledger and job.ledger.path,
    }
    for field, path in private.items():
        if path and folder and folder.resolve() in Path(path).resolve().parents:
            raise PolicyError(
                field, "lies in the folder of the releases", "keep private files elsewhere"
            )
    store = job.state.path
    if job.ledger and store and Path(job.ledger.path).resolve() == store.resolve():
        raise UsageError("ledger.path", "is the state store's file", "use a file of its own")


def _check_charge(job: Job) -> None:
    """Refuse now what ``charge`` would refuse; writes no entry."""
    with _ledger(job) as ledger:
        if job.ledger is not None and ledger is not None:
            limit = job.ledger.limit
            spend = spend_of(job.plan, allocate(job.plan), "")
            ledger.check(spend, limit.epsilon, limit.delta)


def charge(job: Job, run: Run) -> None:
    """Charge a begun run in the data set's ledger, once per run id and epoch, and make its
    store the one copy that goes on; see ``state.tokens``."""
    store = run.open()
    if job.ledger is None and tokens.remembered(store) is not None:
        raise PolicyError(
            "ledger", "this run was charged in a ledger, and the job names none", "name it again"
        )
    with _ledger(job) as ledger:
        if job.ledger is not None and ledger is not None:
            limit, identity = job.ledger.limit, store.identity
            spend = spend_of(job.plan, allocate(job.plan), identity.run_id, identity.epoch)
            tokens.enter(ledger, store, spend, limit.epsilon, limit.delta)


def charge_restored(job: Job, identity: RunIdentity) -> None:
    """Charge a further epoch of a run before its store is there; `begin` finds it charged."""
    with _ledger(job) as ledger:
        if job.ledger is not None and ledger is not None:
            limit = job.ledger.limit
            spend = spend_of(job.plan, allocate(job.plan), identity.run_id, identity.epoch)
            tokens.promise(ledger, spend, limit.epsilon, limit.delta)


def begun_epoch(job: Job, run_id: str) -> int:
    """The last epoch of a run that the job's ledger or sink knows to have begun; -1: none."""
    begun = [published_epoch(sink_of(job), run_id)]
    with _ledger(job) as ledger:
        if ledger is not None:
            begun.append(tokens.begun_epoch(ledger, run_id))
    return max(begun)


@contextlib.contextmanager
def _ledger(job: Job) -> Iterator[Ledger | None]:
    """The job's ledger, if it names one."""
    if job.ledger is None:
        yield None
        return
    if job.plan.privacy.mode == "paper":
        raise PolicyError(
            "ledger", "a mechanism without a guarantee cannot be charged", "use another mode"
        )
    ledger = Ledger(job.ledger.path, job.ledger.data_set)
    try:
        yield ledger
    finally:
        ledger.close()


def spend_of(plan: Plan, budget: Budget, run_id: str, epoch: int = 0) -> Charge:
    """What a run of the plan costs."""
    return Charge(
        run_id=run_id,
        plan_hash=plan.hash,
        unit=unit_in_words(plan),
        epsilon=budget.epsilon,
        delta=budget.delta,
        mu=budget.mu,
        threshold_delta=plan.privacy.contributions * budget.b,
        kind="stream",
        epoch=epoch,
    )


def run_job(
    job: Job,
    runner: str = "DirectRunner",
    beam_args: Sequence[str] = (),
    progress: Progress | None = None,
) -> Result:
    """Run a job to its end.

    Args:
        job: a checked job.
        runner: see ``pipelines.runners``.
        beam_args: further flags for Beam's PipelineOptions.
        progress: told now and then how many steps are done.

    Raises:
        DpstreamError: refused or failed, with a field, a rule and a fix.
    """
    engine, options = make_runner(runner, beam_args)
    source = ReadFiles(job)
    before = stamps(job)
    run, resumed = begin(job)
    line, store = job.plan.timeline, run.open()
    steps = (line.windows - store.marks.first) * line.triggers * run.shards
    restoring, sink = store.restoring, sink_of(job)
    pipeline = beam.Pipeline(runner=engine, options=options)
    read = pipeline | "Source" >> source
    output = read.records | "DPStream" >> DPStream(run.plan, run)
    _ = output.releases | "Releases" >> WriteReleases(sink, only_compare=restoring)
    dead = (read.dead_letter, output.dead_letter) | "AllDead" >> beam.Flatten()
    _ = dead | "DeadLetters" >> WriteDeadLetters(job)
    operator_totals.clear()
    try:
        with watch_steps(progress, steps), HAND_OVER.open():
            pipeline.run().wait_until_finish()
    except DpstreamError as error:
        raise diverged(error, sink, restoring) from None
    except Exception as error:
        raise diverged(coded(error), sink, restoring) from None
    else:
        if stamps(job) != before:
            raise PolicyError(
                "source.path",
                "a file changed while it was read, so this store's noise may belong to two inputs",
                "do not resume this store or publish its last releases; begin a new run",
            )
        if restoring:
            catch_up(run, sink)
        # A ledger that cannot be reached now only leaves copies of the running store unmarked.
        with contextlib.suppress(RunError), _ledger(job) as ledger:
            if ledger is not None:
                tokens.leave(ledger, run.open())
    finally:
        run.destroy_keys()
        identity = run.open().identity
        stores.close_all()
    return Result(identity.run_id, job.plan.hash, steps, sink.place, resumed, dict(operator_totals))


def coded(error: BaseException) -> DpstreamError:
    """The coded error inside a runner's exception; else its class only, never its text."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, DpstreamError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return RunError("runner", f"failed with {type(error).__name__}", "run `dpstream doctor`")
