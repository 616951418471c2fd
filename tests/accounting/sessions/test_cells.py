"""Cells: a partition of what is asked, and the ranges that a column has in them."""

import numpy as np
import pytest

from dpstream.accounting import limits
from dpstream.accounting.errors import UsageError
from dpstream.accounting.sessions.aggregates import Axis, Cells, along
from tests.sessions import SHAPES, boxes_of, points, space

SPACE = space()


@pytest.mark.parametrize(("cells", "ranges"), SHAPES)
def test_what_is_inside_are_the_points_that_have_a_cell(
    cells: Cells, ranges: tuple[tuple[str, int, int], ...]
) -> None:
    boxes = boxes_of(SPACE, Cells(), ranges)
    inside = cells.inside(SPACE, boxes)
    for point in points(SPACE):
        has = all(
            any(
                a <= point[SPACE.place(x.name)] < b
                for a, b in zip(x.edges, x.edges[1:], strict=False)
            )
            for x in cells.axes
        )
        place = np.array(point)
        hit = [((b[:, :, 0] <= place) & (place < b[:, :, 1])).all(axis=1).sum()
               for b in (boxes, inside)]  # fmt: skip
        assert hit[1] == (hit[0] if has else 0)
    assert cells.count == np.prod(cells.shape, dtype=int)


@pytest.mark.parametrize(("cells", "ranges"), SHAPES)
@pytest.mark.parametrize("name", ["age", "price", "city"])
def test_ranges_are_those_of_the_points_of_a_cell(
    cells: Cells, ranges: tuple[tuple[str, int, int], ...], name: str
) -> None:
    boxes, place = boxes_of(SPACE, cells, ranges), SPACE.place(name)
    spans = cells.ranges(SPACE, boxes, name)
    values = SPACE.dimensions[place].values
    met: dict[int, set[int]] = {}
    for point in points(SPACE):
        at = np.array(point)
        if ((boxes[:, :, 0] <= at) & (at < boxes[:, :, 1])).all(axis=1).any():
            number = 0
            for axis in cells.axes:
                x = point[SPACE.place(axis.name)]
                number = number * axis.count + int(np.searchsorted(axis.edges, x, "right")) - 1
            met.setdefault(number, set()).add(point[place])
    for number, of in met.items():
        low, high = spans.bounds[spans.range_numbers[number]].tolist()
        inside = {x for x in of if x < values}
        assert 0 <= low < high <= values
        assert not inside or (min(inside), max(inside) + 1) == (low, high)


def test_ranges_without_boxes_are_ranges() -> None:
    for cells, _ in SHAPES:
        spans = cells.ranges(SPACE, SPACE.everything[:0], "age")
        assert (spans.bounds[:, 0] < spans.bounds[:, 1]).all() and len(
            spans.range_numbers
        ) == cells.count


def test_axes_from_values() -> None:
    assert along(SPACE, "age", [-3, 0, 5]) == Axis("age", (0, 3, 8))
    assert along(SPACE, "price", [0.1, 1.6]) == Axis("price", (1, 4))
    assert along(SPACE, "city") == Axis("city", (0, 1, 2))
    assert along(SPACE, "age") == Axis("age", tuple(range(10)))  # the last: missing values
    for bad in (lambda: along(SPACE, "price", [0.2, 1.6]), lambda: along(SPACE, "city", ["A"]),
                lambda: along(SPACE, "name")):  # fmt: skip
        with pytest.raises(UsageError):
            bad()


@pytest.mark.parametrize("axes", [
    (Axis("age", (3,)),), (Axis("age", ()),), (Axis("age", (2, 2)),), (Axis("age", (3, 1)),),
    (Axis("age", (-1, 2)),), (Axis("age", (0, 10)),), (Axis("age", (0, 9)),),
    (Axis("city", (0, 2)),), (Axis("age", (0, 8)), Axis("age", (0, 8))), (Axis("x", (0, 1)),),
])  # fmt: skip
def test_what_is_no_partition(axes: tuple[Axis, ...]) -> None:
    with pytest.raises(UsageError):
        Cells(axes).check(SPACE)
    Cells((Axis("age", (0, 3, 8, 9)), Axis("city", (0, 1)))).check(SPACE)


def test_too_many_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = Cells((Axis("age", (0, 1, 2)), Axis("city", (0, 1, 2))))
    monkeypatch.setattr(limits, "MAX_CELLS", 4)
    cells.check(SPACE)
    monkeypatch.setattr(limits, "MAX_CELLS", 3)
    with pytest.raises(UsageError, match="at most 3"):
        cells.check(SPACE)
    with pytest.raises(UsageError, match="too many values"):
        along(SPACE, "age")
