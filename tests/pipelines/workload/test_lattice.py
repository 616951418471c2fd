"""Pure epsilon, exact in sensitivity and noise; and which noise answers: the better one."""

import math
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from dpstream.accounting.composition import Cost
from dpstream.accounting.gaussian import mu_of
from dpstream.accounting.periods import Room
from dpstream.accounting.strategies.cells.auto import Plan, auto
from dpstream.accounting.strategies.cells.products import LatticeStrategy, pure
from dpstream.accounting.workloads.workload import marginals, over
from dpstream.dp_transforms.noise.oneshot import OneShot, numbered
from dpstream.pipelines.render.workload_plan import families_line
from dpstream.pipelines.workload.lattice import (
    LAPLACE_HALF_WIDTH,
    Budget,
    Families,
    better_lattice,
    estimate_of,
    families_of,
    lattice_of,
    planned_purely,
    published,
    rmse_of,
)
from tests.accounting.strategies.cells.shapes import attributes
from tests.accounts import room
from tests.fixed import INPUTS
from tests.golden.pinned import check, of_refusals
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


def test_what_is_refused(tmp_path: Path) -> None:
    lattice, union = pure(QUERY_SET).lattice(), marginals(attributes(3, 4), [1], "range")
    plan = estimate_of(LATTICE, np.zeros((len(LATTICE.strategy.factors[0]), 1), np.int64))
    calls: dict[str, Callable[[], object]] = {
        "cells of a total": lambda: list(plan.answers(over([12, 3], ["range", "identity"]))),
        "cells that are not negative": lambda: list(plan.answers(QUERY_SET, consistent=True)),
        "noise beyond exact draws": lambda: lattice_of(lattice, 1e-12, 1),
        "a total": lambda: lattice_of(pure(workload([{"factors": {}}])).lattice(), 1.0, 1),
        "no epsilon": lambda: planned_purely(QUERY_SET, 0.0, 1, tmp_path),
        "infinite": lambda: planned_purely(QUERY_SET, math.inf, 1, tmp_path),
        "negative": lambda: planned_purely(QUERY_SET, -1.0, 1, tmp_path),
        "neither family": lambda: families_of(union, auto(union), Budget(1.0, 0.0, 1), tmp_path),
    }
    check(Path(__file__).with_name("refusals_lattice.txt"), of_refusals(calls))


def test_plan(tmp_path: Path) -> None:
    plan = planned_purely(QUERY_SET, 0.25, 1, tmp_path)
    twice = planned_purely(QUERY_SET, 0.125, 1, tmp_path)
    assert twice["cached"] and not plan["cached"]
    assert twice["rmse"] == pytest.approx(2 * plan["rmse"], rel=5e-3)
    noiseless = np.zeros((len(LATTICE.strategy.factors[0]), 1), np.int64)
    [answers] = estimate_of(LATTICE, noiseless).answers(QUERY_SET)
    assert np.sqrt(np.mean(answers.sd**2)) == pytest.approx(plan["rmse"], rel=5e-3)


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


