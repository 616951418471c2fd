"""BOUND: each unit's first C (record, window) pairs, in the order (stamp, partition, offset).

Sensitivity: over the whole stream (or privacy period) at most C pairs of a unit pass, whatever
the other units send, and whatever the order of delivery within a trigger time (mechanism.md rule
1).  Neighbouring streams therefore differ in at most C admitted pairs, all of one unit; every other
record keeps its admission, window and step, because all three are functions of the unit's own
records.  Decisions are committed before they are seen, so a replay repeats them.

With ``per_key_bound = k`` (mechanism.md section 4, "With a bound per key") a pair is admitted if
its unit has fewer than C pairs and its (unit, window, key) fewer than k; one that is not takes
nothing, so that C counts admitted pairs only.  Of the pairs of a (unit, window, key) the one that
was admitted first is marked and takes the unit's next index of selection: a unit's marked pairs are
in different (window, key)s and have different indices, whatever the order in which their steps
come.  (Where published keys are skipped, k is 1 and every admitted pair the first of its key; those
on unpublished keys are marked and take the indices, `dp_transforms.skipping`.)  Both counts are
made of committed decisions on the unit's own records alone, and neither falls while a window that
they speak of is open, so that a decision that is made again is the same.  Where weights go by the
number of a unit's pairs (`accounting.plan.plan`) all of them are decided in one call, and each
takes that number in the place of an index.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Bool, Ids, Int32, Int64, UInt64
from dpstream.accounting.errors import InvariantError, RunError
from dpstream.accounting.limits import STEP_ATTEMPTS
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.timeline import Timeline
from dpstream.dp_transforms import skipping
from dpstream.dp_transforms.decision import (
    Batch,
    KeyIdsOf,
    admit,
    expand,
    firsts,
    open_windows,
    stamp_order,
)
from dpstream.dp_transforms.pacing import stops
from dpstream.dp_transforms.published_keys import PublishedKeys
from dpstream.state.arrow import position_ids
from dpstream.state.idtable import IdTable
from dpstream.state.keycounts import Wanted
from dpstream.state.retention import dropped_before, period_trigger_time
from dpstream.state.store import Admitted, OvertakenError, PerKey, Store, UnitShard

# Copies of a record: which of the records with one id counts, where ids name records.
#
# An id names a record of its unit.  A unit's records are decided in the order of their stamps, of
# equal ones in that of keyed digests of what they hold.  Once a record is admitted, no other with
# its id is, until every window that it can belong to is past its last trigger time
# (``retention.dropped_before``); then the id names a new record.  A copy that holds the same is
# the record itself, and has its decision.  One that holds something else never gets it: it is left
# out.
#
# All this is a function of the unit's own records and of the plan.  The trigger times that a
# decision spans are gone through one by one, so it does not matter how many are decided together,
# and what blocks an id is the trigger time at which a record was admitted, never whether its
# position is still in the store.  So neither the order of delivery, nor the number of shards, nor
# a crash between two commits chooses between copies.  At most C pairs of a unit are admitted
# whatever its ids are, which is all that the sensitivity needs.


class Copies:
    """The trigger times at which records of each id were last admitted."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline, self._ids = timeline, IdTable()
        self._last = np.zeros(0, np.int64)

    def admitted(self, ids: Ids, trigger_time: Int64 | Int32) -> None:
        """Note that records of these ids were admitted at these trigger times."""
        slots = self._ids.intern(ids)
        more = max(self._ids.size, 2 * len(self._last)) - len(self._last)
        if self._ids.size > len(self._last):
            self._last = np.concatenate([self._last, np.zeros(more, np.int64)])
        np.maximum.at(self._last, slots, trigger_time)

    def blocks(self, ids: Ids, trigger_time: Int64) -> Bool:
        """Return (n,) whether each id counts as taken by an admitted record."""
        slots = self._ids.find(ids)
        last = np.where(slots < 0, 0, np.append(self._last, 0)[slots])
        return last > dropped_before(self._timeline, trigger_time)


class Decided(NamedTuple):
    """The result of BOUND for the records of a shard.

    Attributes:
        pieces: returns the admitted pairs, for the key shards, in batches of about as many rows as
            are asked for.
        counts: counts of records by outcome, for the operator.
        waiting: records to pass in again at a later trigger time: their own trigger time, or the
            one they joined, is still to come.
    """

    pieces: Callable[[int], Iterator[pa.RecordBatch]]
    counts: dict[str, int]
    waiting: pa.RecordBatch


