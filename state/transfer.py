"""A job's store by URL: backed up, restored and resharded as a whole.

A backup is always a file of the embedded store, whatever store it was made of, so that it can be
inspected and restored to another kind.  The embedded store is replaced by renaming a complete file;
the old one is kept beside it.  A database gets a new generation of its rows and is switched to it;
the old one is kept until the store is expired.

All of these copy a whole store into a new one (``copy_store``): with other shards, of another kind,
or for a new epoch.  Names of noise do not know shards, so the same steps on other shards give the
same releases.

**Shards that were ahead.**  Where the shards of a window had come to different triggers, the new
shards stand at the least of them.  A key of a shard that was ahead has taken its steps up to
that shard's trigger; ``ReshardProgress`` keeps these, and what the outbox held of them is
``released_ahead``.  Step t of a new shard then leaves out the keys that have taken it and adds what
was released ahead: together exactly what all old shards would have committed.  For units nothing
is needed: a decision that is made again finds the positions that were admitted, and rejects what it
rejected (a count never falls), so the least ``decided`` of all is right, and ``reach`` tells that
some are beyond.

**Abandoning** keeps nothing but the releases and the units, whose counts stand at the limit.
"""

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Ids
from dpstream.accounting.errors import PolicyError, RunError, UsageError, instance
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.timeline import Timeline
from dpstream.state import durable
from dpstream.state.arrow import id_view, merged
from dpstream.state.idtable import shard_of
from dpstream.state.open import (
    Backend,
    SpannerBackend,
    SqliteBackend,
    backend,
    close_all,
    design_of_run,
    exists,
    key_schema,
    refuse_other_plan,
)
from dpstream.state.retention_store import (
    ReshardProgress,
    RetainedWindows,
    Selection,
    UnitPiece,
    UnitProgress,
    take_keys,
)
from dpstream.state.sqlite.file import create_store, exclusive, read_identity
from dpstream.state.sqlite.store import (
    SqliteStore,
    backup_file,
    check_file,
    copy_backup,
    drafted,
    publish,
    refuse_existing,
    replace_file,
    seal_backup,
)
from dpstream.state.store import FRESH, INPUT, NEVER, RunIdentity, Store

#: Told (windows and unit shards done, in all); both are public.
Progress = Callable[[int, int], None]
#: Notes that belong to the run, not to one copy of its store.
NOTES = ("token", "ledger", "windows", "passes", INPUT, FRESH)
#: What a store knows of its sink: true of its own copies, but a backup may be held against
#: another folder, and all that is published is compared with it.
DELIVERED = "delivered"
#: Told the backup's identity when all is ready; refuses by raising, and may charge.
Confirm = Callable[[RunIdentity], None]


