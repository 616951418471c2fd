"""Run a job: check and charge, build the pipeline, write what is committed."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import apache_beam as beam

from accounting.budget import Budget, allocate
from accounting.calibration import calibrated
from accounting.errors import DpstreamError, PolicyError, RunError, UsageError
from accounting.unit import together
from dp_transforms.batches import HAND_OVER
from dp_transforms.clock import Announced, StreamTime, WallClock
from dp_transforms.delivery import Delivered, forget_delivered, resume_point
from dp_transforms.flow import DPStream
from dp_transforms.records import canonical_public_keys
from dp_transforms.run import KeySource, Performance, Run, begin_run
from dp_transforms.telemetry import forget_error, operator_totals, watch_steps
from dp_transforms.workers import stop_workers
from pipelines.choosing.check import check_choice, unit_in_words, unit_of
from pipelines.jobs.job import Job
from pipelines.jobs.keys import read_public_keys
from pipelines.jobs.text import duration_micros
from pipelines.runners.errors import coded
from pipelines.runners.table import Engine, make_runner
from pipelines.runners.waiting import own_signals, wait_or_stop
from pipelines.sinks.delivered import CountDelivered
from pipelines.sinks.manifest import (
    check_sink,
    published_epoch,
    refuse_emptied,
    refuse_lost_store,
    write_manifest,
)
from pipelines.sinks.restored import (
    Catching,
    catch_up,
    complete,
    diverged,
    finished,
    note_complete,
    publish_missing,
)
from pipelines.sinks.sink import Sink, sink_of
from pipelines.sinks.write import (
    WriteDeadLetters,
    WriteOrHold,
    WriteReleases,
    dead_letter_folder,
)
from pipelines.sources.brake import Brake
from pipelines.sources.inputs import Input, input_of
from pipelines.sources.replay import Replay, replay_bounds
from state import open as stores
from state import tokens
from state.drafts import sweep
from state.ledger import Charge, Ledger
from state.life import expire
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
    stopped: bool = False


def key_source(job: Job) -> KeySource:
    """Where the job's noise key is."""
    if job.privacy.reference is None and job.privacy.insecure_test_key is None:
        raise UsageError(
            "privacy.key", "is required to run", "make one with `dpstream key new FILE`"
        )
    return KeySource(job.privacy.reference, job.privacy.insecure_test_key)


def begin(job: Job, source: Sequence[bytes] | None = None) -> tuple[Run, bool]:
    """Begin or resume the run of a job: store, run id and charge, before any draw.

    The order is the guarantee.  The store commits the run id before the ledger charges it, so
    a begin that is cut off charges nothing (no run id yet) or is found by its run id and not
    charged again; what a charge would refuse is refused before the store is made.  The sink is
    checked before the charge and named after it: a refused store costs nothing, and a manifest
    without a store means that the store was lost.

    Args:
        source: parts that tell the input from others, where it is not the job's own source.

    Returns:
        (run, whether it goes on from an existing store).

    Raises:
        PolicyError: the store, the input, the sink or the ledger forbids it.
    """
    run, resumed, caught_up = prepare(job, source)
    charge(job, run)
    if run.open().restoring:
        tokens.restored(run.open(), caught_up)
    with contextlib.closing(sink_of(job)) as sink:
        write_manifest(run, sink)
    return run, resumed


def prepare(job: Job, source: Sequence[bytes] | None = None) -> tuple[Run, bool, bool]:
    """``begin`` up to the charge: the store exists and its run id is committed.

    Returns:
        (run, whether the store existed, whether it has committed all that is published).
    """
    keys, plan = key_source(job), job.plan
    check_choice(job)
    _refuse_private_in_sink(job)
    sweep(dead_letter_folder(job))
    own = input_of(job) if source is None else None
    parts = (source or ()) if own is None else own.identity()
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
        if own is not None and not own.bounded:  # one that ends is read from its first row again
            refuse_emptied(run, sink)
    finally:
        run.destroy_keys()  # those of the comparison; workers make their own
        sink.close()
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
            spend = spend_of(job, allocate(job.plan), "")
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
            spend = spend_of(job, run.budget(), identity.run_id, identity.epoch)
            tokens.enter(ledger, store, spend, limit.epsilon, limit.delta)


