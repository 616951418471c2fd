"""A job's store by URL: backed up, restored and resharded as a whole.

A backup is always a file of the embedded store, whatever store it was made of, so that it can be
inspected and restored to another kind.  The embedded store is replaced by renaming a complete file;
the old one is kept beside it.  A database gets a new generation of its rows and is switched to it;
the old one is kept until the store is expired.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.plan.plan import Plan
from dpstream.state import drafts
from dpstream.state.copying import DELIVERED, Abandon, Progress, copy_store
from dpstream.state.open import (
    SpannerBackend,
    SqliteBackend,
    backend,
    close_all,
    design_of_run,
    exists,
    key_schema,
)
from dpstream.state.sqlite.backup import (
    backup_file,
    check_file,
    copy_backup,
    drafted,
    publish,
    refuse_existing,
    replace_file,
    seal_backup,
)
from dpstream.state.sqlite.file import alone, create_store, read_identity
from dpstream.state.sqlite.store import SqliteStore
from dpstream.state.store import RunIdentity, Store

#: Told the backup's identity when all is ready; refuses by raising, and may charge.
Confirm = Callable[[RunIdentity], None]


def backup(url: str, plan: Plan, out: Path, progress: Progress | None = None) -> RunIdentity:
    """Write all of a store to one file, as of one instant, also while a run is under way.

    Raises:
        UsageError: there is no store, or the file exists.
        PolicyError: another plan's store.
        RunError: the file cannot be written; it does not exist then.
    """
    _require(url)
    close_all()
    state_backend = backend(url)
    source = state_backend.open(plan)
    try:
        _refuse_other(source.identity, plan)
        if isinstance(state_backend, SqliteBackend):
            return backup_file(state_backend.path, out, progress)
        refuse_existing(out)
        with drafted(out) as draft:
            _draft(source, draft, source.identity, plan, progress)
            seal_backup(draft)
            publish(draft, out)
        return source.identity
    finally:
        source.close()


def restore(
    url: str,
    plan: Plan,
    file: Path,
    *,
    replace: bool = False,
    confirm: Confirm | None = None,
    change: Callable[[RunIdentity], RunIdentity] | None = None,
    abandon: Callable[[Store], Abandon] | None = None,
    progress: Progress | None = None,
) -> tuple[RunIdentity, Path | None]:
    """Make a store from a backup, marked as ``restoring``.

    Args:
        replace: replace an existing store, which is kept under another name.
        confirm: called just before the store is put in place; may refuse by raising.
        change: returns the new store's identity (another epoch).
        abandon: returns what the new epoch gives up, from the backup.

    Returns:
        (identity of the new store, path of the old one).

    Raises:
        UsageError: a store exists and ``replace`` is not set.
        PolicyError: the file is damaged, or the backup of another plan.
        RunError: a run has the store open; a file cannot be written.
    In all these cases the store is as it was.
    """
    close_all()
    state_backend = backend(url)
    if exists(url) and not replace:
        raise UsageError(
            "store",
            "exists",
            "go on with it, or give --replace to put the backup in its place (it is kept aside)",
        )
    if isinstance(state_backend, SpannerBackend):
        return _restore_there(state_backend, plan, file, confirm, change, abandon, progress), None
    path = _path(url)
    with _opened(file, path, plan) as source, drafted(path) as draft:
        old = source.identity
        new = old if change is None else change(old)
        give_up = None if abandon is None else abandon(source)
        _draft(source, draft, new, plan, progress, give_up, restoring=True)
        with alone(path, damaged=True) if path.exists() else contextlib.nullcontext():
            if confirm is not None:
                confirm(old)
            if path.exists():
                return new, replace_file(path, draft)
        publish(draft, path)
    return new, None


def _restore_there(
    state_backend: SpannerBackend,
    plan: Plan,
    file: Path,
    confirm: Confirm | None,
    change: Callable[[RunIdentity], RunIdentity] | None,
    abandon: Callable[[Store], Abandon] | None,
    progress: Progress | None,
) -> RunIdentity:
    """Do ``restore`` into a database, as a new generation."""
    with (
        _scratch() as folder,
        _opened(file, folder / "state", plan) as source,
    ):
        old = source.identity
        new = old if change is None else change(old)
        give_up = None if abandon is None else abandon(source)
        with state_backend.successor(
            plan, new, lambda: confirm(old) if confirm else None
        ) as target:
            target.begin_restoring(anew=give_up is not None)
            copy_store(source, target, plan.timeline, progress, give_up)
    return new


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """Yield a folder for the copy of a backup; those of killed commands are emptied first."""
    prefix = "dpstream-restore-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        drafts.sweep(left)
        with contextlib.suppress(OSError):  # in use, or another user's
            left.rmdir()
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        yield Path(folder)


@contextlib.contextmanager
def _opened(file: Path, beside: Path, plan: Plan) -> Iterator[SqliteStore]:
    """Yield a checked copy of a backup, open; the backup itself is only read."""
    if not file.is_file():
        raise UsageError("backup", "is no file", "give one that `dpstream state backup` wrote")
    with drafted(beside.with_name(f"{beside.name}.backup")) as copy:
        try:
            copy_backup(file, copy)
            identity = check_file(copy)
        except (PolicyError, UsageError):
            raise PolicyError("backup", "is damaged or no backup", "use another backup") from None
        if identity.plan_hash != plan.hash:
            raise PolicyError(
                "backup",
                "holds the state of a job with another plan",
                "use the job it was begun with",
            )
        store = SqliteStore(copy, key_schema(plan), design_of_run(plan, identity).sums)
        try:
            yield store
        finally:
            store.close()


def _draft(
    source: Store,
    draft: Path,
    identity: RunIdentity,
    plan: Plan,
    progress: Progress | None,
    abandon: Abandon | None = None,
    restoring: bool = False,
) -> None:
    """Make a complete store in a temporary file."""
    create_store(draft, identity)
    target = SqliteStore(draft, key_schema(plan), design_of_run(plan, identity).sums)
    try:
        if restoring:
            target.begin_restoring(anew=abandon is not None)
        copy_store(source, target, plan.timeline, progress, abandon)
        if not restoring:
            target.set_metadata(DELIVERED, source.metadata(DELIVERED))
    finally:
        target.close()
    check_file(draft)


def reshard(url: str, plan: Plan, shards: int, progress: Progress | None = None) -> Path | None:
    """Distribute a store's keys and units over another number of shards; no release changes.

    With a file, a run that continues meanwhile is refused.  With a database its work is lost: what
    it commits is not in the new generation; the next run computes it again and compares.

    Returns:
        Path of the old store, if it is a file (a database keeps it until it is expired).

    Raises:
        UsageError: there is no store, or it has this number of shards.
        PolicyError: another plan's store.
        RunError: a run has it open, or no space is left.
    In all these cases the store is as it was.
    """
    _require(url)
    close_all()
    state_backend = backend(url)
    if isinstance(state_backend, SpannerBackend):
        there = state_backend.open(plan)
        new = _resharded(there.identity, plan, shards)
        with state_backend.successor(plan, new, lambda: None) as target:
            # A run that was not stopped publishes on: the next one has to catch up with it.
            target.begin_restoring()
            copy_store(there, target, plan.timeline, progress)
            target.set_metadata(DELIVERED, there.metadata(DELIVERED))
        return None
    path = _path(url)
    with alone(path) as db, drafted(path) as draft:
        identity = read_identity(db)
        sums = design_of_run(plan, identity).sums
        source = SqliteStore(path, key_schema(plan), sums, db)
        _draft(source, draft, _resharded(identity, plan, shards), plan, progress)
        return replace_file(path, draft)


def _resharded(identity: RunIdentity, plan: Plan, shards: int) -> RunIdentity:
    """Return the identity with another number of shards."""
    _refuse_other(identity, plan)
    if identity.shards == shards:
        raise UsageError("shards", "is the store's number already", "choose another number")
    return msgspec.structs.replace(identity, shards=shards)


def _require(url: str) -> None:
    if not exists(url):
        raise UsageError("store", "holds no run yet", "run the job, or correct store")


def _path(url: str) -> Path:
    """Return the file of the embedded store."""
    state_backend = backend(url)
    if not isinstance(state_backend, SqliteBackend):
        raise UsageError("store", "is no file that can be replaced", "use 'sqlite:PATH'")
    return Path(state_backend.path)


def _refuse_other(identity: RunIdentity, plan: Plan) -> None:
    if identity.plan_hash != plan.hash:
        raise PolicyError(
            "store",
            "holds the state of a job with another plan",
            "use the job the store was begun with",
        )