def decide(
    plan: Plan,
    store: Store,
    shard: int,
    records: pa.RecordBatch,
    upto: int,
    since: int,
    key_ids: KeyIdsOf,
    published: PublishedKeys | None = None,
) -> Decided:
    """Decide all records of stamps up to trigger time ``upto``, commit, and return what is
    admitted.

    Args:
        records: canonical records of one unit shard, in any order, possibly repeated.
        upto: global trigger time whose records are complete.
        since: trigger time through which the caller has emitted, as its runner stores it with the
            held records: what was decided up to it is not returned again, however often a source
            delivers it, or a record would be counted twice in a step that is still open.
        key_ids: of records or pairs, from their key columns.
        published: what windows have published, where the plan skips it.

    Returns:
        The decisions: records decided before get their committed decisions; a record that was
        never seen although its trigger time was decided joins the next open trigger time (it
        waits if that lies beyond ``upto``: the store may be ahead of a runner that went back to a
        checkpoint), or is counted as undelivered when there is none.
    """
    with store.at_work("bound", shard):
        # The states of a shard that another process worked on last are old, or its positions
        # have expired meanwhile: the commit notices, and the decision is made on what is there.
        for attempt in range(STEP_ATTEMPTS):
            ends = [upto]
            if published is not None and attempt:
                # The shard's states are new, and still a test lies ahead: the timer fired late.
                decided = store.unit_shard(shard).decided
                ends = stops(plan, decided + 1, upto) if decided < upto else ends
            try:
                parts = [
                    _decide(plan, store, shard, records, end, since, key_ids, published)
                    for end in ends
                ]
                return _together(parts)
            except OvertakenError:
                store.forget_units(shard)
            except BaseException:
                # Counters raised but not committed must not stand when the work is repeated.
                store.forget_units(shard)
                raise
    raise RunError("store", "another worker is always faster", "let it run on")


def _together(parts: list[Decided]) -> Decided:
    """Return the last part with the admitted pairs of the earlier ones.

    Pairs that the earlier parts have left out are counted once.
    """
    last = parts[-1]
    for name in ("operator_pairs_rejected", "operator_pairs_late"):
        last.counts[name] = sum(part.counts[name] for part in parts)
    return last


