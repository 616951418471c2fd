"""What a part of the space has spent and has left, as figures of the account; public and free."""

from typing import Any

import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import UsageError, instance
from dpstream.accounting.regions.amounts import MICRO, MOST
from dpstream.accounting.regions.boxes import cut, overlapped, stacked, taken
from dpstream.accounting.regions.space import Budget, Space
from dpstream.accounting.regions.spent import Spent
from dpstream.pipelines.session import sentences
from dpstream.pipelines.session.open_table import OpenTable
from dpstream.pipelines.session.pictures import kinds
from dpstream.pipelines.session.selection import Selection


def overview(open_table: OpenTable, selection: Selection) -> dict[str, Any]:
    """Return the present account of some points.

    Returns:
        ``table``, ``data_set``, ``unit``, ``entries``, and for each kind of budget the most and
        least that a point has spent, what is closed for ever, how many regions the account holds,
        and the regions of most spending (``spent`` is ``None`` where it is closed).

    Raises:
        UsageError: the selection has no point.
    """
    boxes = selection.boxes(open_table.account)
    if not len(boxes):
        raise UsageError("where", "is true nowhere", "name at least one point")
    return {
        "table": open_table.config.name,
        "digest": open_table.table.digest,
        "data_set": open_table.config.account.data_set,
        "unit": "one record",
        "entries": len(open_table.account.history()),
        "budgets": {
            kind: _budget(open_table.space, open_table.account.spent(kind), boxes)  # type: ignore[arg-type]
            for kind in kinds(open_table.space)
        },
        "quotas": _quotas(open_table),
        "warnings": open_table.table.warnings,
    }


def _budget(space: Space, spent: Spent, boxes: Int64) -> dict[str, Any]:
    regions, amounts = _met(spent, boxes)
    closed = amounts >= MOST
    counted = amounts[~closed] if not closed.all() else np.zeros(1, np.int64)
    place = spent.place
    dimension = space.dimensions[place]
    dimension = instance(dimension, Budget)
    order = np.lexsort((np.arange(len(amounts)), -amounts))[: sentences.MOST_LISTED]
    return {
        "most_spent": int(counted.max()) / MICRO,
        "least_spent": int(counted.min()) / MICRO,
        "closed_boxes": int(closed.sum()),
        "most_initial": (dimension.values - 1) * dimension.step / MICRO,
        "regions": len(spent.amounts),
        "rows": [
            {
                "where": sentences.box(space, regions[i]),
                "spent": None if closed[i] else int(amounts[i]) / MICRO,
            }
            for i in order.tolist()
        ],
    }


def _met(spent: Spent, boxes: Int64) -> tuple[Int64, Int64]:
    """Return the parts of regions in some boxes, and what their points have spent."""
    parts, amounts = list[Int64](), list[Int64]()
    for box in boxes:
        at = overlapped(spent.boxes, box)
        parts.append(cut(taken(spent.boxes, at), box))
        amounts.append(spent.amounts[at])
    return stacked(parts), np.concatenate(amounts)


def _quotas(open_table: OpenTable) -> dict[str, Any]:
    """Return the analyst's quota: the most that they may charge to one point, and have charged."""
    quotas: dict[str, Any] = {}
    for kind in kinds(open_table.space):
        quota = open_table.config.rules.quotas.of(kind, open_table.analyst)
        if quota is not None:
            mine = open_table.account.analyst_spent(kind, open_table.analyst)  # type: ignore[arg-type]
            charged = mine.amounts[mine.amounts < MOST]  # the rest is closed
            most = int(charged.max(initial=0)) / MICRO
            quotas[kind] = {
                "analyst": open_table.analyst,
                "quota": quota / MICRO,
                "most_charged": most,
            }
    return quotas
