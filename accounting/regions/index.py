"""An index of many boxes: which of them share a point with one box, without a look at all.

Boxes are sorted by their lower edge in the dimension with most different edges.  Those that can
meet a box begin there above its lower edge less the widest of them, and below its upper edge; only
they are compared in all dimensions.
"""

import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.accounting.regions.boxes import overlapped, taken


class BoxIndex:
    """Boxes (n, d, 2), numbered as they are given."""

    def __init__(self, boxes: Int64) -> None:
        distinct = [len(np.unique(boxes[:, place, 0])) for place in range(boxes.shape[1])]
        self._place = int(np.argmax(distinct))
        lower = boxes[:, self._place, 0]
        self._order = np.argsort(lower, kind="stable")
        self._boxes, self._lower = taken(boxes, self._order), lower[self._order]
        self._widest = int((boxes[:, self._place, 1] - lower).max(initial=0))

    def overlapped(self, box: Int64) -> Int64:
        """(k,) numbers of the boxes that share a point with one (d, 2), in no order."""
        low, high = box[self._place].tolist()
        first = int(np.searchsorted(self._lower, low - self._widest, "right"))
        last = int(np.searchsorted(self._lower, high, "left"))
        near = overlapped(self._boxes[first:last], box)
        return np.asarray(self._order[first:last][near])
