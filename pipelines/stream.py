"""Run a job: check and charge, build the pipeline, write what is committed."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import apache_beam as beam

from accounting.budget import Budget, allocate
from accounting.errors import DpstreamError, PolicyError, RunError, UsageError
from accounting.plan import Plan
from dp_transforms.batches import HAND_OVER
from dp_transforms.flow import DPStream, SealFactory
from dp_transforms.records import canonical_public_keys
from dp_transforms.run import KeySource, Performance, Run, begin_run
from dp_transforms.telemetry import operator_totals, watch_steps
from pipelines.choice_check import check_choice, unit_in_words
from pipelines.job import Job
from pipelines.keys import read_public_keys
from pipelines.manifest import fingerprint_parts, stamps
from pipelines.runners import make_runner
from pipelines.sink_formats import name_of, release_files
from pipelines.sinks import WriteDeadLetters, WriteReleases, write_release
from pipelines.sources import ReadFiles
from state import open as stores
from state.ledger import Charge, Ledger
from state.store import RunIdentity, Store

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
    if job.privacy.key_file is None and job.privacy.insecure_test_key is None:
        raise UsageError(
            "privacy.key_file", "is required to run", "make one with `dpstream key new FILE`"
        )
    return KeySource(job.privacy.key_file, job.privacy.insecure_test_key)


def begin(job: Job) -> tuple[Run, bool]:
    """Begin or resume the run of a job: store, run id and charge, before any draw.

    Returns:
        (run, whether it goes on from an existing store).

    Raises:
        PolicyError: the store, the input, the sink or the ledger forbids it.
    """
    run, resumed = prepare(job)
    charge(job, charge_name(run.open().identity))
    return run, resumed


def charge_name(identity: RunIdentity) -> str:
    """What a run is charged as: its id, and once more for each further epoch."""
    return f"{identity.run_id}/{identity.epoch}" if identity.epoch else identity.run_id


def prepare(job: Job) -> tuple[Run, bool]:
    """``begin`` up to the charge: the store exists and its run id is committed."""
    keys, plan = key_source(job), job.plan
    check_choice(job)
    _refuse_private_in_sink(job)
    parts = [f"{n}\0{size}\0{digest}".encode() for n, size, digest in fingerprint_parts(job)]
    url = job.state.store or ""
    if not stores.exists(url):
        _refuse_foreign_sink(job)
        charge(job, None)  # a refused charge leaves no store behind
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
    return run, resumed


def _refuse_private_in_sink(job: Job) -> None:
    """What is published must not lie in one folder with what must never be."""
    sink = Path(job.sink.path).resolve()
    private = {
        "privacy.key_file": job.privacy.key_file,
        "state.store": str(job.state.path),
        "ledger.path": job.ledger and job.ledger.path,
    }
    for field, path in private.items():
        if path and sink in Path(path).resolve().parents:
            raise PolicyError(
                field, "lies in the folder of the releases", "keep private files elsewhere"
            )
    if job.ledger and Path(job.ledger.path).resolve() == job.state.path.resolve():
        raise UsageError("ledger.path", "is the state store's file", "use a file of its own")


def _refuse_foreign_sink(job: Job) -> None:
    """A new store must not add to releases of a run it knows nothing of."""
    if any(Path(job.sink.path).glob("window-*/trigger-*")):
        raise PolicyError(
            "sink.path",
            "holds releases, but the store is new: it was lost, moved or belongs elsewhere",
            "restore the run's store, or write this run's releases to an empty folder",
        )


def charge(job: Job, run_id: str | None) -> None:
    """Charge the run in the data set's ledger, if the job names one; once per run id.

    Without a run id nothing is charged: it is only checked that the charge would be accepted.
    """
    if job.ledger is None:
        return
    plan, budget = job.plan, allocate(job.plan)
    if plan.privacy.mode == "paper":
        raise PolicyError(
            "ledger", "a mechanism without a guarantee cannot be charged", "use another mode"
        )
    limit = job.ledger.limit
    ledger = Ledger(job.ledger.path, job.ledger.data_set)
    try:
        spend = spend_of(plan, budget, run_id or "")
        if run_id is None:
            ledger.check(spend, limit.epsilon, limit.delta)
        else:
            ledger.charge(spend, limit.epsilon, limit.delta)
    finally:
        ledger.close()


def spend_of(plan: Plan, budget: Budget, run_id: str) -> Charge:
    """What a run of the plan costs."""
    return Charge(
        run_id=run_id,
        plan_hash=plan.hash,
        unit=unit_in_words(plan),
        epsilon=budget.epsilon,
        delta=budget.delta,
        mu=budget.mu,
        threshold_delta=plan.privacy.contributions * budget.b,
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
    restoring = store.restoring
    pipeline = beam.Pipeline(runner=engine, options=options)
    read = pipeline | "Source" >> source
    output = read.records | "DPStream" >> DPStream(run.plan, run)
    _ = output.releases | "Releases" >> WriteReleases(job, only_compare=restoring)
    dead = (read.dead_letter, output.dead_letter) | "AllDead" >> beam.Flatten()
    _ = dead | "DeadLetters" >> WriteDeadLetters(job)
    operator_totals.clear()
    try:
        with watch_steps(progress, steps), HAND_OVER.open():
            pipeline.run().wait_until_finish()
    except DpstreamError as error:
        raise diverged(error, restoring) from None
    except Exception as error:
        raise diverged(coded(error), restoring) from None
    else:
        if stamps(job) != before:
            raise PolicyError(
                "source.path",
                "a file changed while it was read, so this store's noise may belong to two inputs",
                "do not resume this store or publish its last releases; begin a new run",
            )
        if restoring:
            catch_up(job, run)
    finally:
        identity = run.open().identity
        stores.close_all()
    return Result(
        identity.run_id, job.plan.hash, steps, job.sink.path, resumed, dict(operator_totals)
    )


def diverged(error: DpstreamError, restoring: bool) -> DpstreamError:
    """Says what another release than the published one means for a restored store."""
    if not (restoring and isinstance(error, PolicyError) and error.field == "sink.path"):
        return error
    return PolicyError(
        "state.store",
        f"the restored store does not lead to what is published: the sink {error.rule}",
        "nothing was published; restore another backup, or give the open windows up with"
        " `dpstream state restore --replace --abandon`",
    )


def catch_up(job: Job, run: Run) -> None:
    """Publish what a restored run has committed beyond the sink, once all of that is compared.

    Raises:
        PolicyError: something is published that the store has not committed again.
    """
    store = run.open()
    done, first = store.completed(run.shards), store.marks.first
    for file in release_files(job.sink.path):
        window, trigger = name_of(file)
        if window >= first and trigger > done.get(window, 0):
            raise PolicyError(
                "state.store",
                "the restored store has not come to all that is published",
                "run it again; if this stays, the backup is of another run",
            )
    publish_committed(run, Path(job.sink.path), job.sink.kind)
    store.finish_restoring()


def publish_committed(run: Run, folder: Path, kind: str, progress: Progress | None = None) -> int:
    """Write every release that all shards have committed and the store still has; how many."""
    store, first = run.open(), run.open().marks.first
    sealed, names = SealFactory(run)(), list(committed_names(run, store))
    written = 0
    for number, (window, trigger) in enumerate(names, 1):
        parts = [store.committed_releases(window, n, trigger) for n in range(run.shards)]
        whole = [part for part in parts if part is not None]
        if len(whole) == run.shards:
            write_release(folder, kind, sealed(window, trigger, whole))
            written += 1
        elif window >= first:
            raise PolicyError(
                "state.store", "lost a step it says is committed", "restore it from a backup"
            )
        if progress is not None:
            progress(number, len(names))
    return written


def committed_names(run: Run, store: Store) -> Iterator[tuple[int, int]]:
    """(window, trigger) of every release that all shards have committed, in public order."""
    line, done = run.plan.timeline, store.completed(run.shards)
    for cut in range(1, line.last_cut + 1):
        for window in line.windows_at(cut):
            trigger = cut - line.base(window)
            if trigger <= done.get(window, 0):
                yield window, trigger


def coded(error: BaseException) -> DpstreamError:
    """The coded error inside a runner's exception; else its class only, never its text."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, DpstreamError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return RunError("runner", f"failed with {type(error).__name__}", "run `dpstream doctor`")