def charge_restored(job: Job, identity: RunIdentity) -> None:
    """Charge a further epoch of a run before its store is there; `begin` finds it charged."""
    with _ledger(job) as ledger:
        if job.ledger is not None and ledger is not None:
            limit = job.ledger.limit
            budget = calibrated(job.plan, identity.calibration).budget
            spend = spend_of(job, budget, identity.run_id, identity.epoch)
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


def spend_of(job: Job, budget: Budget, run_id: str, epoch: int = 0) -> Charge:
    """What a run of the job costs."""
    plan = job.plan
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
        identity=unit_of(job).text,
        periods=plan.timeline.periods,
        together=together(plan),
    )


def run_job(
    job: Job,
    runner: str = "DirectRunner",
    beam_args: Sequence[str] = (),
    progress: Progress | None = None,
    speed: float | None = None,
    stop: threading.Event | None = None,
    detach: bool = False,
) -> Result:
    """Run a job to its end; one whose source has no end, until it is stopped.

    Of a run that has committed its last step the input is not read again but for its identity; the
    sink is compared with the store, and gets what it lacks.

    Args:
        job: a checked job.
        runner: see ``pipelines.runners.table``.
        beam_args: further flags for Beam's PipelineOptions.
        progress: told now and then how many steps are done.
        speed: of files on a streaming runner, seconds of stream a second; ``None``: unpaced.
        stop: once it is set, the pipeline is cancelled; nothing is lost by that.
        detach: do not wait: the workers are elsewhere and go on without this process.

    Raises:
        DpstreamError: refused or failed, with a field, a rule and a fix.
    """
    engine, source = make_runner(runner, beam_args), input_of(job)
    _check_engine(engine, source, speed)
    # Whatever is wrong with recorded files is said before a run begins and is charged.
    reader = _recorded(job, source, engine, speed)
    before = source.state()
    run, resumed = begin(job)
    run = _on_threads(run, job, engine)
    restoring, steps, sink = run.open().restoring, _steps(run), sink_of(job, run)
    if source.bounded and not detach and not restoring and finished(run):
        _complete(job, run, source, before, sink, engine)
        if progress is not None:
            progress(steps, steps)
        return Result(run.run_id, job.plan.hash, steps, sink.place, resumed, {})
    pipeline = beam.Pipeline(runner=engine.runner, options=engine.options)
    ends = source.bounded and engine.ends
    _connect(pipeline, job, sink, run, source, reader, ends, engine.spreads)
    operator_totals.clear()
    forget_error()
    try:
        with (
            watch_steps(progress, steps),
            HAND_OVER.open() if engine.by_reference else contextlib.nullcontext(),
        ):
            with own_signals():
                started = pipeline.run()
            if not detach:
                wait_or_stop(started, run, ends, stop, engine.cancel)
    except Exception as error:
        raise diverged(coded(error), sink, restoring and run.open().restoring) from None
    else:
        if not detach:
            _finish(job, run, source, before, sink if restoring and ends else None)
            if engine.streaming and ends:
                publish_missing(run, sink)
            if source.bounded:
                with contextlib.suppress(DpstreamError):  # then the next run compares
                    note_complete(run, sink)
    finally:
        identity = run.open().identity
        _let_go(run, sink, None if detach else engine)
    stopped = stop is not None and stop.is_set()
    totals = dict(operator_totals)
    return Result(identity.run_id, job.plan.hash, steps, sink.place, resumed, totals, stopped)


def _complete(job: Job, run: Run, source: Input, before: Any, sink: Sink, engine: Engine) -> None:
    """What is left to do of a run whose steps are all committed: the sink's part, and to let go."""
    try:
        complete(run, sink)
        expire(run.open(), run.plan.timeline)
        _finish(job, run, source, before, None)
    except Exception as error:
        raise coded(error) from None
    finally:
        _let_go(run, sink, engine)


