"""Pure epsilon: exact sensitivity, exact noise, and the errors that are said."""

import math
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.strategies.cells.pure import LatticeStrategy, pure
from dpstream.accounting.workloads.workload import over
from dpstream.dp_transforms.noise.oneshot import OneShot, numbered
from dpstream.pipelines.workload.lattice import (
    LAPLACE_HALF_WIDTH,
    better_lattice,
    estimate_of,
    lattice_of,
    planned_purely,
    published,
    rmse_of,
)
from tests.fixed import INPUTS
from tests.pipelines.workload.survey import workload
from tests.streams import KEYS

QUERY_SET = over([12, 3], ["range", "total"])
LATTICE = lattice_of(pure(QUERY_SET).lattice(10), 0.5, 2)
CELLS = np.random.default_rng(3).integers(0, 40, (12, 3))
RING = KEYS.ring()


def test_scale_is_never_below_what_pure_epsilon_needs() -> None:
    columns = [np.abs(factor).sum(0).max() for factor in LATTICE.strategy.factors]
    assert LATTICE.scale >= 2 * math.prod(map(int, columns)) / 0.5
    assert LATTICE.scale == pytest.approx(4 * math.prod(map(int, columns)))
    assert LATTICE.sd == pytest.approx(math.sqrt(2) * LATTICE.scale, rel=1e-3)


def test_without_noise_least_squares_is_exact() -> None:
    with mock.patch.object(
        OneShot, "discrete_laplace", lambda self, items, scale: np.zeros(len(items), np.int64)
    ):
        plan = estimate_of(LATTICE, published(LATTICE, CELLS, RING, (b"r",)))
    [answers] = plan.answers(QUERY_SET)
    exact = np.concatenate([a.ravel() for a in QUERY_SET.apply(CELLS)])
    assert np.allclose(answers.estimates, exact)
    with pytest.raises(UsageError, match="only totals"):
        list(plan.answers(over([12, 3], ["range", "identity"])))
    with pytest.raises(UsageError, match="all cells"):
        list(plan.answers(QUERY_SET, consistent=True))


def test_errors_are_those_that_are_said() -> None:
    exact = np.concatenate([a.ravel() for a in QUERY_SET.apply(CELLS)])
    off, sd = [], np.zeros(0)
    for run in range(150):
        plan = estimate_of(LATTICE, published(LATTICE, CELLS, RING, (b"%d" % run,)))
        [answers] = plan.answers(QUERY_SET)
        off.append(answers.estimates - exact)
        sd = answers.sd
    measured = np.sqrt(np.mean(np.square(off), axis=0))
    assert np.abs(measured / sd - 1).max() < 0.3
    assert np.sqrt(np.mean(measured**2)) == pytest.approx(np.sqrt(np.mean(sd**2)), rel=0.1)


def test_noise_that_is_not_drawn() -> None:
    with pytest.raises(UsageError):
        lattice_of(pure(QUERY_SET).lattice(), 1e-12, 1)
    assert lattice_of(pure(workload([{"factors": {}}])).lattice(), 1.0, 1).sd > 0


def test_plan(tmp_path: Path) -> None:
    plan = planned_purely(QUERY_SET, 0.25, 1, tmp_path)
    twice = planned_purely(QUERY_SET, 0.125, 1, tmp_path)
    assert twice["cached"] and not plan["cached"]
    assert twice["rmse"] == pytest.approx(2 * plan["rmse"], rel=5e-3)
    noiseless = np.zeros((len(LATTICE.strategy.factors[0]), 1), np.int64)
    [answers] = estimate_of(LATTICE, noiseless).answers(QUERY_SET)
    assert np.sqrt(np.mean(answers.sd**2)) == pytest.approx(plan["rmse"], rel=5e-3)
    for epsilon in (0.0, math.inf, -1.0):
        with pytest.raises(UsageError):
            planned_purely(QUERY_SET, epsilon, 1, tmp_path)


@pytest.mark.slow
def test_all_ranges_of_256(tmp_path: Path) -> None:
    """At a Laplace variance of 1, i.e. epsilon sqrt 2: HDMM has 5.736."""
    assert planned_purely(over([256], ["range"]), math.sqrt(2), 1, tmp_path)["rmse"] <= 5.74


def outside(s: float, variance: np.ndarray) -> np.ndarray:
    """P(|N| > s) for normals of these variances."""
    return np.vectorize(lambda v: math.erfc(s / math.sqrt(2 * v)) if v > 0 else 0.0)(variance)


