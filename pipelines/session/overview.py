"""What is left: the account of a part of the space in figures; public and free."""

from typing import Any

import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import UsageError, instance
from dpstream.accounting.regions.amounts import MICRO, MOST
from dpstream.accounting.regions.boxes import cut, overlapped, stacked, taken
from dpstream.accounting.regions.dimensions import Budget
from dpstream.accounting.regions.space import Space
from dpstream.accounting.regions.spent import Spent
from dpstream.pipelines.session import words
from dpstream.pipelines.session.desk import Desk
from dpstream.pipelines.session.pictures import kinds
from dpstream.pipelines.session.selection import Selection


def overview(desk: Desk, selection: Selection) -> dict[str, Any]:
    """The account of some points as of now.

    Returns:
        ``table``, ``data_set``, ``unit``, ``entries``, and for each kind of budget the most and
        least that a point has spent, what is closed for ever, how many regions the account holds,
        and the regions of most spending (``spent`` is ``None`` where it is closed).

    Raises:
        UsageError: there is no point.
    """
    boxes = selection.boxes(desk.account)
    if not len(boxes):
        raise UsageError("where", "is true nowhere", "name at least one point")
    return {
        "table": desk.table.name,
        "digest": desk.table.digest,
        "data_set": desk.config.account.data_set,
        "unit": "one record",
        "entries": len(desk.account.history()),
        "budgets": {
            kind: _budget(desk.space, desk.account.spent(kind), boxes)  # type: ignore[arg-type]
            for kind in kinds(desk.space)
        },
        "quotas": _quotas(desk),
        "warnings": desk.table.warnings,
    }


def _budget(space: Space, spent: Spent, boxes: Int64) -> dict[str, Any]:
    regions, amounts = _met(spent, boxes)
    closed = amounts >= MOST
    counted = amounts[~closed] if not closed.all() else np.zeros(1, np.int64)
    place = spent.place
    dimension = space.dimensions[place]
    dimension = instance(dimension, Budget)
    order = np.lexsort((np.arange(len(amounts)), -amounts))[: words.SHOWN]
    return {
        "most_spent": int(counted.max()) / MICRO,
        "least_spent": int(counted.min()) / MICRO,
        "closed_boxes": int(closed.sum()),
        "most_initial": (dimension.values - 1) * dimension.step / MICRO,
        "regions": len(spent.amounts),
        "shown": [
            {
                "where": words.box(space, regions[i]),
                "spent": None if closed[i] else int(amounts[i]) / MICRO,
            }
            for i in order.tolist()
        ],
    }


def _met(spent: Spent, boxes: Int64) -> tuple[Int64, Int64]:
    """Parts of regions in some boxes, and what their points spent."""
    parts, amounts = list[Int64](), list[Int64]()
    for box in boxes:
        at = overlapped(spent.boxes, box)
        parts.append(cut(taken(spent.boxes, at), box))
        amounts.append(spent.amounts[at])
    return stacked(parts), np.concatenate(amounts)


def _quotas(desk: Desk) -> dict[str, Any]:
    """Of the analyst: the most that one point may be charged by them, and the most it was."""
    found: dict[str, Any] = {}
    for kind in kinds(desk.space):
        quota = desk.config.rules.quotas.of(kind, desk.analyst)
        if quota is not None:
            mine = desk.account.analyst_spent(kind, desk.analyst)  # type: ignore[arg-type]
            charged = mine.amounts[mine.amounts < MOST]  # the rest is closed
            most = int(charged.max(initial=0)) / MICRO
            found[kind] = {"analyst": desk.analyst, "quota": quota / MICRO, "most_charged": most}
    return found
