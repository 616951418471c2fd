"""Boxes: half-open ranges of coordinates in every dimension, as int64 arrays (n, d, 2).

``boxes[i, k]`` is (low, high) of box i in dimension k; a point is in it if low <= x < high in all
of them.  Arrays that are made here lie in memory edge by edge (all lows of dimension 0, then all
its highs, ...), because every comparison reads one edge of all boxes; their meaning is the same in
any layout.

**An index** of many boxes says which of them share a point with one box, without a look at all.
Boxes are sorted by their lower edge in the dimension with most different edges.  Those that can
meet a box begin there above its lower edge less the widest of them, and below its upper edge; only
they are compared in all dimensions.

**Clubbing** makes neighbours that have spent the same one box.  Two boxes are neighbours in
dimension k if the one ends there where the other begins and all other edges agree; then their union
is a box.  Neighbours are found by 64-bit sums of mixed edges, one sort for each dimension, and
compared exactly before they are joined: sums that agree by chance can hide a pair, never join one
that is none.

**Clubbing changes no point**: the union of the two has the points of both, which had the same
amount before and have it still.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dpstream.accounting import limits
from dpstream.accounting.arrays import Bool, Float64, Int64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.regions.space import Space

#: So few boxes are compared at once, without looking for fewer.
_FEW = 64
#: Numbers of boxes are gathered where so many times as many are left out.
_RARE = 4


def stacked(parts: Sequence[Int64]) -> Int64:
    """Return the boxes of several arrays in one, edge by edge in memory."""
    shape = parts[0].shape[1], 2, sum(map(len, parts))
    # Without a place of its own, numpy would keep the layout of what it is given.
    edges = np.concatenate(
        [p.transpose(1, 2, 0) for p in parts], axis=2, out=np.empty(shape, np.int64)
    )
    return edges.transpose(2, 0, 1)


def taken(boxes: Int64, at: Int64 | Bool) -> Int64:
    """Return some of the boxes, edge by edge in memory."""
    numbers = np.flatnonzero(at) if at.dtype == np.bool_ else at
    return np.take(boxes.transpose(1, 2, 0), numbers, axis=2).transpose(2, 0, 1)


def overlapped(boxes: Int64, box: Int64, sizes: Int64 | None = None) -> Int64:
    """Return the numbers of the boxes that share a point with one box.

    Args:
        boxes: (n, d, 2).
        box: (d, 2).
        sizes: (d,) of the space, if the boxes are in one: then dimensions that the box fills are
            not compared, and the narrowest ones first, of which few boxes are left for the rest.

    Returns:
        (k,) int64 their numbers, rising.
    """
    low, high = box[:, 0], box[:, 1]
    if sizes is None:
        order, partial = range(len(box)), np.ones(len(box), np.bool_)
    else:
        partial = (low > 0) | (high < sizes)
        order = np.argsort((high - low) / sizes, kind="stable").tolist()
    at: Int64 | None = None  # None: all of them
    hit: Bool | None = None
    for place in order:
        if not partial[place]:
            continue
        begins, ends = boxes[:, place, 0], boxes[:, place, 1]
        if at is not None:
            begins, ends = begins[at], ends[at]
        here = begins < high[place]
        if low[place] > 0:  # every box ends above 0
            here &= ends > low[place]
        if hit is None:
            hit = here
        else:
            hit &= here
        if len(hit) > _FEW and np.count_nonzero(hit) * _RARE < len(hit):
            chosen = np.flatnonzero(hit)
            at, hit = chosen if at is None else at[chosen], None
    if hit is None:
        return np.arange(len(boxes)) if at is None else at
    return np.flatnonzero(hit) if at is None else at[hit]


def cut(boxes: Int64, box: Int64) -> Int64:
    """Return (n, d, 2) the parts of boxes in one box, which all of them overlap."""
    inside = stacked([boxes])
    np.maximum(inside[:, :, 0], box[:, 0], out=inside[:, :, 0])
    np.minimum(inside[:, :, 1], box[:, 1], out=inside[:, :, 1])
    return inside


def cuts(boxes: Int64, box: Int64) -> Int64:
    """Return (n,) how many pieces each of the boxes has outside of a box that it overlaps."""
    counts = (boxes[:, :, 0] < box[:, 0]).sum(axis=1) + (boxes[:, :, 1] > box[:, 1]).sum(axis=1)
    return np.asarray(counts, np.int64)


class Split(NamedTuple):
    """Boxes divided by one box; together the pieces are the boxes, and no two share a point.

    Attributes:
        inside: (n, d, 2), the part of each box in the one.
        outside: (k, d, 2), what is left of them, at most 2 d pieces each.
        owners: (k,) int64, whose piece each is.
    """

    inside: Int64
    outside: Int64
    owners: Int64


def split(boxes: Int64, box: Int64) -> Split:
    """Divide boxes, all of which overlap the one, dimension after dimension."""
    left, parts, owners = stacked([boxes]), list[Int64](), list[Int64]()
    for place, (low, high) in enumerate(box.tolist()):
        for side, edge in ((0, low), (1, high)):
            beyond = left[:, place, 0] < edge if side == 0 else left[:, place, 1] > edge
            if beyond.any():
                piece = taken(left, beyond)
                piece[:, place, 1 - side] = edge
                left[beyond, place, side] = edge
                parts.append(piece)
                owners.append(np.flatnonzero(beyond))
    if not parts:
        return Split(left, taken(left, np.zeros(0, np.int64)), np.zeros(0, np.int64))
    return Split(left, stacked(parts), np.concatenate(owners))


def without(boxes: Int64, others: Int64) -> Int64:
    """Return disjoint boxes of the points of disjoint ``boxes`` that are in none of the others."""
    for other in others:
        met = overlapped(boxes, other)
        if len(met):
            remaining = np.ones(len(boxes), np.bool_)
            remaining[met] = False
            boxes = stacked([taken(boxes, remaining), split(taken(boxes, met), other).outside])
    return boxes


def union(boxes: Int64) -> Int64:
    """Return disjoint boxes of the same points; the boxes themselves where they are disjoint."""
    if disjoint(boxes):
        return boxes
    pieces = boxes[:1]
    for box in boxes[1:]:
        pieces = stacked([pieces, without(box[None], taken(pieces, overlapped(pieces, box)))])
    return pieces


def disjoint(boxes: Int64) -> bool:
    """Return whether no two boxes share a point.

    Halves of the space are looked at apart as long as that makes each smaller; a pair that
    overlaps has a point in common and is together in the half with that point.
    """
    todo = [np.arange(len(boxes))]
    while todo:
        indices = todo.pop()
        halves = _halves(boxes, indices) if len(indices) > _FEW else None
        if halves is not None:
            todo += halves
        elif not _apart(taken(boxes, indices)):
            return False
    return True


def _apart(boxes: Int64) -> bool:
    """Whether no two of a few boxes share a point, all pairs at once or one after the other."""
    if len(boxes) > 8 * _FEW:  # halves did not divide them: as many as the space holds
        return not any(len(overlapped(boxes[n + 1 :], box)) for n, box in enumerate(boxes))
    meets = ~np.eye(len(boxes), dtype=np.bool_)
    for place in range(boxes.shape[1]):
        meets &= boxes[:, place, 0] < boxes[:, place, 1, None]
        meets &= boxes[:, place, 0, None] < boxes[:, place, 1]
    return not meets.any()


def _halves(boxes: Int64, indices: Int64) -> list[Int64] | None:
    """The boxes on either side of the best median, unless it hardly divides them."""
    best: tuple[int, int] | None = None
    size, middle = len(indices) * 9 // 10, len(indices) // 2
    for place in range(boxes.shape[1]):
        low, high = boxes[indices, place, 0], boxes[indices, place, 1]
        at = int(np.partition(low, middle)[middle])
        larger = max(int((low < at).sum()), int((high > at).sum()))
        if larger < size:
            best, size = (place, at), larger
        if size < len(indices) * 6 // 10:
            break
    if best is None:
        return None
    place, at = best
    return [indices[boxes[indices, place, 0] < at], indices[boxes[indices, place, 1] > at]]


def replaced(values: Int64, at: Int64, others: Int64) -> Int64:
    """Return boxes (or a number of each) without some of them and with others; the order changes.

    Args:
        values: (n, d, 2) or (n,).
        at: (k,) rising.
        others: (m, d, 2) or (m,).
    """
    join = stacked if values.ndim == 3 else np.concatenate
    many = min(len(at), len(others))
    merged = join([values, others[many:]])
    merged[at[:many]] = others[:many]
    if many == len(at):
        return merged
    remaining = np.ones(len(values), np.bool_)
    remaining[at[many:]] = False
    return taken(merged, remaining) if values.ndim == 3 else merged[remaining]


def volumes(boxes: Int64) -> Float64:
    """Return (n,) points of each box, multiplied in the order of the dimensions, so that all
    agree.
    """
    return functools.reduce(np.multiply, (boxes[:, :, 1] - boxes[:, :, 0]).T, np.ones(len(boxes)))


def points(boxes: Int64) -> int:
    """Return the exact number of points of disjoint boxes."""
    widths = (boxes[:, :, 1] - boxes[:, :, 0]).astype(object)
    return int(widths.prod(axis=1).sum()) if len(boxes) else 0


def checked(space: Space, boxes: Any) -> Int64:
    """Return the boxes of a query or of an entry, checked: inside of the space, not empty,
    disjoint.

    Raises:
        UsageError: for any other; no edge is named.
    """
    array = np.asarray(boxes)
    if array.dtype.kind not in "iu" or (array.dtype.kind == "u" and array.dtype.itemsize > 4):
        raise UsageError(
            "boxes",
            "must have whole coordinates, not NaN or infinite ones",
            "turn values into coordinates with Space.box",
        )
    size = len(space.dimensions)
    if array.shape != (len(array), size, 2) or len(array) > limits.MAX_QUERY_BOXES:
        raise UsageError(
            "boxes",
            f"must be at most {limits.MAX_QUERY_BOXES:,}, each with {size} pairs (low, high)",
            "ask for fewer, larger boxes at once",
        )
    array = stacked([array.astype(np.int64)])
    low, high = array[:, :, 0], array[:, :, 1]
    for wrong, rule, fix in (
        (low > high, "is inverted: its low is above its high", "exchange the two"),
        (low == high, "is empty: its high is not in it", "put high above low"),
        ((low < 0) | (high > space.sizes), "reaches out of the space", "cut it to the dimension"),
    ):
        if wrong.any():
            place = int(np.flatnonzero(wrong.any(axis=0))[0])
            raise UsageError(f"boxes.{space.dimensions[place].name}", rule, fix)
    if len(array) > 1 and not disjoint(array):
        raise UsageError(
            "boxes", "overlap: a point in two would have to pay twice", "make them disjoint"
        )
    return array


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
        """Return (k,) numbers of the boxes that share a point with one (d, 2), in no order."""
        low, high = box[self._place].tolist()
        first = int(np.searchsorted(self._lower, low - self._widest, "right"))
        last = int(np.searchsorted(self._lower, high, "left"))
        near = overlapped(self._boxes[first:last], box)
        return np.asarray(self._order[first:last][near])


_Words = npt.NDArray[np.uint64]
#: Odd multipliers of splitmix64.
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
#: Of 2^4 words that nothing equals 15 are told so by their leading bits, before any is sorted.
_SPARE = 4
_STEP = 0x9E3779B97F4A7C15


def _mixed(values: Int64 | _Words, salt: int) -> _Words:
    """Numbers spread over 64 bits."""
    word = values.astype(np.uint64) + np.uint64(salt * _STEP & (1 << 64) - 1)
    word ^= word >> np.uint64(30)
    word *= _FIRST
    word ^= word >> np.uint64(27)
    word *= _SECOND
    word ^= word >> np.uint64(31)
    return word


def sums(boxes: Int64, start: int = 0) -> list[_Words]:
    """Return (n,) a mix of both edges for each dimension, the first of which has number
    ``start``.
    """
    return [
        _mixed(_mixed(low, 2 * place + 1) + high.astype(np.uint64), 2 * place + 2)
        for place, (low, high) in enumerate(boxes.transpose(1, 2, 0), start)
    ]


def neighbours(
    boxes: Int64, labels: Int64 | None, place: int, others: _Words
) -> tuple[Int64, Int64]:
    """Return the neighbours of one label in one dimension.

    Args:
        boxes: (n, d, 2), disjoint.
        labels: (n,) int64 that both must have the same of; ``None``: any.
        place: the dimension.
        others: (n,) sum of the mixes of all other dimensions.

    Returns:
        (k,) first and (k,) second of each pair: where the first ends the second begins; each box
        is in at most one pair as the first and in one as the second.
    """
    begins = others + _mixed(boxes[:, place, 0], 0)
    ends = others + _mixed(boxes[:, place, 1], 0)
    some_begins = _shared(begins, ends)
    some_ends = _shared(ends, begins[some_begins])
    if not len(some_ends):
        return some_ends, some_ends
    # What is looked for is sorted too: several times as fast.  Disjoint boxes: no two alike.
    order = some_begins[np.argsort(begins[some_begins])]
    by_end = some_ends[np.argsort(ends[some_ends])]
    begins, ends = begins[order], ends[by_end]
    at = np.minimum(np.searchsorted(begins, ends), len(order) - 1)
    matches = (begins[at] == ends).nonzero()[0]
    first, second = by_end[matches], order[at[matches]]
    if not len(first):
        return first, second
    same = boxes[first, place, 1] == boxes[second, place, 0]
    for k in range(boxes.shape[1]):
        if k != place:
            same &= (boxes[first, k] == boxes[second, k]).all(axis=1)
    if labels is not None:
        same &= labels[first] == labels[second]
    return first[same], second[same]


def _shared(words: _Words, others: _Words) -> Int64:
    """Numbers of the words that may be among the others: all that are, and few that are not."""
    bits = len(others).bit_length() + _SPARE
    shift = np.uint64(64 - bits)
    slots = np.zeros(1 << bits, np.bool_)
    slots[others >> shift] = True
    return np.flatnonzero(slots[words >> shift])


def club(boxes: Int64, spent: Int64) -> tuple[Int64, Int64]:
    """Join neighbours of equal spend until there are none.

    Args:
        boxes: (n, d, 2), disjoint.
        spent: (n,) int64.

    Returns:
        As given, of as many boxes or fewer.
    """
    alone = _alone(spent)
    if alone.any():
        clubbed, amounts = club(taken(boxes, ~alone), spent[~alone])
        joined = stacked([taken(boxes, alone), clubbed])
        return joined, np.concatenate([spent[alone], amounts])
    parts, spends = sums(boxes), _mixed(spent, 0)
    quiet, place = 0, 0
    while quiet < len(parts):  # until no dimension has neighbours any more
        runs = _along(boxes, spent, place, parts, spends)
        quiet += 1
        if runs is not None:
            heads, ends = runs
            boxes, spent, spends = taken(boxes, heads), spent[heads], spends[heads]
            boxes[:, place, 1] = ends
            parts = [part[heads] for part in parts]
            parts[place] = sums(boxes[:, place : place + 1], place)[0]
            quiet = 1
        place = (place + 1) % len(parts)
    return boxes, spent


def _alone(spent: Int64) -> Bool:
    """(n,) which boxes have an amount that no other one has: nobody can be joined with them."""
    order = np.argsort(spent)
    alike = np.diff(spent[order]) == 0
    mask = np.empty(len(spent), np.bool_)
    mask[order] = ~(np.r_[False, alike] | np.r_[alike, False])[: len(spent)]
    return mask


def _along(
    boxes: Int64, spent: Int64, place: int, parts: list[_Words], spends: _Words
) -> tuple[Bool, Int64] | None:
    """The first boxes of rows of neighbours in one dimension, and where the rows end."""
    low, high = boxes[:, place, 0], boxes[:, place, 1]
    # None can meet if all begin, or all end, at one place.
    if len(boxes) < 2 or (low == low[0]).all() or (high == high[0]).all():
        return None
    others = spends.copy()
    for k, part in enumerate(parts):
        if k != place:
            others += part
    first, second = neighbours(boxes, spent, place, others)
    if not len(first):
        return None
    tail = np.arange(len(boxes))
    tail[first] = second
    while True:  # each step doubles how far every box looks along its row
        further = tail[tail]
        if (further == tail).all():
            break
        tail = further
    heads = np.ones(len(boxes), np.bool_)
    heads[second] = False
    return heads, high[tail[heads]]
