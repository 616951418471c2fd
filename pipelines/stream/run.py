"""Execution of a begun job: build the pipeline, publish committed releases, end in order.

**A new run**: `dpstream run --fresh` moves the store and the releases of the existing run away
first, so that a new run begins, with another run id, new noise and a new charge.  Nothing is
deleted or overwritten: store and releases stay in their folders under names with the run's id, and
a job that names them can inspect or continue the old run.  All checks that can refuse the new run
come before the first move.

**The same command again**: after a failure or a kill, ``run --fresh`` completes the moves, or
continues the run that it began, at no further charge.  The store records, before the charge, that
``--fresh`` began the run (``FRESH``); the record is removed when a command has finished the run.
``--fresh`` begins another run only if the store has no such record, or if the plan, secret, input
or number of shards has changed since.  So one noise has one input and one charge.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import apache_beam as beam

from dpstream.accounting.errors import DpstreamError, PolicyError, RunError, UsageError, required
from dpstream.accounting.guarantee import lacks_of
from dpstream.accounting.plan.timeline import Timeline
from dpstream.dp_transforms.batches import HAND_OVER
from dpstream.dp_transforms.beam.clock import Announced, WallClock
from dpstream.dp_transforms.beam.delivery import Delivered, forget_delivered, resume_point
from dpstream.dp_transforms.beam.workers import stop_workers
from dpstream.dp_transforms.flow import DPStream
from dpstream.dp_transforms.run import Run
from dpstream.dp_transforms.telemetry import forget_error, operator_totals, rows_read, watch_steps
from dpstream.pipelines.connectors.files.source import FilesInput
from dpstream.pipelines.connectors.files.stream import StreamFiles
from dpstream.pipelines.connectors.files.types import check_types
from dpstream.pipelines.connectors.final import FINAL, final_in, write_final
from dpstream.pipelines.connectors.input_files import InputWatch
from dpstream.pipelines.connectors.inputs import Backpressure, Input
from dpstream.pipelines.connectors.query import with_cells, with_query
from dpstream.pipelines.connectors.registry import input_of, sink_of
from dpstream.pipelines.connectors.run_manifest import (
    CatchUpOutlet,
    catch_up,
    complete,
    diverged,
    finished,
    note_complete,
    publish_missing,
)
from dpstream.pipelines.connectors.sink import Sink
from dpstream.pipelines.connectors.write import (
    CountDelivered,
    WriteDeadLetters,
    WriteReleases,
    dead_letter_folder,
)
from dpstream.pipelines.jobs.charging import check_begin, folder_used, unfinished_fresh
from dpstream.pipelines.jobs.committed import store_identity
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.secret import secret_source
from dpstream.pipelines.project.text import duration_micros
from dpstream.pipelines.runners.errors import Warn, coded, say
from dpstream.pipelines.runners.memory import sparing_memory
from dpstream.pipelines.runners.table import Engine, make_runner
from dpstream.pipelines.runners.waiting import Stillness, quiet_seconds, wait_or_stop
from dpstream.pipelines.stream import passes
from dpstream.pipelines.stream.begin import begin, leave
from dpstream.pipelines.stream.completeness import STRICT, Terms
from dpstream.pipelines.stream.passes import DueInput, due
from dpstream.pipelines.stream.summary import Summary, summarised
from dpstream.state import open as stores
from dpstream.state.disk_errors import file_error
from dpstream.state.durable import sync_folders
from dpstream.state.ledger.history import Accept
from dpstream.state.retention import expire
from dpstream.state.sqlite.file import connect, exclusive, peek_note, swap_metadata
from dpstream.state.store import FRESH


def set_aside(job: Job, accept: Accept | None = None) -> dict[str, Path]:
    """Move the store, the releases and the dead letters of a job's run away, if there are any.

    Returns:
        The present path of each part that existed, by its name.

    Args:
        accept: may refuse the new run by the charges before it, before anything is moved.

    Raises:
        UsageError: the store is a database or the releases are in no folder, so that they cannot
            be moved.
        DpstreamError: the new run would be refused.
        RunError: a run has the store open, or the operating system cannot move a file.
    """
    store, folder = job.state.path, job.sink.folder
    if store is None or folder is None:
        field = "store" if store is None else "sink.kind"
        raise UsageError(
            "--fresh",
            f"moves the old store and releases away, and {field} names a service, not a file",
            "name another store and another place in sink: that is a new run as well",
        )
    check_begin(job, fresh=True, accept=accept)
    secret_source(job).ring().destroy()
    if not job.source.unbounded:
        check_types(job)
    stores.close_all()
    identity = store_identity(job)
    name = "before" if identity is None else identity.run_id[:12]
    with exclusive(store) if store.exists() else contextlib.nullcontext():  # refused while it runs
        return _moved(store, folder, dead_letter_folder(job), name)


def _moved(store: Path, folder: Path, dead: Path, name: str) -> dict[str, Path]:
    try:
        releases = _set_aside(folder, name) if folder.is_dir() and folder_used(folder) else None
        letters = _set_aside(dead, name) if dead.is_dir() else None
        moved = _set_aside(store, name) if store.exists() else None
        parts = {"store": moved, "releases": releases, "dead letters": letters}
        return {part: path for part, path in parts.items() if path is not None}
    except OSError as error:
        raise file_error("--fresh", "the old store or releases cannot be moved", error) from None


def _set_aside(path: Path, name: str) -> Path:
    """Rename a file or folder to an unused name in its folder."""
    names = (
        f"{path.stem}-{name}{n}{path.suffix}" for n in ("", *(f"-{i}" for i in range(2, 1000)))
    )
    target = next(path.with_name(n) for n in names if not path.with_name(n).exists())
    os.rename(path, target)
    sync_folders([target])
    return target


#: Told (steps done, steps in all); both are public.
Progress = Callable[[int, int], None]


class Result(NamedTuple):
    """The result of a finished run.

    ``operator_only``, here and in the summary, counts records exactly and is private; all else is
    public.  ``through``: for files that grow, the instant through which everything is released
    while more files may be added.  ``input_read``: whether the command opened the input; if not,
    it answered from store and sink.  ``read_at``: when the input was read to its end, if that was
    before this command.  ``missing``: expected names that the releases of this command lack.
    ``rows_by_file``: rows that were read; as private as ``operator_only``.
    """

    run_id: str
    plan_hash: str
    steps: int
    releases: str
    resumed: bool
    operator_only: dict[str, int]
    stopped: bool = False
    summary: Summary | None = None
    through: str | None = None
    input_read: bool = True
    read_at: str | None = None
    missing: tuple[str, ...] = ()
    rows_by_file: tuple[tuple[str, int], ...] = ()


def run_job(
    job: Job,
    runner: str = "DirectRunner",
    beam_args: Sequence[str] = (),
    progress: Progress | None = None,
    stop: threading.Event | None = None,
    detach: bool = False,
    warn: Warn = say,
    through: str | None = None,
    fresh: bool = False,
    accept: Accept | None = None,
    deliver: Callable[[Result], object] = lambda _: None,
    terms: Terms = STRICT,
) -> Result:
    """Run a job to its end, or, if its source has no end, until it is stopped.

    A run that has committed its last step reads nothing: the sink is compared with the store, and
    missing releases are written to it.

    Args:
        job: a checked job.
        runner: see ``pipelines.runners.table``.
        beam_args: further flags for Beam's PipelineOptions.
        progress: called from time to time with the number of finished steps.
        stop: once it is set, the pipeline is cancelled; nothing is lost by that.
        detach: do not wait: the workers are elsewhere and continue without this process.
        warn: called if nothing has moved for long, and with what a continued run lacks; without it
            these are lines on stderr.
        through: for files that grow, the instant through which they are complete (see
            `pipelines.stream.passes`).
        fresh: begin a new run at a new charge; the old one is moved away.  A run that an earlier
            command with ``fresh`` began and did not finish is continued instead.
        accept: may refuse a run that is not charged yet, by the charges before it.
        deliver: shows or writes the result; if it fails, ``fresh`` continues this run.
        terms: what to do where expected files are missing (`pipelines.stream.completeness`).

    Raises:
        DpstreamError: refused or failed, with a field, a rule and a fix.
    """
    if fresh and not _continues(job, through):
        # Refuse flags and files of a new run before anything of the old one is moved.
        engine, source = make_runner(runner, beam_args), input_of(job)
        _check_engine(engine, source)
        _recorded(job, source, engine)
        if not job.source.unbounded:
            passes.expected(job, None, through, terms, warn)
        for name, path in set_aside(job, accept).items():
            warn(f"The old run's {name} moved to {path}.")
    result = None
    for work in due(job, through, terms, warn):
        result = _run(job, work, runner, beam_args, progress, stop, detach, warn, accept, fresh)
    result = required(result, "there is something to do")
    if not (detach or result.stopped):
        _write_final(job, warn)
    deliver(result)
    if not (fresh and result.stopped):  # the same command continues a run that was stopped
        _forget_fresh(job)
    return result


def _write_final(job: Job, warn: Warn) -> None:
    """Write the final table beside releases in a folder; the cells of a workload have none."""
    folder = job.sink.folder
    if folder is None or job.cells is not None:
        return
    try:
        write_final(final_in(job, folder), job, folder / f"{FINAL}.{job.sink.kind}")
    except DpstreamError as error:  # all releases are there, which is what the run is for
        fix = f"{error.fix}; then type `dpstream state final {job.name}`"
        warn(f"The final table was not written: {error.field} {error.rule}. Fix: {fix}.")


def _continues(job: Job, through: str | None) -> bool:
    """Return whether ``--fresh`` must continue the run in the job's store.

    This is so if ``--fresh`` began it, no command has finished it, and a run that would begin now
    has the same plan, secret, input and number of shards.
    """
    identity = unfinished_fresh(job)
    if identity is None or identity.shards != job.state.shards:
        return False
    try:
        with secret_source(job).ring() as ring:
            stores.refuse_other_secret(identity, ring.fingerprint)
        begun = passes.begun_of(job)
        if begun.reads_whole if through is not None else begun.passes is not None:
            return False
        store = stores.open_store(job.state.store or "", job.plan, identity.run_id)
        return begun.ended or passes.same_input(job, store)
    except PolicyError:  # another secret, files that changed while they were read, or damage
        return False
    finally:
        stores.close_all()


def _forget_fresh(job: Job) -> None:
    """Record that a run is finished, so that ``--fresh`` begins another one.

    The command has finished, so it does not fail if this cannot be recorded: the next ``--fresh``
    then continues the run once more, at no charge.
    """
    path = job.state.path
    with contextlib.suppress(DpstreamError):
        if path is not None and peek_note(path, FRESH) is not None:
            with contextlib.closing(connect(path)) as db:
                swap_metadata(db, FRESH, "begun", None)


def _run(
    job: Job,
    work: DueInput,
    runner: str,
    beam_args: Sequence[str],
    progress: Progress | None,
    stop: threading.Event | None,
    detach: bool,
    warn: Warn,
    accept: Accept | None,
    fresh: bool,
) -> Result:
    """Run all of the input, or one pass over input that grows; see ``run_job``."""
    source = work.source
    engine = make_runner(runner, beam_args, recorded=source is not None and source.bounded)
    _check_engine(engine, source)
    if work.passes is not None and (engine.kind.streaming or detach):
        raise UsageError("--runner", "reads no files that grow", "use --runner=DirectRunner")
    watch = InputWatch(() if source is None else source.files())
    # Whatever is wrong with recorded files is said before a run begins and is charged.
    reader = None if source is None else _recorded(job, source, engine)
    run, resumed = _begun(job, engine, warn, work, accept, fresh)
    watch.begin(run, work.contents)
    restoring, steps, sink = run.open().restoring, _steps(run, work), sink_of(job, run, watch)
    upto = work.instant(job.plan.timeline)
    outcome = run.run_id, job.plan.hash, steps, sink.place, resumed
    committed = work.passes is None and finished(run)
    if source is None or (source.bounded and not detach and not restoring and committed):
        read_at = run.open().compared_input
        summary = _complete(job, run, source, watch, sink, engine)
        if progress is not None:
            progress(steps, steps)
        read = source is not None
        return Result(*outcome, {}, False, summary, upto, read, read_at, work.missing)
    pipeline = beam.Pipeline(runner=engine.runner, options=engine.options)
    ends = source.bounded and engine.kind.ends
    summary, clock = None, _announced(work, job.plan.timeline)
    _connect(pipeline, job, sink, run, source, reader, ends, engine.fitted, clock)
    batches = contextlib.ExitStack()
    try:
        batches.enter_context(HAND_OVER.open() if engine.by_reference else HAND_OVER.by_bytes())
        with _started(pipeline, engine, progress, steps) as started:
            if not detach:
                quiet = quiet_seconds(run.plan.timeline, not source.bounded)
                wait_or_stop(started, run, ends, stop, engine, Stillness(quiet, warn))
    except Exception as error:
        failure = diverged(coded(error), sink, restoring and run.open().restoring)
        raise failure if detach else _of_input(failure, watch) from None
    else:
        if not detach:
            _finish(job, run, source, watch, sink if restoring and ends else None)
            _publish_rest(run, sink, source, engine.kind.streaming and ends)
            if work.passes is not None:
                passes.end(run, work)
            if source.bounded:
                summary = _summary(job, run, sink, dict(operator_totals))
    finally:
        with batches:  # until the engine has ended: its last bundles may still ask for some
            _let_go(run, sink, None if detach else engine)
    stopped = stop is not None and stop.is_set()
    rows = tuple((file.name, rows_read[file.partition]) for file in watch.files)
    last = True, None, work.missing, rows
    return Result(*outcome, dict(operator_totals), stopped, summary, upto, *last)


def _announced(work: DueInput, timeline: Timeline) -> Announced | None:
    """Return the clock of a pass; ``None``: the source has one."""
    if work.passes is None:
        return None
    times = work.trigger_times(timeline)
    return Announced(times[-1], times[0])


@contextlib.contextmanager
def _started(
    pipeline: beam.Pipeline, engine: Engine, progress: Progress | None, steps: int
) -> Iterator[Any]:
    """Yield the running pipeline; report its steps meanwhile."""
    operator_totals.clear()
    rows_read.clear()
    forget_error()
    with sparing_memory(), watch_steps(progress, steps):
        started = pipeline.run()
        engine.check()
        yield started


def _publish_rest(run: Run, sink: Sink, source: Input, missing: bool) -> None:
    """Publish what the pipeline left out, and record that a finished run's sink is complete."""
    if missing:
        publish_missing(run, sink)
    if source.bounded:
        with contextlib.suppress(DpstreamError):  # then the next run compares
            note_complete(run, sink)