class Abandon(NamedTuple):
    """The records and windows that are given up because they cannot be replayed.

    Attributes:
        trigger_time: records up to it count as decided; windows that begin before it get no more
            steps.
        limit: C, the count that all units get.
    """

    trigger_time: int
    limit: int

    def windows(self, timeline: Timeline) -> int:
        """Return the first window that begins at or after the trigger time."""
        return -(-self.trigger_time // timeline.stride)


def copy_store(
    source: Store,
    target: Store,
    timeline: Timeline,
    progress: Progress | None = None,
    abandon: Abandon | None = None,
) -> None:
    """Fill a store that was just created with everything ``source`` holds.

    The target's own identity defines its number of shards and its epoch.

    Raises:
        RunError: a database failed; or shards of the source are apart and one of them has
            committed a step in part only.
    """
    for name in NOTES:
        target.set_metadata(name, source.metadata(name))
    if abandon is not None:
        old, first = source.retained_windows, abandon.windows(timeline)
        epochs = (*old.epochs, (source.identity.epoch, first))
        target.retained_windows = RetainedWindows(old.dropped, first, epochs)
    with source.snapshot():
        committed: dict[int, list[int]] = {}
        for window, shard, trigger in source.progress():
            committed.setdefault(window, [0] * source.identity.shards)[shard] = trigger
        reshards = {} if abandon else _reshards(source, timeline, committed)
        target.reshards = reshards
        total = len(committed) + source.identity.shards
        tell = progress or (lambda done, total: None)
        with target.filling():
            for done, window in enumerate(sorted(committed), 1):
                _copy_steps(source, target, window, committed[window], reshards.get(window, []))
                if abandon is None:
                    _copy_keys(source, target, timeline, window, committed[window])
                tell(done, total)
            for shard in range(source.identity.shards):
                _copy_units(source, target, shard, abandon)
                tell(len(committed) + shard + 1, total)
            _copy_unit_progress(source, target, abandon)
            _copy_selections(source, target)


def _reshards(
    source: Store, timeline: Timeline, committed: dict[int, list[int]]
) -> dict[int, list[ReshardProgress]]:
    """Return reshards that still matter after the copy: of windows that are not complete."""
    before, out = source.reshards, {}
    for window, triggers in committed.items():
        low = min(triggers)
        if low == timeline.triggers:
            continue
        reshards = [reshard for reshard in before.get(window, []) if max(reshard.progress) > low]
        if max(triggers) > low:
            reshards.append(ReshardProgress(tuple(triggers)))
        if reshards:
            out[window] = reshards
    return out


def _split(rows: pa.RecordBatch, shards: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    shard = shard_of(id_view(rows.column("_id")), shards)
    for number in range(shards):
        yield number, rows.take(pa.array(np.flatnonzero(shard == number)))


def _copy_steps(
    source: Store,
    target: Store,
    window: int,
    committed: Sequence[int],
    reshards: Sequence[ReshardProgress],
) -> None:
    low, shards = min(committed), target.identity.shards
    # A step that was committed in part has left its releases one beyond its shard's last.
    most = max(max(committed) + 1, *(max(reshard.progress) for reshard in reshards), 0)
    for trigger in range(1, most + 1):
        read = [
            (source.committed_releases if trigger <= last else source.released_ahead)(
                window, shard, trigger
            )
            for shard, last in enumerate(committed)
        ]
        parts = [rows for rows in read if rows is not None]
        if not parts:
            for shard in range(shards if trigger <= low else 0):
                target.put_step(window, shard, trigger, None)
            continue
        for shard, rows in _split(merged(parts), shards):
            if trigger <= low:
                target.put_step(window, shard, trigger, rows)
            elif rows.num_rows:
                target.put_released_ahead(window, shard, trigger, rows)


def _copy_keys(
    source: Store, target: Store, timeline: Timeline, window: int, committed: Sequence[int]
) -> None:
    shards = target.identity.shards
    for shard, trigger in enumerate(committed):
        if trigger == timeline.triggers:
            continue  # closed here: its keys are gone
        for piece in source.key_pieces(window, shard):
            if piece.done.any() and trigger > min(committed):
                raise RunError(
                    "store",
                    "a step was committed in part while other shards are behind",
                    "run the job for a while, or to its end, and try again",
                )
            ids = id_view(piece.keys.column("_id").combine_chunks())
            for number, rows in _by_shard(ids, shards):
                target.put_keys(window, number, take_keys(piece, rows))


def _copy_selections(source: Store, target: Store) -> None:
    """Copy what tests selected: published keys, which an abandoned run remembers too."""
    every = [s for shard in range(source.identity.shards) for s in source.selections(shard, -1)]
    for trigger_time, window, keys in sorted(every, key=lambda s: s[:2]):
        for shard, rows in _split(keys, target.identity.shards):
            if rows.num_rows:
                target.put_selection(shard, Selection(trigger_time, window, rows))


def _copy_units(source: Store, target: Store, shard: int, abandon: Abandon | None) -> None:
    shards = target.identity.shards
    for piece in source.unit_pieces(shard):
        open_rows = np.arange(len(piece.ids))
        counts = piece.counts
        if abandon is not None:
            # Units of closed periods are not asked for any more, those of open ones are spent.
            open_rows = np.flatnonzero(
                (piece.period_end == NEVER) | (piece.period_end > abandon.trigger_time)
            )
            counts = np.full(len(counts), abandon.limit, np.int32)
        # At the limit no index is taken any more, whatever was.
        for number, rows in _by_shard(piece.ids[open_rows], shards):
            at = open_rows[rows]
            shard_piece = UnitPiece(
                piece.ids[at], counts[at], piece.period_end[at], piece.indices[at]
            )
            target.put_units(number, shard_piece)
    if abandon is not None:
        return
    for positions in source.position_pieces(shard):
        for number, rows in _by_shard(positions.ids, shards):
            target.put_positions(number, positions.at(rows))


def _by_shard(ids: Ids, shards: int) -> Iterator[tuple[int, "np.typing.NDArray[np.int64]"]]:
    to = shard_of(ids, shards)
    for number in range(shards):
        rows = np.flatnonzero(to == number)
        if len(rows):
            yield number, rows


def _copy_unit_progress(source: Store, target: Store, abandon: Abandon | None) -> None:
    """Copy the progress of units.

    ``forgotten`` is a public trigger time that is right for all shards: the largest of any shard.
    """
    if abandon is not None:
        new = UnitProgress(abandon.trigger_time, abandon.trigger_time, abandon.trigger_time)
    else:
        every = [source.unit_progress(shard) for shard in range(source.identity.shards)]
        decided = min(p.decided for p in every)
        forgotten = min(decided, max(p.forgotten for p in every))
        new = UnitProgress(decided, forgotten, max(p.reach for p in every))
    for shard in range(target.identity.shards):
        target.put_unit_progress(shard, new)


def backup(url: str, plan: Plan, out: Path, progress: Progress | None = None) -> RunIdentity:
    """Write all of a store to one file, as of one instant, also while a run is under way.

    Raises:
        UsageError: there is no store, or the file exists.
        PolicyError: another plan's store.
        RunError: the file cannot be written; it does not exist then.
    """
    state_backend = _existing_backend(url)
    with contextlib.closing(state_backend.open(plan)) as source:
        refuse_other_plan(source.identity, plan)
        if isinstance(state_backend, SqliteBackend):
            return backup_file(state_backend.path, out, progress)
        refuse_existing(out)
        with drafted(out) as draft:
            _draft(source, draft, source.identity, plan, progress)
            seal_backup(draft)
            publish(draft, out)
        return source.identity


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
    with _beside(state_backend) as path, _opened(file, path, plan) as source:
        old = source.identity
        new = old if change is None else change(old)
        give_up = None if abandon is None else abandon(source)
        confirmed = functools.partial(confirm or (lambda _: None), old)
        if isinstance(state_backend, SpannerBackend):  # as a new generation
            with state_backend.successor(plan, new, confirmed) as target:
                target.begin_restoring(anew=give_up is not None)
                copy_store(source, target, plan.timeline, progress, give_up)
            return new, None
        with drafted(path) as draft:
            _draft(source, draft, new, plan, progress, give_up, restoring=True)
            with exclusive(path, damaged=True) if path.exists() else contextlib.nullcontext():
                confirmed()
                if path.exists():
                    return new, replace_file(path, draft)
            publish(draft, path)
    return new, None


@contextlib.contextmanager
def _beside(state_backend: Backend) -> Iterator[Path]:
    """Yield the path beside which a backup is copied: the store's, or one in a scratch folder.

    Scratch folders of killed commands are emptied first.
    """
    if isinstance(state_backend, SqliteBackend):
        yield Path(state_backend.path)
        return
    prefix = "dpstream-restore-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        durable.sweep(left)
        with contextlib.suppress(OSError):  # in use, or another user's
            left.rmdir()
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        yield Path(folder) / "state"


@contextlib.contextmanager
def _opened(file: Path, beside: Path, plan: Plan) -> Iterator[SqliteStore]:
    """Yield a checked copy of a backup, open; the backup itself is only read."""
    if not file.is_file():
        raise UsageError("backup", "is no file", "give one that `dpstream state backup` wrote")
    with drafted(beside.with_name(f"{beside.name}.backup")) as copy:
        try:
            copy_backup(file, copy)
            identity = check_file(copy)
        except PolicyError:
            raise PolicyError("backup", "is damaged or no backup", "use another backup") from None
        if identity.plan_hash != plan.hash:
            raise PolicyError(
                "backup",
                "holds the state of a job with another plan",
                "use the job it was begun with",
            )
        store = SqliteStore(copy, key_schema(plan), design_of_run(plan, identity).sums)
        with contextlib.closing(store):
            yield store


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
    with contextlib.closing(target):
        if restoring:
            target.begin_restoring(anew=abandon is not None)
        copy_store(source, target, plan.timeline, progress, abandon)
        if not restoring:
            target.set_metadata(DELIVERED, source.metadata(DELIVERED))
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
    state_backend = _existing_backend(url)
    if isinstance(state_backend, SpannerBackend):
        there = state_backend.open(plan)
        new = _resharded(there.identity, plan, shards)
        with state_backend.successor(plan, new, lambda: None) as target:
            # A run that was not stopped publishes on: the next one has to catch up with it.
            target.begin_restoring()
            copy_store(there, target, plan.timeline, progress)
            target.set_metadata(DELIVERED, there.metadata(DELIVERED))
        return None
    path = Path(instance(state_backend, SqliteBackend).path)
    with exclusive(path) as db, drafted(path) as draft:
        identity = read_identity(db)
        sums = design_of_run(plan, identity).sums
        source = SqliteStore(path, key_schema(plan), sums, db)
        _draft(source, draft, _resharded(identity, plan, shards), plan, progress)
        return replace_file(path, draft)


def _resharded(identity: RunIdentity, plan: Plan, shards: int) -> RunIdentity:
    """Return the identity with another number of shards."""
    refuse_other_plan(identity, plan)
    if identity.shards == shards:
        raise UsageError(
            "shards",
            "is the store's number already",
            "`dpstream state info JOB` shows it; there is nothing to do, or choose another number",
        )
    return msgspec.structs.replace(identity, shards=shards)


def _existing_backend(url: str) -> Backend:
    """Return the backend of a store that is there, which nobody in this process has open."""
    if not exists(url):
        raise UsageError("store", "holds no run yet", "run the job, or correct store")
    close_all()
    return backend(url)
