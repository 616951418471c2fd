"""Charge an amount to every point of some boxes, or close them.

Regions that a box cuts are divided, their inside pays, and neighbours that have spent the same
are clubbed where the charge was.  All boxes of one charge are one query, of which a point pays the
amount once.

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

from typing import Any

import numpy as np

from dpstream.accounting.arrays import Bool, Int64
from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.regions.amounts import CLOSED, check_amount
from dpstream.accounting.regions.boxes import (
    checked,
    club,
    cut,
    cuts,
    neighbours,
    overlapped,
    points,
    replaced,
    split,
    stacked,
    sums,
    taken,
    volumes,
)
from dpstream.accounting.regions.space import Space
from dpstream.accounting.regions.spent import MOST_SPENT, Decision, Spent, decide, outward

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
# joined.  The cap on their number does not rest on this alone, see ``charging``.

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
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
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


def ask(spent: Spent, boxes: Any, amount: int, drop: bool = False) -> tuple[Decision, Spent]:
    """Decide a query and charge what it may spend; see ``spent.decide``."""
    decision = decide(spent, boxes, amount, drop)
    if not decision.accepted:
        return decision, spent
    return decision, charge(spent, decision.charged, amount)


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
        divided = at[_divided(taken(self.boxes, at), box, self.room)]
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


def _divided(met: Int64, box: Int64, room: int) -> Bool:
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
