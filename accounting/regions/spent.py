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

**Charges and closings.** Regions that a box cuts are divided, their inside pays, and neighbours
that have spent the same are clubbed where the charge was. All boxes of one charge are one query, of
which a point pays the amount once.

**The cap holds whatever is asked.**  Dividing a region into 1 + p pieces adds p.  Before anything
is divided the room under the cap is shared out: regions of which most would lie outside, for each
piece, are divided first, and the others pay as a whole.  That is joining their pieces at the
larger amount, so it only over-charges, like coarsening, which makes room for later charges (from
7/8 of the cap to 3/4).  Boxes of many dimensions that follow no grid fill any cap, and their
points are then charged many times over: it is the public grid that keeps regions few and exact.

**What is proven of the state.**  Let H(p) be the sum of the amounts of all charges with p in one
of their boxes.  Every step keeps amount(p) >= H(p): dividing and clubbing change no point, inside
pieces and whole regions add the amount to every point of the boxes, and coarsening never lowers a
point.  A query that is accepted has initial(p) - amount(p) >= its own amount at all of its points,
so that after it H(p) <= initial(p): by induction no point ever pays more than its initial budget.

**Closed boxes** count for ever as having spent more than any initial budget (``CLOSED``).  **No
query there is answered.**  No initial budget is above ``MOST``, so a closed point has nothing left,
and the amount of every query is above 0.  **Why it is sound:** a point's amount is raised or,
where it was beyond all budgets already, lowered to one that refuses as well; the sum of what was
charged there grows no more.  **Why no open point counts as closed:** a region that pays has spent s
of which initial - s >= a at a point of the query, so s + a <= initial <= ``MOST`` for all of it.
Only coarsening closes a point that nobody closed, beside one that is.  Closed boxes that meet are
one region, so that a stream which closes what lies behind it holds one region for it.
"""

import functools
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from dpstream.accounting import limits
from dpstream.accounting.arrays import Bool, Int64
from dpstream.accounting.errors import PolicyError, UsageError, instance
from dpstream.accounting.regions.amounts import CLOSED, MICRO, MOST, check_amount
from dpstream.accounting.regions.boxes import (
    checked,
    club,
    cut,
    cuts,
    disjoint,
    neighbours,
    overlapped,
    points,
    replaced,
    split,
    stacked,
    sums,
    taken,
    union,
    volumes,
    without,
)
from dpstream.accounting.regions.space import Budget, BudgetKind, Space

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
    kind: BudgetKind
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


def untouched(space: Space, kind: BudgetKind, cap: int = limits.MAX_REGIONS) -> Spent:
    """Return the state in which nothing is spent anywhere.

    Raises:
        UsageError: if records have no budget of the kind, or the cap is out of range.
    """
    space.budget_place(kind)
    return Spent(space, kind, stacked([space.everything]), np.zeros(1, np.int64), cap)


def restored(space: Space, kind: BudgetKind, boxes: Any, amounts: Any, cap: int) -> Spent:
    """Return a state from its stored arrays.

    Raises:
        UsageError: as for ``untouched``.
        PolicyError: if the boxes do not fill the space, each point once, or an amount is negative
            or far beyond all budgets.
    """
    space.budget_place(kind)
    regions, spent = np.array(boxes), np.array(amounts)
    integral = regions.dtype == spent.dtype == np.int64
    shaped = regions.shape == (len(spent), len(space.dimensions), 2) and len(spent) <= cap
    if not (integral and shaped and ((spent >= 0) & (spent <= MOST_SPENT)).all()):
        raise _not_a_state()
    low, high = regions[:, :, 0], regions[:, :, 1]
    inside = (low >= 0) & (low < high) & (high <= space.sizes)
    regions = stacked([regions])
    if not inside.all() or points(regions) != points(space.everything) or not disjoint(regions):
        raise _not_a_state()
    return Spent(space, kind, regions, spent, cap)


def _not_a_state() -> PolicyError:
    rule = "must be boxes that fill the space, each point once, and an amount of each box"
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
        charged: (k, d, 2) what is to be charged: ``boxes``, with ``drop`` its points with enough,
            none if refused.
        lacking: (j, d, 2) the points of ``boxes`` with too little.
        left: (j,) int64 the least that a point of each of them has left, in millionths; where
            only the analyst's quota is short, what is left of that.
        largest: the largest amount that every point of ``boxes`` has, in millionths.
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


# Coarsening: where there are too many boxes, neighbours that differ are joined at the larger.
#
# Cheapest first: what a pair costs is the difference times the points that are raised by it.
# Pairs are joined in rounds; in a round each box is in at most one, and a pair goes first if
# neither of its boxes has a cheaper one.  All of it is decided by the boxes alone, in an order
# that is the same on every machine.
#
# **Coarsening only over-charges**: a point's amount becomes the larger of its own and its
# neighbour's, so it never falls, and what a query may still spend there never rises.
#
# Boxes can be such that no two are neighbours (five that turn around a middle one): then none are
# joined.  The cap on their number does not rest on this alone, see ``charge``.

#: What a joined box has spent.
joined = np.maximum


def coarsen(boxes: Int64, spent: Int64, most: int) -> tuple[Int64, Int64]:
    """Join neighbours until there are at most ``most`` boxes, or no neighbours.

    Args:
        boxes: (n, d, 2), disjoint.
        spent: (n,) int64.
        most: at least 1.

    Returns:
        As given: every point is in a box, of at least its old amount.
    """
    while len(boxes) > most:
        first, second, place = _cheapest(boxes, spent, len(boxes) - most)
        if not len(first):
            break
        boxes, spent = boxes.copy(order="K"), spent.copy()
        boxes[first, place, 1] = boxes[second, place, 1]
        spent[first] = joined(spent[first], spent[second])
        remaining = np.ones(len(boxes), np.bool_)
        remaining[second] = False
        boxes, spent = taken(boxes, remaining), spent[remaining]
    return boxes, spent


def _cheapest(boxes: Int64, spent: Int64, most: int) -> tuple[Int64, Int64, Int64]:
    """(first, second, dimension) of at most so many pairs without a box in common."""
    parts = sums(boxes)
    total = functools.reduce(np.add, parts)
    pairs = [neighbours(boxes, None, k, total - part) for k, part in enumerate(parts)]
    first, second = map(np.concatenate, zip(*pairs, strict=True))
    place = np.repeat(np.arange(len(parts)), [len(begins) for begins, _ in pairs])
    size = volumes(boxes)
    raised = np.where(spent[first] < spent[second], size[first], size[second])
    order = np.argsort(np.abs(spent[first] - spent[second]) * raised, kind="stable")
    first, second, place = first[order], second[order], place[order]
    rank = np.arange(len(first))
    best = np.full(len(boxes), len(first))
    np.minimum.at(best, first, rank)
    np.minimum.at(best, second, rank)
    chosen = np.flatnonzero((best[first] == rank) & (best[second] == rank))[:most]
    return first[chosen], second[chosen], place[chosen]


def charge(spent: Spent, boxes: Any, amount: int) -> Spent:
    """Return the state after a charge that was decided before, as for a ledger's entry.

    Args:
        spent: the state before, which stays as it is.
        boxes: (m, d, 2), the decision's ``charged``; they are not snapped again.
        amount: in millionths.

    Raises:
        UsageError: for boxes or an amount that are none.
        PolicyError: if a point's sum would leave the range of budgets.
    """
    check_amount(amount)
    checked_boxes = checked(spent.space, boxes)
    if not len(checked_boxes):
        return spent
    inner, rim = _near(spent, checked_boxes)
    work = Work(spent, rim)
    for box in checked_boxes:
        work.pay(box, int(amount))
    amounts = spent.amounts.copy()
    amounts[inner] += int(amount)
    if max(amounts.max(), work.amounts.max(initial=0)) > MOST_SPENT:
        raise PolicyError("budget", "sums beyond all budgets", "look for entries that are not ours")
    return renewed(spent, amounts, rim, *club(work.boxes, work.amounts))


def renewed(
    spent: Spent, amounts: Int64, at: Int64, changed: Int64, changed_amounts: Int64
) -> Spent:
    """Return the state with other amounts, and with other regions for some; coarsened if full."""
    if len(changed) == len(at) and (changed == spent.boxes[at]).all():
        amounts[at] = changed_amounts
        return Spent(spent.space, spent.kind, spent.boxes, amounts, spent.cap)
    boxes = replaced(spent.boxes, at, changed)
    amounts = replaced(amounts, at, changed_amounts)
    if len(amounts) > spent.cap * 7 // 8:
        boxes, amounts = coarsen(boxes, amounts, max(spent.cap * 3 // 4, 1))
    return Spent(spent.space, spent.kind, boxes, amounts, spent.cap)


def _near(spent: Spent, boxes: Int64) -> tuple[Int64, Int64]:
    """(inner, rim) numbers, rising, of the regions that meet or touch a charge's boxes.

    Inner ones lie in one box and do not touch its faces.  Their neighbours pay what they pay, so
    that who could not be clubbed before cannot be clubbed behind it.
    """
    sizes = spent.space.sizes
    inner = np.zeros(len(spent.boxes), np.bool_)
    near = spent.near(boxes)
    for box in boxes:
        # At the end of the space a box has no face.
        low, high = box[:, 0] + (box[:, 0] > 0), box[:, 1] - (box[:, 1] < sizes)
        candidates = near
        for place in np.flatnonzero((low > 0) | (high < sizes)).tolist():
            begins, ends = spent.boxes[candidates, place, 0], spent.boxes[candidates, place, 1]
            candidates = candidates[(begins >= low[place]) & (ends <= high[place])]
        inner[candidates] = True
    return np.flatnonzero(inner), near[~inner[near]]


class Work:
    """The regions near a charge, while it is made.

    Attributes:
        boxes, amounts: boxes and amounts of the state.
        paid: (n,) which have paid; a region that paid as a whole meets later boxes of the query.
        room: by how many boxes the state may still grow.
    """

    def __init__(self, spent: Spent, at: Int64) -> None:
        self.boxes, self.amounts = taken(spent.boxes, at), spent.amounts[at]
        self.paid = np.zeros(len(at), np.bool_)
        self.room = spent.cap - len(spent.boxes)

    def pay(self, box: Int64, amount: int) -> None:
        """Charge one box."""
        at = overlapped(self.boxes, box)
        at = at[~self.paid[at]]
        divided = at[_is_divided(taken(self.boxes, at), box, self.room)]
        owed = self.amounts[divided]
        self.amounts = self.amounts.copy()
        self.amounts[at] += amount
        self.paid[at] = True
        if len(divided):
            pieces = split(taken(self.boxes, divided), box)
            self.boxes = stacked([self.boxes, pieces.outside])
            self.boxes[divided] = pieces.inside
            self.amounts = np.concatenate([self.amounts, owed[pieces.owners]])
            self.paid = np.concatenate([self.paid, np.zeros(len(pieces.owners), np.bool_)])
            self.room -= len(pieces.owners)


def _is_divided(met: Int64, box: Int64, room: int) -> Bool:
    """(n,) which of the regions are divided: all that the box cuts, if there is room."""
    pieces = cuts(met, box)
    if pieces.sum() <= room:
        return pieces > 0
    waste = 1 - volumes(cut(met, box)) / volumes(met)
    order = np.argsort(-waste / np.maximum(pieces, 1), kind="stable")
    chosen = np.zeros(len(met), np.bool_)
    chosen[order[np.cumsum(pieces[order]) <= room]] = True
    return chosen & (pieces > 0)


def closable(space: Space, boxes: Any) -> Int64:
    """Return the boxes that may be closed: of whole cells of the grid, so that nothing beside them
    is.

    Raises:
        UsageError: for any other.
    """
    checked_boxes = checked(space, boxes)
    if not len(checked_boxes) or (outward(space, checked_boxes) != checked_boxes).any():
        raise UsageError(
            "boxes", "must be whole cells of the grid to be closed", "end them on lines of the grid"
        )
    return checked_boxes


def close(spent: Spent, boxes: Any) -> Spent:
    """Return the state with some boxes closed; with a full cap also what could not be divided.

    Args:
        spent: the state before, which stays as it is.
        boxes: (m, d, 2), of ``closable``.

    Raises:
        UsageError: for boxes that are none.
    """
    checked_boxes = checked(spent.space, boxes)
    if not len(checked_boxes):
        return spent
    touched = spent.near(checked_boxes)
    work = Work(spent, touched)
    for box in checked_boxes:
        work.pay(box, CLOSED)
    closed = work.paid
    work.amounts[closed] = CLOSED
    regions, amounts = work.boxes, work.amounts
    if points(taken(regions, closed)) == points(checked_boxes):  # exactly these: as they were named
        regions = stacked([taken(regions, ~closed), checked_boxes])
        amounts = np.concatenate([amounts[~closed], np.full(len(checked_boxes), CLOSED)])
    return renewed(spent, spent.amounts.copy(), touched, *club(regions, amounts))
