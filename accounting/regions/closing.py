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
    found = checked(space, boxes)
    if not len(found) or (outward(space, found) != found).any():
        raise UsageError(
            "boxes", "must be whole cells of the grid to be closed", "end them on lines of the grid"
        )
    return found


def close(spent: Spent, boxes: Any) -> Spent:
    """The state with some boxes closed; under a full cap also what could not be cut off them.

    Args:
        spent: the state before, which stays as it is.
        boxes: (m, d, 2), of ``closable``.

    Raises:
        UsageError: for boxes that are none.
    """
    found = checked(spent.space, boxes)
    if not len(found):
        return spent
    touched = spent.near(found)
    work = Work(taken(spent.boxes, touched), spent.amounts[touched], room(spent))
    for box in found:
        work.pay(box, MOST)
    closed = work.paid
    work.amounts[closed] = MOST
    regions, amounts = work.boxes, work.amounts
    if points(taken(regions, closed)) == points(found):  # exactly these: as they were named
        regions = stacked([taken(regions, ~closed), found])
        amounts = np.concatenate([amounts[~closed], np.full(len(found), MOST)])
    return renewed(spent, spent.amounts.copy(), touched, *club(regions, amounts))
