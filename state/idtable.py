"""Hash tables over 128-bit ids: id -> dense slot, and a set of (slot, id) pairs.

Ids are outputs of a PRF, so their low bits are the hash.  Equality is always on all 128 bits:
a shorter fingerprint would couple units (mechanism.md rule 3).
"""

import numpy as np

from dpstream.accounting.arrays import Bool, Ids, Int32, Int64
from dpstream.accounting.libraries import njit

_LOAD = 0.6
_FIRST_SIZE = 1024
_ROWS_AT_ONCE = 1 << 20


@njit(cache=True, nogil=True)
def _intern(
    table: Int32, ids: Ids, size: int, queries: Ids, slots: Int64
) -> int:  # pragma: no cover - compiled
    mask = np.uint64(table.size - 1)
    for i in range(queries.shape[0]):
        low, high = queries[i, 0], queries[i, 1]
        at = low & mask
        while True:
            slot = table[at]
            if slot < 0:
                table[at] = size
                ids[size, 0] = low
                ids[size, 1] = high
                slots[i] = size
                size += 1
                break
            if ids[slot, 0] == low and ids[slot, 1] == high:
                slots[i] = slot
                break
            at = (at + np.uint64(1)) & mask
    return size


@njit(cache=True, nogil=True)
def _rehash(table: Int32, ids: Ids, size: int) -> None:  # pragma: no cover - compiled
    mask = np.uint64(table.size - 1)
    for slot in range(size):
        at = ids[slot, 0] & mask
        while table[at] >= 0:
            at = (at + np.uint64(1)) & mask
        table[at] = slot


@njit(cache=True, nogil=True)
def _find(table: Int32, ids: Ids, queries: Ids, slots: Int64) -> None:  # pragma: no cover
    mask = np.uint64(table.size - 1)
    for i in range(queries.shape[0]):
        at = queries[i, 0] & mask
        while True:
            slot = table[at]
            same = slot >= 0 and ids[slot, 0] == queries[i, 0] and ids[slot, 1] == queries[i, 1]
            if slot < 0 or same:
                slots[i] = slot
                break
            at = (at + np.uint64(1)) & mask


def shard_of(ids: Ids, shards: int) -> Int64:
    """Return the shard number of keyed ids (the high bits; hash tables use the low ones)."""
    return ((ids[:, 1] >> np.uint64(32)) % np.uint64(shards)).astype(np.int64)


def shard_order(shard: Int64, shards: int) -> tuple[Int64, list[int]]:
    """Return (order, bounds): rows ``order[bounds[s] : bounds[s + 1]]`` are of shard s, in order.

    Args:
        shard: (n,) number of each row's shard, below ``shards``.
    """
    order = np.argsort(shard.astype(np.uint16), kind="stable")
    return order, np.searchsorted(shard[order], np.arange(shards + 1)).tolist()


class IdTable:
    """128-bit id -> slot 0, 1, 2, ... in order of first appearance."""

    def __init__(self) -> None:
        self.size = 0
        self._table = np.full(_FIRST_SIZE, -1, np.int32)
        self._ids = np.empty((_FIRST_SIZE, 2), np.uint64)

    @property
    def ids(self) -> Ids:
        """Return (size, 2) ids by slot."""
        return self._ids[: self.size]

    def intern(self, queries: Ids) -> Int64:
        """Return slots of the ids, new ones assigned in order; (n, 2) -> (n,) int64."""
        slots = np.empty(len(queries), np.int64)
        # A part at a time: all of a large shard may name few, and the table stays small.
        for begin in range(0, len(queries), _ROWS_AT_ONCE):
            part = slice(begin, begin + _ROWS_AT_ONCE)
            self._reserve(self.size + len(queries[part]))
            size = _intern(self._table, self._ids, self.size, queries[part], slots[part])
            self.size = int(size)
        return slots

    def find(self, queries: Ids) -> Int64:
        """Return slots of the ids; -1 for unknown ids."""
        slots = np.empty(len(queries), np.int64)
        _find(self._table, self._ids, queries, slots)
        return slots

    def _reserve(self, size: int) -> None:
        if size > len(self._ids):
            grown = np.empty((max(size, 2 * len(self._ids)), 2), np.uint64)
            grown[: self.size] = self._ids[: self.size]
            self._ids = grown
        if size > _LOAD * len(self._table):
            length = 1 << int(size / _LOAD).bit_length()
            self._table = np.full(length, -1, np.int32)
            _rehash(self._table, self._ids, self.size)


