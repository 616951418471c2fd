"""Operations on a job's store: make, show, export, expire, back up, restore, reshard.

Progress and the run's identity are public.  Sizes of state reveal roughly how many units and keys
there are, so they are for the operator only.  Exported releases are the bytes that the run's own
sink got or will get, so a lost sink can be written again.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from dpstream.accounting.budget.calibration import begun, calibrated
from dpstream.accounting.errors import NEW_RUN, DpstreamError, PolicyError, UsageError
from dpstream.accounting.figures import EPOCH
from dpstream.accounting.guarantee import of_periods
from dpstream.accounting.limits import MAX_SHARDS
from dpstream.accounting.places import ReleaseKind
from dpstream.accounting.plan.timeline import Timeline
from dpstream.dp_transforms.release import facts_of, stamped_run_id
from dpstream.dp_transforms.run import Run
from dpstream.dp_transforms.skipping import exhausted
from dpstream.pipelines.connectors.files.sink import FileSink
from dpstream.pipelines.connectors.final import final_in, final_of, require_final, write_final
from dpstream.pipelines.connectors.input_files import refuse, refuse_changed
from dpstream.pipelines.connectors.registry import input_of, sink_of
from dpstream.pipelines.connectors.run_manifest import (
    check_sink,
    publish_committed,
    refuse_older_store,
    resealed,
    write_manifest,
)
from dpstream.pipelines.connectors.sink import Sink, is_last, name_of_release
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.secret import secret_source
from dpstream.pipelines.project.text import instant
from dpstream.pipelines.stream import passes
from dpstream.pipelines.stream.begin import begun_epoch, charge_restored, prepare
from dpstream.pipelines.stream.run import Progress
from dpstream.state import open as stores
from dpstream.state import retention, transfer
from dpstream.state.retention import reached, settled_trigger_time
from dpstream.state.store import RunIdentity, Store
from dpstream.state.transfer import Abandon


def open_job_store(job: Job) -> Store:
    """Open the job's store to read what is committed.

    Raises:
        UsageError: there is no store.
        PolicyError: it belongs to another plan, or is older than the job's folder of releases.
    """
    url = job.state.store or ""
    if stores.backend(url).identity() is None:
        raise UsageError("store", "holds no run yet", "run the job, or correct store")
    store = stores.open_store(url, job.plan, stores.identity_of(url, job.plan).run_id)
    if job.sink.folder is not None:
        refuse_older_store(store, job.plan, sink_of(job))
    return store


@contextlib.contextmanager
def _closing_stores() -> Iterator[None]:
    """Close the stores of this process at the end."""
    try:
        yield
    finally:
        stores.close_all()


@_closing_stores()
def info(job: Job, operator: bool = False) -> dict[str, Any]:
    """Return identity and progress by window of a job's store; all of it public.

    Args:
        operator: add ``operator_only``: sizes by part and window, and whether the input changed
            while it was read, which are private.

    Raises:
        UsageError: there is no store.
        PolicyError: it belongs to another plan.
    """
    store = open_job_store(job)
    identity, timeline, retained = store.identity, job.plan.timeline, store.retained_windows
    done = store.completed(identity.shards)
    summary = {
        "run_id": stamped_run_id(job.plan, identity),
        "epoch": identity.epoch,
        "plan_hash": identity.plan_hash,
        "shards": identity.shards,
        "windows": None if timeline.end is None else timeline.windows,
        "triggers": timeline.triggers,
        "complete": retained.dropped + sum(t == timeline.triggers for t in done.values()),
        "committed": {str(w): trigger for w, trigger in sorted(done.items())},
        "settled_cut": settled_trigger_time(timeline, reached(store, timeline).complete),
        "dropped": retained.dropped,
        "abandoned": retained.abandoned,
        "restoring": store.restoring,
    }
    return summary | {"operator_only": _private(job, store)} if operator else summary


def _private(job: Job, store: Store) -> dict[str, Any]:
    """Return bytes of the embedded store's files (a database shows its own), and of parts; and
    whether files changed while a run read them.
    """
    path = job.state.path
    files = [] if path is None else [Path(f"{path}{side}") for side in ("", "-wal", "-shm")]
    size = sum(p.stat().st_size for p in files if p.exists())
    parts = [part._asdict() for part in store.parts()]
    return {"bytes": size or None, "parts": parts, "input_changed": store.input_changed}


def _refuse_other_input(job: Job, store: Store) -> None:
    """Refuse to publish releases that changed files may have affected; see
    `pipelines.connectors.input_files`.

    Raises:
        PolicyError: files have changed, while they were read or since a run was interrupted.
    """
    refuse(store)
    if store.reading and not passes.same_input(job, store):
        raise PolicyError(
            "table.path",
            "its files are not those that the run was reading when it was cut off",
            f"bring them back and go on with `dpstream run {job.name}`, or {NEW_RUN}",
        )


@_closing_stores()
def export(job: Job, folder: Path, kind: ReleaseKind, progress: Progress | None = None) -> int:
    """Write every committed release of all shards to a folder; return their number.

    Writing the same content again changes nothing; other content is refused.

    Raises:
        UsageError: there is no store.
        PolicyError: another plan or secret, or a published value would change.
    """
    with _running(job) as run:
        _refuse_other_input(job, run.open())
        sink = FileSink(folder, kind, job.sink.guarded)
        return publish_committed(run, sink, progress, lambda: write_manifest(run, sink))


@_closing_stores()
def publish(job: Job, progress: Progress | None = None) -> int:
    """Write every committed release of all shards to the job's own sink; return their number.

    Existing releases stay as they are: use it for a sink that was emptied, or a new one.

    Raises:
        UsageError: there is no store.
        PolicyError: another plan or secret, a sink that is not the run's, or a store that must
            still be compared with what is published.
    """
    with _running(job) as run, contextlib.closing(sink_of(job, run)) as sink:
        _refuse_other_input(job, run.open())
        _refuse_behind(job, run, sink)
        check_sink(run, sink)
        return publish_committed(run, sink, progress, lambda: write_manifest(run, sink))


@_closing_stores()
def final(job: Job, out: Path) -> int:
    """Write the final table of a job (`pipelines.connectors.final`); return its number of rows.

    It is made from the sink's releases if they are files, else from the store's.

    Raises:
        UsageError: nothing was released, or another file is there.
        PolicyError: the releases or the store are of another plan.
        RunError: it cannot be read or written.
    """
    folder = job.sink.folder
    require_final(out, "--out")
    if folder is not None:
        if folder.resolve() in out.resolve().parent.parents:
            raise UsageError("--out", "lies among the releases", "choose another folder")
        return write_final(final_in(job, folder), job, out, "--out")
    store = open_job_store(job)
    plan = begun(job.plan, store.identity.calibration)
    return write_final(final_of(plan, store, facts_of(plan, store.identity)), job, out, "--out")


def _refuse_behind(job: Job, run: Run, sink: Sink) -> None:
    """Refuse a store that may lack published releases, because it cannot show what is right."""
    store, used = run.open(), sink.used()
    if store.restoring and used is not False:
        raise PolicyError(
            "store",
            "was restored, and has not caught up with what is published",
            "run the job: it compares, and publishes what is missing",
        )
    if used is None and begun_epoch(job, run.run_id) > store.identity.epoch:
        raise PolicyError(
            "store",
            "is older than its run, which goes on in a later epoch",
            "use the store that goes on",
        )


def store_run(job: Job) -> Run:
    """Return the run of a job's store; its key is checked where it is used."""
    identity = open_job_store(job).identity
    keys = secret_source(job).of_run(identity.run_id, identity.secret_fingerprint)
    plan = begun(job.plan, identity.calibration)
    return Run(plan, keys, job.state.store or "", identity.shards, identity.run_id)


