"""Clubbing joins what can be joined and changes no point."""

import numpy as np
import pytest

from dpstream.accounting.regions import clubbing
from dpstream.accounting.regions.clubbing import club, neighbours, sums
from tests.accounting.regions.spaces import painted, partition

SIZES = np.array([5, 4, 6])


def joinable(boxes: np.ndarray, spent: np.ndarray) -> bool:
    """Whether two boxes of equal spend make one, by looking at all pairs."""
    for one in range(len(boxes)):
        for two in range(len(boxes)):
            differ = (boxes[one] != boxes[two]).any(axis=1)
            if spent[one] == spent[two] and differ.sum() == 1:
                place = int(np.flatnonzero(differ)[0])
                if boxes[one, place, 1] == boxes[two, place, 0]:
                    return True
    return False


def test_no_point_changes_and_nothing_is_left() -> None:
    rng = np.random.default_rng(0)
    fewer = 0
    for rounds in (0, 5, 40, 80):
        for _ in range(15):
            boxes, spent = partition(rng, SIZES, rounds)
            merged_boxes, left = club(boxes, spent)
            assert (painted(merged_boxes, left, SIZES) == painted(boxes, spent, SIZES)).all()
            assert not joinable(merged_boxes, left)
            fewer += len(boxes) - len(merged_boxes)
    assert fewer > 150


def test_a_grid_of_equal_spend_becomes_one_box() -> None:
    cells = np.array([[[a, a + 1], [b, b + 1]] for a in range(16) for b in range(16)])
    merged_boxes, left = club(cells, np.full(256, 7))
    assert merged_boxes.tolist() == [[[0, 16], [0, 16]]] and left.tolist() == [7]
    left_out = np.arange(256) == 100
    assert len(club(cells, left_out.astype(np.int64))[0]) == 5


def test_sums_that_agree_by_chance_join_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clubbing, "_mixed", lambda v, _: np.zeros(len(v), np.uint64))
    rng = np.random.default_rng(1)
    for _ in range(20):
        boxes, spent = partition(rng, SIZES, 40)
        merged_boxes, left = club(boxes, spent)
        assert (painted(merged_boxes, left, SIZES) == painted(boxes, spent, SIZES)).all()


def test_neighbours_of_any_spend() -> None:
    boxes = np.array([[[2, 4], [0, 1]], [[0, 2], [0, 1]], [[4, 5], [0, 2]]])
    parts = sums(boxes)
    pairs = neighbours(boxes, None, 0, parts[1])
    assert (pairs.first.tolist(), pairs.second.tolist()) == ([1], [0])
    assert not len(neighbours(boxes, np.array([1, 2, 3]), 0, parts[1]).first)


def test_the_given_arrays_stay() -> None:
    boxes, spent = partition(np.random.default_rng(2), SIZES, 40)
    before = boxes.copy(), spent.copy()
    club(boxes, spent)
    assert (boxes == before[0]).all() and (spent == before[1]).all()
