"""Queries are snapped outward to the public grid of each dimension before they are decided.

Edges of queries then fall on few lines, so that regions meet and can be joined, and their number
is bounded by that of the grid's cells.  The snapped box is what is checked, shown and charged;
the query itself runs on the box that was asked for.

**Snapping only over-charges.**  The snapped boxes contain the asked ones (low edges go down, high
edges up).  A record that the query reads is in an asked box, so in a snapped one, and its point
is checked and charged the whole amount.  Asked boxes are disjoint, so that a record is read
once; snapped ones may share points, which pay once: the union is charged.
"""

import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.accounting.regions.boxes import stacked, union
from dpstream.accounting.regions.clubbing import club
from dpstream.accounting.regions.space import Space


def outward(space: Space, boxes: Int64) -> Int64:
    """(n, d, 2) the least boxes of whole cells that contain the boxes; they may overlap.

    The cells of a dimension begin at 0; the last one ends with the values, and the coordinate of
    missing values is a cell of its own.
    """
    low, high = boxes[:, :, 0], boxes[:, :, 1]
    values, grids = space.values, space.grids
    down = np.where(low >= values, low, low // grids * grids)
    up = np.where(high > values, high, np.minimum(-(-high // grids) * grids, values))
    return stacked([np.stack([down, up], axis=2)])


def snapped(space: Space, boxes: Int64) -> Int64:
    """Disjoint boxes of all cells that disjoint boxes have a point in, as few as clubbing makes."""
    outer = outward(space, boxes)
    if len(outer) == 1:
        return outer
    if (space.grids > 1).any():
        outer = union(outer)
    return club(outer, np.zeros(len(outer), np.int64))[0]
