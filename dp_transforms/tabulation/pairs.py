"""Exact counts as sorted pairs (group and leaf, count), which batches add up to.

PRIVATE: they are exact, and leave a worker only on the way to where noise is added.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dpstream.accounting.arrays import Int64


class Pairs(NamedTuple):
    """Counts that are not 0.

    Attributes:
        keys: (n,) ``group * leaves + leaf``, increasing.
        counts: (n,) how many records.
    """

    keys: Int64
    counts: Int64

    def within(self, first: int, last: int) -> "Pairs":
        """Return the pairs with keys ``first .. last - 1``."""
        begin, end = np.searchsorted(self.keys, (first, last))
        return Pairs(self.keys[begin:end], self.counts[begin:end])


NONE = Pairs(np.zeros(0, np.int64), np.zeros(0, np.int64))


def counted(keys: Int64) -> Pairs:
    """Count keys in any order; ``keys`` is sorted in place."""
    keys.sort()
    starts = _starts(keys)
    return Pairs(keys[starts], np.diff(starts, append=len(keys)))


def summed(parts: Sequence[Pairs]) -> Pairs:
    """Return one list from several, whose counts add up."""
    parts = [part for part in parts if len(part.keys)]
    if len(parts) < 2:
        return parts[0] if parts else NONE
    keys = np.concatenate([part.keys for part in parts])
    counts = np.concatenate([part.counts for part in parts])
    order = np.argsort(keys, kind="stable")  # runs that are sorted: merged
    keys, counts = keys[order], counts[order]
    starts = _starts(keys)
    return Pairs(keys[starts], np.add.reduceat(counts, starts))


def _starts(keys: Int64) -> Int64:
    """Return where a new key begins."""
    new = np.empty(len(keys), np.bool_)
    new[:1] = True
    np.not_equal(keys[1:], keys[:-1], out=new[1:])
    return np.flatnonzero(new)
