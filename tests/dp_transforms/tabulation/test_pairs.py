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
    found = summed(pairs)
    assert as_counter(found) == wanted
    assert summed([found]) == found and summed([]) is NONE and summed([NONE, NONE]) is NONE
    some = as_counter(found.within(7, 21))
    assert some == {key: count for key, count in wanted.items() if 7 <= key < 21}