RANGES = over([16], ["range"])
PLAN = auto(RANGES)
SMALL = Budget(1.0, 1e-9, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("strategies")


def of(folder: Path, budget: Budget, limit: Room | None = None) -> Families:
    return families_of(RANGES, PLAN, budget, folder, limit)


def test_the_better_one_is_taken(folder: Path) -> None:
    families = of(folder, SMALL)
    assert families.taken == "geometric" and families.gaussian is not None
    assert families.geometric == pytest.approx(planned_purely(RANGES, 1.0, 1, folder)["rmse"])
    mu = mu_of(1.0, 1e-9)
    assert families.gaussian == pytest.approx(math.sqrt(PLAN.error / RANGES.weight) / mu)
    loose = of(folder, Budget(1.0, 0.05, 1))
    assert loose.taken == "gaussian" and loose.gaussian is not None
    assert loose.geometric is not None and loose.gaussian < loose.geometric


def test_a_bound_spares_the_search(tmp_path: Path) -> None:
    families = families_of(RANGES, PLAN, Budget(1.0, 0.2, 1), tmp_path)
    assert families.taken == "gaussian" and families.least and not list(tmp_path.iterdir())
    assert families.geometric is not None
    assert families.geometric <= planned_purely(RANGES, 1.0, 1, tmp_path)["rmse"]


@pytest.mark.parametrize("contributions", [1, 3])
def test_errors_never_rise_with_epsilon_or_delta(folder: Path, contributions: int) -> None:
    def error(epsilon: float, delta: float) -> float:
        families = of(folder, Budget(epsilon, delta, contributions))
        value = families.gaussian if families.taken == "gaussian" else families.geometric
        assert value is not None
        return value

    deltas = [0.0, 1e-12, 1e-9, 1e-6, 1e-3, 0.1]
    for epsilon in (0.3, 1.0, 4.0):
        errors = [error(epsilon, delta) for delta in deltas]
        assert errors == sorted(errors, reverse=True)
    errors = [error(epsilon, 1e-9) for epsilon in (0.1, 0.3, 1.0, 3.0, 9.0)]
    assert errors == sorted(errors, reverse=True)


def test_at_an_equal_share_of_a_limit(folder: Path) -> None:
    """76 Gaussian questions of (1, 1e-9) are within (8, 1e-5), and 8 geometric ones."""
    assert of(folder, SMALL, room((8.0, 1e-5))).taken == "gaussian"
    # Shares that are equal, or less for geometric noise, are compared as they are.
    assert of(folder, SMALL, room((1.0, 1e-9))).taken == "geometric"
    assert of(folder, SMALL, room((8.0, 1e-40))).taken == "geometric"


def test_shares_decide_where_the_bound_does_not(folder: Path) -> None:
    """Geometric noise of its own epsilon is better, and of Gaussian noise's share it is not."""
    families = of(folder, SMALL, room((4.0, 1e-9)))
    assert families.taken == "gaussian" and not families.least
    assert families.gaussian is not None and families.geometric is not None
    assert families.geometric < families.gaussian
    assert of(folder, SMALL, room((3.0, 1e-9))).taken == "geometric"


def test_errors_are_those_of_all_records_of_a_unit(folder: Path) -> None:
    families = of(folder, Budget(1.0, 1e-9, 3))
    gaussian = 3 * math.sqrt(PLAN.error / RANGES.weight) / mu_of(1.0, 1e-9)
    assert families.gaussian == pytest.approx(gaussian)
    assert families.geometric == pytest.approx(planned_purely(RANGES, 1.0, 3, folder)["rmse"])


def test_what_the_limit_does_not_allow_is_not_taken(folder: Path) -> None:
    mostly = Budget(1.0, 1e-5, 1)
    assert of(folder, mostly, room((8.0, 1e-5))).taken == "gaussian"
    assert of(folder, SMALL, room((1.0, 1e-12))).taken == "geometric"
    # Gaussian noise of mu 1.45 is spent: a little more of it is accepted, and no epsilon of 1.
    spent = Cost(9.0, 0.0, 1.45, 0.0)
    assert of(folder, SMALL, room((8.0, 1e-6))).taken == "gaussian"
    large = Budget(6.0, 1e-9, 1)
    alone = of(folder, large)
    assert alone.taken == "geometric" and alone.geometric is not None and alone.geometric < 1
    assert of(folder, large, room((8.0, 1e-6))).taken == "geometric"
    assert of(folder, Budget(1.0, 1e-12, 1), room((8.0, 1e-6), spent)).taken == "gaussian"
    loose = Budget(1.0, 0.2, 1)
    assert of(folder, loose).taken == "gaussian"
    # A first charge of the whole limit is accepted by its own guarantee.
    assert of(folder, loose, room((1.0, 0.2))).taken == "gaussian"
    assert of(folder, loose, room((1.0, 1e-12))).taken == "geometric"


def test_one_that_cannot_answer(tmp_path: Path) -> None:
    union = marginals(attributes(3, 4), [1], "range")
    families = families_of(union, auto(union), SMALL, tmp_path)
    assert families.taken == "gaussian" and families.geometric is None and families.refused
    assert [f["taken"] for f in families.described()] == [True, False]
    assert "gaussian (taken) RMSE" in families_line(families.described())


def test_without_delta_noise_is_geometric(folder: Path) -> None:
    families = of(folder, Budget(1.0, 0.0, 1))
    assert families.taken == "geometric" and families.gaussian is None
    assert families_line(families.described()).startswith("geometric (taken) RMSE")
    gaussian, geometric = families.described()
    assert gaussian["rmse"] is None and gaussian["refused"] and not geometric["refused"]
    both = of(folder, SMALL).described()
    assert [row["refused"] for row in both] == ["", ""]


def test_nothing_is_looked_at_but_public_numbers(folder: Path) -> None:
    """A plan and a budget decide: a sabotaged plan of a better error changes the choice."""
    better = Plan(PLAN.strategy, "total", PLAN.error / 100, PLAN.floor / 100)
    assert families_of(RANGES, better, SMALL, folder).taken == "gaussian"


def test_two_attributes_are_one_product(tmp_path: Path) -> None:
    product = over([4, 3], ["range", "identity"])
    assert families_of(product, auto(product), SMALL, tmp_path).taken == "geometric"
