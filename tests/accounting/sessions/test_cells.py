"""Cells against the plainest loop over records."""

import itertools

import numpy as np
import pytest

from dpstream.accounting import limits
from dpstream.accounting.errors import UsageError
from dpstream.accounting.regions.dimensions import Budget, Integer
from dpstream.accounting.regions.space import Space
from dpstream.accounting.sessions.cells import Cells, located, totalled

SPACE = Space(
    (
        Integer(name="a", low=0, high=6, missing="point"),
        Integer(name="b", low=0, high=5),
        Budget(name="eps", most=0.000003),
    )
)
BOXES = np.array([[[0, 4], [0, 5], [1, 4]], [[4, 7], [1, 3], [2, 4]]])
CELLS = Cells(SPACE, (1, 0), ([0, 2, 3], [1, 2, 4, 7]))


def records(count: int = 400) -> np.ndarray:
    rng = np.random.default_rng(2)
    return np.stack([rng.integers(0, size, count) for size in SPACE.sizes], axis=1)


def cell_of(row: list[int]) -> int:
    """By trying every cell."""
    if not any(all(lo <= x < hi for x, (lo, hi) in zip(row, box, strict=True)) for box in BOXES):
        return -1
    ranges = itertools.product(*(itertools.pairwise(edges.tolist()) for edges in CELLS.edges))
    for number, cell in enumerate(ranges):
        if all(lo <= row[p] < hi for p, (lo, hi) in zip(CELLS.places, cell, strict=True)):
            return number
    return -1


def test_records_are_in_the_cell_that_holds_them() -> None:
    at = records()
    want = [cell_of(row) for row in at.tolist()]
    assert located(at, BOXES, CELLS).tolist() == want
    assert len(set(want)) == CELLS.size + 1 == 7


def test_totals_are_sums_of_what_is_there() -> None:
    at = records()
    found = totalled(at, BOXES, CELLS, SPACE, (0, 1))
    for cell in range(CELLS.size):
        rows = [row for row in at.tolist() if cell_of(row) == cell]
        there = [row for row in rows if row[0] < 6]  # the last coordinate is no value
        assert found.counts[cell] == len(rows)
        assert found.present[:, cell].tolist() == [len(there), len(rows)]
        assert found.sums[0, cell] == sum(row[0] for row in there)
        assert found.sums[1, cell] == sum(row[1] for row in rows)
    assert (found.present[0] < found.present[1]).any()


def test_one_record_changes_one_cell() -> None:
    at = records(60)
    whole = totalled(at, BOXES, CELLS, SPACE, (1,))
    for row in range(len(at)):
        less = totalled(np.delete(at, row, axis=0), BOXES, CELLS, SPACE, (1,))
        changed = whole.counts != less.counts
        assert changed.sum() <= 1 and np.abs(whole.counts - less.counts).sum() <= 1
        assert ((whole.sums != less.sums)[0] <= changed).all()


def test_without_dimensions_there_is_one_cell() -> None:
    cells = Cells(SPACE)
    assert (cells.shape, cells.size) == ((), 1) and (cells.box(SPACE) == SPACE.whole[0]).all()
    assert totalled(records(), SPACE.whole, cells, SPACE).counts.tolist() == [400]


def test_what_cells_fill() -> None:
    assert CELLS.shape == (2, 3)
    assert CELLS.box(SPACE).tolist() == [[1, 7], [0, 3], [0, 4]]


@pytest.mark.parametrize(
    ("places", "edges"),
    [
        ((0, 0), ([0, 1], [1, 2])),
        ((0,), ()),
        ((0,), ([0],)),
        ((0,), ([0.0, 1.0],)),
        ((0,), ([0, float("nan")],)),
        ((0,), ([[0, 1]],)),
        ((0,), ([1, 1],)),
        ((0,), ([2, 1],)),
        ((0,), ([-1, 1],)),
        ((0,), ([0, 8],)),
    ],
)
def test_cells_that_are_none(places: tuple[int, ...], edges: tuple[list[int], ...]) -> None:
    with pytest.raises(UsageError, match="cells"):
        Cells(SPACE, places, edges)


def test_too_many_cells() -> None:
    wide = Space((Integer(name="a", low=0, high=1 << 13), Integer(name="b", low=0, high=1 << 13),
                  Budget(name="eps", most=1.0)))  # fmt: skip
    edges = np.arange((1 << 13) + 1)
    assert Cells(wide, (0,), (edges,)).size == 1 << 13
    with pytest.raises(UsageError, match=f"at most {limits.MAX_HISTOGRAM_CELLS:,}"):
        Cells(wide, (0, 1), (edges, edges))
