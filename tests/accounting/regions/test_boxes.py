"""Boxes against all points of small spaces; what is no box is refused."""

from typing import Any

import numpy as np
import pytest

from dpstream.accounting import limits
from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.regions import boxes as module
from dpstream.accounting.regions.boxes import (
    BoxIndex,
    checked,
    club,
    cut,
    cuts,
    disjoint,
    neighbours,
    overlapped,
    points,
    replaced,
    split,
    stacked,
    sums,
    taken,
    union,
    volumes,
    without,
)
from tests.accounting.regions.spaces import members, painted, partition, small, some_box, some_boxes

SIZES = np.array([5, 4, 6])


def everywhere(boxes: Any) -> Any:
    """How many of the boxes each point is in."""
    return sum((members(box[None], SIZES).astype(int) for box in boxes), np.zeros(SIZES, int))


def test_overlap_split_and_difference() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        boxes, _ = partition(rng, SIZES, 12)
        box = some_box(rng, SIZES)
        inside = members(box, SIZES)
        met = overlapped(boxes, box[0])
        assert met.tolist() == [n for n, b in enumerate(boxes)
                                if (members(b[None], SIZES) & inside).any()]  # fmt: skip
        subset = taken(boxes, met)
        pieces = split(subset, box[0])
        assert (pieces.inside == cut(subset, box[0])).all()
        assert (everywhere(pieces.inside) == inside).all()
        assert (everywhere(stacked([pieces.inside, pieces.outside])) == everywhere(subset)).all()
        assert (
            np.bincount(pieces.owners, minlength=len(met)).tolist() == cuts(subset, box[0]).tolist()
        )
        assert (everywhere(without(boxes, box)) == ~inside).all()


def test_overlap_in_a_space_is_that_of_all_comparisons() -> None:
    """Whatever dimensions are left out or looked at first."""
    rng, sizes = np.random.default_rng(2), np.array([40, 30, 50, 7])
    boxes, _ = partition(rng, sizes, 3_000)
    boxes, few = stacked([boxes]), 0
    for number in range(200):
        box = some_box(rng, sizes)[0]
        for place in range(number % 4):
            box[place] = 0, sizes[place]
        met = overlapped(boxes, box, sizes)
        assert met.tolist() == overlapped(boxes, box).tolist()
        few += len(met) < len(boxes) // 16
    assert few > 5 and len(overlapped(boxes, np.stack([sizes * 0, sizes], 1), sizes)) == len(boxes)


def test_some_boxes_in_place_of_others() -> None:
    boxes = np.arange(10 * 4).reshape(10, 2, 2)
    for at, many in (([1, 4, 9], 3), ([1, 4, 9], 5), ([1, 4, 9], 1), ([], 2), ([0, 9], 0)):
        others, numbers = -boxes[:many] - 1, np.array(at, np.int64)
        new_boxes = replaced(boxes, numbers, others)
        remaining = [box for n, box in enumerate(boxes.tolist()) if n not in at]
        assert sorted(new_boxes.tolist()) == sorted(remaining + others.tolist())
        amounts = replaced(boxes[:, 0, 0], numbers, others[:, 0, 0])
        assert amounts.tolist() == new_boxes[:, 0, 0].tolist()
    assert (boxes == np.arange(10 * 4).reshape(10, 2, 2)).all()


def test_boxes_lie_edge_by_edge_in_memory() -> None:
    """Whatever the layout of what is given."""
    boxes = np.arange(10 * 4).reshape(10, 2, 2)
    for given in (boxes, np.asfortranarray(boxes), stacked([boxes])):
        for copy in (stacked([given]), stacked([given, boxes]), taken(given, np.arange(10))):
            assert (copy[:10] == boxes).all() and copy.transpose(1, 2, 0).flags.c_contiguous


def test_thousands_are_disjoint_or_not() -> None:
    """One pair that shares a point is found wherever it is."""
    rng, sizes = np.random.default_rng(3), np.array([400, 300, 500])
    boxes, _ = partition(rng, sizes, 4_000)
    assert disjoint(boxes)
    for _ in range(20):
        worse, at, place = boxes.copy(), int(rng.integers(len(boxes))), int(rng.integers(3))
        worse[at, place, 1] += 1  # into its neighbours, if it has any there
        assert disjoint(worse) == (boxes[at, place, 1] == sizes[place])
    slabs = np.zeros((600, 2, 2), np.int64)  # all meet in one dimension, none in the other
    slabs[:, 0], slabs[:, 1, 0], slabs[:, 1, 1] = (0, 9), np.arange(600), np.arange(1, 601)
    assert disjoint(slabs)
    slabs[77, 1, 1] += 1
    assert not disjoint(slabs)


def test_owners_are_whose_piece_each_is() -> None:
    boxes, _ = partition(np.random.default_rng(1), SIZES, 20)
    box = np.array([[1, 4], [1, 3], [2, 5]])
    subset = taken(boxes, overlapped(boxes, box))
    pieces = split(subset, box)
    for piece, owner in zip(pieces.outside, pieces.owners, strict=True):
        assert (cut(piece[None], subset[owner])[0] == piece).all()


