"""Pairs of keys and counts add up like a counter."""

from collections import Counter

import numpy as np
import pytest

from dpstream.dp_transforms.tabulation.pairs import NONE, Pairs, counted, summed


def as_counter(pairs: Pairs) -> Counter[int]:
    assert (np.diff(pairs.keys) > 0).all()
    return Counter(dict(zip(pairs.keys.tolist(), pairs.counts.tolist(), strict=True)))


@pytest.mark.parametrize("seed", range(3))
def test_pairs_add_up(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = [rng.integers(0, 40, size) for size in (0, 1, 300, 25)]
    wanted = Counter[int]()
    for part in parts:
        wanted.update(part.tolist())
    pairs = [counted(part.copy()) for part in parts]
    total = summed(pairs)
    assert as_counter(total) == wanted
    assert summed([total]) == total and summed([]) is NONE and summed([NONE, NONE]) is NONE
    part_counts = as_counter(total.within(7, 21))
    assert part_counts == {key: count for key, count in wanted.items() if 7 <= key < 21}


def test_two_parts_that_have_counts_add_up() -> None:
    """Neither is taken for the only one, whatever empty parts come with them."""
    one, two = counted(np.array([3, 1, 3])), counted(np.array([9, 3]))
    for parts in ([one, two], [two, NONE, one]):
        total = summed(parts)
        assert total.keys.tolist() == [1, 3, 9] and total.counts.tolist() == [1, 3, 1]
    assert len(NONE.keys) == len(NONE.counts) == 0
