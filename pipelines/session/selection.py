"""What a query selects: a predicate over dimensions and consumption, perhaps on boxes that are
fixed.

A predicate on consumption means other points after each charge.  It is resolved in the transaction
that charges (`boxes`), so that no charge of others comes between the look and the payment.
"""

import dataclasses
import functools

import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.limits import MAX_QUERY_BOXES
from dpstream.accounting.regions.boxes import cut, overlapped, stacked, taken
from dpstream.accounting.regions.space import Space
from dpstream.pipelines.session.predicates import Predicate, Views, predicate_of


@dataclasses.dataclass(frozen=True, eq=False)
class Selection:
    """A part of a space.

    Attributes:
        space: of which points.
        text: a predicate, empty for all points.
        fixed: (m, d, 2) disjoint boxes that it is cut to, ``None``: the whole space.
        parsed: the text as it was parsed, ``None``: it was not yet.
    """

    space: Space
    text: str = ""
    fixed: Int64 | None = None
    parsed: Predicate | None = None

    def where(self, text: str) -> "Selection":
        """The part of it where a predicate is true as well.

        Raises:
            UsageError: it is none.
        """
        predicate = predicate_of(text, self.space)  # by itself: not half of a bracket
        if not text.strip():
            return self
        if self.text:
            text = f"({self.text}) AND ({text})"
            predicate = self.predicate.both(predicate)
        return dataclasses.replace(self, text=text, parsed=predicate)

    def cut_to(self, boxes: Int64) -> "Selection":
        """The part of it in boxes that do not change."""
        fixed = boxes if self.fixed is None else common(self.fixed, boxes)
        return dataclasses.replace(self, fixed=fixed)

    def boxes(self, views: Views | None = None) -> Int64:
        """(m, d, 2) its points as disjoint boxes, perhaps none.

        Args:
            views: needed if it speaks of consumption.
        """
        return self._boxes(views) if self.moves else self._still

    def _boxes(self, views: Views | None) -> Int64:
        boxes = self.predicate.boxes(views)
        return boxes if self.fixed is None else common(boxes, self.fixed)

    @functools.cached_property
    def predicate(self) -> Predicate:
        """The predicate, parsed."""
        return predicate_of(self.text, self.space) if self.parsed is None else self.parsed

    @functools.cached_property
    def _still(self) -> Int64:
        """The boxes of one that does not move."""
        boxes = self._boxes(None)
        boxes.setflags(write=False)
        return boxes

    @property
    def moves(self) -> bool:
        """Whether a charge can change which points it has."""
        return bool(self.predicate.kinds)

    @property
    def identity(self) -> bytes:
        """Equal for selections of the same points: the text where it speaks of consumption."""
        if not self.moves:
            return b"boxes " + _canonical(self.boxes())
        fixed = b"" if self.fixed is None else _canonical(self.fixed)
        return b"text " + self.text.encode() + b"\0" + fixed


def _canonical(boxes: Int64) -> bytes:
    """Of the boxes in order; not deflated, which every version of zlib does in its own way."""
    order = np.lexsort(boxes.reshape(len(boxes), 2 * boxes.shape[1]).T[::-1])
    return len(boxes).to_bytes(4, "little") + np.ascontiguousarray(boxes[order], "<i8").tobytes()


def common(boxes: Int64, others: Int64) -> Int64:
    """(k, d, 2) the points that are in boxes of both, each disjoint.

    Raises:
        UsageError: they are more boxes than one query may have.
    """
    few, many = (boxes, others) if len(boxes) <= len(others) else (others, boxes)
    parts = [cut(taken(many, at), box) for box in few if len(at := overlapped(many, box))]
    if not parts:
        return stacked([few[:0]])
    overlaps = stacked(parts)
    if len(overlaps) > MAX_QUERY_BOXES:
        raise UsageError(
            "where", f"is more than {MAX_QUERY_BOXES:,} boxes", "ask for simpler parts one by one"
        )
    return overlaps
