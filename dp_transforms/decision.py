"""Records of one unit shard, the decision on each, and the pairs that are admitted.

These are the decisions of BOUND themselves, on arrays: of a unit the first C pairs count, in the
order (stamp, partition, offset).  ``bounding`` has what they are made on, and commits them.  With a
bound per key the decision is ``state.keycounts``'s.
"""

import functools
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Bool, Ids, Int32, Int64, UInt64
from dpstream.accounting.libraries import njit
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.timeline import Timeline
from dpstream.dp_transforms import skipping
from dpstream.dp_transforms.batches import (
    admitted_schema,
    ids_of,
    key_fields,
    numpy_view,
    value_columns,
)
from dpstream.state.arrow import id_array, position_ids
from dpstream.state.idtable import IdTable
from dpstream.state.keycounts import numbered
from dpstream.state.numbers import values_of
from dpstream.state.store import PerKey

#: Rows -> the (n, 2) ids of their keys.
KeyIdsOf = Callable[[pa.RecordBatch], Ids]


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
    timeline: Timeline, event_trigger_time: Int64, entry_trigger_time: Int64, least: int = 0
) -> tuple[Int64, Int64]:
    """Return (first open window, count of them) of records that enter at ``entry_trigger_time``.

    A window is open for a record when it covers the event and ``entry_trigger_time`` is not past
    its last trigger; those before ``least`` are abandoned.
    """
    stride = timeline.stride
    width = timeline.width
    most = np.iinfo(np.int64).max if timeline.end is None else timeline.windows - 1
    first, count = np.empty_like(event_trigger_time), np.empty_like(event_trigger_time)
    _open(
        event_trigger_time,
        entry_trigger_time,
        stride,
        width,
        timeline.triggers,
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


class Batch:
    """Records of one unit shard and the decision on each; arrays by row.

    Attributes:
        records: the records themselves.
        stamp, partition, offset, event_trigger_time, ids: columns of the records.
        digest: of what they hold, where ids of records take the place of positions.
        unit: slots of their units.
        pairs, rank: admitted pairs and the rank of the first.
        trigger_time: trigger time at which it was or will be decided.
        seen: decided before.
        undelivered: arrived when no open trigger time was left.
        settled: whether the unit's decision can no longer change.
        per_key: with a bound per key, which windows are admitted, in place of the first ``pairs``.
        order: ``stamp_order`` of all rows, where all were decided now.
        least: the first window that was not abandoned.
    """

    def __init__(
        self, plan: Plan, records: pa.RecordBatch, key_ids: KeyIdsOf, least: int = 0
    ) -> None:
        rows, self.least, self.records = records.num_rows, least, records
        self._key_ids = key_ids
        self.stamp = numpy_view(records.column("stamp"))
        self.partition = numpy_view(records.column("partition"))
        self.offset = numpy_view(records.column("offset"))
        self.ids = ids_of(records.column("unit"))
        named = plan.record_id is not None
        self.digest = values_of(records.column("_digest")) if named else None
        stamp_trigger_time = plan.timeline.trigger_time_of(self.stamp)
        of_event = plan.stamp != "event_time"
        self.event_trigger_time = (
            event_trigger_times(plan, records) if of_event else stamp_trigger_time
        )
        # A stamp may lie before the start (by max_skew): it belongs to the first trigger time.
        self.trigger_time = np.maximum(1, stamp_trigger_time)
        # One zero that stands for all rows: what is decided at once takes the arrays' places.
        self.unit = self.pairs = np.broadcast_to(np.int64(0), rows)
        self.rank = np.broadcast_to(np.int32(0), rows)
        self.seen, self.undelivered = np.zeros(rows, np.bool_), np.zeros(rows, np.bool_)
        self.settled = np.zeros(rows, np.bool_)
        self.per_key: PerKey | None = None
        self.order: Int64 | None = None

    @functools.cached_property
    def key_ids(self) -> Ids:
        """(n, 2) ids of the keys, computed when they are first asked for."""
        return self._key_ids(self.records)

    def positions(self, rows: Int64 | slice = slice(None)) -> Ids:
        """Return (n, 2) ids of the rows' positions; copies of a record with an id share one."""
        return position_ids(self.partition[rows], self.offset[rows], self.unit[rows])

    def record_ids(self, rows: Int64 | slice = slice(None)) -> Ids:
        """Return (n, 2) ids of rows; copies with other contents have others."""
        where = self.partition[rows], self.offset[rows], self.unit[rows]
        return position_ids(*where, None if self.digest is None else self.digest[rows])

    def write(
        self,
        rows: Int64 | Bool,
        pairs: Int32 | Int64,
        rank: Int32 | None,
        per_key: PerKey | None = None,
    ) -> None:
        """Record the decisions on some of the rows."""
        if per_key is not None:
            if self.per_key is None:
                none = np.zeros(self.records.num_rows, np.uint64)
                self.per_key = PerKey(none, none.astype(np.int32), none.copy(), none.copy())
            mine = self.per_key
            mine.keys[rows], mine.first[rows] = per_key.keys, per_key.first
            mine.taken[rows], mine.fresh[rows] = per_key.taken, per_key.fresh
        if not self.pairs.flags.writeable:
            self.pairs, self.rank = self.pairs.copy(), self.rank.copy()
        self.pairs[rows] = pairs
        if rank is not None:
            self.rank[rows] = rank


def firsts(rows: Int64, batch: Batch, ids: Ids) -> Int64:
    """Return, of the rows with one id, the one with the least stamp, then digest, in row order.

    Which of them came first never decides: the order of delivery can follow the records of other
    units.
    """
    least = (batch.stamp[rows],)
    order = np.lexsort(least if batch.digest is None else (batch.digest[rows], *least))
    slots = IdTable().intern(ids[order])
    return rows[np.sort(order[np.unique(slots, return_index=True)[1]])]


def event_trigger_times(plan: Plan, records: pa.RecordBatch) -> Int64:
    """Return the global trigger index of each record's event time."""
    if plan.stamp == "event_time":
        return plan.timeline.trigger_time_of(numpy_view(records.column("stamp")))
    trigger_times: Int64 = numpy_view(records.column("_event_trigger_time"))
    return trigger_times


def expand(plan: Plan, records: pa.RecordBatch, rows: Int64, batch: Batch) -> pa.RecordBatch:
    """Return one row per admitted (record, window) pair, with its window and step, in row order.

    The step is the later of the event's trigger and the stamp's (or decision's) trigger,
    counted inside the window: a public function of the record alone.
    """
    timeline = plan.timeline
    stride = timeline.stride
    event_trigger_time, pairs = batch.event_trigger_time[rows], batch.pairs[rows]
    entry_trigger_time = np.maximum(event_trigger_time, batch.trigger_time[rows])
    rank, nth = batch.rank[rows], np.zeros(len(rows), np.int64)
    index = None
    if batch.per_key is not None:
        taken = batch.per_key.at(rows)
        repeated, nth, index = taken_pairs(taken.taken, taken.fresh, rank)
        rows, entry_trigger_time = rows[repeated], entry_trigger_time[repeated]
        window, rank = taken.first[repeated].astype(np.int64) + nth, index
        if plan.design.skips:  # every pair is the first of its key
            rank = np.zeros_like(index)
    else:
        window, _ = open_windows(timeline, event_trigger_time, entry_trigger_time, batch.least)
        if (pairs != 1).any():
            repeated = np.repeat(np.arange(len(rows)), pairs)
            nth = np.arange(len(repeated)) - np.repeat(np.cumsum(pairs) - pairs, pairs)
            rows, entry_trigger_time = rows[repeated], entry_trigger_time[repeated]
            window, rank = window[repeated] + nth, rank[repeated]
        if plan.design.skips:
            rank, index = skipping.laid_out(rank, nth)
        else:
            rank = rank + nth
    step_index = entry_trigger_time - window * stride
    own = [pa.array(window.astype(np.int32)), pa.array(step_index.astype(np.int32))]
    if plan.design.ranked:
        own.append(pa.array(rank.astype(np.int32)))
    if plan.design.skips:
        own.append(pa.array(index))
    names = ["unit", *(f.name for f in key_fields(plan)), *value_columns(plan)]
    taken_rows = records.select(names).take(pa.array(rows))
    arrays = [*own, id_array(batch.key_ids[rows]), *taken_rows.columns]
    return pa.RecordBatch.from_arrays(arrays, schema=admitted_schema(plan))


def taken_pairs(taken: UInt64, fresh: UInt64, rank: Int32) -> tuple[Int64, Int64, Int32]:
    """Return (row, its window's number, rank) of every admitted pair, in order of rows and windows.

    Args:
        taken, fresh, rank: (n,) as in ``store.PerKey``.

    Returns:
        The rank of a pair that is not the first of its (unit, window, key), or takes no index, is
        -1.
    """
    most = int(np.bitwise_or.reduce(taken, initial=np.uint64(0))).bit_length()
    if most <= 1:
        row = np.flatnonzero(taken)
        return row, np.zeros_like(row), np.where(fresh[row], rank[row], -1).astype(np.int32)
    bits = np.arange(most, dtype=np.uint64)
    row, nth = np.nonzero((taken[:, None] >> bits) & np.uint64(1))
    below = (np.uint64(1) << nth.astype(np.uint64)) - np.uint64(1)
    first = (fresh[row] >> nth.astype(np.uint64)) & np.uint64(1) == 1
    index = rank[row] + np.bitwise_count(fresh[row] & below)
    return row, nth, np.where(first, index, -1).astype(np.int32)
