"""Coarsening: where there are too many boxes, neighbours that differ are joined at the larger.

Cheapest first: what a pair costs is the difference times the points that are raised by it.  Pairs
are joined in rounds; in a round each box is in at most one, and a pair goes first if neither of
its boxes has a cheaper one.  All of it is decided by the boxes alone, in an order that is the same
on every machine.

**Coarsening only over-charges**: a point's amount becomes the larger of its own and its
neighbour's, so it never falls, and what a query may still spend there never rises.

Boxes can be such that no two are neighbours (five that turn around a middle one): then none are
joined.  The cap on their number does not rest on this alone, see ``charging``.
"""

import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.accounting.regions.boxes import taken, volumes
from dpstream.accounting.regions.clubbing import neighbours, sums

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
    first = np.concatenate([pair.first for pair in pairs])
    second = np.concatenate([pair.second for pair in pairs])
    place = np.repeat(np.arange(len(parts)), [len(pair.first) for pair in pairs])
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
