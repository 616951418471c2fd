"""Snapped boxes contain the asked ones, end on the grid, and share no point."""

import numpy as np
import pytest

from dpstream.accounting.arrays import Int64
from dpstream.accounting.regions import snapping
from dpstream.accounting.regions.boxes import disjoint
from dpstream.accounting.regions.snapping import outward, snapped
from dpstream.accounting.regions.space import Space
from tests.accounting.regions.spaces import members, small, some_boxes


def test_every_asked_point_is_in_the_snapped_boxes() -> None:
    rng = np.random.default_rng(0)
    space = small(grid=4)
    for _ in range(100):
        boxes = some_boxes(rng, space.sizes, 6)
        snapped_boxes = snapped(space, boxes)
        assert disjoint(snapped_boxes)
        inside = members(boxes, space.sizes)
        charged = members(snapped_boxes, space.sizes)
        assert (charged | ~inside).all()
        for edges in snapped_boxes:
            assert set(edges[0].tolist()) <= {0, 4, 6, 7}
        # No cell that no asked box has a point in.
        for low, high in ((0, 4), (4, 6), (6, 7)):
            met = inside[low:high].any(axis=0)
            assert (charged[low:high] == met).all()


def inward(space: Space, boxes: Int64) -> Int64:
    """Sabotaged: edges move to the grid line inside."""
    snapped_boxes = outward(space, boxes)
    snapped_boxes[:, 0, 0] = np.minimum(-(-boxes[:, 0, 0] // 4) * 4, boxes[:, 0, 1] - 1)
    return snapped_boxes


def test_snapping_inward_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapping, "outward", inward)
    with pytest.raises(AssertionError):
        test_every_asked_point_is_in_the_snapped_boxes()


def test_a_grid_of_one_changes_nothing_but_the_number() -> None:
    rng = np.random.default_rng(1)
    space = small()
    for _ in range(30):
        boxes = some_boxes(rng, space.sizes, 6)
        snapped_boxes = snapped(space, boxes)
        assert len(snapped_boxes) <= len(boxes)
        assert (members(snapped_boxes, space.sizes) == members(boxes, space.sizes)).all()


def test_missing_values_are_a_cell_of_their_own() -> None:
    space = small(grid=4)
    assert outward(space, space.box(age=(15, 16)))[0, 0].tolist() == [4, 6]
    assert outward(space, np.array([[[6, 7], [0, 1], [0, 1]]]))[0, 0].tolist() == [6, 7]
