"""What a job's store holds, and its committed releases again: the outbox is the release.

Everything shown is public (progress, sizes of files, the run's identity); exported releases are
the bytes that the run's own sink got or will get, so a lost sink can be written again.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from accounting.errors import UsageError
from accounting.timeline import Timeline
from dp_transforms.release import stamped_run_id
from dp_transforms.run import Run
from pipelines.job import Job
from pipelines.sink_manifest import resealed, write_manifest
from pipelines.sinks import write_release
from pipelines.stream import key_source
from state import open as stores
from state.store import RunIdentity, Store

Progress = Callable[[int, int], None]


def _store(job: Job) -> Store:
    """The job's store, opened for reading what is committed."""
    url = job.state.store or ""
    if not stores.exists(url):
        raise UsageError("state.store", "holds no run yet", "run the job, or correct state.store")
    return stores.open_store(url, job.plan, stores.identity_of(url, job.plan).run_id)


def info(job: Job) -> dict[str, Any]:
    """Identity, progress by window and size of a job's store; all of it public.

    Raises:
        UsageError: there is no store; PolicyError: it belongs to another plan.
    """
    try:
        store = _store(job)
        identity, line = store.identity, job.plan.timeline
        done = store.completed(identity.shards)
        return {
            "run_id": stamped_run_id(job.plan, identity),
            "epoch": identity.epoch,
            "plan_hash": identity.plan_hash,
            "shards": identity.shards,
            "windows": line.windows,
            "triggers": line.triggers,
            "committed": {str(w): trigger for w, trigger in sorted(done.items())},
            "bytes": _bytes(job),
        }
    finally:
        stores.close_all()


def _bytes(job: Job) -> int | None:
    """Size of the embedded store's files; a database service tells its own."""
    path = job.state.path
    if path is None:
        return None
    return sum(p.stat().st_size for p in path.parent.glob(path.name + "*"))


def export(job: Job, folder: Path, kind: str, progress: Progress | None = None) -> int:
    """Write every committed release of all shards to a folder; returns how many.

    Writing the same content again changes nothing; other content is refused.

    Raises:
        UsageError: there is no store; PolicyError: another plan or key, or a published value
            would change.
    """
    try:
        store = _store(job)
        identity = store.identity
        # Release ids depend on the key: another is refused.
        keys = key_source(job).of_run(identity.run_id, identity.key_fingerprint)
        run = Run(job.plan, keys, job.state.store or "", identity.shards, identity.run_id)
        try:
            return _write(job, run, store, folder, kind, progress)
        finally:
            run.destroy_keys()
    finally:
        stores.close_all()


def _write(
    job: Job, run: Run, store: Store, folder: Path, kind: str, progress: Progress | None
) -> int:
    names = list(_names(job.plan.timeline, store, store.identity))
    batches = resealed(run, store, iter(names))  # refuses another key before anything is written
    write_manifest(run, folder, kind)
    for number, batch in enumerate(batches, 1):
        write_release(folder, kind, batch)
        if progress is not None:
            progress(number, len(names))
    return len(names)


def _names(line: Timeline, store: Store, identity: RunIdentity) -> Iterator[tuple[int, int]]:
    """(window, trigger) of every release that all shards have committed, in public order."""
    done = store.completed(identity.shards)
    for cut in range(1, line.last_cut + 1):
        for window in line.windows_at(cut):
            trigger = cut - line.base(window)
            if trigger <= done.get(window, 0):
                yield window, trigger
