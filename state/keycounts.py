"""Counts of the admitted records of each (unit, window, key), which a bound per key needs.

BOUND admits at most k records of a (unit, window, key) and at most C pairs of a unit (mechanism.md
section 4).  A record that exceeds k takes nothing; the first pair of each (unit, window, key) is
told apart, because only it counts its unit and takes a weight of selection.  Every decision is a
function of what was decided on the same unit's records before, so that it depends on no other unit.

The counts are those of the admitted records themselves (``store.PerKey``): they are made again
from these when a shard is loaded, and those of closed windows, whose records expire, are not
needed any more.

Units and windows are compared as a whole, keys by the first 64 bits of their ids.  Two keys that
agree in them count as one for the units that have both: such a unit has fewer pairs or marks, the
limits hold as they stand, and its decisions still depend on its own records alone, so that the
sensitivity is the same.  Ids are outputs of a PRF under a secret, so nobody can look for such
keys, and m keys of a unit hold two of them with a chance below m^2 / 2^65.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dpstream.accounting.arrays import Bool, Int32, Int64, UInt64
from dpstream.accounting.libraries import njit

_LOAD = 0.6
_FIRST_SIZE = 1024
#: Records that are decided between two looks at the room in the table.
_ROWS_AT_ONCE = 1 << 18
#: Rows whose places in memory are read ahead of their decisions.
_AHEAD = 32
_MIX = np.uint64(0x9E3779B97F4A7C15)


@njit(inline="always")
def _hash(unit: int, at_window: int, key: np.uint64) -> np.uint64:  # pragma: no cover - compiled
    """Its low bits are the place in the table, its high ones the tag: ids are a PRF's outputs."""
    return np.uint64(
        key ^ (np.uint64(unit) * _MIX) ^ (np.uint64(at_window) * (_MIX >> np.uint64(7)))
    )


@njit(inline="always")
def _tag(hashed: np.uint64, bits: int) -> np.int64:  # pragma: no cover - compiled
    """What a place of the table has room for beside the entry's number, of the hash's high bits."""
    return np.int64(hashed >> np.uint64(33) >> np.uint64(bits))


@njit(inline="always")
def _owner(unit: int, at_window: int) -> np.uint64:  # pragma: no cover - compiled
    """Unit and window in one word."""
    return np.uint64(np.uint64(unit) << np.uint64(32) | np.uint64(at_window))


@njit(inline="always")
def _hash_of(entries: UInt64, entry: int) -> np.uint64:  # pragma: no cover - compiled
    """The hash of an entry."""
    owner = entries[entry, 1]
    unit, at_window = owner >> np.uint64(32), owner & np.uint64(0xFFFFFFFF)
    return np.uint64(_hash(np.int64(unit), np.int64(at_window), entries[entry, 0]))


@njit(cache=True, nogil=True)
def _find(
    table: Int32, bits: int, entries: UInt64, unit: int, at_window: int, key: np.uint64
) -> tuple[int, int]:  # pragma: no cover - compiled
    """(entry, its place in the table), or (-1, the free place where it belongs).

    A place holds the tag of its entry above the entry's number, which has ``bits`` bits: an entry
    of another tag is passed by without a look at its words, which lie elsewhere in memory.
    """
    owner = _owner(unit, at_window)
    place, hashed = np.uint64(table.size - 1), _hash(unit, at_window, key)
    at, tag, number = hashed & place, _tag(hashed, bits), (1 << bits) - 1
    while table[at] >= 0:
        entry = table[at] & number
        if table[at] >> bits == tag and entries[entry, 0] == key and entries[entry, 1] == owner:
            return int(entry), int(at)
        at = (at + np.uint64(1)) & place
    return -1, int(at)


@njit(cache=True, nogil=True)
def _add(
    table: Int32,
    bits: int,
    entries: UInt64,
    entry: int,
    at: int,
    unit: int,
    at_window: int,
    key: np.uint64,
) -> None:  # pragma: no cover - compiled
    """Write a new entry, and its number into the free place that was found for it."""
    table[at] = _tag(_hash(unit, at_window, key), bits) << bits | entry
    entries[entry, 0], entries[entry, 1] = key, _owner(unit, at_window)


@njit(cache=True, nogil=True)
def _repeated(
    rows: Int64, k: int, unit: Int64, partition: Int32, offset: Int64, name: Int64, named: Bool
) -> bool:  # pragma: no cover - compiled
    """Return whether a row is the same record again, or its id is that of an admitted record."""
    row, before = rows[k], rows[max(0, k - 1)]
    if name.size:
        return bool(named[name[row]])
    same = offset[before] == offset[row] and partition[before] == partition[row]
    return bool(k > 0 and same and unit[before] == unit[row])