def _complete(
    job: Job, run: Run, source: Input | None, watch: InputWatch, sink: Sink, engine: Engine
) -> Summary | None:
    """Finish a run whose due steps are all committed: complete the sink and close everything.

    Args:
        source: the input, which must not have changed; ``None``: it is not compared.
    """
    try:
        if run.open().restoring:
            catch_up(run, sink)
        if not job.source.unbounded:  # all else is published when it is delivered
            complete(run, sink)
        lasting = run.plan.design.remembered_for
        expire(run.open(), run.plan.timeline, remembered_for=lasting)
        _finish(job, run, source, watch, None)
        return _summary(job, run, sink, {})
    except Exception as error:
        raise coded(error) from None
    finally:
        _let_go(run, sink, engine)


def _summary(job: Job, run: Run, sink: Sink, counts: dict[str, int]) -> Summary | None:
    """Return the summary of a run; ``None`` if a release cannot be read back."""
    with contextlib.suppress(DpstreamError):
        return summarised(job, run, sink, counts)
    return None


def _begun(
    job: Job, engine: Engine, warn: Warn, work: DueInput, accept: Accept | None, fresh: bool
) -> tuple[Run, bool]:
    first = work.noted is None and work.passes is not None
    source = required(work.source, "a first pass has files").identity() if first else None
    run, resumed = begin(job, source, accept=accept, reads=work.compares, fresh=fresh)
    if work.passes is not None:
        run = passes.commit(run, work)
    elif not job.source.unbounded:
        passes.check_no_passes(run)
    for words in lacks_of(run.plan, run.budget()) if resumed else ():
        warn(words)
    return _on_threads(run, job, engine), resumed