@contextlib.contextmanager
def _running(job: Job) -> Iterator[Run]:
    """Yield the run of a job's store; its keys are destroyed at the end."""
    run = store_run(job)
    try:
        yield run
    finally:
        run.destroy_keys()


@_closing_stores()
def initialise(job: Job) -> tuple[str, bool]:
    """Make the job's store with a new run id; nothing is drawn or charged yet.

    Returns:
        (run id, whether the store is new).

    Raises:
        PolicyError: the sink, the account or an existing store does not allow it.
    """
    store = stores.backend(job.state.store or "")
    store.prepare()
    run, existed, _ = prepare(job, reads=store.identity() is None)
    return run.run_id, not existed


@_closing_stores()
def expire(
    job: Job, releases_before: str | None = None, progress: Progress | None = None
) -> dict[str, int]:
    """Drop what no run can need any more, then return the space to the disk.

    Args:
        releases_before: drop releases of complete windows that end, with their lateness, at or
            before this time; each is first compared with the sink's.

    Returns:
        Number of shards that dropped positions, and of windows whose releases were dropped; both
        public.

    Raises:
        PolicyError: the sink lacks a release that is to be dropped, or has another.
    """
    store, timeline = open_job_store(job), job.plan.timeline
    lasting = job.plan.design.remembered_for
    changed, dropped = retention.expire(store, timeline, remembered_for=lasting), 0
    if releases_before is not None:
        before = _droppable(job, _micros("releases-before", releases_before, timeline))
        _require_published(job, before, progress)
        dropped = max(0, before - store.retained_windows.dropped)
        retention.drop_releases(store, timeline, before)
    store.compact()
    return {"shards_expired": changed, "windows_dropped": dropped}


