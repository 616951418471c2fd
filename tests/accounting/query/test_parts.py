"""Parts of columns: bounds, and the effect of one unit as the accounting states it."""

import itertools
import math

import numpy as np
import pytest

from dpstream.accounting.query.parts import (
    LEAVES,
    QueryPart,
    cell_at,
    cells_of,
    centre_of,
    half_of,
    levels_of,
    middle_of,
    parts_by_column,
    parts_of,
    rank_factor,
    tree_of,
    value_at,
    windows_of,
)
from dpstream.accounting.query.plan import QueryColumn
from tests.queries import ALL, COUNT, MEAN, QUANTILES, ROW_SUM, ROWS, STDDEV, SUM, UNITS, VAR, query


@pytest.mark.parametrize("cells", [2, 16, 256])
def test_levels_are_the_ones_of_a_column(cells: int) -> None:
    tree = tree_of(cells)
    assert (tree.matrix.sum(axis=0) == tree.levels).all()
    assert (
        tree.levels == levels_of(QueryColumn("q", "quantiles", 0, cells - 1)) == cells.bit_length()
    )


def test_least_squares_gives_exact_prefixes_back() -> None:
    tree = tree_of(64)
    counts = np.random.default_rng(1).integers(0, 50, (10, 64))
    estimates = (counts @ tree.matrix.T) @ tree.prefixes.T
    assert np.allclose(estimates, np.cumsum(counts, axis=1))


def test_covariance_of_prefixes() -> None:
    tree = tree_of(16)
    noise = np.random.default_rng(2).normal(size=(200_000, len(tree.matrix)))
    seen = np.cov((noise @ tree.prefixes.T).T)
    assert np.allclose(seen, tree.factor, atol=0.03)


def test_cells_cover_the_range_in_order() -> None:
    for column in (
        QueryColumn("q", "quantiles", -7, 20),
        QueryColumn("q", "quantiles", 0, 1000),
        QueryColumn("q", "quantiles", 0, 1, grid=0.001),
    ):
        lo, hi = column.grid_bounds()
        values = np.arange(lo - 3, hi + 4)
        cells = cell_at(column, values)
        assert cells.min() == 0 and (np.diff(cells) >= 0).all()
        assert cells.max() < cells_of(column) <= LEAVES
        # The first value of a cell comes back from the cell's beginning.
        back = value_at(column, cells.astype(float) + 1 - 1e-9)
        inside = np.clip(values, lo, hi) * column.grid
        width = max(1, (hi - lo + 1) / cells_of(column)) * column.grid
        assert (np.abs(back - inside) <= width + 1e-12).all()


def test_few_values_have_a_cell_each() -> None:
    column = QueryColumn("q", "quantiles", 0, 15)
    assert (cell_at(column, np.arange(16)) == np.arange(16)).all()
    assert (value_at(column, np.arange(16, dtype=np.float64) + 0.7) == np.arange(16)).all()


def test_rank_factor_is_a_sd() -> None:
    column, tree = QueryColumn("q", "quantiles", 0, 15), tree_of(16)
    noise = np.random.default_rng(2).normal(size=(100_000, len(tree.matrix))) @ tree.prefixes.T
    seen = (noise - noise[:, -1:] / 2).std(axis=0).max()
    assert np.isclose(rank_factor(column), seen, rtol=0.01)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_windows_are_means_of_prefixes(size: int) -> None:
    """By their definition, prefix by prefix; and of noise by its own draws."""
    tree, windows = tree_of(16), windows_of(16, size)
    prefix = np.cumsum(np.random.default_rng(3).integers(0, 9, 16)).astype(float)
    ahead, behind = (means @ prefix for means in windows.means)
    for cell in range(16):
        on = [prefix[min(cell + k, 15)] for k in range(size)]
        before = [prefix[cell - 1 - k] if cell > k else 0 for k in range(size)]
        assert np.isclose(ahead[cell], np.mean(on)) and np.isclose(behind[cell], np.mean(before))
    noise = np.random.default_rng(2).normal(size=(200_000, len(tree.matrix))) @ tree.prefixes.T
    for means, variance, total in zip(*windows, strict=True):
        smooth = noise @ means.T
        assert np.allclose(smooth.var(axis=0), variance, atol=0.03)
        assert np.allclose((smooth * noise[:, -1:]).mean(axis=0), total, atol=0.03)


