"""A whole store copied into a new one: with other shards, of another kind, or for a new epoch.

Names of noise do not know shards, so the same steps on other shards give the same releases.

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

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Ids
from dpstream.accounting.errors import RunError
from dpstream.accounting.plan.timeline import Timeline
from dpstream.state.arrow import id_view
from dpstream.state.idtable import shard_of
from dpstream.state.retention_store import (
    ReshardProgress,
    RetainedWindows,
    Selection,
    UnitPiece,
    UnitProgress,
    take_keys,
)
from dpstream.state.store import INPUT, NEVER, Store

#: Told (windows and unit shards done, in all); both are public.
Progress = Callable[[int, int], None]
#: Notes that belong to the run, not to one copy of its store.
NOTES = ("token", "ledger", "windows", "passes", INPUT)
#: What a store knows of its sink: true of its own copies, but a backup may be held against
#: another folder, and all that is published is compared with it.
DELIVERED = "delivered"


class Abandon(NamedTuple):
    """What to give up because it cannot be replayed.

    Attributes:
        trigger_time: records up to it count as decided; windows that begin before it get no more
            steps.
        limit: C, the count that all units get.
    """

    trigger_time: int
    limit: int

    def windows(self, line: Timeline) -> int:
        """Return the first window that begins at or after the trigger time."""
        return -(-self.trigger_time // (line.slide // line.trigger_every))


def copy_store(
    source: Store,
    target: Store,
    line: Timeline,
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
        old, first = source.retained_windows, abandon.windows(line)
        epochs = (*old.epochs, (source.identity.epoch, first))
        target.retained_windows = RetainedWindows(old.dropped, first, epochs)
    with source.snapshot():
        committed: dict[int, list[int]] = {}
        for window, shard, trigger in source.progress():
            committed.setdefault(window, [0] * source.identity.shards)[shard] = trigger
        reshards = {} if abandon else _reshards(source, line, committed)
        target.reshards = reshards
        total = len(committed) + source.identity.shards
        tell = progress or (lambda done, of: None)
        with target.filling():
            for done, window in enumerate(sorted(committed), 1):
                _copy_steps(source, target, window, committed[window], reshards.get(window, []))
                if abandon is None:
                    _copy_keys(source, target, line, window, committed[window])
                tell(done, total)
            for shard in range(source.identity.shards):
                _copy_units(source, target, shard, abandon)
                tell(len(committed) + shard + 1, total)
            _copy_unit_progress(source, target, abandon)
            _copy_selections(source, target)


def _reshards(
    source: Store, line: Timeline, committed: dict[int, list[int]]
) -> dict[int, list[ReshardProgress]]:
    """Return reshards that still matter after the copy: of windows that are not complete."""
    before, out = source.reshards, {}
    for window, triggers in committed.items():
        low = min(triggers)
        if low == line.triggers:
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
        parts = []
        for shard, last in enumerate(committed):
            mine = trigger <= last
            rows = (source.committed_releases if mine else source.released_ahead)(
                window, shard, trigger
            )
            if rows is not None:
                parts.append(rows)
        if not parts:
            for shard in range(shards if trigger <= low else 0):
                target.put_step(window, shard, trigger, None)
            continue
        table = pa.Table.from_batches(parts).combine_chunks()
        batch = table.to_batches()[0] if table.num_rows else parts[0]
        for shard, rows in _split(batch, shards):
            if trigger <= low:
                target.put_step(window, shard, trigger, rows)
            elif rows.num_rows:
                target.put_released_ahead(window, shard, trigger, rows)


def _copy_keys(
    source: Store, target: Store, line: Timeline, window: int, committed: Sequence[int]
) -> None:
    shards = target.identity.shards
    for shard, trigger in enumerate(committed):
        if trigger == line.triggers:
            continue  # closed here: its keys are gone
        for piece in source.key_pieces(window, shard):
            if piece.done.any() and trigger > min(committed):
                raise RunError(
                    "store",
                    "a step was committed in part while other shards are behind",
                    "run the job for a while, or to its end, and try again",
                )
            ids = id_view(piece.keys.column("_id").combine_chunks())
            to = shard_of(ids, shards)
            for number in range(shards):
                rows = np.flatnonzero(to == number)
                if len(rows):
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
                (piece.until == NEVER) | (piece.until > abandon.trigger_time)
            )
            counts = np.full(len(counts), abandon.limit, np.int32)
        # At the limit no index is taken any more, whatever was.
        for number, rows in _by_shard(piece.ids[open_rows], shards):
            at = open_rows[rows]
            shard_piece = UnitPiece(piece.ids[at], counts[at], piece.until[at], piece.indices[at])
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