def _on_threads(run: Run, job: Job, engine: Engine) -> Run:
    """The run with the number of threads for its engine.

    More than two only where the job asks for them: each holds a shard's work in memory.
    """
    threads = job.performance.threads or min(2, os.cpu_count() or 1)
    settings = run.performance._replace(threads=threads if engine.by_reference else 1)
    return run._replace(performance=settings)


def _let_go(run: Run, sink: Sink, engine: Engine | None) -> None:
    """Keys, clients and stores, whatever came; of an engine that nobody waits for any more, too."""
    try:
        if engine is not None:
            engine.close()
    finally:
        stop_workers(run.run_id)
        run.destroy_keys()
        sink.close()
        stores.close_all()


def _finish(job: Job, run: Run, source: Input, before: Any, behind: Sink | None) -> None:
    """What is left to do when the pipeline has ended; ``behind``: the sink that a restored run has
    compared with, and has still to publish the rest to."""
    if source.state() != before:
        raise PolicyError(
            "source.path",
            "a file changed while it was read, so this store's noise may belong to two inputs",
            "do not resume this store or publish its last releases; begin a new run",
        )
    if behind is not None:
        catch_up(run, behind)
    # A ledger that cannot be reached now only leaves copies of the running store unmarked.
    with contextlib.suppress(RunError), _ledger(job) as ledger:
        if ledger is not None:
            tokens.leave(ledger, run.open())


def _check_engine(engine: Engine, source: Input, speed: float | None) -> None:
    if not source.bounded and not engine.streaming:
        raise UsageError(
            "--runner", "takes input that ends only", "use --runner=PrismRunner, or Flink"
        )
    if speed is not None and not (source.bounded and engine.streaming):
        raise UsageError("--speed", "is for recorded files on a streaming runner", "leave it out")


def _steps(run: Run) -> int:
    """Steps of a run that has an end, else 0: a public number."""
    line = run.plan.timeline
    if line.end is None:
        return 0
    return (line.windows - run.open().marks.first) * line.triggers * run.shards


def _recorded(job: Job, source: Input, engine: Engine, speed: float | None) -> Any:
    """The reader of a source that ends; ``None`` for others, which go on where the run is."""
    if not source.bounded:
        return None
    return Replay(job, speed) if engine.streaming else source.read()


def _connect(
    pipeline: beam.Pipeline,
    job: Job,
    sink: Sink,
    run: Run,
    source: Input,
    reader: Any,
    ends: bool,
    spread: bool,
) -> None:
    """Source, flow and sinks; a pipeline that does not end by itself notes what is delivered."""
    line, clock = run.plan.timeline, None
    if isinstance(reader, Replay):
        reader.brake(Brake(run))
        clock = _replayed(reader, job)
        forget_delivered(run.open())
    elif reader is None:
        at = resume_point(run)
        clock, reader = WallClock(line, at.first), source.read(at.begin, Brake(run), spread)
    read = pipeline | "Source" >> reader
    output = read.records | "DPStream" >> DPStream(run.plan, run, clock=clock)
    if ends:
        writing = WriteReleases(sink, only_compare=run.open().restoring)
        written = output.releases | "Releases" >> writing
    else:
        written, held = output.releases | "Releases" >> WriteOrHold(sink, run)
    _ = written | "Counted" >> CountDelivered(line)
    dead = (read.dead_letter, output.dead_letter) | "AllDead" >> beam.Flatten()
    refused = dead | "DeadLetters" >> WriteDeadLetters(job)
    if not ends:
        keep = job.state.keep_releases
        kept = None if keep is None else duration_micros("state.keep_releases", keep)
        delivered = Delivered(run, Catching(run, sink), kept)
        _ = (written, held, refused, output.pulses) | "Delivered" >> delivered


def _replayed(replay: Replay, job: Job) -> Announced | WallClock:
    """The clock of a recording: as fast as it can be read, or at its speed."""
    line = job.plan.timeline
    if replay.speed is None:
        return Announced(line.last_cut)
    bounds = replay_bounds(job)
    return WallClock(line, now=StreamTime(*bounds, line.cut_time(line.last_cut), replay.speed))