def test_no_sum_of_laplace_noises_is_outside_more_often() -> None:
    """The majorant of the module's proof, made here from its description: convex, nowhere below
    the normal's tails, of mean .05 over 2 E, with E exponential."""
    s = LAPLACE_HALF_WIDTH * math.sqrt(2)
    v = np.linspace(0, 80, 400_001)
    h = outside(s, v)

    def slope(x: float) -> float:
        return s * math.exp(-(s**2) / (2 * x)) / math.sqrt(2 * math.pi) * x**-1.5

    low, high = 0.1, s**2 / 3
    for _ in range(60):  # where the tangent that touches at v1 + 2 begins
        v1 = (low + high) / 2
        start, touch = outside(s, np.array([v1, v1 + 2]))
        low, high = (v1, high) if touch - start < 2 * slope(v1 + 2) else (low, v1)
    line = touch + slope(v1 + 2) * (v - v1 - 2)
    majorant = np.where(v < v1, h, line)
    assert (majorant - h).min() > -1e-9
    assert np.diff(majorant, 2).min() > -1e-12
    weight = np.exp(-v / 2) / 2
    mean = float(np.trapezoid(majorant * weight, v))
    assert mean <= 0.05 and mean == pytest.approx(0.05, abs=2e-6)
    # A sum of one is outside with exp(-s): the bound is near what a single noise needs.
    assert 0.047 < math.exp(-s) < 0.05 and 1.02 * math.log(20) / math.sqrt(2) > LAPLACE_HALF_WIDTH


@pytest.mark.parametrize("weights", [[1], [1, 1], [3, 1], [5, 2, 1], [1] * 12])
def test_intervals_cover_sums(weights: list[float]) -> None:
    rng = np.random.default_rng(len(weights))
    drawn = rng.laplace(size=(len(weights), 200_000))
    total = np.array(weights, float) @ drawn
    sd = math.sqrt(2 * float(np.sum(np.square(weights))))
    assert np.mean(np.abs(total) > LAPLACE_HALF_WIDTH * sd) <= 0.05


def test_intervals_are_wide_enough_for_what_rounding_adds() -> None:
    """A row's noise is a Laplace but for less than 1."""
    plain = LAPLACE_HALF_WIDTH * math.sqrt(2) * LATTICE.scale / LATTICE.sd
    rows = math.prod(map(len, LATTICE.strategy.factors))
    assert LATTICE.half_width == pytest.approx(plain + math.sqrt(rows) / LATTICE.sd)
    plan = estimate_of(LATTICE, np.zeros((len(LATTICE.strategy.factors[0]), 1), np.int64))
    assert plan.half_width == LATTICE.half_width > LAPLACE_HALF_WIDTH
    small = lattice_of(LatticeStrategy((np.eye(3, dtype=np.int64),)), 3.0, 1)
    draws = (
        OneShot(RING, (b"c",), INPUTS)
        .discrete_laplace(numbered(30_000), small.scale)
        .reshape(3, -1)
    )
    total, width = np.ones(3) @ draws, small.half_width * small.sd * math.sqrt(3)
    assert np.mean(np.abs(total) > width) <= 0.05


def test_whole_cells_where_most_noise_is_zero() -> None:
    """At epsilon 6 a record noises a cell itself least; at epsilon 1 / 2 the strategy is better."""
    ranges = over([32], ["range"])
    solved = pure(ranges)
    figures = {}
    for epsilon in (0.5, 6.0):
        name, chosen = better_lattice(solved.name, solved.lattice(), ranges, epsilon, 1)
        other = lattice_of(solved.lattice(), epsilon, 1)
        figures[epsilon] = name, rmse_of(chosen, ranges) / rmse_of(other, ranges)
    assert figures[6.0][0] == "identity" and figures[6.0][1] < 0.9
    assert figures[0.5] == (solved.name, 1.0)
    total = workload([{"factors": {}}])
    only = pure(total).lattice()
    _, chosen = better_lattice("total", only, total, 6.0, 1)
    assert [f.shape[0] for f in chosen.strategy.factors] == [len(f) for f in only.factors]
    assert chosen.strategy.sensitivity1 == 1


@pytest.mark.parametrize("epsilon", [0.7, 3.0, 6.0])
def test_intervals_of_whole_cells_hold(epsilon: float) -> None:
    """Sums of 1, 2 and 5 noises, exactly: outside at most 5%, also where one noise is mostly 0."""
    cell_lattice = lattice_of(LatticeStrategy((np.eye(40, dtype=np.int64),)), epsilon, 1)
    reach = math.ceil(60 / epsilon)
    law = np.exp(-np.abs(np.arange(-reach, reach + 1.0)) / cell_lattice.scale)
    law /= law.sum()
    total = law
    for terms in range(1, 6):
        sums = np.arange(len(total)) - len(total) // 2
        far = np.abs(sums) > cell_lattice.half_width * cell_lattice.sd * math.sqrt(terms)
        assert float(total[far].sum()) <= 0.05
        total = np.convolve(total, law)
    assert cell_lattice.half_width <= math.sqrt(20) + 1e-4
