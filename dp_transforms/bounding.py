"""BOUND: each unit's first C (record, window) pairs, in the order (stamp, partition, offset).

Sensitivity: over the whole stream (or privacy period) at most C pairs of a unit pass, whatever
the other units send, and whatever the order of delivery within a trigger time (mechanism.md rule
1).  Neighbouring streams therefore differ in at most C admitted pairs, all of one unit; every other
record keeps its admission, window and step, because all three are functions of the unit's own
records.  Decisions are committed before they are seen, so a replay repeats them.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numba import njit

from dpstream.accounting.arrays import Bool, Int32, Int64
from dpstream.accounting.errors import RunError
from dpstream.accounting.limits import STEP_ATTEMPTS
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.timeline import Timeline
from dpstream.dp_transforms import skipping
from dpstream.dp_transforms.batches import (
    admitted_schema,
    ids_of,
    key_fields,
    numbers,
    value_columns,
)
from dpstream.dp_transforms.published_keys import PublishedKeys
from dpstream.state.arrow import position_ids
from dpstream.state.idtable import IdTable
from dpstream.state.retention import period_trigger_time
from dpstream.state.store import Admitted, OvertakenError, Store, UnitShard


@njit(cache=True, nogil=True)
def _admit(
    order: Int64,
    unit: Int64,
    partition: Int32,
    offset: Int64,
    wanted: Int64,
    counts: Int32,
    limit: int,
    out: Int64,
    rank: Int32,
) -> None:  # pragma: no cover - compiled
    before = -1
    for k in range(order.size):
        row = order[k]
        slot = unit[row]
        rank[row] = counts[slot]
        repeats = before >= 0 and unit[before] == slot
        if repeats and offset[before] == offset[row] and partition[before] == partition[row]:
            out[row] = 0
            continue
        before = row
        take = min(wanted[row], np.int64(limit - counts[slot]))
        counts[slot] += take
        out[row] = take


@njit(cache=True, nogil=True)
def _tied(stamp: Int64, order: Int64, at: Int64) -> int:  # pragma: no cover - compiled
    """Places in the order whose stamp is that of a neighbour; returns how many there are."""
    found, last = 0, order.size - 1
    for k in range(order.size):
        here = stamp[order[k]]
        if (k > 0 and stamp[order[k - 1]] == here) or (k < last and stamp[order[k + 1]] == here):
            at[found] = k
            found += 1
    return found


def stamp_order(stamp: Int64, partition: Int32, offset: Int64, unit: Int64 | None = None) -> Int64:
    """Permutation that sorts by (stamp, partition, offset, unit)."""
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
) -> tuple[Int64, Int32]:
    """How many of each record's windows are admitted; ``counts`` is updated.

    Args:
        unit: (n,) slot of each record's unit.
        stamp, partition, offset: (n,) order of admission; equal positions of a unit are one
            record (of two units they are two: no unit can push out another's record).
        wanted: (n,) windows that are still open for the record.
        counts: admitted pairs of each unit slot so far.
        limit: C.
        order: ``stamp_order`` of the records, where the caller has it.

    Returns:
        (n,) pairs admitted, 0 .. wanted (a record delivered twice is admitted once), and the
        (n,) rank of its first: pairs of the unit admitted before it.
    """
    if order is None:
        order = stamp_order(stamp, partition, offset, unit)
    out, rank = np.empty(len(order), np.int64), np.empty(len(order), np.int32)
    _admit(order, unit, partition, offset, wanted, counts, limit, out, rank)
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


class Bounded(NamedTuple):
    """What BOUND makes of the records of a shard.

    Attributes:
        admitted: pairs for the key shards.
        counts: for the operator.
        waiting: records that must be asked for again at a later trigger time: their own trigger
            time, or the one they joined, is still to come.
    """

    admitted: pa.RecordBatch
    counts: dict[str, int]
    waiting: pa.RecordBatch


class Decided(NamedTuple):
    """``Bounded`` before the admitted pairs are laid out.

    Attributes:
        pieces: gives the admitted pairs in batches of about as many rows as are asked for.
        counts, waiting: as there.
    """

    pieces: Callable[[int], Iterator[pa.RecordBatch]]
    counts: dict[str, int]
    waiting: pa.RecordBatch


def bound(
    plan: Plan,
    store: Store,
    shard: int,
    records: pa.RecordBatch,
    upto: int,
    since: int = 0,
    published: PublishedKeys | None = None,
) -> Bounded:
    """``decide`` with all admitted pairs in one batch."""
    pieces, counts, waiting = decide(plan, store, shard, records, upto, since, published)
    admitted, *_ = pieces(max(1, counts["operator_pairs_admitted"]))
    return Bounded(admitted, counts, waiting)


def decide(
    plan: Plan,
    store: Store,
    shard: int,
    records: pa.RecordBatch,
    upto: int,
    since: int = 0,
    published: PublishedKeys | None = None,
) -> Decided:
    """Decide all records of stamps up to trigger time ``upto``, commit, and return what is
    admitted.

    Args:
        records: canonical records of one unit shard, in any order, possibly repeated.
        upto: global trigger time whose records are complete.
        since: trigger time through which the caller has emitted, as its runner keeps it with the
            held records: what was decided up to it is not returned again, however often a source
            delivers it, or a record would be counted twice in a step that is still open.
        published: what windows have published, where the plan skips it.

    Returns:
        Records decided before are answered from the committed decisions; one that was never seen
        although its trigger time was decided joins the next open trigger time (it waits if
        that lies beyond ``upto``: the store may be ahead of a runner that went back to a
        checkpoint), or is counted as undelivered when there is none.
    """
    with store.at_work("bound", shard):
        # The states of a shard that another process worked on last are old, or its positions
        # have expired meanwhile: the commit notices, and the decision is made on what is there.
        for _ in range(STEP_ATTEMPTS):
            try:
                return _decide(plan, store, shard, records, upto, since, published)
            except OvertakenError:
                store.forget_units(shard)
            except BaseException:
                # Counters raised but not committed must not stand when the work is repeated.
                store.forget_units(shard)
                raise
    raise RunError("state.store", "another worker is always faster", "let it run on")


class Batch:
    """Records of one unit shard and what is decided on each; arrays by row.

    Attributes:
        records: the records themselves; stamp, partition, offset, event_trigger_time, ids: of them.
        unit: slots of their units; pairs, rank: admitted pairs and the rank of the first.
        trigger_time: trigger at which it was or will be decided; known: decided before.
        undelivered: turned up when no open trigger time was left.
        settled: nothing can become of it any more.
        order: ``stamp_order`` of all rows, where all were decided now.
        least: the first window that was not abandoned.
    """

    def __init__(self, plan: Plan, records: pa.RecordBatch, least: int = 0) -> None:
        rows, self.least, self.records = records.num_rows, least, records
        self.stamp = numbers(records.column("stamp"))
        self.partition = numbers(records.column("partition"))
        self.offset = numbers(records.column("offset"))
        self.ids = ids_of(records.column("unit"))
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
        self.known, self.undelivered = np.zeros(rows, np.bool_), np.zeros(rows, np.bool_)
        self.settled = np.zeros(rows, np.bool_)
        self.order: Int64 | None = None

    def write(self, rows: Int64 | Bool, pairs: Int32 | Int64, rank: Int32 | None) -> None:
        """Note what was decided on some of the rows."""
        if not self.pairs.flags.writeable:
            self.pairs, self.rank = self.pairs.copy(), self.rank.copy()
        self.pairs[rows] = pairs
        if rank is not None:
            self.rank[rows] = rank


def _decide(
    plan: Plan,
    store: Store,
    shard: int,
    records: pa.RecordBatch,
    upto: int,
    since: int,
    published: PublishedKeys | None,
) -> Decided:
    """See ``decide``; changes the counters in memory before they are committed."""
    units = store.unit_shard(shard)
    batch = Batch(plan, records, store.retained_windows.abandoned)
    store.load_units(shard, units, batch.ids)
    late = rejected = 0
    # A record that an id names may come again with a later stamp, at any trigger time.
    again = plan.record_id is not None and units.decided > 0
    if again or units.ahead or (batch.trigger_time <= units.decided).any():
        _recall(plan, store, shard, batch)
    if upto > units.decided:
        late, rejected = _admit_new(plan, store, shard, batch, upto, published)
    # A decision cut short may have gone further than this one does.
    now = (batch.pairs > 0) & (batch.trigger_time > since) & (batch.trigger_time <= upto)
    if batch.order is not None:
        rows, batch.order = batch.order[now[batch.order]], None
    else:
        rows = _unrepeated(np.flatnonzero(now), batch)
        rows = rows[stamp_order(batch.stamp[rows], batch.partition[rows], batch.offset[rows])]
    pairs = int(batch.pairs[rows].sum())
    counts = {
        "operator_pairs_admitted": pairs,
        "operator_pairs_rejected": rejected,
        "operator_pairs_late": late,
        "operator_records_undelivered": int(batch.undelivered.sum()),
    }
    waits = (batch.trigger_time > upto) & ~batch.settled
    waiting = records.filter(pa.array(waits)) if waits.any() else records.slice(0, 0)

    def pieces(size: int) -> Iterator[pa.RecordBatch]:
        step = max(1, size * len(rows) // max(1, pairs))
        for begin in range(0, max(1, len(rows)), step):
            yield expand(plan, records, rows[begin : begin + step], batch)

    return Decided(pieces, counts, waiting)


def _enter(plan: Plan, store: Store, shard: int, batch: Batch) -> UnitShard:
    """Give every unit of the batch its slot, and say until when it can have records."""
    units = store.unit_shard(shard)
    batch.unit = units.intern(batch.ids)
    if plan.timeline.period is not None:
        units.until[batch.unit] = period_trigger_time(plan.timeline, batch.event_trigger_time)
    return units


def _recall(plan: Plan, store: Store, shard: int, batch: Batch) -> None:
    """Fill in committed decisions; what has none though its trigger time was decided is late."""
    units = _enter(plan, store, shard, batch)
    index, before = store.admitted_before(shard, units)
    at = index.find(position_ids(batch.partition, batch.offset, batch.unit))
    known = at >= 0
    # Positions up to this trigger time may be gone, or going: none of their windows is open any
    # more.
    known[known] = before.trigger_time[at[known]] > units.forgotten
    settled = ~known & (batch.trigger_time <= units.forgotten)
    batch.known = known | settled
    missed = ~batch.known & (batch.trigger_time <= units.decided)
    found = at[known]
    batch.trigger_time[known] = before.trigger_time[found]
    pairs: Int64 | Int32 = before.pairs[found]
    counts: Int64 | Int32 = units.counts[batch.unit]
    if plan.design.skips:
        pairs, counts = skipping.pairs_in(pairs), skipping.pairs_in(counts)
    batch.write(known, pairs, None if before.rank is None else before.rank[found])
    full = counts >= plan.privacy.contributions
    ended = plan.timeline.end is not None and units.decided >= plan.timeline.last_trigger_time
    batch.undelivered = missed & ~full & ended
    # The unit's C pairs are decided: there is nothing to wait for.
    batch.settled = settled | (missed & (full | ended))
    batch.trigger_time[missed] = units.decided + 1


def _admit_new(
    plan: Plan,
    store: Store,
    shard: int,
    batch: Batch,
    upto: int,
    published: PublishedKeys | None,
) -> tuple[int, int]:
    """Decide and commit what is undecided up to a trigger time; returns (late, rejected) pairs."""
    units = _enter(plan, store, shard, batch)
    fresh = ~batch.known & (batch.trigger_time <= upto) & ~batch.undelivered
    # Of all rows, as a run decides that is not begun again, no column is copied.
    whole = plan.record_id is None and bool(fresh.all())
    new: Int64 | slice = slice(None) if whole else np.flatnonzero(fresh)
    if plan.record_id is not None:  # copies of a record can have other stamps
        new = _firsts(np.flatnonzero(fresh), batch)
    event_trigger_time = batch.event_trigger_time[new]
    line, entry_trigger_time = (
        plan.timeline,
        np.maximum(event_trigger_time, batch.trigger_time[new]),
    )
    first, wanted = open_windows(line, event_trigger_time, entry_trigger_time, batch.least)
    late = 0
    if batch.least or (entry_trigger_time != event_trigger_time).any():
        late = int((open_windows(line, event_trigger_time, event_trigger_time)[1] - wanted).sum())
    unit, position = batch.unit[new], (batch.stamp[new], batch.partition[new], batch.offset[new])
    order = stamp_order(*position, unit)
    limit = plan.privacy.contributions
    if published is None:
        taken, rank = admit(unit, *position, wanted, units.counts, limit, order)
        words = taken
    else:
        rows = batch.records if isinstance(new, slice) else batch.records.take(pa.array(new))
        known = published.of_records(rows, first, wanted, units.decided, upto)
        words, rank = skipping.admit(unit, *position[1:], wanted, known, units.counts, limit, order)
        taken = skipping.pairs_in(words)
    some = np.flatnonzero(taken)
    if isinstance(new, slice):
        batch.pairs, batch.rank, batch.order = taken, rank, order
        kept = new if len(some) == len(taken) else some
    else:
        batch.write(new, taken, rank)
        kept = new[some]
    words = words if len(some) == len(words) else words[some]
    admitted = Admitted(
        batch.partition[kept],
        batch.offset[kept],
        batch.unit[kept].astype(np.int32),
        words.astype(np.int32),
        batch.trigger_time[kept].astype(np.int32),
        batch.rank[kept] if plan.design.ranked else None,
    )
    store.commit_units(shard, upto, units, admitted)
    return late, int((wanted - taken).sum())


def _unrepeated(rows: Int64, batch: Batch) -> Int64:
    """One row of each recalled position (new decisions already give pairs to one row only)."""
    return _firsts(rows, batch) if batch.known[rows].any() else rows


def _firsts(rows: Int64, batch: Batch) -> Int64:
    """Of each position the row with the least stamp, in the order of ``rows``.

    Copies with one stamp can hold different things.  What they hold decides then (event time,
    key, values), never which of them came first: the order of delivery can follow the records
    of other units.
    """
    order = np.argsort(batch.stamp[rows], kind="stable")
    at = rows[order]
    places = position_ids(batch.partition[at], batch.offset[at], batch.unit[at])
    slots = IdTable().intern(places)
    first = np.unique(slots, return_index=True)[1]
    stamp = batch.stamp[at]
    equal = np.flatnonzero(stamp == stamp[first][slots])
    if len(equal) > len(first):
        equal = equal[_by_content(batch.records, at[equal])]
        first = equal[np.unique(slots[equal], return_index=True)[1]]
    return rows[np.sort(order[first])]


def _by_content(records: pa.RecordBatch, rows: Int64) -> Int64:
    """Permutation that sorts rows by all that a record says beside its unit and position."""
    where = ("unit", "stamp", "partition", "offset")
    names = [name for name in records.schema.names if name not in where]
    said = records.select(names).take(pa.array(rows))
    order: Int64 = pc.sort_indices(said, [(name, "ascending") for name in names]).to_numpy()
    return order.astype(np.int64)


def event_trigger_times(plan: Plan, records: pa.RecordBatch) -> Int64:
    """Global trigger index of each record's event time."""
    if plan.stamp == "event_time":
        return plan.timeline.trigger_time_of(numbers(records.column("stamp")))
    trigger_times: Int64 = numbers(records.column("_event_trigger_time"))
    return trigger_times


def expand(plan: Plan, records: pa.RecordBatch, rows: Int64, batch: Batch) -> pa.RecordBatch:
    """One row per admitted (record, window) pair, with its window and step, in order of ``rows``.

    The step is the later of the event's trigger and the stamp's (or decision's) trigger,
    counted inside the window: a public function of the record alone.
    """
    line = plan.timeline
    stride = line.slide // line.trigger_every
    event_trigger_time, pairs = batch.event_trigger_time[rows], batch.pairs[rows]
    entry_trigger_time = np.maximum(event_trigger_time, batch.trigger_time[rows])
    window, _ = open_windows(line, event_trigger_time, entry_trigger_time, batch.least)
    rank, nth = batch.rank[rows], np.zeros(len(rows), np.int64)
    if (pairs != 1).any():
        repeated = np.repeat(np.arange(len(rows)), pairs)
        nth = np.arange(len(repeated)) - np.repeat(np.cumsum(pairs) - pairs, pairs)
        rows, entry_trigger_time = rows[repeated], entry_trigger_time[repeated]
        window, rank = window[repeated] + nth, rank[repeated]
    step_index = entry_trigger_time - window * stride
    own = [pa.array(window.astype(np.int32)), pa.array(step_index.astype(np.int32))]
    if plan.design.skips:
        own += map(pa.array, skipping.laid_out(rank, nth))
    elif plan.design.ranked:
        own.append(pa.array((rank + nth).astype(np.int32)))
    take = pa.array(rows)
    names = ["unit", *(f.name for f in key_fields(plan)), *value_columns(plan)]
    arrays = [records.column(name).take(take) for name in names]
    return pa.RecordBatch.from_arrays([*own, *arrays], schema=admitted_schema(plan))