def test_union_has_each_point_once() -> None:
    rng = np.random.default_rng(2)
    for _ in range(60):
        boxes = np.concatenate([some_box(rng, SIZES) for _ in range(4)])
        union_boxes = union(boxes)
        assert disjoint(union_boxes) and (everywhere(union_boxes) == (everywhere(boxes) > 0)).all()
    apart = some_boxes(rng, SIZES)
    assert union(apart) is apart


def test_disjoint_of_few_and_many() -> None:
    rng = np.random.default_rng(3)
    for _ in range(100):
        boxes = np.concatenate([some_box(rng, SIZES) for _ in range(2)])
        assert disjoint(boxes) == (everywhere(boxes).max() <= 1)
    sizes = np.array([1_000, 1_000, 1_000])
    many, _ = partition(rng, sizes, 3_000)
    assert len(many) > 2_500 and disjoint(many)
    corner = many[17:18].copy()
    corner[:, :, 1] = corner[:, :, 0] + 1
    assert not disjoint(np.concatenate([many, corner]))


def test_points_are_exact_and_volumes_near() -> None:
    boxes, _ = partition(np.random.default_rng(4), SIZES, 30)
    assert points(boxes) == 120 == volumes(boxes).sum() and points(boxes[:0]) == 0
    huge = np.full((1, 16, 2), [0, limits.MAX_COORDINATES])
    assert points(huge) == limits.MAX_COORDINATES**16 == volumes(huge)[0]


@pytest.mark.parametrize(("boxes", "rule"), [
    ([[[0, 7], [0, 3], [5, 5]]], "boxes.initial: is empty"),
    ([[[0, 7], [2, 1], [0, 9]]], "boxes.city: is inverted"),
    ([[[-1, 7], [0, 3], [0, 9]]], "boxes.age: reaches out"),
    ([[[0, 8], [0, 3], [0, 9]]], "boxes.age: reaches out"),
    ([[[0, 7], [0, 3], [0, 1 << 62]]], "boxes.initial: reaches out"),
    ([[[0.0, np.nan], [0, 3], [0, 9]]], "whole coordinates"),
    ([[[0.0, np.inf], [0, 3], [0, 9]]], "whole coordinates"),
    ([[[0.5, 2], [0, 3], [0, 9]]], "whole coordinates"),
    ([[[0, 1 << 63], [0, 3], [0, 9]]], "whole coordinates"),
    ([[[0, 1 << 70], [0, 3], [0, 9]]], "whole coordinates"),
    ([[[0, 7], [0, 3]]], "each with 3 pairs"),
    ([[0, 7], [0, 3], [0, 9]], "each with 3 pairs"),
    ([[[0, 4], [0, 3], [0, 9]], [[3, 7], [2, 3], [8, 9]]], "overlap"),
])  # fmt: skip
def test_what_is_no_box_is_refused_with_its_rule(boxes: Any, rule: str) -> None:
    with pytest.raises(UsageError, match=rule) as refused:
        checked(small(), boxes)
    assert refused.value.fix


def test_too_many_boxes_are_refused() -> None:
    most = limits.MAX_QUERY_BOXES
    boxes = np.broadcast_to(small().everything, (most + 1, 3, 2))
    with pytest.raises(UsageError, match="at most 4,096"):
        checked(small(), boxes)


def test_boxes_of_any_whole_type_are_accepted() -> None:
    box = [[[0, 7], [0, 3], [0, 9]]]
    for kind in (np.int8, np.int64, np.uint32):
        checked_box = checked(small(), np.array(box, kind))
        assert checked_box.dtype == np.int64 and checked_box.tolist() == box


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
    monkeypatch.setattr(module, "_mixed", lambda v, _: np.zeros(len(v), np.uint64))
    rng = np.random.default_rng(1)
    for _ in range(20):
        boxes, spent = partition(rng, SIZES, 40)
        merged_boxes, left = club(boxes, spent)
        assert (painted(merged_boxes, left, SIZES) == painted(boxes, spent, SIZES)).all()


def test_neighbours_of_any_spend() -> None:
    boxes = np.array([[[2, 4], [0, 1]], [[0, 2], [0, 1]], [[4, 5], [0, 2]]])
    parts = sums(boxes)
    pairs = neighbours(boxes, None, 0, parts[1])
    assert tuple(side.tolist() for side in pairs) == ([1], [0])
    assert not len(neighbours(boxes, np.array([1, 2, 3]), 0, parts[1])[0])


def test_the_given_arrays_stay() -> None:
    boxes, spent = partition(np.random.default_rng(2), SIZES, 40)
    before = boxes.copy(), spent.copy()
    club(boxes, spent)
    assert (boxes == before[0]).all() and (spent == before[1]).all()
