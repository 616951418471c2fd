"""Close boxes for ever: their points count as having spent all that any record could have.

**Why nothing there is answered any more.**  No initial budget is above ``MOST``, so a point that
spent as much has nothing left, and every amount is above 0.  **Why it is sound:** a point's amount
is raised or, where it was beyond all budgets already, lowered to one that refuses as well; the sum
of what was charged there grows no more.  Closed boxes that meet are one region, so that a stream
which closes what lies behind it holds one region for it.
"""

from typing import Any

import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.regions.amounts import MOST
from dpstream.accounting.regions.boxes import checked, points, stacked, taken
from dpstream.accounting.regions.charging import Work, renewed, room
from dpstream.accounting.regions.clubbing import club
from dpstream.accounting.regions.snapping import outward
from dpstream.accounting.regions.space import Space
from dpstream.accounting.regions.spent import Spent


def closable(space: Space, boxes: Any) -> Int64:
    """Boxes that may be closed: of whole cells of the grid, so that nothing beside them is.

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
    """The state with some boxes closed; under a full cap also what could not be cut off them.

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
    work = Work(taken(spent.boxes, touched), spent.amounts[touched], room(spent))
    for box in checked_boxes:
        work.pay(box, MOST)
    closed = work.paid
    work.amounts[closed] = MOST
    regions, amounts = work.boxes, work.amounts
    if points(taken(regions, closed)) == points(checked_boxes):  # exactly these: as they were named
        regions = stacked([taken(regions, ~closed), checked_boxes])
        amounts = np.concatenate([amounts[~closed], np.full(len(checked_boxes), MOST)])
    return renewed(spent, spent.amounts.copy(), touched, *club(regions, amounts))