def _decide(
    plan: Plan,
    store: Store,
    shard: int,
    records: pa.RecordBatch,
    upto: int,
    since: int,
    key_ids: KeyIdsOf,
    published: PublishedKeys | None = None,
) -> Decided:
    """Decide as ``decide`` does; change the counters in memory before they are committed."""
    units = store.unit_shard(shard)
    batch = Batch(plan, records, key_ids, store.retained_windows.abandoned)
    store.load_units(shard, units, batch.ids)
    late = rejected = left_out = 0
    # A record that an id names may come again with a later stamp, at any trigger time.
    again = plan.record_id is not None and units.decided > 0
    copies = None if plan.record_id is None else Copies(plan.timeline)
    if again or units.ahead or (batch.trigger_time <= units.decided).any():
        left_out = _recall(plan, store, shard, batch, copies)
    if upto > units.decided:
        new = _admit_new(plan, store, shard, batch, upto, published, copies)
        late, rejected, left_out = new.late, new.rejected, left_out + new.left_out
    # A decision cut short may have gone further than this one does.
    now = (batch.pairs > 0) & (batch.trigger_time > since) & (batch.trigger_time <= upto)
    if batch.order is not None:
        rows, batch.order = batch.order[now[batch.order]], None
    else:
        rows = np.flatnonzero(now)
        if batch.seen[rows].any():  # new decisions give pairs to one row of a record only
            rows = firsts(rows, batch, batch.record_ids(rows))
        rows = rows[stamp_order(batch.stamp[rows], batch.partition[rows], batch.offset[rows])]
    pairs = int(batch.pairs[rows].sum())
    counts = {
        "operator_pairs_admitted": pairs,
        "operator_pairs_rejected": rejected,
        "operator_pairs_late": late,
        "operator_records_undelivered": int(batch.undelivered.sum()),
        "operator_copies_left_out": left_out,
    }
    waits = (batch.trigger_time > upto) & ~batch.settled
    waiting = records.filter(pa.array(waits)) if waits.any() else records.slice(0, 0)

    def pieces(size: int) -> Iterator[pa.RecordBatch]:
        step = max(1, size * len(rows) // max(1, pairs))
        for begin in range(0, max(1, len(rows)), step):
            yield expand(plan, records, rows[begin : begin + step], batch)

    return Decided(pieces, counts, waiting)


def _enter(plan: Plan, store: Store, shard: int, batch: Batch) -> UnitShard:
    """Give every unit of the batch its slot, and record until when it can have records."""
    units = store.unit_shard(shard)
    batch.unit = units.intern(batch.ids)
    if plan.timeline.period is not None:
        units.period_end[batch.unit] = period_trigger_time(plan.timeline, batch.event_trigger_time)
    return units


def _recall(plan: Plan, store: Store, shard: int, batch: Batch, copies: Copies | None) -> int:
    """Fill in committed decisions.

    A record without one is late if its trigger time was decided.

    Returns:
        The number of rows that are copies of another record.
    """
    units = _enter(plan, store, shard, batch)
    index, before = store.admitted_before(shard, units)
    at = index.find(batch.record_ids())
    remembered = at >= 0
    # Positions up to this trigger time may be gone, or going: none of their windows is open any
    # more.
    remembered[remembered] = before.trigger_time[at[remembered]] > units.forgotten
    settled = ~remembered & (batch.trigger_time <= units.forgotten)
    left_out = np.zeros(len(remembered), np.bool_)
    if copies is not None and len(before.offset):
        copies.admitted(
            position_ids(before.partition, before.offset, before.unit), before.trigger_time
        )
        others = np.flatnonzero(~remembered & ~settled)
        left_out[others] = copies.blocks(batch.positions(others), batch.trigger_time[others])
        settled |= left_out
    batch.seen = remembered | settled
    missed = ~batch.seen & (batch.trigger_time <= units.decided)
    rows = at[remembered]
    batch.trigger_time[remembered] = before.trigger_time[rows]
    was = before.at(rows)
    pairs: Int64 | Int32 = was.pairs
    counts: Int64 | Int32 = units.counts[batch.unit]
    if plan.design.packs_indices:
        pairs, counts = skipping.pairs_in(pairs), skipping.pairs_in(counts)
    batch.write(remembered, pairs, was.rank, was.per_key)
    full = counts >= plan.privacy.contributions
    ended = plan.timeline.end is not None and units.decided >= plan.timeline.last_trigger_time
    batch.undelivered = missed & ~full & ended
    # The unit's C pairs are decided: there is nothing to wait for.
    batch.settled = settled | (missed & (full | ended))
    batch.trigger_time[missed] = units.decided + 1
    return int(left_out.sum())


class _New(NamedTuple):
    """The new decisions.

    Attributes:
        rows: those that are admitted; pairs: what the store records of their pairs.
        late, rejected: pairs; left_out: copies of other records.
    """

    rows: Int64 | slice
    pairs: Int64 | Int32
    late: int = 0
    rejected: int = 0
    left_out: int = 0


def _admit_new(
    plan: Plan,
    store: Store,
    shard: int,
    batch: Batch,
    upto: int,
    published: PublishedKeys | None,
    copies: Copies | None,
) -> _New:
    """Decide and commit what is undecided up to a trigger time."""
    units = _enter(plan, store, shard, batch)
    fresh = ~batch.seen & (batch.trigger_time <= upto) & ~batch.undelivered
    if copies is not None and batch.digest is not None:
        rows = np.flatnonzero(fresh)
        new = _admit_named(plan, units, batch, rows, batch.digest, upto, copies)
    else:
        # Of all rows, as a run decides that is not begun again, no column is copied.
        every: slice | Int64 = slice(None) if fresh.all() else np.flatnonzero(fresh)
        new = _admit_rows(plan, units, batch, every, upto, published)
    admitted = Admitted(
        batch.partition[new.rows],
        batch.offset[new.rows],
        batch.unit[new.rows].astype(np.int32),
        new.pairs.astype(np.int32),
        batch.trigger_time[new.rows].astype(np.int32),
        batch.rank[new.rows] if plan.design.ranked else None,
        None if batch.per_key is None else batch.per_key.at(new.rows),
        None if batch.digest is None else batch.digest[new.rows],
    )
    store.commit_units(shard, upto, units, admitted)
    return new


def _admit_named(
    plan: Plan,
    units: UnitShard,
    batch: Batch,
    rows: Int64,
    digest: UInt64,
    upto: int,
    copies: Copies,
) -> _New:
    """Decide on records that ids name: one trigger time after the other, see `copies`."""
    # Copies with one stamp keep the order of their digests.
    order = rows[np.lexsort((digest[rows], batch.trigger_time[rows]))]
    ends = np.flatnonzero(np.diff(batch.trigger_time[order])) + 1
    out, contents = [_New(rows[:0], np.zeros(0, np.int64))], IdTable()
    for part in np.split(order, ends):
        positions, trigger_time = batch.positions(part), batch.trigger_time[part]
        free = ~copies.blocks(positions, trigger_time)
        name = IdTable().intern(positions[free])
        new = _admit_rows(plan, units, batch, part[free], upto, None, name)
        copies.admitted(batch.positions(new.rows), batch.trigger_time[new.rows])
        contents.intern(batch.record_ids(new.rows))
        others = contents.find(batch.record_ids(part)) < 0
        left_out = int((others & copies.blocks(positions, trigger_time)).sum())
        out.append(new._replace(left_out=left_out))
    admitted, pairs, *counts = zip(*out, strict=True)
    return _New(np.concatenate(admitted), np.concatenate(pairs), *map(sum, counts))


def _admit_rows(
    plan: Plan,
    units: UnitShard,
    batch: Batch,
    new: Int64 | slice,
    upto: int,
    published: PublishedKeys | None,
    name: Int64 | None = None,
) -> _New:
    """Decide on rows; changes the counters.

    Args:
        name: (n,) numbers of the ids that name them: one of each is admitted at most.
    """
    event_trigger_time = batch.event_trigger_time[new]
    timeline, entry_trigger_time = (
        plan.timeline,
        np.maximum(event_trigger_time, batch.trigger_time[new]),
    )
    window, wanted = open_windows(timeline, event_trigger_time, entry_trigger_time, batch.least)
    late = 0
    if batch.least or (entry_trigger_time != event_trigger_time).any():
        late = int(
            (open_windows(timeline, event_trigger_time, event_trigger_time)[1] - wanted).sum()
        )
    del entry_trigger_time  # here and below: not in memory together with what is decided
    unit, position = batch.unit[new], (batch.stamp[new], batch.partition[new], batch.offset[new])
    order = stamp_order(*position, unit)
    limit, per_key, words = plan.privacy.contributions, None, None
    if published is not None or plan.design.admits_per_key:
        ids, key_tests = batch.key_ids[new], np.zeros(len(unit), np.int32)
        if published is not None:
            key_tests = published.of_keys(ids, window, wanted, units.decided, upto)
    if plan.design.admits_per_key:
        keys = np.ascontiguousarray(ids[:, 0])
        wanted_records = Wanted(unit, *position[1:], window, wanted, keys, key_tests)
        taken, rank, per_key = _admit_per_key(plan, units, order, wanted_records, batch.least, name)
    elif published is not None:
        words, rank = skipping.admit(
            unit, *position[1:], wanted, key_tests, units.counts, limit, order
        )
        taken = skipping.pairs_in(words)
    else:
        del window
        taken, rank = admit(unit, *position, wanted, units.counts, limit, order, name)
    admitted = np.flatnonzero(taken)
    if isinstance(new, slice):
        batch.pairs, batch.rank, batch.per_key, batch.order = taken, rank, per_key, order
        rows = new if len(admitted) == len(taken) else admitted
    else:
        batch.write(new, taken, rank, per_key)
        rows = new[admitted]
    pairs = batch.pairs[rows] if words is None else words[taken > 0]
    rejected = int(wanted.sum() - taken.sum())
    if name is not None:  # a copy of a record that is admitted is not rejected
        rejected -= int(wanted[np.isin(name, name[admitted]) & (taken == 0)].sum())
    return _New(rows, pairs, late, rejected)


def _admit_per_key(
    plan: Plan, units: UnitShard, order: Int64, records: Wanted, least: int, name: Int64 | None
) -> tuple[Int64, Int32, PerKey]:
    """(pairs, rank, which windows) of records, at most k of each (unit, window, key)."""
    privacy, timeline = plan.privacy, plan.timeline
    if privacy.per_key_bound is None:
        raise InvariantError("per_key_bound is not None")
    # Windows whose last trigger time is decided take no more records of any unit.
    open_ = max(least, (units.decided - timeline.triggers) // timeline.base(1) + 1)
    counters = units.counts, units.indices
    limits = privacy.contributions, privacy.per_key_bound
    taken = units.keys.admit(order, records, *counters, *limits, open_, name)
    pairs = np.bitwise_count(taken.pairs).astype(np.int64)
    if plan.design.by_size:
        taken = taken._replace(rank=_by_size(units, records.unit, pairs))
    per_key = PerKey(records.keys, records.first.astype(np.int32), taken.pairs, taken.fresh)
    return pairs, taken.rank, per_key


def _by_size(units: UnitShard, unit: Int64, pairs: Int64) -> Int32:
    """(n,) in the place of ranks: number of the weight of a unit with so many pairs, 0 first.

    Sensitivity: all pairs of a unit are decided in one call (`accounting.plan.plan`), and the
    number is committed with each of them, so that it is the same whenever it is read back.

    Args:
        unit: (n,) slots of records that were decided; pairs: (n,) admitted pairs, 0 or 1.
    """
    admitted = unit[pairs > 0]
    sizes = np.bincount(admitted, minlength=int(unit.max(initial=-1)) + 1)
    if (sizes[admitted] != units.indices[admitted]).any():
        raise InvariantError("all pairs of a unit are decided at once")
    return np.asarray(np.where(pairs > 0, sizes[unit] - 1, 0), np.int32)
