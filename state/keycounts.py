"""How many records of each (unit, window, key) were admitted: what a bound per key goes by.

BOUND admits at most k records of a (unit, window, key) and at most C pairs of a unit (mechanism.md
section 4).  A record that exceeds k takes nothing; the first pair of each (unit, window, key) is
told apart, because only it counts its unit and takes a weight of selection.  Every decision is a
function of what was decided on the same unit's records before, so that it depends on no other unit.

The counts are those of the admitted records themselves (``store.PerKey``): they are made again
from these when a shard is loaded, and those of closed windows, whose records expire, are not
needed any more.  Owners, windows and key ids are compared as a whole: no fingerprint couples units.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dpstream.accounting.arrays import Bool, Ids, Int32, Int64, UInt64
from dpstream.accounting.compiled import njit

_LOAD = 0.6
_FIRST_SIZE = 1024
#: Records that are decided between two looks at the room in the table.
_ROWS_AT_ONCE = 1 << 18
_MIX = np.uint64(0x9E3779B97F4A7C15)


@njit(inline="always")
def _hash(unit: int, at_window: int, low: np.uint64) -> np.uint64:  # pragma: no cover - compiled
    """Its low bits are the place in the table, its high ones the tag: ids are a PRF's outputs."""
    return low ^ (np.uint64(unit) * _MIX) ^ (np.uint64(at_window) * (_MIX >> np.uint64(7)))


@njit(inline="always")
def _tag(hashed: np.uint64, bits: int) -> np.int64:  # pragma: no cover - compiled
    """What a place of the table has room for beside the entry's number, of the hash's high bits."""
    return np.int64(hashed >> np.uint64(33) >> np.uint64(bits))


@njit(cache=True, nogil=True)
def _find(
    table: Int32,
    bits: int,
    owner: Int32,
    window: Int32,
    key: Ids,
    unit: int,
    at_window: int,
    low: np.uint64,
    high: np.uint64,
) -> tuple[int, int]:  # pragma: no cover - compiled
    """(entry, its place in the table), or (-1, the free place where it belongs).

    A place holds the tag of its entry above the entry's number, which has ``bits`` bits: an entry
    of another tag is passed by without a look at its arrays, which lie elsewhere in memory.
    """
    place, hashed = np.uint64(table.size - 1), _hash(unit, at_window, low)
    at, tag, number = hashed & place, _tag(hashed, bits), (1 << bits) - 1
    while table[at] >= 0:
        entry = table[at] & number
        if (
            table[at] >> bits == tag
            and owner[entry] == unit
            and window[entry] == at_window
            and key[entry, 0] == low
            and key[entry, 1] == high
        ):
            return int(entry), int(at)
        at = (at + np.uint64(1)) & place
    return -1, int(at)


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
def _admit(
    rows: Int64,
    begin: int,
    end: int,
    unit: Int64,
    partition: Int32,
    offset: Int64,
    first: Int64,
    wanted: Int64,
    ids: Ids,
    spared: Int32,
    pairs: Int32,
    indices: Int32,
    limit: int,
    bound: int,
    table: Int32,
    bits: int,
    owner: Int32,
    window: Int32,
    key: Ids,
    used: Int32,
    size: int,
    name: Int64,
    named: Bool,
    taken: UInt64,
    fresh: UInt64,
    rank: Int32,
) -> int:  # pragma: no cover - compiled
    """Decide the rows ``rows[begin:end]``; return the number of entries afterwards."""
    for k in range(begin, end):
        row = rows[k]
        slot = unit[row]
        rank[row] = indices[slot]
        taken[row] = fresh[row] = np.uint64(0)
        if _repeated(rows, k, unit, partition, offset, name, named):
            continue
        for nth in range(wanted[row]):
            if pairs[slot] >= limit:
                break
            low, high = ids[row, 0], ids[row, 1]
            at_window = first[row] + nth
            entry, at = _find(table, bits, owner, window, key, slot, at_window, low, high)
            bit = np.uint64(1) << np.uint64(nth)
            if entry < 0:
                entry = size
                size += 1
                table[at] = _tag(_hash(slot, at_window, low), bits) << bits | entry
                owner[entry], window[entry], used[entry] = slot, at_window, 0
                key[entry, 0], key[entry, 1] = low, high
                if (spared[row] >> nth) & 1 == 0:
                    fresh[row] |= bit
                    indices[slot] += 1
            elif used[entry] >= bound:
                continue
            used[entry] += 1
            pairs[slot] += 1
            taken[row] |= bit
        if name.size and taken[row]:
            named[name[row]] = True
    return size