def test_cells_follow_the_width_of_the_range_wherever_it_lies() -> None:
    for low in (-1_000_000, -8, 0, 500):
        for width, cells in ((2, 2), (16, 16), (27, 32), (129, 256), (5_000, 256)):
            column = QueryColumn("q", "quantiles", low, low + width - 1)
            assert cells_of(column) == cells == 1 << (levels_of(column) - 1)
            steps = np.arange(width)
            wanted = steps * cells // max(width, cells)
            assert cell_at(column, low + steps).tolist() == wanted.tolist()
            assert cell_at(column, low + steps).dtype == np.int64
        column = QueryColumn("q", "quantiles", low, low + 15)
        assert (cell_at(column, low + np.arange(16)) == np.arange(16)).all()
        assert (
            value_at(column, np.arange(16, dtype=np.float64) + 0.5) == low + np.arange(16)
        ).all()


def test_rank_factor_is_of_the_rows_of_the_inverse() -> None:
    for cells in (2, 16, 256):
        prefixes = tree_of(cells).prefixes
        wanted = np.linalg.norm(prefixes - prefixes[-1] / 2, axis=1).max()
        factor = rank_factor(QueryColumn("q", "quantiles", 0, cells - 1))
        assert np.isclose(factor, wanted, rtol=1e-9)


def test_a_tree_that_all_share_is_read_only() -> None:
    tree = tree_of(16)
    assert not tree.prefixes.flags.writeable and not tree.factor.flags.writeable


def ranges(*columns: QueryColumn) -> list[tuple[str, int, int, int]]:
    return [(p.what, p.low, p.high, p.nodes) for p in parts_of(query(*columns))]


def test_ranges() -> None:
    assert ranges(COUNT) == ranges(UNITS) == [("count", 0, 1, 1)]
    assert ranges(ROWS) == [("count", 0, 3, 1)]
    assert ranges(SUM) == [("sum", -4, 10, 1)]
    assert ranges(ROW_SUM) == [("sum", 0, 12, 1)]
    assert ranges(MEAN) == [("sum", -60, 60, 1), ("count", 0, 3, 1)]
    assert ranges(VAR) == [("sum", -8, 10, 1), ("square", -24, 26, 1), ("count", 0, 2, 1)]
    assert ranges(QUANTILES) == [("tree", 0, 2, 5)]


@pytest.mark.parametrize("column", [MEAN, VAR, STDDEV])
def test_ranges_hold_every_table_of_rows(column: QueryColumn) -> None:
    lo, hi = column.grid_bounds()
    total = next(p for p in parts_of(query(column)) if p.what == "sum")
    middle, most = middle_of(column), 0
    for values in itertools.combinations_with_replacement({lo, lo + 1, middle, hi - 1, hi}, 2):
        centred = [v - middle for v in values]
        most = max(most, *map(abs, centred))
        assert total.low <= sum(centred) <= total.high
        if column.kind != "mean":
            square = next(p for p in parts_of(query(column)) if p.what == "square")
            assert square.low <= sum(v * v - centre_of(column) for v in centred) <= square.high
    assert most == half_of(column) <= math.ceil((hi - lo) / 2)


def test_shares_add_up() -> None:
    assert math.isclose(sum(p.share for p in parts_of(query(*ALL))), 1)
    twice = parts_of(query(COUNT, QueryColumn("t", "sum", 0, 1, share=3.0)))
    assert [p.share for p in twice] == [0.25, 0.75]


