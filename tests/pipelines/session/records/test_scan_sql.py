"""The words of boxes and cells, run by DuckDB over every coordinate."""

import itertools

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.regions.boxes import union
from dpstream.pipelines.session.records import scan_sql
from dpstream.pipelines.session.records.scan_sql import BOXES, cell, where

SIZES = (7, 5, 6)
POINTS = np.array(list(itertools.product(*map(range, SIZES))))
HELD = np.array([[0, size] for size in SIZES])


def rows(boxes: np.ndarray, held: np.ndarray = HELD) -> list[list[int]]:
    """The points that DuckDB finds in boxes, each as often as it finds it."""
    with duckdb.connect() as db:
        db.register("t", pa.table({f"x{i}": POINTS[:, i].astype(np.uint8) for i in range(3)}))
        clause = where(boxes, held)
        if clause.boxes is not None:
            db.register(BOXES, clause.boxes)
        text = f"SELECT x0, x1, x2 FROM t{clause.join} WHERE {clause.text} ORDER BY ALL"
        return [list(row) for row in db.sql(text).fetchall()]


def held_in(boxes: np.ndarray) -> list[list[int]]:
    inside = [((box[:, 0] <= POINTS) & (box[:, 1] > POINTS)).all(axis=1) for box in boxes]
    return list(POINTS[np.logical_or.reduce(inside)].tolist())


def some_boxes(rng: np.random.Generator, count: int) -> np.ndarray:
    edges = [[np.sort(rng.choice(size + 1, 2, replace=False)) for size in SIZES]
             for _ in range(count)]  # fmt: skip
    return union(np.array(edges))


@pytest.mark.parametrize("most", [1, 4, 30, 1 << 20])
def test_disjoint_boxes_hold_their_points_once(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_sql, "MAX_ROWS", most)
    rng, joins = np.random.default_rng(4), 0
    for count in (1, 2, 3, 4, 6, 9):
        boxes = some_boxes(rng, count)
        assert rows(boxes) == held_in(boxes)
        joins += where(boxes, HELD).boxes is not None
    assert joins >= 3


def test_a_comparison_that_all_records_meet_is_left_out() -> None:
    box = np.array([[[2, 7], [0, 3], [1, 5]]])
    assert where(box, HELD).text == "x0 >= 2 AND x1 < 3 AND x2 >= 1 AND x2 < 5"
    assert where(box, np.array([[3, 6], [1, 3], [0, 6]])).text == "x2 >= 1 AND x2 < 5"
    assert where(box, np.array([[3, 6], [1, 3], [1, 5]])).text == "true"
    assert where(box, np.array([[0, 2], [0, 5], [0, 6]])).text == "false"


def test_boxes_that_can_be_clubbed_are_no_join() -> None:
    parts = np.array([[[i, i + 1], [0, 5], [2, 4]] for i in range(7)])
    assert where(parts, HELD) == ("x2 >= 2 AND x2 < 4", "", None)


@pytest.mark.parametrize(
    ("edges", "most", "form"),
    [
        ([0, 2, 4, 6], 1 << 14, "//"),
        ([1, 2, 3], 1 << 14, "-"),
        ([0, 5], 1 << 14, "0"),
        ([0, 1, 4, 6], 1 << 14, "["),
        ([0, 2, 6], 1 << 14, "["),
        ([0, 1, 4, 6], 2, "CASE"),
        ([1, 2, 4, 5, 6], 2, "CASE"),
    ],
)
def test_ranges_between_edges(
    edges: list[int], most: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_sql, "MAX_LIST", most)
    text = cell("x", np.array(edges))
    assert form in text
    values = np.arange(edges[0], edges[-1], dtype=np.uint8)
    with duckdb.connect() as db:
        db.register("t", pa.table({"x": values}))
        places = [row[0] for row in db.sql(f"SELECT {text} FROM t").fetchall()]
    assert places == (np.searchsorted(edges, values, "right") - 1).tolist()


def test_very_wide_dimensions() -> None:
    """Coordinates of 40 bits, with cells of several dimensions: numbers stay within 64 bits."""
    bounds = np.array([[0, 1 << 40]] * 3)
    boxes = np.array([[[i << 30, (i << 30) + 1]] * 3 for i in range(5)])
    clause = where(boxes, bounds)
    assert clause.boxes is not None and clause.boxes.num_rows == 5
    with duckdb.connect() as db:
        at = np.array([0, 1, 1 << 30, 4 << 30, (4 << 30) + 1])
        db.register("t", pa.table({f"x{i}": at for i in range(3)}))
        db.register(BOXES, clause.boxes)
        text = f"SELECT x0 FROM t{clause.join} WHERE {clause.text} ORDER BY ALL"
        assert [row[0] for row in db.sql(text).fetchall()] == [0, 1 << 30, 4 << 30]
