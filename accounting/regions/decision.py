"""May a query spend an amount on some boxes?  Decided on the spent budget alone, never on data.

A query is accepted if and only if EVERY point of its (snapped) boxes has

    initial - spent >= amount,

whether or not a record is there.  The initial budget is a dimension of the space: of the points
of a region that spent s, those with the least initial budget have the least left, and that is the
region's low edge there, or the query's if that is higher.  So one comparison for each region that
the query meets decides for all of its points, exactly.

**Why a decision tells nothing about records.**  Its inputs are the boxes, the amount and the spent
budget, a function of the boxes and amounts charged before.  All of them are known to the analyst;
so are, then, refusals, the boxes that lack budget, the largest amount that would pass, and what
``drop`` leaves out.  On two databases with the same answers so far, all of them are the same.

**Drop.**  The points with enough are boxes again: of each region the part whose initial budget is
at least spent + amount.  Only they are charged, and the query reads only records there.
"""

from typing import Any, NamedTuple

import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.regions.amounts import check_amount
from dpstream.accounting.regions.boxes import checked, cut, overlapped, stacked, taken
from dpstream.accounting.regions.clubbing import club
from dpstream.accounting.regions.snapping import snapped
from dpstream.accounting.regions.spent import Spent


class Decision(NamedTuple):
    """What a query may do; public.

    Attributes:
        accepted: whether every point has enough; with ``drop``, whether any has.
        asked: (m, d, 2) the snapped boxes, disjoint: what was checked.
        charged: (k, d, 2) what is to be charged: ``asked``, with ``drop`` its points with enough,
            none if refused.
        lacking: (j, d, 2) the points of ``asked`` with too little.
        left: (j,) int64 the least that a point of each of them has left, in millionths.
        largest: the largest amount that every point of ``asked`` has, in millionths.
    """

    accepted: bool
    asked: Int64
    charged: Int64
    lacking: Int64
    left: Int64
    largest: int


def decide(spent: Spent, boxes: Any, amount: int, drop: bool = False) -> Decision:
    """Decide a query.

    Args:
        spent: the state.
        boxes: (m, d, 2) whole coordinates, disjoint, not snapped.
        amount: in millionths (``amounts.charge_of``).
        drop: leave out points with too little instead of refusing.

    Raises:
        UsageError: for boxes or an amount that are none.
    """
    check_amount(amount)
    amount = int(amount)
    found = checked(spent.space, boxes)
    if not len(found):
        raise UsageError("boxes", "are none", "name at least one box")
    asked = snapped(spent.space, found)
    met = [overlapped(spent.boxes, box) for box in asked]
    left = [_left(spent, at, box) for at, box in zip(met, asked, strict=True)]
    largest = min(int(part.min()) for part in left)
    none, nothing = asked[:0], np.zeros(0, np.int64)
    if largest >= amount:
        return Decision(True, asked, asked, none, nothing, largest)
    rows = np.concatenate(met)
    parts = stacked([cut(taken(spent.boxes, at), box) for at, box in zip(met, asked, strict=True)])
    enough = -(-(spent.amounts[rows] + amount) // spent.step)
    below = _ranged(parts, spent.place, parts[:, spent.place, 0], enough)
    lacking = taken(below, below[:, spent.place, 0] < below[:, spent.place, 1])
    short = np.concatenate(left)[below[:, spent.place, 0] < below[:, spent.place, 1]]
    kept = none
    if drop:
        above = _ranged(parts, spent.place, enough, parts[:, spent.place, 1])
        kept = taken(above, above[:, spent.place, 0] < above[:, spent.place, 1])
        kept = club(kept, np.zeros(len(kept), np.int64))[0]
    return Decision(len(kept) > 0, asked, kept, lacking, np.maximum(short, 0), max(largest, 0))


def _left(spent: Spent, at: Int64, box: Int64) -> Int64:
    """The least that a point of the box has left in each of the regions that it meets."""
    least = np.maximum(spent.boxes[at, spent.place, 0], box[spent.place, 0])
    return np.asarray(least * spent.step - spent.amounts[at])


def _ranged(parts: Int64, place: int, low: Int64, high: Int64) -> Int64:
    """The parts with low and high in one dimension, cut to their own; they may be empty."""
    found = stacked([parts])
    np.maximum(found[:, place, 0], low, out=found[:, place, 0])
    np.minimum(found[:, place, 1], high, out=found[:, place, 1])
    return found
