"""SKIP: which of a unit's pairs take a selection weight, and which weight (mechanism.md section 9).

A pair whose key its window has published takes none: it adds nothing to the selection stream, and
counts for C and for the values like any other.  Any other pair takes w[counter] of its unit's one
counter over all windows (of the privacy period), and the counter rises.

Sensitivity.  Pairs are decided once, by the trigger time at which they are decided and then by
(stamp, partition, offset, window start), and each reads what was published by tests at or before
the trigger time BEFORE the one that decides it: a function of committed releases, which are part
of the output.  So, given equal outputs so far, all other units' indices are the same on
neighbouring streams, because a unit's index is a function of its own records and of the outputs.
The unit itself takes each index at most once on every path of outputs, whatever is published
later, because the counter never falls and no decision is made again: it moves the encoded
selection streams by at most sqrt(sum w_i^2 col2), and with n keys by the n largest w_i, as
sections 4 and 8 ask on each path (encoders are lower-triangular in time, so that inputs may
follow outputs).  A unit alone in a key adds at most max w, so thresholds stand as they are.
It rests on three things, which the store keeps and the flow waits for: the counter and the
decisions are committed before a pair is seen; what a test published is committed by all key shards
before a pair behind it is decided; and whoever decides again reads the decision back.  And on one
that the source keeps: a position holds one record, so that copies of it say the same, and it does
not matter which of them a decision that is read back stands for (`bounding` takes the one with the
least stamp).  Copies that could say something else are those of records that ids name: plans with
such ids do not skip (`accounting.plan.design.suits`).

With a bound of 1 per key BOUND keeps it (`dp_transforms.bounding`): repeats are not admitted, and
the pairs that take an index are marked beside each record (``store.PerKey.fresh``), which is also
how many its unit has taken.  Nothing below is used then.

Without, pairs and indices share the store's numbers, so that copies, expiry and reshards know
nothing of them: a unit's count is a sum of words, each ``pairs + indices taken << 16``; what is
kept of the order of a record is ``rank + first index << 10 + published windows << 20``.
"""

import numpy as np

from dpstream.accounting.arrays import Int32, Int64
from dpstream.accounting.libraries import njit

_TAKEN = 16
_PAIRS = (1 << _TAKEN) - 1
_INDEX, _WINDOWS = 10, 20
_LOW = (1 << _INDEX) - 1


@njit(cache=True, nogil=True)
def _admit(
    order: Int64,
    unit: Int64,
    partition: Int32,
    offset: Int64,
    wanted: Int64,
    published: Int32,
    counts: Int32,
    limit: int,
    out: Int64,
    rank: Int32,
) -> None:  # pragma: no cover - compiled
    before = -1
    for k in range(order.size):
        row = order[k]
        slot = unit[row]
        have, index = counts[slot] & _PAIRS, counts[slot] >> _TAKEN
        out[row] = rank[row] = 0
        repeats = before >= 0 and unit[before] == slot
        if repeats and offset[before] == offset[row] and partition[before] == partition[row]:
            continue
        before = row
        take = min(wanted[row], np.int64(limit - have))
        if take <= 0:
            continue
        mask = published[row] & ((1 << take) - 1)
        new = 0
        for window in range(take):
            new += 1 - ((mask >> window) & 1)
        counts[slot] += take + (new << _TAKEN)
        out[row] = take + (new << _TAKEN)
        rank[row] = have + (index << _INDEX) + (mask << _WINDOWS)


def admit(
    unit: Int64,
    partition: Int32,
    offset: Int64,
    wanted: Int64,
    published: Int32,
    counts: Int32,
    limit: int,
    order: Int64,
) -> tuple[Int64, Int32]:
    """Return the admitted pairs of each record as words; ``counts`` is updated.

    Args:
        unit: (n,) slot of each record's unit.
        partition, offset, order: as in ``bounding.admit``.
        wanted: (n,) windows that are still open for the record.
        published: (n,) bit k is set where the record's k-th open window has published its key.
        counts: (units,) sum of the words of a unit's records so far.
        limit: C.

    Returns:
        (n,) words of pairs and indices, and (n,) words of rank, index and published windows.
    """
    words, rank = np.empty(len(order), np.int64), np.empty(len(order), np.int32)
    _admit(order, unit, partition, offset, wanted, published, counts, limit, words, rank)
    return words, rank


def pairs_in(words: Int64 | Int32) -> Int64:
    """Return the number of admitted pairs that words, or sums of them, hold."""
    return np.asarray(words & _PAIRS, np.int64)


def exhausted(contributions: int) -> int:
    """Return the count of a unit that has no pair and no index left."""
    return contributions + (contributions << _TAKEN)


def laid_out(rank: Int32, nth: Int64) -> tuple[Int32, Int32]:
    """Return (rank, index) of the ``nth`` pair of records whose words are ``rank``; -1 if none.

    Args:
        rank: (n,) word of each pair's record; nth: (n,) number of the pair's window, 0 first.
    """
    mask = rank >> _WINDOWS
    before = mask & ((1 << nth.astype(np.int32)) - 1)
    skipped = np.zeros(len(mask), np.int32)
    while before.any():
        skipped += before & 1
        before = before >> 1
    index = ((rank >> _INDEX) & _LOW) + nth - skipped
    taken = (mask >> nth) & 1 == 0
    order = (rank & _LOW) + nth
    return order.astype(np.int32), np.where(taken, index, -1).astype(np.int32)
