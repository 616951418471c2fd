"""Clubbing: neighbours that have spent the same become one box.

Two boxes are neighbours in dimension k if the one ends there where the other begins and all other
edges agree; then their union is a box.  Neighbours are found by 64-bit sums of mixed edges, one
sort for each dimension, and compared exactly before they are joined: sums that agree by chance can
hide a pair, never join one that is none.

**Clubbing changes no point**: the union of the two has the points of both, which had the same
amount before and have it still.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpstream.accounting.arrays import Bool, Int64
from dpstream.accounting.regions.boxes import stacked, taken

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


class Neighbours(NamedTuple):
    """Pairs of boxes in one dimension.

    Attributes:
        first, second: (k,) int64, where the first ends the second begins; each box is in at most
            one pair as the first and in one as the second.
    """

    first: Int64
    second: Int64


def sums(boxes: Int64, start: int = 0) -> list[_Words]:
    """For each dimension, the first of which is number ``start``, (n,) a mix of both edges."""
    return [
        _mixed(_mixed(low, 2 * place + 1) + high.astype(np.uint64), 2 * place + 2)
        for place, (low, high) in enumerate(boxes.transpose(1, 2, 0), start)
    ]


def neighbours(boxes: Int64, labels: Int64 | None, place: int, others: _Words) -> Neighbours:
    """Neighbours of one label in one dimension.

    Args:
        boxes: (n, d, 2), disjoint.
        labels: (n,) int64 that both must have the same of; ``None``: any.
        place: the dimension.
        others: (n,) sum of the mixes of all other dimensions.
    """
    begins = others + _mixed(boxes[:, place, 0], 0)
    ends = others + _mixed(boxes[:, place, 1], 0)
    some_begins = _shared(begins, ends)
    some_ends = _shared(ends, begins[some_begins])
    if not len(some_ends):
        return Neighbours(some_ends, some_ends)
    # What is looked for is sorted too: several times as fast.  Disjoint boxes: no two alike.
    order = some_begins[np.argsort(begins[some_begins])]
    by_end = some_ends[np.argsort(ends[some_ends])]
    begins, ends = begins[order], ends[by_end]
    at = np.minimum(np.searchsorted(begins, ends), len(order) - 1)
    matches = (begins[at] == ends).nonzero()[0]
    first, second = by_end[matches], order[at[matches]]
    if not len(first):
        return Neighbours(first, second)
    same = boxes[first, place, 1] == boxes[second, place, 0]
    for k in range(boxes.shape[1]):
        if k != place:
            same &= (boxes[first, k] == boxes[second, k]).all(axis=1)
    if labels is not None:
        same &= labels[first] == labels[second]
    return Neighbours(first[same], second[same])


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