def _micros(field: str, text: str, timeline: Timeline) -> int:
    """Return an instant; a day and a time without an offset are of the calendar's zone, or UTC."""
    return (instant(field, text, timeline.zone) - EPOCH) // timedelta(microseconds=1)


def _droppable(job: Job, instant: int) -> int:
    """Return the first window that is not complete or ends after the instant."""
    store, timeline = open_job_store(job), job.plan.timeline
    complete = reached(store, timeline).complete
    return max(store.retained_windows.dropped, min(complete, timeline.ended(instant)))


def _require_published(job: Job, before: int, progress: Progress | None) -> None:
    """Compare every release that is to be dropped with the sink's."""
    with _running(job) as run, contextlib.closing(sink_of(job)) as sink:
        store, timeline = run.open(), run.plan.timeline
        names = [
            (window, trigger)
            for window in range(store.retained_windows.first, before)
            for trigger in range(1, timeline.triggers + 1)
        ]
        compared = 0
        for batch in resealed(run, store, iter(names)):
            if not sink.holds(batch):
                window, trigger = name_of_release(batch)
                raise PolicyError(
                    sink.field,
                    f"does not hold the release of window {window}, trigger {trigger}",
                    "write it with `dpstream state releases JOB` before the store lets it go",
                )
            compared += is_last(batch)
            if progress is not None:
                progress(compared, len(names))


@_closing_stores()
def backup(job: Job, out: Path, progress: Progress | None = None) -> str:
    """Write all of the job's store to a file, also while the job runs; return the run id.

    Raises: see `state.transfer.backup`, and `open_job_store`.
    """
    folder = job.sink.folder
    if folder is not None and folder.resolve() in out.resolve().parents:
        raise PolicyError("backup", "lies in the folder of the releases", "keep it elsewhere")
    open_job_store(job)
    return transfer.backup(job.state.store or "", job.plan, out, progress).run_id


