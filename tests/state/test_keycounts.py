"""Counts of admitted records by (unit, window, key), against a dictionary."""

from collections import defaultdict
from typing import NamedTuple

import numpy as np
import pytest

from dpstream.state import keycounts
from dpstream.state.keycounts import KeyCounts, Taken, Wanted

UNITS = 7


class Limits(NamedTuple):
    pairs: int
    per_key: int


class Slow:
    """The same by hand, window by window and record by record."""

    def __init__(self) -> None:
        self.pairs, self.firsts = defaultdict[int, int](int), defaultdict[int, int](int)
        self.of_key = defaultdict[tuple[int, int, int], int](int)

    def admit(
        self, order: np.ndarray, records: Wanted, limits: Limits
    ) -> list[tuple[int, int, int]]:
        out = [(0, 0, 0)] * len(order)
        seen = set[tuple[int, int, int]]()
        for row in order.tolist():
            unit = int(records.unit[row])
            place = (unit, int(records.partition[row]), int(records.offset[row]))
            taken = fresh = 0
            rank = self.firsts[unit]
            for nth in range(0 if place in seen else int(records.wanted[row])):
                key = (unit, int(records.first[row]) + nth, int(records.keys[row]))
                if self.pairs[unit] == limits.pairs or self.of_key[key] == limits.per_key:
                    continue
                indexed = self.of_key[key] == 0 and not int(records.spared[row]) >> nth & 1
                fresh |= indexed << nth
                taken |= 1 << nth
                self.firsts[unit] += indexed
                self.pairs[unit] += 1
                self.of_key[key] += 1
            seen.add(place)
            out[row] = (taken, fresh, rank)
        return out


def wanted(rng: np.random.Generator, rows: int, begin: int, windows: int) -> Wanted:
    """Records of few units and keys; some stand there twice, one behind the other."""
    offset = begin + np.arange(rows) // 2
    same = np.arange(rows) // 2 * 2
    unit = rng.integers(0, UNITS, rows)[same]
    first = rng.integers(0, 5, rows)[same] + begin // 100
    # Keys that differ in no low bit.
    keys = (rng.integers(0, 6, rows) << 40)[same].astype(np.uint64)
    many = rng.integers(0, windows + 1, rows)[same]
    none = np.zeros(rows, np.int32)
    spared = none if windows == 64 else rng.integers(0, 1 << windows, rows).astype(np.int32)[same]
    return Wanted(unit, none, offset, first, many, keys, spared)


def plain(taken: Taken) -> list[tuple[int, int, int]]:
    return list(zip(*(column.tolist() for column in taken), strict=True))


@pytest.mark.parametrize("windows", [1, 3, 64])
@pytest.mark.parametrize("limits", [Limits(9, 1), Limits(40, 3), Limits(10**6, 2)])
def test_decisions_are_those_of_a_dictionary(
    windows: int, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over many batches, with a table that grows and loses closed windows, in parts of a batch;
    in between the counts are made again from what was admitted."""
    monkeypatch.setattr(keycounts, "_ROWS_AT_ONCE", 37)
    rng = np.random.default_rng(windows + limits.per_key)
    slow, counts, history = Slow(), KeyCounts(), list[tuple[Wanted, Taken]]()
    pairs, indices = np.zeros(UNITS, np.int32), np.zeros(UNITS, np.int32)
    pair_count = 0
    for begin in range(0, 2000, 100):
        of = wanted(rng, 200, begin, windows)
        order = rng.permutation(100).repeat(2) * 2 + np.tile([0, 1], 100)
        least = begin // 100
        got = counts.admit(order, of, pairs, indices, *limits, least)
        assert plain(got) == slow.admit(order, of, limits)
        assert pairs.tolist() == [slow.pairs[unit] for unit in range(UNITS)]
        assert indices.tolist() == [slow.firsts[unit] for unit in range(UNITS)]
        pair_count += int(np.bitwise_count(got.pairs).sum())
        history.append((of, got))
        if begin % 300 == 0:
            counts = KeyCounts()
            for was, what in history:
                rows = np.flatnonzero(what.pairs)
                first = was.first[rows].astype(np.int32)
                counts.enter(was.unit[rows], first, what.pairs[rows], was.keys[rows])
    assert pair_count > 50


def test_equal_positions_of_two_units_are_two_records() -> None:
    """A source that reuses positions must not let one unit push out another's record."""
    counters, zero = (np.zeros(2, np.int32), np.zeros(2, np.int32)), np.zeros(4, np.int64)
    of = Wanted(np.array([0, 0, 1, 1]), zero.astype(np.int32), zero, zero, zero + 1,
                np.zeros(4, np.uint64), np.zeros(4, np.int32))  # fmt: skip
    taken = KeyCounts().admit(np.arange(4), of, *counters, 9, 9, 0)
    assert taken.pairs.tolist() == [1, 0, 1, 0] and counters[0].tolist() == [1, 1]


def test_closed_windows_leave_the_table() -> None:
    """What is kept is bounded by what windows that can be open hold."""
    counts = KeyCounts()
    pairs, indices = np.zeros(1, np.int32), np.zeros(1, np.int32)
    for window in range(60):
        keys = np.arange(500, dtype=np.uint64)
        rows = np.zeros(500, np.int64)
        none = np.zeros(500, np.int32)
        of = Wanted(
            rows, rows.astype(np.int32), np.arange(500), rows + window, rows + 1, keys, none
        )
        taken = counts.admit(np.arange(500), of, pairs, indices, 10**6, 1, window)
        assert (taken.fresh == 1).all()
        again = counts.admit(np.arange(500), of, pairs, indices, 10**6, 1, window)
        assert (again.pairs == 0).all()
    assert counts.size < 3_000
    assert pairs[0] == indices[0] == 60 * 500
