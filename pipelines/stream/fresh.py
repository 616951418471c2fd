"""`dpstream run --fresh`: moves the store and the releases of the existing run away, so that a new
run begins, with another run id, new noise and a new charge.

Nothing is deleted or overwritten: store and releases stay in their folders under names with the
run's id, and a job that names them can inspect or continue the old run.  All checks that can
refuse the new run come before the first move.  After a kill between the moves, the same command
completes them; after a kill that follows the moves, use the command without ``--fresh``: with it,
another run is charged.
"""

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from dpstream.accounting.errors import RunError, UsageError
from dpstream.pipelines.connectors.files.types import check_types
from dpstream.pipelines.connectors.write import dead_letter_folder
from dpstream.pipelines.jobs.charging import check_begin, folder_used, store_identity
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.secret import secret_source
from dpstream.state import open as stores
from dpstream.state.durable import sync_folders
from dpstream.state.ledger.history import Accept
from dpstream.state.sqlite.file import alone


class Moved(NamedTuple):
    """The present paths of the old run; ``None`` for a part that did not exist.

    Attributes:
        store: its file.
        releases, dead_letters: their folders.
    """

    store: Path | None
    releases: Path | None
    dead_letters: Path | None


def set_aside(job: Job, accept: Accept | None = None) -> Moved:
    """Move the store, the releases and the dead letters of a job's run away, if there are any.

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
    with alone(store) if store.exists() else contextlib.nullcontext():  # refused while it runs
        return _moved(store, folder, dead_letter_folder(job), name)


def _moved(store: Path, folder: Path, dead: Path, name: str) -> Moved:
    try:
        releases = _renamed(folder, name) if folder.is_dir() and folder_used(folder) else None
        letters = _renamed(dead, name) if dead.is_dir() else None
        return Moved(_renamed(store, name) if store.exists() else None, releases, letters)
    except OSError:
        raise RunError(
            "--fresh", "the old store or releases cannot be moved", "check the folder's rights"
        ) from None


def _renamed(path: Path, name: str) -> Path:
    """Rename a file or folder to an unused name in its folder."""
    names = (
        f"{path.stem}-{name}{n}{path.suffix}" for n in ("", *(f"-{i}" for i in range(2, 1000)))
    )
    target = next(path.with_name(n) for n in names if not path.with_name(n).exists())
    os.rename(path, target)
    sync_folders([target])
    return target