@njit(cache=True, nogil=True)
def _enter(
    unit: Int64,
    first: Int32,
    taken: UInt64,
    ids: Ids,
    table: Int32,
    bits: int,
    owner: Int32,
    window: Int32,
    key: Ids,
    used: Int32,
    size: int,
) -> int:  # pragma: no cover - compiled
    """Count records that were admitted before."""
    for row in range(unit.size):
        for nth in range(64):
            if (taken[row] >> np.uint64(nth)) & np.uint64(1) == 0:
                continue
            slot, low, high = unit[row], ids[row, 0], ids[row, 1]
            at_window = first[row] + nth
            entry, at = _find(table, bits, owner, window, key, slot, at_window, low, high)
            if entry < 0:
                entry = size
                size += 1
                table[at] = _tag(_hash(slot, at_window, low), bits) << bits | entry
                owner[entry], window[entry], used[entry] = slot, at_window, 0
                key[entry, 0], key[entry, 1] = low, high
            used[entry] += 1
    return size


@njit(cache=True, nogil=True)
def _rehash(
    table: Int32, bits: int, owner: Int32, window: Int32, key: Ids, size: int
) -> None:  # pragma: no cover - compiled
    """Put entries, which all differ, into an empty table."""
    place = np.uint64(table.size - 1)
    for entry in range(size):
        hashed = _hash(owner[entry], window[entry], key[entry, 0])
        at = hashed & place
        while table[at] >= 0:
            at = (at + np.uint64(1)) & place
        table[at] = _tag(hashed, bits) << bits | entry


def numbered(name: Int64 | None) -> tuple[Int64, Bool]:
    """Numbers of ids that name records, and for each whether a record of it is admitted: of none
    yet.  Both are empty where positions name records."""
    if name is None:
        return np.zeros(0, np.int64), np.zeros(0, np.bool_)
    return name, np.zeros(int(name.max(initial=-1)) + 1, np.bool_)


class Wanted(NamedTuple):
    """Records to be decided; arrays by row.

    Attributes:
        unit: slot of each one's unit.
        partition, offset: its position.
        first, wanted: first window that is open for it, and how many are.
        ids: (n, 2) ids of the keys.
        spared: bit i: the pair with window ``first + i`` takes no index (its key is published).
    """

    unit: Int64
    partition: Int32
    offset: Int64
    first: Int64
    wanted: Int64
    ids: Ids
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
        self._table = np.empty(0, np.int32)
        self._owner, self._window, self._used = (np.empty(0, np.int32) for _ in range(3))
        self._key = np.empty((0, 2), np.uint64)
        self._allocate(_FIRST_SIZE)

    def admit(
        self,
        order: Int64,
        of: Wanted,
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
            self._reserve(int(of.wanted[order[begin:end]].sum()), least)
            parts = self._parts()
            counters = pairs, indices, limit, bound
            self.size = int(_admit(order, begin, end, *of, *counters, *parts, *names, *taken))
        return taken

    def enter(self, unit: Int64, first: Int32, taken: UInt64, ids: Ids) -> None:
        """Count admitted records: their units' slots, first open windows, windows and key ids."""
        self._reserve(int(np.bitwise_count(taken).sum()), 0)
        parts = self._parts()
        self.size = int(_enter(unit, first, taken, np.ascontiguousarray(ids), *parts))

    def _parts(self) -> tuple[Int32, int, Int32, Int32, Ids, Int32, int]:
        """Arguments of the kernels."""
        arrays = self._owner, self._window, self._key, self._used
        return self._table, self._bits, *arrays, self.size

    def _allocate(self, room: int) -> None:
        """Arrays of so many entries, of which the first are those there are, and the table."""
        self._bits = room.bit_length()
        # One at a time, so that no two copies of all of them are there at once.
        self._owner = _longer(self._owner, self.size, room)
        self._window = _longer(self._window, self.size, room)
        self._used = _longer(self._used, self.size, room)
        self._key = _longer(self._key, self.size, room)
        del self._table
        self._table = np.full(1 << int(room / _LOAD).bit_length(), -1, np.int32)
        _rehash(self._table, self._bits, self._owner, self._window, self._key, self.size)

    def _reserve(self, more: int, least: int) -> None:
        """Room for more entries; those of windows before ``least`` go when it has to grow."""
        if self.size + more <= min(len(self._owner), int(_LOAD * len(self._table))):
            return
        window = self._window[: self.size]
        if self.size and window.min() < least:
            indices = np.flatnonzero(window >= least)
            self._owner, self._window = self._owner[indices], window[indices]
            self._used, self._key = self._used[indices], self._key[indices]
            self.size = len(indices)
        # Half as many again, so that the next batches find room.
        self._allocate(max(_FIRST_SIZE, self.size + more + (self.size + more) // 2))


def _longer(array: npt.NDArray[Any], size: int, room: int) -> npt.NDArray[Any]:
    """The first ``size`` rows of an array, with room for more behind them."""
    out = np.empty((room, *array.shape[1:]), array.dtype)
    out[:size] = array[:size]
    return out
