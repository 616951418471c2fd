"""AGGREGATE: the micro-batch of a (window, key shard, trigger) -> changes of key states.

Sensitivity: a unit counts once per (key, round) over all micro-batches of the round, by exact
sets of 128-bit ids (mechanism.md rule 3), so an added unit moves one round's count by at most
1; each admitted pair moves each value prefix by at most that stream's L.  All sums are int64
and the plan's bounds keep them far from wrapping.
"""

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numba import njit

from accounting.plan import Plan
from dp_transforms.batches import Ids, ids_of, numbers
from state.store import KeyShard

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
_ROUND_MIX = np.uint64(0x9E3779B97F4A7C15)


class Aggregated(msgspec.Struct, frozen=True):
    """What a micro-batch touched.

    Attributes:
        touched: distinct slots with data, ascending.
        pair_slots, pair_units: unit pairs counted for the first time in their round.
    """

    touched: Int64
    pair_slots: Int64
    pair_units: Ids


@njit(cache=True, nogil=True)
def _add_at(target: Int64, slots: Int64, amounts: Int64) -> None:  # pragma: no cover - compiled
    for i in range(slots.size):
        target[slots[i]] += amounts[i]


def aggregate(plan: Plan, states: KeyShard, rows: pa.RecordBatch, ids: Ids) -> Aggregated:
    """Add the rows to the states (``units``, ``values``); returns what was touched.

    Args:
        rows: admitted pairs of one window, key shard and leaf (schema ``admitted_schema``).
        ids: (n, 2) key ids of the rows.
    """
    slots = states.intern(ids, rows)
    for stream, spec in enumerate(plan.value_streams):
        counted = spec.column is None
        amounts = np.ones_like(slots) if counted else numbers(rows.column(f"v{stream}"))
        _add_at(states.values[:, stream], slots, amounts)
    pair_slots, pair_units = _count_units(plan, states, slots, ids_of(rows.column("unit")))
    return Aggregated(distinct(slots, states.size), pair_slots, pair_units)


def distinct(slots: Int64, size: int) -> Int64:
    """Distinct slots, ascending; marks instead of sorting."""
    seen = np.zeros(size, np.bool_)
    seen[slots] = True
    return np.flatnonzero(seen)


def _count_units(plan: Plan, states: KeyShard, slots: Int64, units: Ids) -> tuple[Int64, Ids]:
    """Count units that are new in the current round of their key."""
    if not plan.counts_units:
        return slots[:0], units[:0]
    stale = None
    if plan.privacy.mode == "sticky" and not plan.keeps_counting_units:
        stale = states.round[: states.size] > 0
        counting = ~stale[slots]
        slots, units = slots[counting], units[counting]
    marked = units.copy()
    if plan.privacy.mode != "sticky":
        # The id of the pair in its round: still 128 keyed bits, so sets stay exact.  A sticky
        # key has one set for the whole window: selection must not count its units again.
        marked[:, 1] ^= states.round[slots].astype(np.uint64) * _ROUND_MIX
    fresh = states.pairs.add(slots, marked, stale)
    slots, marked = slots[fresh], marked[fresh]
    _add_at(states.units, slots, np.ones(len(slots), np.int64))
    return slots, marked
