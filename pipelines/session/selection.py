"""What a query selects: a predicate over dimensions and consumption, perhaps limited to fixed
boxes.

After each charge a predicate on consumption selects other points.  It is resolved in the
transaction that charges (`boxes`), so that no other charge comes between.
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
        space: the space of the points.
        text: a predicate; empty for all points.
        fixed: (m, d, 2) disjoint boxes that limit the selection; ``None``: the whole space.
        parsed: the parsed text; ``None``: it is not parsed yet.
    """

    space: Space
    text: str = ""
    fixed: Int64 | None = None
    parsed: Predicate | None = None

    def where(self, text: str) -> "Selection":
        """Return the part in which a predicate is true as well.

        Raises:
            UsageError: the text is not a predicate.
        """
        predicate = predicate_of(text, self.space)  # by itself: not half of a bracket
        if not text.strip():
            return self
        if self.text:
            text = f"({self.text}) AND ({text})"
            predicate = self.predicate.both(predicate)
        return dataclasses.replace(self, text=text, parsed=predicate)

    def cut_to(self, boxes: Int64) -> "Selection":
        """Return the part that lies in some fixed boxes."""
        fixed = boxes if self.fixed is None else common(self.fixed, boxes)
        return dataclasses.replace(self, fixed=fixed)

    def boxes(self, views: Views | None = None) -> Int64:
        """Return (m, d, 2) the points as disjoint boxes, perhaps none.

        Args:
            views: required if the predicate depends on consumption.
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
        """The boxes of a selection that does not depend on consumption."""
        boxes = self._boxes(None)
        boxes.setflags(write=False)
        return boxes

    @property
    def moves(self) -> bool:
        """Whether a charge can change which points are selected."""
        return bool(self.predicate.kinds)

    @property
    def identity(self) -> bytes:
        """Bytes that are equal for selections of the same points; the text, if it depends on
        consumption.
        """
        if not self.moves:
            return b"boxes " + _canonical(self.boxes())
        fixed = b"" if self.fixed is None else _canonical(self.fixed)
        return b"text " + self.text.encode() + b"\0" + fixed


def _canonical(boxes: Int64) -> bytes:
    """Encode boxes in order; uncompressed, because versions of zlib compress differently."""
    order = np.lexsort(boxes.reshape(len(boxes), 2 * boxes.shape[1]).T[::-1])
    return len(boxes).to_bytes(4, "little") + np.ascontiguousarray(boxes[order], "<i8").tobytes()


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
    if len(overlaps) > MAX_QUERY_BOXES:
        raise UsageError(
            "where", f"is more than {MAX_QUERY_BOXES:,} boxes", "ask for simpler parts one by one"
        )
    return overlaps
