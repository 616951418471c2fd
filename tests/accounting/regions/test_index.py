"""The index of boxes against a comparison of all pairs."""

import numpy as np
import pytest

from dpstream.accounting.arrays import Int64
from dpstream.accounting.regions.index import BoxIndex


def boxes(rng: np.random.Generator, count: int, dimensions: int, size: int) -> Int64:
    low = rng.integers(0, size, (count, dimensions))
    return np.stack([low, low + rng.integers(1, size, (count, dimensions))], axis=2)


@pytest.mark.parametrize("size", [3, 40, 10**12])
def test_against_all_pairs(size: int) -> None:
    rng = np.random.default_rng(size % 97)
    for count, dimensions in ((1, 1), (50, 2), (400, 4)):
        held, queries = boxes(rng, count, dimensions, size), boxes(rng, 60, dimensions, size)
        index = BoxIndex(held)
        for box in queries:
            inside = (held[:, :, 0] < box[:, 1]) & (held[:, :, 1] > box[:, 0])
            assert sorted(index.overlapped(box)) == np.flatnonzero(inside.all(axis=1)).tolist()


def test_no_boxes() -> None:
    index = BoxIndex(np.zeros((0, 2, 2), np.int64))
    assert len(index.overlapped(np.array([[0, 5], [0, 5]]))) == 0