@njit(cache=True, nogil=True)
def _touched(
    rows: Int64,
    begin: int,
    end: int,
    unit: Int64,
    first: Int64,
    keys: UInt64,
    pairs: Int32,
    table: Int32,
) -> int:  # pragma: no cover - compiled
    """Read the places that the next rows need, so that these reads of memory overlap instead of
    each waiting for the decision before it; return something made of all, to be kept."""
    place, total = np.uint64(table.size - 1), 0
    for k in range(begin, end):
        row = rows[k]
        slot = unit[row]
        total += table[_hash(slot, first[row], keys[row]) & place] ^ pairs[slot]
    return total


@njit(cache=True, nogil=True)
def _admit(
    rows: Int64,
    begin: int,
    end: int,
    unit: Int64,
    partition: Int32,
    offset: Int64,
    first: Int64,
    wanted: Int64,
    keys: UInt64,
    spared: Int32,
    pairs: Int32,
    indices: Int32,
    limit: int,
    bound: int,
    table: Int32,
    bits: int,
    entries: UInt64,
    used: Int32,
    size: int,
    name: Int64,
    named: Bool,
    taken: UInt64,
    fresh: UInt64,
    rank: Int32,
) -> tuple[int, int]:  # pragma: no cover - compiled
    """Decide the rows ``rows[begin:end]``; return the number of entries afterwards, and what was
    read ahead, so that no compiler drops it."""
    ahead = 0
    for k in range(begin, end):
        if (k - begin) % _AHEAD == 0:
            ahead ^= _touched(rows, k, min(end, k + _AHEAD), unit, first, keys, pairs, table)
        row = rows[k]
        slot = unit[row]
        rank[row] = indices[slot]
        taken[row] = fresh[row] = np.uint64(0)
        if _repeated(rows, k, unit, partition, offset, name, named):
            continue
        for nth in range(wanted[row]):
            if pairs[slot] >= limit:
                break
            at_window = first[row] + nth
            entry, at = _find(table, bits, entries, slot, at_window, keys[row])
            bit = np.uint64(1) << np.uint64(nth)
            if entry < 0:
                entry = size
                size += 1
                _add(table, bits, entries, entry, at, slot, at_window, keys[row])
                used[entry] = 0
                if (spared[row] >> nth) & 1 == 0:
                    fresh[row] |= bit
                    indices[slot] += 1
            elif bound == 1 or used[entry] >= bound:
                continue
            used[entry] += 1
            pairs[slot] += 1
            taken[row] |= bit
        if name.size and taken[row]:
            named[name[row]] = True
    return size, ahead


@njit(cache=True, nogil=True)
def _enter(
    unit: Int64,
    first: Int32,
    taken: UInt64,
    keys: UInt64,
    table: Int32,
    bits: int,
    entries: UInt64,
    used: Int32,
    size: int,
) -> int:  # pragma: no cover - compiled
    """Count records that were admitted before."""
    for row in range(unit.size):
        for nth in range(64):
            if (taken[row] >> np.uint64(nth)) & np.uint64(1) == 0:
                continue
            at_window = first[row] + nth
            entry, at = _find(table, bits, entries, unit[row], at_window, keys[row])
            if entry < 0:
                entry = size
                size += 1
                _add(table, bits, entries, entry, at, unit[row], at_window, keys[row])
                used[entry] = 0
            used[entry] += 1
    return size


@njit(cache=True, nogil=True)
def _rehash(
    table: Int32, bits: int, entries: UInt64, size: int
) -> int:  # pragma: no cover - compiled
    """Put entries, which all differ, into an empty table; return what was read ahead."""
    place, ahead = np.uint64(table.size - 1), 0
    for entry in range(size):
        if entry % _AHEAD == 0:
            for later in range(entry, min(size, entry + _AHEAD)):
                ahead ^= table[_hash_of(entries, later) & place]
        hashed = _hash_of(entries, entry)
        at = hashed & place
        while table[at] >= 0:
            at = (at + np.uint64(1)) & place
        table[at] = _tag(hashed, bits) << bits | entry
    return ahead


def numbered(name: Int64 | None) -> tuple[Int64, Bool]:
    """Return the number of the record that each id names, and (records,) whether one is admitted.

    No record is admitted yet.  Both are empty where positions name records.
    """
    if name is None:
        return np.zeros(0, np.int64), np.zeros(0, np.bool_)
    return name, np.zeros(int(name.max(initial=-1)) + 1, np.bool_)


