"""What bounds cut: exact without noise where bounds are seen, near the truth where they are not."""

import math

import numpy as np
import numpy.typing as npt
import pytest

from dpstream.accounting.query.bounds import (
    cells_of_values,
    design_bounds,
    not_estimated,
    settled,
)
from dpstream.accounting.query.cuts import Cut, cut_of
from dpstream.accounting.query.plan import GROUPS, QueryColumn
from dpstream.accounting.tuning.question import Histogram, encoder_matrix, histogram, magnitudes
from tests.queries import COUNT, MEAN, ROWS, SUM, UNITS, query

Int64 = npt.NDArray[np.int64]
COUNTED = QueryColumn("c", "count", per="group")


def prefixes(of: Histogram, values: Int64) -> npt.NDArray[np.float64]:
    return np.cumsum(np.bincount(cells_of_values(of, values), minlength=of.cells)).astype(float)


def tree(edges: tuple[int, ...]) -> Histogram:
    return histogram("c", edges, len(edges), (0.01, 0.99), 1, 0.5, 1.0)


def chosen(column: QueryColumn, values: Int64, seed: int, epsilon: float = 1.0) -> Cut:
    """Of bounds that are chosen from noisy nodes."""
    plan = query(column, groups=1, selects=False, epsilon=epsilon)
    design = design_bounds(plan)
    assert design is not None
    [of] = design.histograms
    counts = np.bincount(cells_of_values(of, values), minlength=of.cells)
    nodes = encoder_matrix(of.cells) @ counts
    noise = np.rint(np.random.default_rng(seed).normal(0, of.sigma, len(nodes)))
    return settled(plan, design, [nodes + noise.astype(np.int64)]).cuts[column.name]


def of_counts(values: Int64, bound: float) -> float:
    """Share of the rows that a bound on rows cuts."""
    return float(np.maximum(values - bound, 0).sum() / values.sum())


def test_shares_of_values_are_exact_without_noise() -> None:
    of = tree((-8, -4, -2, -1, 0, 1, 2, 4, 8))
    values = np.array([-9, -8, -3, -1, 0, 0, 1, 2, 3, 5, 8, 20])
    for low, high in ((-2, 2), (-4, 4), (-1, 0), (0, 1), (1, 4), (-4, -1), (-8, 8)):
        cut = cut_of(of, prefixes(of, values), "values", (low, high), 0.5, True)
        # A bound nearer to 0 takes values that are equal to it as beyond: their cell is not divided
        under = values < low if low <= 0 else values <= low
        over = values > high if high >= 0 else values >= high
        if high == 8:  # the last cell of a tree holds all beyond
            over[:], under[:] = False, False
        assert (cut.low, cut.high) == (low / 2, high / 2)
        assert cut.below == pytest.approx(under.mean()) and cut.above == pytest.approx(over.mean())
        assert 0 <= (cut.amount or 0) <= (cut.amount_at_most or 0) <= 1


def test_nothing_is_cut_of_nothing() -> None:
    of = tree(magnitudes(64))
    for values in (np.zeros(0, np.int64), np.ones(2, np.int64)):
        cut = cut_of(of, prefixes(of, values), "rows", (0, 32), 1.0, True)
        assert cut.above == cut.below == cut.amount == 0 and cut.within == 1


@pytest.mark.parametrize("units", [3_000, 30_000, 300_000])
@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0])
def test_the_cut_of_log_normal_rows_is_near_the_truth(units: int, sigma: float) -> None:
    draw = np.random.default_rng(units)
    rows = np.ceil(draw.lognormal(1.5, sigma, units)).astype(np.int64)
    errors, truths, within = [], [], []
    for seed in range(9):
        cut = chosen(COUNTED, rows, seed)
        assert cut.of == "rows" and cut.amount is not None and cut.amount_at_most is not None
        truths.append(of_counts(rows, cut.high))
        errors.append(abs(cut.amount - truths[-1]))
        within.append(cut.amount <= cut.amount_at_most >= truths[-1])
        assert abs(cut.above - np.mean(rows > cut.high)) <= cut.within
    assert np.mean(errors) < 0.01 + np.mean(truths) < 0.2 and sum(within) >= 8


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_where_nothing_is_cut_little_is_reported(rows: int) -> None:
    values = np.random.default_rng(2).integers(1, rows + 1, 20_000)
    for seed in range(9):
        cut = chosen(COUNTED, values, seed)
        assert rows <= cut.high <= 1.5 * rows
        assert (cut.amount or 0) < 0.02 and cut.above <= cut.within


def test_a_power_law_is_within_what_is_reported_at_most() -> None:
    rows = np.ceil(np.random.default_rng(4).pareto(1.5, 100_000) + 1e-9).astype(np.int64)
    cuts = [chosen(COUNTED, rows, seed) for seed in range(9)]
    within = [of_counts(rows, cut.high) <= (cut.amount_at_most or 0) for cut in cuts]
    assert sum(within) >= 8


def test_sizes_of_both_signs_add_up() -> None:
    values = np.rint(np.random.default_rng(5).normal(0, 300, 200_000)).astype(np.int64)
    cut = chosen(QueryColumn("c", "sum", per="group"), values, 1)
    beyond = np.maximum(values - cut.high, 0) + np.maximum(cut.low - values, 0)
    assert cut.amount == pytest.approx(beyond.sum() / np.abs(values).sum(), abs=0.01)


def test_variances_have_no_amount() -> None:
    values = np.random.default_rng(6).integers(0, 900, 100_000)
    cut = chosen(QueryColumn("c", "var"), values, 1)
    assert cut.amount is None and cut.amount_at_most is None and cut.above <= cut.within


@pytest.mark.parametrize("kind", ["sum", "var"])
def test_values_beyond_all_candidates_are_reported_as_beyond(kind: str) -> None:
    column = QueryColumn("c", kind, per="row" if kind == "var" else "group")  # type: ignore[arg-type]
    values = np.where(np.arange(50_000) % 4 > 0, 100, 1 << 40)
    cut = chosen(column, values, 1)
    assert cut.above == pytest.approx(0.25, abs=0.02) and cut.high < 1 << 40


def test_an_estimate_is_of_noisy_counts() -> None:
    """Another draw of noise gives another share: the exact one is nowhere."""
    rows = np.ceil(np.random.default_rng(7).lognormal(1, 1, 20_000)).astype(np.int64)
    shares = {chosen(COUNTED, rows, seed).above for seed in range(6)}
    assert len(shares) > 4


def test_what_is_not_estimated_is_named() -> None:
    plan = query(SUM, MEAN, COUNT, ROWS, UNITS)
    given = not_estimated(plan, (), True)
    assert given == ("groups", "bounds of s", "bounds of m", "rows of m", "bounds of n",
                     "rows of rows")  # fmt: skip
    names = not_estimated(plan, {GROUPS, "m", MEAN.rows_histogram, "n"}, True)
    assert names == ("bounds of s", "rows of rows")
    assert not_estimated(query(UNITS), (), False) == ()
    assert math.isfinite(chosen(COUNTED, np.ones(9_000, np.int64), 1).within)
