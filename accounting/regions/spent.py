"""The spent amount of one kind of budget at every point of a space, and what it still allows.

**The state** (`Spent`) is disjoint boxes that fill the space.  It is a value: a charge makes a new
one from it, and from the same entries in the same order every reader makes the same one.  Epsilon
and rho have one each, because a query pays one of them and divides only its boxes.

**The decision** (`decide`) whether a query may spend an amount on some boxes is made by the spent
budget alone.  A query is accepted if and only if EVERY point of its (snapped) boxes has

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

**Rules of the steward** only ever refuse more.  Where a share u of initial budgets is usable,
floor(u initial) <= initial stands in its place, and is as monotone, so that the least initial
budget still decides.  An analyst's quota q is compared with what the analyst has charged to the
same points, own + amount <= q: a region of that account has one amount, so it passes or not as a
whole.  Both are public.

**Snapping.**  Queries are snapped outward to the public grid of each dimension before they are
decided.  Edges of queries then fall on few lines, so that regions meet and can be joined, and their
number is bounded by that of the grid's cells.  The snapped box is what is checked, shown and
charged; the query itself runs on the box that was asked for.

**Snapping only over-charges.**  The snapped boxes contain the asked ones (low edges go down, high
edges up).  A record that the query reads is in an asked box, so in a snapped one, and its point
is checked and charged the whole amount.  Asked boxes are disjoint, so that a record is read
once; snapped ones may share points, which pay once: the union is charged.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from dpstream.accounting import limits
from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import PolicyError, UsageError, instance
from dpstream.accounting.regions.amounts import MICRO, MOST, check_amount
from dpstream.accounting.regions.boxes import (
    checked,
    club,
    cut,
    disjoint,
    overlapped,
    points,
    stacked,
    taken,
    union,
    without,
)
from dpstream.accounting.regions.space import Budget, Space

#: What one point may have spent, beyond all budgets; sums of it stay far from 2^63.
MOST_SPENT = 1 << 61


@dataclass(frozen=True, eq=False)
class Spent:
    """The spent budget of all points; arrays are read-only.

    Attributes:
        space: of which points.
        kind: of which budget, ``epsilon`` or ``rho``.
        boxes: (n, d, 2) int64, disjoint, together the whole space.
        amounts: (n,) int64, spent by each point of a box, in millionths.
        cap: most boxes there may ever be; readers must agree on it.
    """

    space: Space
    kind: Literal["epsilon", "rho"]
    boxes: Int64
    amounts: Int64
    cap: int = limits.MAX_REGIONS

    def __post_init__(self) -> None:
        if not 1 <= self.cap <= limits.MAX_REGIONS:
            raise UsageError(
                "cap", f"must be 1 to {limits.MAX_REGIONS:,}", "choose a number in that range"
            )
        self.boxes.setflags(write=False)
        self.amounts.setflags(write=False)

    @cached_property
    def place(self) -> int:
        """The number of the dimension of initial budgets."""
        return self.space.budget_place(self.kind)

    @cached_property
    def step(self) -> int:
        """The millionths of one coordinate of it."""
        return instance(self.space.dimensions[self.place], Budget).step

    def most_in(self, boxes: Any) -> int:
        """Return the most that a point of the boxes has spent, in millionths; ``MOST`` if closed.

        Raises:
            UsageError: if they are none, or no boxes of the space.
        """
        checked_boxes = checked(self.space, boxes)
        if not len(checked_boxes):
            raise UsageError("boxes", "are none", "name at least one box")
        return min(self.most_over(checked_boxes), MOST)

    def most_over(self, boxes: Int64) -> int:
        """Return the most that a point of boxes that were checked has spent, or ``CLOSED``."""
        sizes = self.space.sizes
        return max(int(self.amounts[overlapped(self.boxes, b, sizes)].max()) for b in boxes)

    def least_over(self, boxes: Int64) -> int:
        """Return the least that a point of boxes that were checked has spent, in millionths."""
        sizes = self.space.sizes
        return min(int(self.amounts[overlapped(self.boxes, b, sizes)].min()) for b in boxes)

    def near(self, boxes: Int64) -> Int64:
        """Return the numbers, rising, of the regions that meet or touch one of the boxes."""
        sizes, mask = self.space.sizes, np.zeros(len(self.boxes), np.bool_)
        for low, high in boxes.transpose(0, 2, 1):
            wider = np.stack([np.maximum(low - 1, 0), np.minimum(high + 1, sizes)], axis=1)
            mask[overlapped(self.boxes, wider, sizes)] = True
        return np.flatnonzero(mask)


def untouched(
    space: Space, kind: Literal["epsilon", "rho"], cap: int = limits.MAX_REGIONS
) -> Spent:
    """Return the state in which nothing is spent anywhere.

    Raises:
        UsageError: if records have no budget of the kind, or the cap is out of range.
    """
    space.budget_place(kind)
    return Spent(space, kind, stacked([space.everything]), np.zeros(1, np.int64), cap)


def restored(
    space: Space, kind: Literal["epsilon", "rho"], boxes: Any, amounts: Any, cap: int
) -> Spent:
    """Return a state from its stored arrays.

    Raises:
        UsageError: as for ``untouched``.
        PolicyError: if the boxes do not fill the space, each point once, or an amount is negative
            or far beyond all budgets.
    """
    space.budget_place(kind)
    regions, spent = np.array(boxes), np.array(amounts)
    integral = regions.dtype == spent.dtype == np.int64
    if not integral or regions.shape != (len(spent), len(space.dimensions), 2) or len(spent) > cap:
        raise _broken("must be whole numbers for each box and dimension, no more than the cap")
    if ((spent < 0) | (spent > MOST_SPENT)).any():
        raise _broken("must have amounts of 0 or more that are not beyond all budgets")
    low, high = regions[:, :, 0], regions[:, :, 1]
    if ((low < 0) | (low >= high) | (high > space.sizes)).any():
        raise _broken("must have boxes of the space, none of them empty or inverted")
    regions = stacked([regions])
    if points(regions) != points(space.everything) or not disjoint(regions):
        raise _broken("must fill the space, each point once")
    return Spent(space, kind, regions, spent, cap)


def _broken(rule: str) -> PolicyError:
    return PolicyError("spent budget", rule, "replay the account from its first entry")


def outward(space: Space, boxes: Int64) -> Int64:
    """Return (n, d, 2) the least boxes of whole cells that contain the boxes; they may overlap.

    The cells of a dimension begin at 0; the last one ends with the values, and the coordinate of
    missing values is a cell of its own.
    """
    low, high = boxes[:, :, 0], boxes[:, :, 1]
    values, grids = space.values, space.grids
    down = np.where(low >= values, low, low // grids * grids)
    up = np.where(high > values, high, np.minimum(-(-high // grids) * grids, values))
    return stacked([np.stack([down, up], axis=2)])


def snapped(space: Space, boxes: Int64) -> Int64:
    """Return disjoint boxes of all cells in which disjoint boxes have a point, clubbed to few."""
    outer = outward(space, boxes)
    if len(outer) == 1:
        return outer
    if (space.grids > 1).any():
        outer = union(outer)
    return club(outer, np.zeros(len(outer), np.int64))[0]


class Decision(NamedTuple):
    """The decision on a query; public.

    Attributes:
        accepted: whether every point has enough; with ``drop``, whether any has.
        boxes: (m, d, 2) the snapped boxes, disjoint: what was checked.
        charged: (k, d, 2) what is to be charged: ``asked``, with ``drop`` its points with enough,
            none if refused.
        lacking: (j, d, 2) the points of ``asked`` with too little.
        left: (j,) int64 the least that a point of each of them has left, in millionths; where
            only the analyst's quota is short, what is left of that.
        largest: the largest amount that every point of ``asked`` has, in millionths.
    """

    accepted: bool
    boxes: Int64
    charged: Int64
    lacking: Int64
    left: Int64
    largest: int


class Own(NamedTuple):
    """The charges of one analyst and the quota: the most for any one point, in millionths."""

    spent: Spent
    quota: int


class _Short(NamedTuple):
    """Boxes that lack something, and what their points have left at least."""

    boxes: Int64
    left: Int64


def decide(
    spent: Spent,
    boxes: Any,
    amount: int,
    drop: bool = False,
    usable: int = MICRO,
    own: Own | None = None,
) -> Decision:
    """Decide a query.

    Args:
        spent: the state.
        boxes: (m, d, 2) whole coordinates, disjoint, not snapped.
        amount: in millionths (``amounts.charge_of``).
        drop: leave out points with too little instead of refusing.
        usable: millionths of every initial budget that may be used.
        own: the analyst's, ``None`` without a quota.

    Raises:
        UsageError: for boxes or an amount that are none.
    """
    check_amount(amount)
    amount = int(amount)
    checked_boxes = checked(spent.space, boxes)
    if not len(checked_boxes):
        raise UsageError("boxes", "are none", "name at least one box")
    requested = snapped(spent.space, checked_boxes)
    largest = min(
        int(_left(spent, overlapped(spent.boxes, box, spent.space.sizes), box, usable).min())
        for box in requested
    )
    if own is not None:
        largest = min(largest, own.quota - own.spent.most_over(requested))
    none = requested[:0]
    if largest >= amount:
        return Decision(True, requested, requested, none, np.zeros(0, np.int64), largest)
    poor, accepted = _divided(spent, requested, amount, usable)
    if own is not None:
        beyond = _short_of_quota(own, accepted, amount)
        accepted = without(accepted, beyond.boxes)
        poor = _Short(stacked([poor.boxes, beyond.boxes]), np.r_[poor.left, beyond.left])
    accepted = club(accepted, np.zeros(len(accepted), np.int64))[0] if drop else none
    return Decision(len(accepted) > 0, requested, accepted, poor.boxes, poor.left, max(largest, 0))


def _left(spent: Spent, at: Int64, box: Int64, usable: int) -> Int64:
    """The least that a point of the box has left in each of the regions that it meets."""
    all_regions = len(at) == len(spent.boxes)
    lows, amounts = spent.boxes[:, spent.place, 0], spent.amounts
    if not all_regions:
        lows, amounts = lows[at], amounts[at]
    least = np.maximum(lows, box[spent.place, 0]) * spent.step
    if usable < MICRO:
        least = least * usable // MICRO
    return np.asarray(least - amounts)


def _divided(spent: Spent, requested: Int64, amount: int, usable: int) -> tuple[_Short, Int64]:
    """The points of what is asked that lack the amount, and those that have it."""
    met = [overlapped(spent.boxes, box, spent.space.sizes) for box in requested]
    pairs = list(zip(met, requested, strict=True))
    parts = stacked([cut(taken(spent.boxes, at), box) for at, box in pairs])
    left = np.concatenate([_left(spent, at, box, usable) for at, box in pairs])
    # No initial budget is above MOST: who spent that much has nothing left, whatever it was.
    owed = np.minimum(spent.amounts[np.concatenate(met)], MOST) + amount
    if usable == MICRO:
        enough = -(-owed // spent.step)
    elif usable:
        enough = -(-owed * MICRO // (spent.step * usable))
    else:
        enough = np.full(len(owed), MOST + 1)
    place = spent.place
    below = _ranged(parts, place, parts[:, place, 0], enough)
    above = _ranged(parts, place, enough, parts[:, place, 1])
    poor = below[:, place, 0] < below[:, place, 1]
    rich = above[:, place, 0] < above[:, place, 1]
    return _Short(taken(below, poor), np.maximum(left[poor], 0)), taken(above, rich)


def _short_of_quota(own: Own, requested: Int64, amount: int) -> _Short:
    """The points of what is asked at which the analyst has charged too much."""
    full = own.spent.amounts + amount > own.quota
    regions = taken(own.spent.boxes, full)
    left = np.maximum(own.quota - own.spent.amounts[full], 0)
    met = [overlapped(regions, box, own.spent.space.sizes) for box in requested]
    pairs = zip(met, requested, strict=True)
    parts = [requested[:0], *(cut(taken(regions, at), box) for at, box in pairs)]
    return _Short(stacked(parts), np.concatenate([left[:0], *(left[at] for at in met)]))


def _ranged(parts: Int64, place: int, low: Int64, high: Int64) -> Int64:
    """The parts with low and high in one dimension, cut to their own; they may be empty."""
    boxes = stacked([parts])
    np.maximum(boxes[:, place, 0], low, out=boxes[:, place, 0])
    np.minimum(boxes[:, place, 1], high, out=boxes[:, place, 1])
    return boxes