class Wanted(NamedTuple):
    """Records to be decided; arrays by row.

    Attributes:
        unit: slot of each one's unit.
        partition, offset: the record's position.
        first, wanted: first window that is open for it, and how many are.
        keys: (n,) first 64 bits of the ids of the keys.
        spared: bit i: the pair with window ``first + i`` takes no index (its key is published).
    """

    unit: Int64
    partition: Int32
    offset: Int64
    first: Int64
    wanted: Int64
    keys: UInt64
    spared: Int32


class Taken(NamedTuple):
    """The decisions; arrays by row.

    Attributes:
        pairs: bit i: the pair with window ``first + i`` is admitted.
        fresh: bit i: it is the first of its (unit, window, key), and not spared: it takes an index
            of selection.
        rank: pairs of the unit that took an index before.
    """

    pairs: UInt64
    fresh: UInt64
    rank: Int32


class KeyCounts:
    """Admitted records by (unit slot, window, key id), of windows that may be open."""

    def __init__(self) -> None:
        self.size = 0
        #: By entry: its key, and its unit and window in one word; and its admitted records.
        self._entries, self._used = np.empty((0, 2), np.uint64), np.empty(0, np.int32)
        self._allocate(_FIRST_SIZE)

    def admit(
        self,
        order: Int64,
        records: Wanted,
        pairs: Int32,
        indices: Int32,
        limit: int,
        bound: int,
        least: int,
        name: Int64 | None = None,
    ) -> Taken:
        """Decide records in an order; ``pairs`` and ``indices`` of the units are updated.

        Args:
            order: (n,) rows, a unit's records in the order they count in, copies of one record one
                after the other.
            pairs, indices: by unit slot, admitted pairs and indices taken so far.
            limit: C; bound: k.
            least: first window that can be open.
            name: (n,) numbers of the ids that name records, from 0 on: of the records with one id
                the first that can be admitted is, and no other.
        """
        rows, names = len(order), numbered(name)
        taken = Taken(
            np.empty(rows, np.uint64), np.empty(rows, np.uint64), np.empty(rows, np.int32)
        )
        for begin in range(0, rows, _ROWS_AT_ONCE):
            end = min(rows, begin + _ROWS_AT_ONCE)
            self._reserve(int(records.wanted[order[begin:end]].sum()), least)
            parts = self._parts()
            counters = pairs, indices, limit, bound
            self.size, _ = _admit(order, begin, end, *records, *counters, *parts, *names, *taken)
        return taken

    def enter(self, unit: Int64, first: Int32, taken: UInt64, keys: UInt64) -> None:
        """Count admitted records: their units' slots, first open windows, windows and keys."""
        self._reserve(int(np.bitwise_count(taken).sum()), 0)
        parts = self._parts()
        self.size = int(_enter(unit, first, taken, np.ascontiguousarray(keys), *parts))

    def _parts(self) -> tuple[Int32, int, UInt64, Int32, int]:
        """Arguments of the kernels."""
        return self._table, self._bits, self._entries, self._used, self.size

    def _allocate(self, room: int) -> None:
        """A table for so many entries, and the entries that there are with room for as many as
        the table takes: memory that is not written to yet takes no place."""
        places = 1 << int(room / _LOAD).bit_length()
        room = int(_LOAD * places)
        self._bits = room.bit_length()
        self._used = _longer(self._used, self.size, room)
        self._entries = _longer(self._entries, self.size, room)
        self._table = np.full(places, -1, np.int32)
        _rehash(self._table, self._bits, self._entries, self.size)

    def _reserve(self, more: int, least: int) -> None:
        """Room for more entries; those of windows before ``least`` go when it has to grow."""
        if self.size + more <= len(self._used):
            return
        window = (self._entries[: self.size, 1] & np.uint64(0xFFFFFFFF)).astype(np.int64)
        if self.size and window.min() < least:
            indices = np.flatnonzero(window >= least)
            self._entries, self._used = self._entries[indices], self._used[indices]
            self.size = len(indices)
        self._allocate(max(_FIRST_SIZE, self.size + more))


def _longer(array: npt.NDArray[Any], size: int, room: int) -> npt.NDArray[Any]:
    """The first ``size`` rows of an array, with room for more behind them."""
    out = np.empty((room, *array.shape[1:]), array.dtype)
    out[:size] = array[:size]
    return out
