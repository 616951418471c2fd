"""The points of a question, as boxes: where a condition is true, perhaps limited to fixed boxes.

After each charge a condition on consumption selects other points.  It is resolved in the
transaction that charges (`Selection.boxes`), so that no other charge comes between.
"""

import dataclasses
import functools

import numpy as np

from dpstream.accounting import limits
from dpstream.accounting.arrays import Int64
from dpstream.accounting.regions.boxes import cut, overlapped, stacked, taken
from dpstream.accounting.regions.conditions import (
    AllOf,
    Condition,
    Views,
    boxes_where,
    canonical,
    kinds_in,
    too_many,
)
from dpstream.accounting.regions.space import Space

EVERYWHERE = AllOf(())


@dataclasses.dataclass(frozen=True, eq=False)
class Selection:
    """A part of a space.

    Attributes:
        space: the space of the points.
        condition: where it is true.
        fixed: (m, d, 2) disjoint boxes that limit the selection; ``None``: the whole space.
    """

    space: Space
    condition: Condition = EVERYWHERE
    fixed: Int64 | None = None

    def cut_to(self, boxes: Int64) -> "Selection":
        """Return the part that lies in some fixed boxes."""
        return dataclasses.replace(self, fixed=boxes)

    def boxes(self, views: Views | None = None) -> Int64:
        """Return (m, d, 2) the points as disjoint boxes, perhaps none.

        Args:
            views: required if the condition depends on consumption.

        Raises:
            UsageError: it needs more boxes than one query may have.
        """
        return self._boxes(views) if self.moves else self._still

    def _boxes(self, views: Views | None) -> Int64:
        boxes = boxes_where(self.condition, self.space, views)
        if len(boxes) > limits.MAX_QUERY_BOXES:
            raise too_many()
        return boxes if self.fixed is None else common(boxes, self.fixed)

    @functools.cached_property
    def _still(self) -> Int64:
        """The boxes of a selection that does not depend on consumption."""
        boxes = self._boxes(None)
        boxes.setflags(write=False)
        return boxes

    @functools.cached_property
    def moves(self) -> bool:
        """Return whether a charge can change which points are selected."""
        return bool(kinds_in(self.condition))

    @functools.cached_property
    def identity(self) -> bytes:
        """Bytes without anything of how the condition is written: the boxes of its points, or what
        it compares, if it depends on consumption.
        """
        if not self.moves:
            return b"boxes " + _canonical(self.boxes())
        fixed = b"" if self.fixed is None else _canonical(self.fixed)
        return b"condition " + canonical(self.condition).encode() + b"\0" + fixed


def _canonical(boxes: Int64) -> bytes:
    """Encode boxes in order; uncompressed, because versions of zlib compress differently."""
    order = np.lexsort(boxes.reshape(len(boxes), 2 * boxes.shape[1]).T[::-1])
    return len(boxes).to_bytes(4, "little") + np.ascontiguousarray(boxes[order], "<i8").tobytes()


def same_boxes(boxes: Int64, others: Int64) -> bool:
    """Return whether both are the same boxes, in any order."""
    return _canonical(boxes) == _canonical(others)


def common(boxes: Int64, others: Int64) -> Int64:
    """Return (k, d, 2) the points that are in boxes of both; each argument is disjoint.

    Raises:
        UsageError: the result has more boxes than one query may have.
    """
    few, many = (boxes, others) if len(boxes) <= len(others) else (others, boxes)
    parts = [cut(taken(many, at), box) for box in few if len(at := overlapped(many, box))]
    if not parts:
        return stacked([few[:0]])
    overlaps = stacked(parts)
    if len(overlaps) > limits.MAX_QUERY_BOXES:
        raise too_many()
    return overlaps