def _on_threads(run: Run, job: Job, engine: Engine) -> Run:
    """Return the run with the number of threads for its engine.

    More than two are used only if the job asks for them: each holds a shard's work in memory.
    """
    threads = job.section.threads or min(2, os.cpu_count() or 1)
    settings = run.performance._replace(threads=threads if engine.kind.by_reference else 1)
    return run._replace(performance=settings)


def _let_go(run: Run, sink: Sink, engine: Engine | None) -> None:
    """Close keys, clients and stores, whatever happened; also an engine that is not waited for."""
    try:
        if engine is not None:
            engine.close()
    finally:
        stop_workers(run.run_id)
        run.destroy_keys()
        sink.close()
        stores.close_all()


def _of_input(failure: DpstreamError, watch: InputWatch) -> DpstreamError:
    """Return a failure, or an error that the input has changed, which may have caused it."""
    try:
        watch.check()
    except PolicyError as changed:
        return changed
    except RunError:
        """A file is gone: what failed says more."""
    return failure


def _finish(
    job: Job, run: Run, source: Input | None, watch: InputWatch, behind: Sink | None
) -> None:
    """Do what remains when the pipeline has ended.

    Args:
        behind: the sink that a restored run was compared with, and must still publish the rest to.
    """
    watch.check()
    if isinstance(source, FilesInput) and {file.name for file in source.files()} - {
        file.name for file in watch.files
    }:
        raise PolicyError(
            "table.path",
            "files joined it while the run read the others, and nothing of them is released",
            "move them away and run again; for input that grows begin a new run with `--through`",
        )
    watch.end()  # the input is not read after this
    if behind is not None:
        catch_up(run, behind)
    leave(job, run)


