"""Shows a job's store, and exports its committed releases again.

Progress and the run's identity are public.  Sizes of state reveal roughly how many units and keys
there are, so they are for the operator only.  Exported releases are the bytes that the run's own
sink got or will get, so a lost sink can be written again.
"""

import contextlib
from pathlib import Path
from typing import Any

from dpstream.accounting.budget.calibration import begun
from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.dp_transforms.release import stamped_run_id
from dpstream.dp_transforms.run import Run
from dpstream.pipelines.connectors.files.sink import FileSink
from dpstream.pipelines.connectors.registry import sink_of
from dpstream.pipelines.connectors.run_manifest import check_sink, publish_committed, write_manifest
from dpstream.pipelines.connectors.sink import ReadableSink, Sink
from dpstream.pipelines.connectors.watch import refuse
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.secret import secret_source
from dpstream.pipelines.project.file_kinds import FileKind
from dpstream.pipelines.stream import passes
from dpstream.pipelines.stream.begin import begun_epoch
from dpstream.pipelines.stream.run import Progress
from dpstream.state import open as stores
from dpstream.state.retention import reached, settled_trigger_time
from dpstream.state.store import Store


def open_job_store(job: Job) -> Store:
    """Open the job's store to read what is committed.

    Raises:
        UsageError: there is no store.
        PolicyError: it belongs to another plan.
    """
    url = job.state.store or ""
    if not stores.exists(url):
        raise UsageError("store", "holds no run yet", "run the job, or correct store")
    return stores.open_store(url, job.plan, stores.identity_of(url, job.plan).run_id)


def info(job: Job, operator: bool = False) -> dict[str, Any]:
    """Return identity and progress by window of a job's store; all of it public.

    Args:
        operator: add ``operator_only``: sizes by part and window, which are private.

    Raises:
        UsageError: there is no store.
        PolicyError: it belongs to another plan.
    """
    try:
        store = open_job_store(job)
        identity, line, retained = store.identity, job.plan.timeline, store.retained_windows
        done = store.completed(identity.shards)
        summary = {
            "run_id": stamped_run_id(job.plan, identity),
            "epoch": identity.epoch,
            "plan_hash": identity.plan_hash,
            "shards": identity.shards,
            "windows": None if line.end is None else line.windows,
            "triggers": line.triggers,
            "complete": retained.dropped + sum(t == line.triggers for t in done.values()),
            "committed": {str(w): trigger for w, trigger in sorted(done.items())},
            "settled_cut": settled_trigger_time(line, reached(store, line).complete),
            "dropped": retained.dropped,
            "abandoned": retained.abandoned,
            "restoring": store.restoring,
            "input_changed": store.input_changed,
        }
        return summary | {"operator_only": _sizes(job, store)} if operator else summary
    finally:
        stores.close_all()


def _sizes(job: Job, store: Store) -> dict[str, Any]:
    """Return bytes of the embedded store's files, and of parts; a database shows its own."""
    path = job.state.path
    files = [] if path is None else [Path(f"{path}{side}") for side in ("", "-wal", "-shm")]
    size = sum(p.stat().st_size for p in files if p.exists())
    return {"bytes": size or None, "parts": [part._asdict() for part in store.parts()]}


def _refuse_other_input(job: Job, store: Store) -> None:
    """Refuse to publish releases that changed files may have affected; see
    `pipelines.connectors.watch`.

    Raises:
        PolicyError: files have changed, while they were read or since a run was interrupted.
    """
    refuse(store)
    if store.reading and not passes.same_input(job, store):
        raise PolicyError(
            "table.path",
            "its files are not those that the run was reading when it was cut off",
            "bring them back and go on with `dpstream run JOB`, or begin a new run, which is"
            " charged again: `dpstream run JOB --fresh`",
        )


def export(job: Job, folder: Path, kind: FileKind, progress: Progress | None = None) -> int:
    """Write every committed release of all shards to a folder; return their number.

    Writing the same content again changes nothing; other content is refused.

    Raises:
        UsageError: there is no store.
        PolicyError: another plan or secret, or a published value would change.
    """
    try:
        run = store_run(job)
        try:
            _refuse_other_input(job, run.open())
            sink = FileSink(folder, kind, job.sink.guarded)
            return publish_committed(run, sink, progress, lambda: write_manifest(run, sink))
        finally:
            run.destroy_keys()
    finally:
        stores.close_all()


def publish(job: Job, progress: Progress | None = None) -> int:
    """Write every committed release of all shards to the job's own sink; return their number.

    Existing releases stay as they are: use it for a sink that was emptied, or a new one.

    Raises:
        UsageError: there is no store.
        PolicyError: another plan or secret, a sink that is not the run's, or a store that must
            still be compared with what is published.
    """
    try:
        run = store_run(job)
        try:
            with contextlib.closing(sink_of(job, run)) as sink:
                _refuse_other_input(job, run.open())
                _refuse_behind(job, run, sink)
                check_sink(run, sink)
                return publish_committed(run, sink, progress, lambda: write_manifest(run, sink))
        finally:
            run.destroy_keys()
    finally:
        stores.close_all()


def _refuse_behind(job: Job, run: Run, sink: Sink) -> None:
    """Refuse a store that may lack published releases, because it cannot show what is right."""
    store, used = run.open(), sink.used() if isinstance(sink, ReadableSink) else None
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
