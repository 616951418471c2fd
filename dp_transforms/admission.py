"""Which records of a unit count: the first C pairs in the order (stamp, partition, offset).

The decisions of BOUND themselves, on arrays; ``bounding`` has what they are made on, and commits
them.  With a bound per key the decision is ``state.keycounts``'s.
"""

import numpy as np

from dpstream.accounting.arrays import Bool, Int32, Int64
from dpstream.accounting.compiled import njit
from dpstream.accounting.plan.timeline import Timeline
from dpstream.state.keycounts import numbered


@njit(cache=True, nogil=True)
def _admit(
    order: Int64,
    unit: Int64,
    partition: Int32,
    offset: Int64,
    wanted: Int64,
    counts: Int32,
    limit: int,
    name: Int64,
    named: Bool,
    out: Int64,
    rank: Int32,
) -> None:  # pragma: no cover - compiled
    before = -1
    for k in range(order.size):
        row = order[k]
        slot = unit[row]
        rank[row] = counts[slot]
        repeats = name.size == 0 and before >= 0 and unit[before] == slot
        if repeats and offset[before] == offset[row] and partition[before] == partition[row]:
            out[row] = 0
            continue
        if name.size and named[name[row]]:
            out[row] = 0
            continue
        before = row
        take = min(wanted[row], np.int64(limit - counts[slot]))
        counts[slot] += take
        out[row] = take
        if name.size and take > 0:
            named[name[row]] = True


@njit(cache=True, nogil=True)
def _tied(stamp: Int64, order: Int64, at: Int64) -> int:  # pragma: no cover - compiled
    """Mark places in the order whose stamp is that of a neighbour; return how many there are."""
    count, last = 0, order.size - 1
    for k in range(order.size):
        here = stamp[order[k]]
        if (k > 0 and stamp[order[k - 1]] == here) or (k < last and stamp[order[k + 1]] == here):
            at[count] = k
            count += 1
    return count


def stamp_order(stamp: Int64, partition: Int32, offset: Int64, unit: Int64 | None = None) -> Int64:
    """Return the permutation that sorts by (stamp, partition, offset, unit)."""
    order = np.argsort(stamp, kind="stable")
    at = np.empty(len(order), np.int64)
    at = at[: _tied(stamp, order, at)].copy()
    rows = order[at]
    ties = (offset[rows], partition[rows], stamp[rows])
    order[at] = rows[np.lexsort(ties if unit is None else (unit[rows], *ties))]
    return order


def admit(
    unit: Int64,
    stamp: Int64,
    partition: Int32,
    offset: Int64,
    wanted: Int64,
    counts: Int32,
    limit: int,
    order: Int64 | None = None,
    name: Int64 | None = None,
) -> tuple[Int64, Int32]:
    """Return how many of each record's windows are admitted; ``counts`` is updated.

    Args:
        unit: (n,) slot of each record's unit.
        stamp, partition, offset: (n,) order of admission; equal positions of a unit are one
            record (of two units they are two: no unit can push out another's record).
        wanted: (n,) windows that are still open for the record.
        counts: admitted pairs of each unit slot so far.
        limit: C.
        order: ``stamp_order`` of the records, where the caller has it.
        name: (n,) numbers of the ids that name records, from 0 on: of the records with one id the
            first that can be admitted is, and no other.

    Returns:
        (n,) pairs admitted, 0 .. wanted (a record delivered twice is admitted once), and the
        (n,) rank of its first: pairs of the unit admitted before it.
    """
    if order is None:
        order = stamp_order(stamp, partition, offset, unit)
    out, rank = np.empty(len(order), np.int64), np.empty(len(order), np.int32)
    names = numbered(name)
    _admit(order, unit, partition, offset, wanted, counts, limit, *names, out, rank)
    return out, rank


def open_windows(
    line: Timeline, event_trigger_time: Int64, entry_trigger_time: Int64, least: int = 0
) -> tuple[Int64, Int64]:
    """(first open window, how many) of records of an event that enter at ``entry_trigger_time``.

    A window is open for a record when it covers the event and ``entry_trigger_time`` is not past
    its last trigger; those before ``least`` are abandoned.
    """
    stride = line.slide // line.trigger_every
    width = line.window // line.trigger_every
    most = np.iinfo(np.int64).max if line.end is None else line.windows - 1
    first, count = np.empty_like(event_trigger_time), np.empty_like(event_trigger_time)
    _open(
        event_trigger_time,
        entry_trigger_time,
        stride,
        width,
        line.triggers,
        least,
        most,
        first,
        count,
    )
    return first, count


@njit(cache=True, nogil=True)
def _open(
    event_trigger_time: Int64,
    entry_trigger_time: Int64,
    stride: int,
    width: int,
    triggers: int,
    least: int,
    most: int,
    first: Int64,
    count: Int64,
) -> None:  # pragma: no cover - compiled
    for i in range(event_trigger_time.size):
        covers = -((width - event_trigger_time[i]) // stride)
        unclosed = -((triggers - entry_trigger_time[i]) // stride)
        begin = max(least, covers, unclosed)
        first[i] = begin
        count[i] = max(0, min((event_trigger_time[i] - 1) // stride, most) - begin + 1)