def restore(
    job: Job, file: Path, replace: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """Restore a store from a backup; the next run replays its input and compares with the sink.

    Raises: see `state.transfer.restore`; PolicyError: the backup was begun with another secret, or
        the input of the existing store has changed: a backup may have been made after that.
    """
    refuse_changed(job)
    new, aside = transfer.restore(
        job.state.store or "",
        job.plan,
        file,
        replace=replace,
        confirm=lambda identity: _same_key(job, identity),
        progress=progress,
    )
    return {"run_id": new.run_id, "epoch": new.epoch, "kept": aside and str(aside)}


def _same_key(job: Job, identity: RunIdentity) -> None:
    with secret_source(job).of_run(identity.run_id, identity.secret_fingerprint).ring():
        """Another key is refused."""


def abandon(
    job: Job,
    file: Path,
    now: str | None = None,
    replace: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Restore a store from a backup whose input since then is lost: give up open windows.

    Windows that begin at ``now`` or before get no further release, all units of the backup count as
    exhausted, records stamped up to ``now`` as decided.  The run continues in a new epoch, with
    new noise, and is charged a second time before that.

    Args:
        now: an instant after everything that any run of this store has read or released; default
            for a stream without end: the wall clock.

    Raises:
        UsageError: ``now`` is missing for a bounded source, whose input can be replayed.
        PolicyError: the account's limit does not allow the second charge.
        Else as `state.transfer.restore`.
    """
    timeline = job.plan.timeline
    if now is None and timeline.end is not None:
        raise UsageError(
            "now",
            "is required: the job's files can be read again, so a plain restore loses nothing",
            "restore without --abandon; if the input is gone, give an instant after all it held",
        )
    refuse_changed(job)
    instant = time.time_ns() // 1000 if now is None else _micros("now", now, timeline)
    continued = functools.cache(_in_next_epoch(job))

    def confirm(old: RunIdentity) -> None:
        _same_key(job, old)
        charge_restored(job, continued(old))

    new, aside = transfer.restore(
        job.state.store or "",
        job.plan,
        file,
        replace=replace,
        confirm=confirm,
        change=continued,
        abandon=lambda store: _given_up(job, store, instant),
        progress=progress,
    )
    return {
        "run_id": new.run_id,
        "epoch": new.epoch,
        "kept": aside and str(aside),
        "charged": job.ledger is not None,
        **spent(job, new),
    }


def _in_next_epoch(job: Job) -> Callable[[RunIdentity], RunIdentity]:
    """Return a function from a backup's identity to that of the store that continues from it.

    The new store has the job's input.  Units count from the backup on, so whatever epoch was begun
    since is spent.
    """
    parts = input_of(job).identity()
    with secret_source(job).ring() as ring:
        source = ring.source_fingerprint(parts)

    def continued(old: RunIdentity) -> RunIdentity:
        epoch = 1 + max(old.epoch, begun_epoch(job, old.run_id), _epoch_in_place(job, old.run_id))
        return msgspec.structs.replace(old, epoch=epoch, source_fingerprint=source)

    return continued


def _epoch_in_place(job: Job, run_id: str) -> int:
    """Return the epoch of the run's store that is to be replaced, if no account shows whether it
    has begun; -1: there is none, or it cannot be read.
    """
    url = job.state.store or ""
    if job.ledger is not None or not stores.exists(url):
        return -1
    try:
        there = stores.identity_of(url, job.plan)
    except DpstreamError:
        return -1
    return there.epoch if there.run_id == run_id else -1


def _given_up(job: Job, store: Store, instant: int) -> Abandon:
    """Return a trigger time and the count of units to give up with.

    The trigger time is that of the instant, and no earlier than any that the backup or sink has.
    """
    timeline, shards = job.plan.timeline, range(store.identity.shards)
    trigger_times = [
        timeline.passed(instant) + 1,
        store.retained_windows.abandoned,
    ]
    trigger_times += [store.unit_progress(shard).reach for shard in shards]
    trigger_times += [timeline.base(window) + trigger for window, _, trigger in store.progress()]
    trigger_times += [
        timeline.base(window) + trigger for window, trigger, _ in sink_of(job).published()
    ]
    most = job.plan.privacy.contributions
    # By the rules of the run that is given up, not by those of new ones.
    design = stores.design_of_run(job.plan, store.identity)
    limit = exhausted(most) if design.packs_indices else most
    return Abandon(max(1, *trigger_times), limit)


def spent(job: Job, identity: RunIdentity) -> dict[str, float]:
    """Return the joint cost of all epochs of a run; each draws new noise, so they compose."""
    epochs, budget = identity.epoch + 1, calibrated(job.plan, identity.calibration).budget
    cost = of_periods(job.plan, budget, epochs)
    return {"epochs": epochs, **{name: cost[name] for name in ("mu", "epsilon", "delta")}}


def reshard(job: Job, shards: int, progress: Progress | None = None) -> str | None:
    """Distribute the job's store over other shards.

    Returns:
        The path of the old store, if it is a file.

    Raises: see `state.transfer.reshard`.
    """
    if not 1 <= shards <= MAX_SHARDS:
        raise UsageError("shards", f"must be a whole number from 1 to {MAX_SHARDS}", "correct it")
    old_store = transfer.reshard(job.state.store or "", job.plan, shards, progress)
    return None if old_store is None else str(old_store)