def _check_engine(engine: Engine, source: Input | None) -> None:
    if source is not None and not source.bounded and not engine.kind.streaming:
        raise UsageError(
            "--runner", "takes input that ends only", "use --runner=PrismRunner, or Flink"
        )


def _steps(run: Run, work: DueInput) -> int:
    """Return the number of steps of a run or pass that has an end, else 0: a public number."""
    timeline = run.plan.timeline
    if work.passes is not None:
        times = work.trigger_times(timeline)
        return sum(len(timeline.windows_at(time)) for time in times) * run.shards
    if timeline.end is None:
        return 0
    return (timeline.windows - run.open().retained_windows.first) * timeline.triggers * run.shards


def _recorded(job: Job, source: Input, engine: Engine) -> Any:
    """Return the reader of a bounded source; ``None`` for others, which continue from the run."""
    if not source.bounded:
        return None
    return StreamFiles(job) if engine.kind.streaming else source.read()


def _connect(
    pipeline: beam.Pipeline,
    job: Job,
    sink: Sink,
    run: Run,
    source: Input,
    reader: Any,
    ends: bool,
    fitted: Callable[[Any], Any],
    clock: Announced | WallClock | None,
) -> None:
    """Connect source, flow and sinks; a pipeline without end also records what is delivered."""
    timeline = run.plan.timeline
    if isinstance(reader, StreamFiles):
        reader.backpressure(Backpressure(run))
        clock = Announced(timeline.last_trigger_time)
        forget_delivered(run.open())
    elif reader is None:
        at = resume_point(run)
        clock, reader = (
            WallClock(timeline, at.first),
            fitted(source.read(at.begin, Backpressure(run))),
        )
    read = pipeline | "Source" >> reader
    records = with_cells(with_query(read.records, job), job)
    output = records | "DPStream" >> DPStream(run.plan, run, clock=clock)
    restoring = ends and run.open().restoring
    writing = WriteReleases(sink, restoring, None if ends else run)
    written, held = output.releases | "Releases" >> writing
    _ = written | "Counted" >> CountDelivered(timeline)
    dead = (read.dead_letter, output.dead_letter) | "AllDead" >> beam.Flatten()
    refused = dead | "DeadLetters" >> WriteDeadLetters(job)
    if not ends:
        keep = job.state.keep_releases
        retention = None if keep is None else duration_micros("keep_releases", keep)
        delivered = Delivered(run, CatchUpOutlet(run, sink), retention)
        _ = (written, held, refused, output.clock_ticks) | "Delivered" >> delivered
