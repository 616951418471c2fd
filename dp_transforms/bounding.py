"""BOUND: each unit's first C (record, window) pairs, in the order (stamp, partition, offset).

Sensitivity: over the whole stream (or privacy period) at most C pairs of a unit pass, whatever
the other units send, and whatever the order of delivery within a cut (mechanism.md rule 1).
Neighbouring streams therefore differ in at most C admitted pairs, all of one unit; every other
record keeps its admission, window and leaf, because all three are functions of the unit's own
records.  Decisions are committed before they are seen, so a replay repeats them.
"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numba import njit

from accounting.plan import Plan
from accounting.timeline import Timeline
from dp_transforms.batches import admitted_schema, ids_of, key_fields, numbers, value_columns
from state.log import position_ids
from state.store import Admitted, Store

Bool = npt.NDArray[np.bool_]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@njit(cache=True, nogil=True)
def _admit(
    order: Int64, unit: Int64, wanted: Int64, repeat: Bool, counts: Int32, limit: int, out: Int64
) -> None:  # pragma: no cover - compiled
    for k in range(order.size):
        row = order[k]
        if repeat[k]:
            out[row] = 0
            continue
        slot = unit[row]
        take = min(wanted[row], np.int64(limit - counts[slot]))
        counts[slot] += take
        out[row] = take


def stamp_order(stamp: Int64, partition: Int32, offset: Int64, unit: Int64 | None = None) -> Int64:
    """Permutation that sorts by (stamp, partition, offset, unit)."""
    order = np.argsort(stamp, kind="stable")
    sorted_stamp = stamp[order]
    tied = np.zeros(len(order), np.bool_)
    if len(order):
        equal = sorted_stamp[1:] == sorted_stamp[:-1]
        tied[1:] |= equal
        tied[:-1] |= equal
    at = np.flatnonzero(tied)
    rows = order[at]
    order[at] = rows[np.lexsort((offset[rows], partition[rows], stamp[rows]))]
    return order


def admit(
    unit: Int64,
    stamp: Int64,
    partition: Int32,
    offset: Int64,
    wanted: Int64,
    counts: Int32,
    limit: int,
) -> Int64:
    """How many of each record's windows are admitted; ``counts`` is updated.

    Args:
        unit: (n,) slot of each record's unit.
        stamp, partition, offset: (n,) order of admission; equal positions of a unit are one
            record (of two units they are two: no unit can push out another's record).
        wanted: (n,) windows that are still open for the record.
        counts: admitted pairs of each unit slot so far.
        limit: C.

    Returns:
        (n,) pairs admitted, 0 .. wanted; a record delivered twice is admitted once.
    """
    order = stamp_order(stamp, partition, offset)
    repeat = np.zeros(len(order), np.bool_)
    where, at, whose = partition[order], offset[order], unit[order]
    repeat[1:] = (where[1:] == where[:-1]) & (at[1:] == at[:-1]) & (whose[1:] == whose[:-1])
    out = np.empty(len(order), np.int64)
    _admit(order, unit, wanted, repeat, counts, limit, out)
    return out


def open_windows(line: Timeline, event_cut: Int64, leaf_cut: Int64) -> tuple[Int64, Int64]:
    """(first open window, how many) of records of an event cut that enter at ``leaf_cut``.

    A window is open for a record when it covers the event and ``leaf_cut`` is not past its
    last trigger.
    """
    stride = line.slide // line.trigger_every
    width = line.window // line.trigger_every
    most = np.iinfo(np.int64).max if line.end is None else line.windows - 1
    first, count = np.empty_like(event_cut), np.empty_like(event_cut)
    _open(event_cut, leaf_cut, stride, width, line.triggers, most, first, count)
    return first, count


@njit(cache=True, nogil=True)
def _open(
    event_cut: Int64,
    leaf_cut: Int64,
    stride: int,
    width: int,
    triggers: int,
    most: int,
    first: Int64,
    count: Int64,
) -> None:  # pragma: no cover - compiled
    for i in range(event_cut.size):
        covers = -((width - event_cut[i]) // stride)
        unclosed = -((triggers - leaf_cut[i]) // stride)
        begin = max(0, covers, unclosed)
        first[i] = begin
        count[i] = max(0, min((event_cut[i] - 1) // stride, most) - begin + 1)


def bound(
    plan: Plan, store: Store, shard: int, records: pa.RecordBatch, upto: int
) -> tuple[pa.RecordBatch, dict[str, int]]:
    """Decide all records of stamp cuts up to ``upto``, commit, and return what is admitted.

    Args:
        records: canonical records of one unit shard, in any order, possibly repeated.
        upto: global cut whose records are complete.

    Returns:
        (admitted pairs, counts for the operator).  Records decided before are answered from
        the committed decisions; one that was never seen although its cut was decided joins the
        next open cut, or is counted as undelivered when there is none.
    """
    try:
        return _decide(plan, store, shard, records, upto)
    except BaseException:
        # Counters raised but not committed must not stand when the work is repeated.
        store.forget_units(shard)
        raise


def _decide(
    plan: Plan, store: Store, shard: int, records: pa.RecordBatch, upto: int
) -> tuple[pa.RecordBatch, dict[str, int]]:
    """See ``bound``; changes the counters in memory before they are committed."""
    line = plan.timeline
    units = store.unit_shard(shard)
    # A stamp may lie before the start (by max_skew): it belongs to the first cut.
    stamp_cut = np.maximum(1, line.cut_of(numbers(records.column("stamp"))))
    event_cut = event_cuts(plan, records)
    partition, offset = numbers(records.column("partition")), numbers(records.column("offset"))
    pairs = np.zeros(records.num_rows, np.int64)
    decision = stamp_cut.copy()
    known = np.zeros(records.num_rows, np.bool_)
    undelivered = np.zeros(records.num_rows, np.bool_)
    everyone = np.zeros(records.num_rows, np.int64)
    if (stamp_cut <= units.decided).any():
        everyone = units.intern(ids_of(records.column("unit")))
        known = _recall(store, shard, partition, offset, everyone, pairs, decision)
        missed = ~known & (stamp_cut <= units.decided)
        full = units.counts[everyone] >= plan.privacy.contributions
        undelivered = missed & ~full & (upto <= units.decided)
        decision[missed] = units.decided + 1
    undecided = np.flatnonzero(~known & (decision <= upto) & ~undelivered)
    rejected = late = 0
    if upto > units.decided:
        slots = units.intern(ids_of(records.column("unit")))[undecided]
        leaf_cut = np.maximum(event_cut, decision)[undecided]
        _, wanted = open_windows(line, event_cut[undecided], leaf_cut)
        _, possible = open_windows(line, event_cut[undecided], event_cut[undecided])
        late = int((possible - wanted).sum())
        taken = admit(
            slots,
            numbers(records.column("stamp"))[undecided],
            partition[undecided],
            offset[undecided],
            wanted,
            units.counts,
            plan.privacy.contributions,
        )
        pairs[undecided] = taken
        rejected = int((wanted - taken).sum())
        kept = undecided[taken > 0]
        decided = Admitted(
            partition[kept],
            offset[kept],
            slots[taken > 0].astype(np.int32),
            pairs[kept].astype(np.int32),
            decision[kept].astype(np.int32),
        )
        store.commit_units(shard, upto, units, decided)
    rows = _unrepeated(np.flatnonzero(pairs > 0), partition, offset, everyone, known)
    rows = rows[stamp_order(numbers(records.column("stamp"))[rows], partition[rows], offset[rows])]
    leaf_cut = np.maximum(event_cut, decision)[rows]
    out = expand(plan, records, rows, pairs[rows], event_cut[rows], leaf_cut)
    return out, {
        "operator_pairs_admitted": out.num_rows,
        "operator_pairs_rejected": rejected,
        "operator_pairs_late": late,
        "operator_records_undelivered": int(undelivered.sum()),
    }


def _recall(
    store: Store,
    shard: int,
    partition: Int32,
    offset: Int64,
    unit: Int64,
    pairs: Int64,
    decision: Int64,
) -> Bool:
    """Fill in committed decisions; True for the records that have one."""
    index, before = store.admitted_before(shard)
    at = index.find(position_ids(partition, offset, unit))
    known = at >= 0
    pairs[known] = before.pairs[at[known]]
    decision[known] = np.maximum(decision[known], before.cut[at[known]])
    return known


def _unrepeated(rows: Int64, partition: Int32, offset: Int64, unit: Int64, known: Bool) -> Int64:
    """One row of each recalled position (new decisions already give pairs to one row only)."""
    if not known[rows].any():
        return rows
    places = np.stack([partition[rows].astype(np.int64), offset[rows], unit[rows]])
    _, first = np.unique(places, axis=1, return_index=True)
    return rows[np.sort(first)]


def event_cuts(plan: Plan, records: pa.RecordBatch) -> Int64:
    """Global trigger index of each record's event time."""
    if plan.stamp == "event_time":
        return plan.timeline.cut_of(numbers(records.column("stamp")))
    cuts: Int64 = numbers(records.column("event_cut"))
    return cuts


def expand(
    plan: Plan,
    records: pa.RecordBatch,
    rows: Int64,
    pairs: Int64,
    event_cut: Int64,
    leaf_cut: Int64,
) -> pa.RecordBatch:
    """One row per admitted (record, window) pair, with its window and leaf, in order of ``rows``.

    The leaf is the later of the event's trigger and the stamp's (or decision's) trigger,
    counted inside the window: a public function of the record alone.
    """
    line = plan.timeline
    stride = line.slide // line.trigger_every
    first, _ = open_windows(line, event_cut, leaf_cut)
    repeated = np.repeat(np.arange(len(rows)), pairs)
    nth = np.arange(len(repeated)) - np.repeat(np.cumsum(pairs) - pairs, pairs)
    window = first[repeated] + nth
    leaf = leaf_cut[repeated] - window * stride
    take = pa.array(rows[repeated])
    names = ["unit", *(f.name for f in key_fields(plan)), *value_columns(plan)]
    arrays = [records.column(name).take(take) for name in names]
    return pa.RecordBatch.from_arrays(
        [pa.array(window.astype(np.int32)), pa.array(leaf.astype(np.int32)), *arrays],
        schema=admitted_schema(plan),
    )
