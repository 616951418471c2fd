"""AGGREGATE: the micro-batch of a (window, key shard, trigger) -> changes of key states.

Sensitivity: a unit counts once per (window, key) over all micro-batches, by exact
sets of 128-bit keyed ids (mechanism.md rule 3), so an added unit moves a key's count by at
most 1 (the weighted count by its weight); each admitted pair moves each value prefix by at most
that stream's L.  With ``per_key_bound`` BOUND admits at most k pairs of a (unit, window, key) and
says which one is the first: that one counts the unit, and no set is kept here.  All sums are int64
and the plan's bounds keep them far from wrapping.
"""

import msgspec
import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Ids, Int64
from dpstream.accounting.libraries import njit
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.batches import ids_of, numpy_view
from dpstream.state.store import KeyShard


class Aggregated(msgspec.Struct, frozen=True):
    """The slots and pairs that a micro-batch changed.

    Attributes:
        touched: distinct slots with data, ascending.
        pair_slots, pair_units: unit pairs counted for the first time.
    """

    touched: Int64
    pair_slots: Int64
    pair_units: Ids


@njit(cache=True, nogil=True)
def _add_at(target: Int64, slots: Int64, amounts: Int64) -> None:  # pragma: no cover - compiled
    for i in range(slots.size):
        target[slots[i]] += amounts[i]


def aggregate(
    plan: Plan, states: KeyShard, rows: pa.RecordBatch, weights: Int64 | None
) -> Aggregated:
    """Add the rows to the states (``units``, ``values``); return the slots and pairs that changed.

    Args:
        rows: admitted pairs of one window and key shard (schema ``admitted_schema``), of one step
            or of several that are taken together.
        weights: (C,) what a unit's pairs add to the weighted count, if the plan has one.
    """
    slots = states.intern(ids_of(rows.column("_id")), rows)
    fresh, marked = _fresh_units(plan, states, slots, rows)
    pair_slots = slots[fresh]
    _add_at(states.units, pair_slots, np.ones(len(fresh), np.int64))
    if weights is not None:
        number = numpy_view(rows.column("_index" if plan.design.skips else "rank"))[fresh]
        # A pair on a key that was published already adds nothing to the selection stream.
        added = np.where(number < 0, 0, weights[number]) if plan.design.skips else weights[number]
        _add_at(states.values[:, -1], pair_slots, added)
    for stream, spec in enumerate(plan.design.streams):
        ones = spec.column is None
        amounts = np.ones_like(slots) if ones else numpy_view(rows.column(f"v{stream}"))
        _add_at(states.values[:, stream], slots, amounts)
    pair_rows = slice(None) if plan.design.unit_sets != "none" else slice(0)
    return Aggregated(distinct(slots, states.size), pair_slots[pair_rows], marked[pair_rows])


def distinct(slots: Int64, size: int) -> Int64:
    """Return distinct slots, ascending; marks them instead of sorting."""
    seen = np.zeros(size, np.bool_)
    seen[slots] = True
    return np.flatnonzero(seen)


def _fresh_units(
    plan: Plan, states: KeyShard, slots: Int64, rows: pa.RecordBatch
) -> tuple[Int64, Ids]:
    """Return rows whose unit is new to its key, and the ids to store for them.

    Of several new rows of one unit and key the one admitted first counts, in whatever order
    they were delivered.
    """
    units = ids_of(rows.column("unit"))
    chosen = np.arange(len(slots))
    if plan.design.admits_per_key:
        firsts = np.flatnonzero(numpy_view(rows.column("rank")) >= 0)
        return firsts, units[firsts]
    sets = plan.design.unit_sets
    if sets == "none":
        return chosen[:0], units[:0]
    stale = None
    if sets == "until selected":
        stale = states.selected[: states.size] > 0
        chosen = np.flatnonzero(~stale[slots])
    if plan.design.ranked:
        # By step, then by rank, which is below C.  The shortest integers that hold both are sorted,
        # because numpy sorts those of up to 16 bits by digits.
        step = numpy_view(rows.column("trigger")).astype(np.int64) * plan.privacy.contributions
        sort_key = (step + numpy_view(rows.column("rank")))[chosen]
        shortest = sort_key.astype(np.min_scalar_type(sort_key.max(initial=0)))
        chosen = chosen[np.argsort(shortest, kind="stable")]
    marked = units[chosen]
    fresh = states.pairs.add(slots[chosen], marked, stale)
    return chosen[fresh], marked[fresh]
