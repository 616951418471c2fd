"""The parts of a store that may be deleted, and when: a function of the plan and of progress.

**Positions.**  A record decided at trigger time c has a stamp before it, and an event time at most
``max_skew`` ahead of its stamp, so every window it can belong to starts before trigger time c + s,
with s the skew in trigger intervals, rounded up.  Let windows 0 .. k-1 be complete in all key
shards.  Then positions up to ``settled_trigger_time`` = base(k) - s may go: their records' windows
all are among 0 .. k-1.  Should such a record be delivered again, its trigger time is at most
``forgotten``, and BOUND answers "no pairs" at once.  That is right: it cannot be admitted again,
since its windows are closed (and were so by the plan's time alone: the unit shards had decided
beyond their last trigger times before any key shard could commit its last step); and it is not
missed, since every step that could need its pairs is committed and is read back.  One that was
never seen before could not have been admitted either.  The count of its unit stays: rule 1 of
mechanism.md.

**Counters.**  With privacy periods a record of period p has a stamp before the period's end plus
the lateness, i.e. a trigger time of at most ``period_trigger_time``.  Once ``forgotten`` has
reached it no record of the period is decided any more, so its units' counters are never asked for
again.

**Selections.**  Window V asks for what was selected at most ``remembered_for`` trigger times before
its start, if that is a fixed time, and windows that are complete ask no more.

**Windows.**  Key states of a closed window go with its last step.  Its releases stay: they are
the release.  They may be dropped when the sink has them; from then on a run skips the window, and
nothing at all is kept of it.
"""

from typing import NamedTuple

import msgspec
import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import InvariantError
from dpstream.accounting.plan.timeline import Timeline
from dpstream.state.store import NEVER, Store

#: Note of a store: windows before it are complete in all key shards.
_COMPLETE = "complete"
#: Windows between two such notes, each of which is a commit.
_NOTED = 64
#: Releases are dropped when a share of those that are to be kept has grown too old.
_SHARE = 16


def period_trigger_time(timeline: Timeline, event_trigger_time: Int64) -> Int64:
    """Return the last trigger time at which a record of these events' periods can be stamped."""
    return np.minimum(timeline.period_trigger_time(event_trigger_time), NEVER)


class Reached(NamedTuple):
    """The progress of the key shards of a store.

    Attributes:
        complete: windows before it take no more steps in any key shard.
        open: window, from ``complete`` on -> last trigger that all shards have committed.
    """

    complete: int
    open: dict[int, int]

    def trigger(self, timeline: Timeline, window: int) -> int:
        """Return the last trigger of a window that all shards have committed.

        The number of an abandoned window has no meaning.
        """
        return timeline.triggers if window < self.complete else self.open.get(window, 0)


def reached(store: Store, timeline: Timeline, remember: bool = False) -> Reached:
    """Return the progress of the key shards; reads little more than what is open.

    That a window is complete never changes, so the store keeps a note of how many were found to
    be.

    Args:
        remember: write the note, if many have become complete since.
    """
    noted = int(store.metadata(_COMPLETE) or 0)
    window = max(noted, store.retained_windows.first)
    completed = store.completed(store.identity.shards, window)
    while completed.get(window, 0) == timeline.triggers:
        del completed[window]
        window += 1
    if remember and window >= noted + _NOTED:
        store.swap_metadata(_COMPLETE, str(noted) if noted else None, str(window))
    return Reached(window, completed)


def settled_trigger_time(timeline: Timeline, windows: int) -> int:
    """Return the last trigger time whose records all belong to the first ``windows`` windows."""
    if timeline.end is not None and windows >= timeline.windows:
        return timeline.last_trigger_time
    return max(0, timeline.base(windows) - timeline.skew_trigger_times)


def dropped_before(timeline: Timeline, trigger_time: Int64) -> Int64:
    """Return the last trigger time whose positions may be deleted when a trigger time is decided.

    Positions go with windows that are complete, and a window is complete only after its last
    trigger time was decided.  So this bounds ``forgotten`` from above, and is a function of the
    plan alone, whenever a store really drops what it may.
    """
    stride = timeline.stride
    windows = np.maximum(0, (trigger_time - 1 - timeline.triggers) // stride + 1)
    return np.asarray(np.maximum(0, windows * stride - timeline.skew_trigger_times), np.int64)


def expire(
    store: Store, timeline: Timeline, least_settled: int = 1, remembered_for: int | None = None
) -> int:
    """Drop positions, counters of closed periods, and selections that are no longer remembered, as
    far as nothing can ask for them any more.

    Args:
        least_settled: leave a shard alone unless this many trigger times have become settled since
            the last time, so that the work of rewriting it is shared by many trigger times.
        remembered_for: trigger times that a selection is remembered for; ``None``: for ever, or
            none is.

    Returns:
        Shards that gave something up.
    """
    windows = reached(store, timeline, remember=True).complete
    trigger_time, changed = settled_trigger_time(timeline, windows), 0
    if trigger_time == 0:
        return 0
    last = timeline.base(windows - 1) + timeline.triggers
    for shard in range(store.identity.shards):
        progress = store.unit_progress(shard)
        # Never before the shard itself is past the last trigger of these windows.
        behind = progress.decided < last and windows > store.retained_windows.first
        if trigger_time - progress.forgotten >= least_settled and not behind:
            with store.at_work("bound", shard):  # not while a decision uses the counters
                store.forget_positions(shard, trigger_time)
            changed += 1
    if remembered_for is not None and changed:
        # The first window that may still begin, or be asked for, looks back that far.
        store.forget_selections(timeline.base(windows) - remembered_for)
    return changed


def drop_releases(store: Store, timeline: Timeline, before: int) -> None:
    """Drop the releases of the windows before ``before``, all complete and all in the sink.

    The note comes first: a run that begins meanwhile skips the windows.
    """
    retained = store.retained_windows
    if not before <= reached(store, timeline).complete:
        raise InvariantError("only complete windows give up their releases")
    if before > retained.dropped:
        store.retained_windows = msgspec.structs.replace(retained, dropped=before)
    store.drop_releases(before)


def drop_delivered(store: Store, timeline: Timeline, delivered: int, keep: int) -> int:
    """Drop releases that have been in the sink for long enough; how many windows gave theirs up.

    A few windows at a time, so that the work of it is shared by many trigger times.

    Args:
        delivered: trigger time through which every release has reached the sink.
        keep: how long (micros, of the stream's time) the releases of a window that has ended,
            its lateness included, are kept.
    """
    ended = timeline.ended(timeline.instant_of(delivered) - keep)
    dropped = store.retained_windows.dropped
    if ended - dropped < max(1, keep // timeline.slide // _SHARE):
        return 0
    before = min(ended, reached(store, timeline).complete)
    if before <= dropped:
        return 0
    drop_releases(store, timeline, before)
    return before - dropped