@njit(cache=True, nogil=True)
def _add(
    owner: Int32, pairs: Ids, slots: Int64, queries: Ids, fresh: Bool
) -> int:  # pragma: no cover - compiled
    mask = np.uint64(owner.size - 1)
    added = 0
    for i in range(slots.size):
        low, high = queries[i, 0], queries[i, 1]
        at = (low ^ (np.uint64(slots[i]) * np.uint64(0x9E3779B97F4A7C15))) & mask
        fresh[i] = False
        while True:
            if owner[at] < 0:
                owner[at] = slots[i]
                pairs[at, 0] = low
                pairs[at, 1] = high
                fresh[i] = True
                added += 1
                break
            if owner[at] == slots[i] and pairs[at, 0] == low and pairs[at, 1] == high:
                break
            at = (at + np.uint64(1)) & mask
    return added


@njit(cache=True, nogil=True)
def _move(
    owner: Int32, pairs: Ids, gone: Bool, to_owner: Int32, to_pairs: Ids
) -> int:  # pragma: no cover - compiled
    """Put the pairs of slots that are not gone into an empty table; return how many."""
    mask = np.uint64(to_owner.size - 1)
    moved = 0
    for i in range(owner.size):
        slot = owner[i]
        if slot < 0 or (slot < gone.size and gone[slot]):
            continue
        at = (pairs[i, 0] ^ (np.uint64(slot) * np.uint64(0x9E3779B97F4A7C15))) & mask
        while to_owner[at] >= 0:
            at = (at + np.uint64(1)) & mask
        to_owner[at] = slot
        to_pairs[at, 0] = pairs[i, 0]
        to_pairs[at, 1] = pairs[i, 1]
        moved += 1
    return moved


@njit(cache=True, nogil=True)
def _owned(owner: Int32, gone: Bool) -> int:  # pragma: no cover - compiled
    """Return how many pairs are of slots that are gone."""
    count = 0
    for i in range(owner.size):
        slot = owner[i]
        count += slot >= 0 and slot < gone.size and gone[slot]
    return count


class PairSet:
    """Exact set of (slot, unit id) pairs; stale slots are dropped when it grows."""

    def __init__(self) -> None:
        self.size = 0
        self._owner = np.full(_FIRST_SIZE, -1, np.int32)
        self._pairs = np.empty((_FIRST_SIZE, 2), np.uint64)

    def add(self, slots: Int64, units: Ids, stale: Bool | None = None) -> Bool:
        """Insert pairs; return True for a pair that is new (the first of equal ones).

        Args:
            slots: (n,) owner of each pair; ``units``: (n, 2) ids.
            stale: by slot, owners whose pairs may be dropped when the table grows.
        """
        if self.size + len(slots) > _LOAD * len(self._owner):
            self._grow(len(slots), stale)
        fresh = np.empty(len(slots), np.bool_)
        self.size += int(_add(self._owner, self._pairs, slots, units, fresh))
        return fresh

    def entries(self) -> tuple[Int64, Ids]:
        """Return (owner of each pair, (n, 2) ids), in no particular order."""
        live = self._owner >= 0
        return self._owner[live].astype(np.int64), self._pairs[live]

    def _grow(self, extra: int, stale: Bool | None) -> None:
        gone = np.zeros(0, np.bool_) if stale is None else stale
        remaining = self.size - int(_owned(self._owner, gone))
        length = max(_FIRST_SIZE, 1 << int((remaining + extra) / _LOAD * 1.3).bit_length())
        owner, pairs = np.full(length, -1, np.int32), np.empty((length, 2), np.uint64)
        self.size = int(_move(self._owner, self._pairs, gone, owner, pairs))
        self._owner, self._pairs = owner, pairs
