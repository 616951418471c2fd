"""Boxes and cells in DuckDB's words, over columns x0, x1, ... of coordinates.

All columns are whole numbers that are there (no NULL), so that nothing here can fail or round, and
DuckDB may use every optimizer.  What is written down is public: edges, and how many boxes.

* One box is a comparison for each edge that leaves something out.
* Many disjoint boxes are a join: where a row lies between the edges of some dimensions is a cell
  number; a small table names the boxes of each cell with their ranges in the other dimensions.
  A row meets at most one box, because they are disjoint, so that the join never doubles a row.
* Which range of edges a coordinate is in: a division where the edges are even, else a list that is
  looked up by the coordinate (in the greatest common divisor of the widths), else nested
  comparisons.
"""

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Int64
from dpstream.accounting.regions.boxes import club

#: Entries of a list that is looked up; rows of the small table of boxes; boxes that are an OR.
MAX_LIST, MAX_ROWS, FEW = 1 << 14, 1 << 20, 2
#: The small table's name.
BOXES = "boxes_of_query"


class Where(NamedTuple):
    """A condition on rows.

    Attributes:
        text: of WHERE, ``true`` if it leaves nothing out.
        join: of FROM, perhaps empty.
        boxes: the table that it names.
    """

    text: str
    join: str = ""
    boxes: pa.Table | None = None


def where(boxes: Int64, held: Int64) -> Where:
    """Return the condition that a row is in one of some boxes.

    Args:
        boxes: (m, d, 2) disjoint, at least one.
        held: (d, 2) the range of existing coordinates: edges beyond it leave nothing out.
    """
    boxes = _clubbed(boxes, held)
    if not len(boxes):
        return Where("false")
    around = np.stack([boxes[:, :, 0].min(axis=0), boxes[:, :, 1].max(axis=0)], axis=1)
    outer = _ranges(around, held)
    if len(boxes) == 1:
        return Where(_all(outer))
    if len(boxes) <= FEW:
        either = " OR ".join(f"({_all(_ranges(box, around))})" for box in boxes)
        return Where(_all([*outer, f"({either})"]))
    return _joined(boxes, around, outer)


def cell(column: str, edges: Int64) -> str:
    """Return the expression for the number of the range between edges that has a coordinate."""
    widths = np.diff(edges)
    low, unit = int(edges[0]), int(np.gcd.reduce(widths))
    if len(widths) == 1:
        return "0"
    moved = f"({column}::BIGINT - {low})" if low else f"{column}::BIGINT"
    if (widths == unit).all():
        return f"{moved} // {unit}" if unit > 1 else moved
    if int(edges[-1] - low) // unit <= MAX_LIST:
        steps = np.repeat(np.arange(len(widths)), widths // unit).tolist()
        at = f"{moved} // {unit}" if unit > 1 else moved
        return f"{steps}[{at} + 1]"
    return _nested(column, edges.tolist(), 0, len(widths))


def _nested(column: str, edges: list[int], first: int, last: int) -> str:
    if last - first == 1:
        return str(first)
    middle = (first + last) // 2
    return (
        f"CASE WHEN {column} < {edges[middle]} THEN {_nested(column, edges, first, middle)} "
        f"ELSE {_nested(column, edges, middle, last)} END"
    )


def _clubbed(boxes: Int64, held: Int64) -> Int64:
    """Return the same rows as few merged boxes, limited to the existing coordinates."""
    cut = np.stack(
        [np.maximum(boxes[:, :, 0], held[:, 0]), np.minimum(boxes[:, :, 1], held[:, 1])], axis=2
    )
    cut = cut[(cut[:, :, 0] < cut[:, :, 1]).all(axis=1)]
    return club(cut, np.zeros(len(cut), np.int64))[0] if len(cut) > 1 else cut


def _ranges(box: Int64, around: Int64) -> list[str]:
    """Return the comparisons of a box that leave something of a larger one out."""
    conditions = []
    for place, ((low, high), (least, end)) in enumerate(
        zip(box.tolist(), around.tolist(), strict=True)
    ):
        if low > least:
            conditions.append(f"x{place} >= {low}")
        if high < end:
            conditions.append(f"x{place} < {high}")
    return conditions


def _all(parts: list[str]) -> str:
    return " AND ".join(parts) or "true"


def _joined(boxes: Int64, around: Int64, outer: list[str]) -> Where:
    """Return cells of some dimensions, and in each the boxes with their ranges in the others."""
    apart = [place for place in range(boxes.shape[1]) if (boxes[:, place] != around[place]).any()]
    edges = {place: np.unique(boxes[:, place]) for place in apart}
    chosen, cells, rows = list[int](), 1, np.ones(len(boxes))
    for place in sorted(apart, key=lambda place: -len(edges[place])):
        first, last = (np.searchsorted(edges[place], boxes[:, place, side]) for side in (0, 1))
        more = rows * (last - first)
        if more.sum() <= MAX_ROWS and cells * len(edges[place]) < 1 << 40:
            chosen.append(place)
            cells, rows = cells * len(edges[place]), more
    number, owner = _cells_of(boxes, chosen, edges)
    columns = {"cell": number}
    on = ["cell = " + _number(chosen, edges)]
    for place in apart:
        if place not in chosen:
            columns |= {
                f"low{place}": boxes[owner, place, 0],
                f"high{place}": boxes[owner, place, 1],
            }
            on += [f"x{place} >= low{place}", f"x{place} < high{place}"]
    return Where(_all(outer), f" JOIN {BOXES} ON {' AND '.join(on)}", pa.table(columns))


def _number(chosen: list[int], edges: dict[int, Int64]) -> str:
    """Return the expression for the cell number of a row."""
    cell_number = "0"
    for place in chosen:
        cell_number = (
            f"({cell_number} * {len(edges[place]) - 1} + {cell(f'x{place}', edges[place])})"
        )
    return cell_number


def _cells_of(boxes: Int64, chosen: list[int], edges: dict[int, Int64]) -> tuple[Int64, Int64]:
    """Return (cell numbers, boxes): all pairs of a box and a cell that it fills in the chosen."""
    number, owner = np.zeros(len(boxes), np.int64), np.arange(len(boxes))
    for place in chosen:
        first = np.searchsorted(edges[place], boxes[owner, place, 0])
        count = np.searchsorted(edges[place], boxes[owner, place, 1]) - first
        at = np.repeat(np.arange(len(owner)), count)
        within = np.arange(len(at)) - np.repeat(np.cumsum(count) - count, count)
        number = number[at] * (len(edges[place]) - 1) + first[at] + within
        owner = owner[at]
    return number, owner
