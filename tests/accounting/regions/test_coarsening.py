"""Coarsening makes fewer boxes and never lowers a point."""

import numpy as np
import pytest

from dpstream.accounting.regions import charging as coarsening
from dpstream.accounting.regions.charging import coarsen
from tests.accounting.regions.spaces import painted, partition

SIZES = np.array([5, 4, 6])


def test_no_point_falls() -> None:
    rng = np.random.default_rng(0)
    for most in (1, 5, 20):
        for _ in range(20):
            boxes, spent = partition(rng, SIZES, 60)
            coarse_boxes, raised = coarsen(boxes, spent, most)
            assert (painted(coarse_boxes, raised, SIZES) >= painted(boxes, spent, SIZES)).all()
            assert len(coarse_boxes) <= len(boxes) and raised.max() == spent.max()


def test_the_smaller_amount_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coarsening, "joined", np.minimum)
    with pytest.raises(AssertionError):
        test_no_point_falls()


def test_as_many_as_allowed() -> None:
    cells = np.array([[[a, a + 1], [b, b + 1]] for a in range(16) for b in range(16)])
    spent = np.random.default_rng(1).permutation(256)
    for most in (64, 100, 255):
        assert len(coarsen(cells, spent, most)[0]) == most
    same, amounts = coarsen(cells, spent, 256)
    assert same is cells and amounts is spent


def test_the_cheapest_go_first() -> None:
    boxes = np.array([[[0, 1]], [[1, 2]], [[2, 10]], [[10, 11]]])
    coarse_boxes, spent = coarsen(boxes, np.array([5, 0, 3, 4]), 3)
    # Raising eight points by one costs 8, two by five and one by three less: 1-2 costs 3.
    assert coarse_boxes.tolist() == [[[0, 1]], [[1, 10]], [[10, 11]]] and spent.tolist() == [
        5,
        3,
        4,
    ]


def test_boxes_without_neighbours_stay() -> None:
    turning = np.array([[[0, 2], [0, 1]], [[2, 3], [0, 2]], [[1, 3], [2, 3]], [[0, 1], [1, 3]],
                        [[1, 2], [1, 2]]])  # fmt: skip
    coarse_boxes, spent = coarsen(turning, np.arange(5), 2)
    assert (coarse_boxes == turning).all() and spent.tolist() == [0, 1, 2, 3, 4]
