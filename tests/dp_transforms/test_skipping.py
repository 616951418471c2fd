"""Which pairs take which weight, by definition; `test_every_path` looks at all outputs."""

from collections import defaultdict

import numpy as np
import pytest

from dpstream.dp_transforms import skipping


def by_definition(
    unit: list[int], wanted: list[int], published: list[int], limit: int
) -> list[list[tuple[int, int]]]:
    """(rank, index) of each admitted pair of each record, in order."""
    used, taken = defaultdict[int, int](int), defaultdict[int, int](int)
    out = []
    for who, windows, mask in zip(unit, wanted, published, strict=True):
        pairs = []
        for window in range(windows):
            if used[who] == limit:
                break
            published_bit = mask >> window & 1
            pairs.append((used[who], -1 if published_bit else taken[who]))
            used[who] += 1
            taken[who] += not published_bit
        out.append(pairs)
    return out


@pytest.mark.parametrize("seed", range(20))
def test_words_hold_ranks_indices_and_windows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size, units, windows = 60, 4, int(rng.integers(1, 12))
    limit = int(rng.choice([1, 3, 8, 1023]))
    unit = np.sort(rng.integers(0, units, size))
    wanted = rng.integers(0, windows + 1, size)
    published = rng.integers(0, 1 << windows, size).astype(np.int32)
    partition, offset = np.zeros(size, np.int32), np.arange(size)
    counts, words, ranks = np.zeros(units, np.int32), list[int](), list[int]()
    for half in (slice(0, 25), slice(25, size)):  # two decisions: the counters go on
        order = np.arange(len(unit[half]))
        admission = skipping.admit(
            unit[half], partition[half], offset[half], wanted[half], published[half],
            counts, limit, order,
        )  # fmt: skip
        words += admission[0].tolist()
        ranks += admission[1].tolist()
    want = by_definition(unit.tolist(), wanted.tolist(), published.tolist(), limit)
    pairs = skipping.pairs_in(np.array(words))
    assert pairs.tolist() == [len(p) for p in want]
    at = np.repeat(np.arange(size), pairs)
    nth = np.concatenate([np.arange(n) for n in pairs])
    rank, index = skipping.laid_out(np.array(ranks, np.int32)[at], nth)
    assert list(zip(rank.tolist(), index.tolist(), strict=True)) == [p for ps in want for p in ps]
    # A unit's count is the sum of its records' words, so that stores need not know what they say.
    assert counts.tolist() == np.bincount(unit, words, units).astype(int).tolist()


def test_a_position_that_comes_twice_counts_once() -> None:
    zeros = np.zeros(3, np.int64)
    counts = np.zeros(1, np.int32)
    words, _ = skipping.admit(
        zeros, np.zeros(3, np.int32), np.array([5, 5, 6]), zeros + 1, np.zeros(3, np.int32),
        counts, 9, np.arange(3),
    )  # fmt: skip
    assert skipping.pairs_in(words).tolist() == [1, 0, 1]


def test_an_exhausted_unit_gets_nothing() -> None:
    counts = np.array([skipping.exhausted(4)], np.int32)
    one = np.ones(1, np.int64)
    words, _ = skipping.admit(
        0 * one, np.zeros(1, np.int32), one, one, np.ones(1, np.int32), counts, 4, 0 * one
    )
    assert words.tolist() == [0] and counts.tolist() == [skipping.exhausted(4)]


def test_words_are_what_stores_hold() -> None:
    """A store that was begun before must say the same: no other place for any of the numbers."""
    counts, one = np.array([3 + (2 << 16)], np.int32), np.ones(1, np.int64)
    words, rank = skipping.admit(
        0 * one, np.zeros(1, np.int32), one, 3 * one, np.array([0b1101], np.int32), counts, 5,
        0 * one,
    )  # fmt: skip
    # Two of three windows: the unit is full.  The first has published the key, the second not.
    assert words.tolist() == [2 + (1 << 16)] and counts.tolist() == [5 + (3 << 16)]
    assert rank.tolist() == [3 + (2 << 10) + (0b01 << 20)]
    assert skipping.exhausted(7) == 7 + (7 << 16)
