"""Trees of quantiles: matrix, least squares, cells."""

import numpy as np
import pytest

from dpstream.accounting.query.plan import QueryColumn
from dpstream.accounting.query.tree import (
    LEAVES,
    cell_at,
    cells_of,
    levels_of,
    rank_factor,
    tree_of,
    value_at,
    windows_of,
)


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