def test_effects_of_a_unit() -> None:
    total, count = parts_of(query(MEAN))
    assert [total.squared(n) for n in (1, 4)] == [3600, 4 * 3600]
    assert [count.squared(n) for n in (1, 4)] == [9, 36]
    [tree] = parts_of(query(QUANTILES))
    assert tree.squared(3) == 3 * 2**2 * 5
    total, count = parts_of(query(MEAN, groups=None, norm=4.0))
    assert [count.squared(n) for n in (1, 2, 9)] == [9, 16, 16]
    assert total.squared(100) == (4 * 20) ** 2
    assert count.alone == 3 * count.unit and total.unit == 1 << 16


def test_norms_are_of_what_one_row_adds() -> None:
    """R' = R times the most of one row, or of one unit of value: in grid units of the part."""
    fine = QueryColumn("f", "sum", -3, 1, rows=2, grid=0.25)
    wanted = {
        (COUNT, "count"): 1, (ROWS, "count"): 1, (UNITS, "count"): 1, (QUANTILES, "tree"): 1,
        (SUM, "sum"): 2, (fine, "sum"): 4, (MEAN, "sum"): 20, (MEAN, "count"): 1,
        (VAR, "sum"): 5, (VAR, "square"): 13, (STDDEV, "square"): 41,
    }  # fmt: skip
    for (column, what), row in wanted.items():
        parts = parts_of(query(column, groups=None, norm=1.5))
        [norm] = [part.norm for part in parts if part.what == what]
        assert norm == 1.5 * row, (column, what)
        assert all(part.norm is None for part in parts_of(query(column)))


def test_ranges_of_either_sign() -> None:
    assert ranges(QueryColumn("m", "mean", 10, 20, per="group")) == [
        ("sum", -5, 5, 1), ("count", 0, 1, 1),
    ]  # fmt: skip
    assert ranges(QueryColumn("n", "count", 2, 9, per="group")) == [("count", 0, 9, 1)]
    assert ranges(QueryColumn("s", "sum", -4, -1, rows=3)) == [("sum", -12, 0, 1)]
    low = parts_of(query(QueryColumn("s", "sum", -9, 2, per="group")))[0]
    assert low.most == 9 and low.squared(2) == 2 * 81 and low.alone == 9


@pytest.mark.parametrize(("low", "high"), [(50, 150), (-150, -50), (-150, 50), (0, 150)])
def test_a_unit_that_comes_or_goes_moves_a_sum_by_its_farther_bound(low: int, high: int) -> None:
    """Absent (0) or in the bounds: never by the width of the bounds alone."""
    part = parts_of(query(QueryColumn("s", "sum", low, high, per="group")))[0]
    assert (part.low, part.high) == (min(low, 0), max(high, 0))
    assert part.most == 150 and part.squared(3) == 3 * 150**2 and part.alone == 150


def test_every_part_can_be_absent() -> None:
    low = QueryColumn("l", "mean", 50, 150, per="group")
    for part in parts_of(query(*ALL, low, QueryColumn("c", "count", 3, 9, per="group"))):
        assert part.low <= 0 <= part.high


def test_scaled_vectors_of_coarse_grids_are_refined() -> None:
    def refined(low: int, high: int) -> int:
        column = QueryColumn("s", "sum", low, high, per="group")
        return parts_of(query(column, groups=None, norm=2.0))[0].refine

    assert refined(0, (1 << 16) - 1) == refined(1 - (1 << 16), 0) == 16
    assert refined(0, 1 << 16) == refined(-(1 << 16), 0) == refined(-(1 << 17), 1) == 0
    assert parts_of(query(SUM))[0].refine == 0


def test_parts_by_column() -> None:
    plan = query(MEAN, QUANTILES, UNITS)
    lone = QueryPart("", "count", 0, 1, 1, None, 0, 1.0)
    part_indices = parts_by_column(plan, (*parts_of(plan), lone))
    assert part_indices == {"m": [0, 1], "q": [2], "u": [3]}
