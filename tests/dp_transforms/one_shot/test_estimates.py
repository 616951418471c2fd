"""Estimates of quotients: NULL, bounds, first-order errors."""

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest

from dpstream.accounting.query.calibration import allocate_query
from dpstream.accounting.query.parts import centre_of, middle_of
from dpstream.accounting.query.plan import QueryColumn
from dpstream.dp_transforms.noise.oneshot import OneShot, numbered
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.one_shot.estimates import Estimate, direct, mean, variance
from tests.fixed import INPUTS
from tests.queries import COUNT, MEAN, STDDEV, SUM, VAR, query

Z = 1.96
SETTINGS: tuple[dict[str, Any], ...] = ({}, {"groups": None, "norm": 9.0})


def parts(column: QueryColumn) -> list:  # type: ignore[type-arg]
    return list(allocate_query(query(column)).parts)


def int_arrays(*values: int) -> list:  # type: ignore[type-arg]
    return [np.array([value]) for value in values]


def test_no_count_is_null() -> None:
    for count in (0, -4):
        assert np.isnan(mean(MEAN, parts(MEAN), int_arrays(3, count), Z)).all()
        assert np.isnan(variance(VAR, parts(VAR), int_arrays(3, 5, count), Z)).all()
    assert not np.isnan(mean(MEAN, parts(MEAN), int_arrays(3, 1), Z)).any()


def test_everything_stays_in_its_range() -> None:
    far = mean(MEAN, parts(MEAN), int_arrays(10**9, 5), Z)
    assert far.value[0] == far.high[0] == 20 and far.low[0] >= 10
    for column, most in ((VAR, 25.0), (STDDEV, 5.0)):
        for square in (10**9, -(10**9)):
            estimate = variance(column, parts(column), int_arrays(0, square, 9), Z)
            assert all(
                0 <= part[0] <= most for part in (estimate.value, estimate.low, estimate.high)
            )
            assert estimate.sd[0] >= 0 and np.isfinite(estimate.sd[0])


def test_first_order_errors() -> None:
    """Against small differences of the estimate itself."""

    def value(made: Estimate) -> float:
        return float(made.value[0])

    for column, at in ((MEAN, (7_000, 3_000)), (VAR, (-2_000, 9_000, 5_000)),
                       (STDDEV, (-2_000, 9_000, 5_000))):  # fmt: skip
        noises, make = parts(column), mean if column is MEAN else variance
        base = make(column, noises, int_arrays(*at), Z)
        total = 0.0
        for index, noise in enumerate(noises):
            moved = list(at)
            moved[index] += 20
            slope = (value(make(column, noises, int_arrays(*moved), Z)) - value(base)) / 20
            total += (slope * noise.sd) ** 2
        assert abs(total**0.5 / float(base.sd[0]) - 1) < 0.02


def test_a_sum_in_its_own_units() -> None:
    [noise] = parts(SUM)
    estimate = direct(SUM, noise, np.array([7]))
    assert estimate.value[0] == 3.5 and estimate.high[0] - 3.5 == noise.margin * 0.5


def drawn(
    column: QueryColumn, values: np.ndarray, ring: KeyRing, draws: int, mechanism: str = "gaussian"
) -> tuple[Estimate, np.ndarray]:
    """So many answers for one group of values at epsilon 1, and whether each holds the truth."""
    plan = query(column, groups=1, selects=False, mechanism=mechanism, delta=1e-9)
    budget = allocate_query(plan)
    exact = np.round(values / column.grid).astype(int)
    sums = {"sum": exact - middle_of(column), "count": np.ones(len(exact), int)}
    sums["square"] = np.square(sums["sum"]) - centre_of(column)
    noisy = []
    for noise in budget.parts:
        one = OneShot(ring, (b"test", noise.part.what.encode(), str(len(values)).encode()), INPUTS)
        draw = one.rounded_gaussian if noise.law == "gaussian" else one.discrete_laplace
        total = int(sums[noise.part.what].sum()) * noise.part.unit
        noisy.append(total + draw(numbered(draws), noise.scale))
    make = mean if column.kind == "mean" else variance
    estimate = make(column, list(budget.parts), noisy, budget.quantile)
    truth = exact.mean() if column.kind == "mean" else exact.var() * column.grid
    truth *= column.grid
    defined = ~np.isnan(estimate.value)
    assert defined.mean() > 0.998
    estimate = Estimate(*(part[defined] for part in estimate))
    return estimate, (estimate.low <= truth) & (truth <= estimate.high)


@pytest.mark.parametrize("mechanism", ["gaussian", "geometric"])
@pytest.mark.parametrize("rows", [40, 100, 400, 2_000])
def test_intervals_of_means_cover(rows: int, mechanism: str, ring: KeyRing) -> None:
    """95% +- 1% also where the count is four sds of its noise, whatever the values; to both sides
    alike."""
    column = QueryColumn("m", "mean", 0, 100, grid=2.0**-17, rows=1)
    random = np.random.default_rng(rows)
    for values in (100 * random.beta(2, 5, rows), random.uniform(45, 55, rows),
                   random.uniform(0, 100, rows)):  # fmt: skip
        estimate, inside = drawn(column, values, ring, 12_000, mechanism)
        assert abs(inside.mean() - 0.95) < 0.0111, inside.mean()
        truth = values.mean()
        for side in (truth < estimate.low, truth > estimate.high):
            assert abs(side.mean() - 0.025) < 0.008
        if (rows, mechanism) == (40, "gaussian") and truth < 35:  # first-order ones fail
            far = 1.96 * estimate.sd
            plain = (truth < estimate.value - far).mean(), (truth > estimate.value + far).mean()
            assert abs(plain[0] - plain[1]) > 0.016


@pytest.mark.parametrize("rows", [40, 100, 400, 2_000])
def test_intervals_of_variances_cover(rows: int, ring: KeyRing) -> None:
    """95% and a little more; around the estimate it would be 91% of 40 rows."""
    column = QueryColumn("v", "var", 0, 100, grid=2.0**-9, rows=1)
    random = np.random.default_rng(rows)
    for values in (100 * random.beta(2, 5, rows), random.choice([0.0, 100.0], rows)):
        _, inside = drawn(column, values, ring, 8_000)
        assert inside.mean() > 0.94 and inside.mean() < 0.985, inside.mean()


def test_a_count_that_may_be_none_says_little() -> None:
    """Noise alone could give it: the mean may be anything, and the interval is in order."""
    noises = parts(MEAN)
    estimate = mean(MEAN, noises, int_arrays(0, 2), Z)
    assert (estimate.low[0], estimate.high[0]) == (10, 20)
    random = np.random.default_rng(5)
    noisy = [random.integers(-9_000, 9_000, 4_000), random.integers(1, 900, 4_000)]
    for column, made in ((MEAN, mean), (VAR, variance)):
        many = [*noisy, noisy[1]] if made is variance else noisy
        estimate = made(column, parts(column), many, Z)
        assert (estimate.low <= estimate.value).all() and (estimate.value <= estimate.high).all()


def test_values_and_sds_are_those_of_the_definitions() -> None:
    m, o, n = 40 / 20, 90 / 20, 20
    var = msgspec.structs.replace(VAR, low=0, high=4.5, grid=0.5)
    for column, settings in itertools.product((MEAN, var, STDDEV), SETTINGS):
        noises = list(allocate_query(query(column, **settings)).parts)
        unit = noises[0].part.unit
        assert unit == (1 if not settings else 1 << 16)
        sds = [noise.sd / unit for noise in noises]
        if column is MEAN:
            made = mean(MEAN, noises, int_arrays(40 * unit, n * unit), Z)
            sd = np.hypot(sds[0], m * sds[1]) / n * 0.25
            assert made.value[0] == (60 + m) * 0.25 and np.isclose(made.sd[0], sd)
            continue
        made = variance(column, noises, int_arrays(40 * unit, 90 * unit, n * unit), Z)
        squared = o + (12 if column is var else 40) - m * m
        sd = np.sqrt(sds[1] ** 2 + (2 * m * sds[0]) ** 2 + ((2 * m * m - o) * sds[2]) ** 2) / n
        if column is var:
            assert np.isclose(made.value[0], squared / 4) and np.isclose(made.sd[0], sd / 4)
        else:
            assert np.isclose(made.value[0], np.sqrt(squared) / 2)
        assert not np.isnan(variance(column, noises, int_arrays(0, 5 * unit, unit), Z)).any()


def test_a_count_in_its_own_units() -> None:
    for settings in SETTINGS:
        [count] = allocate_query(query(COUNT, **settings)).parts
        unit = count.part.unit
        plain = direct(COUNT, count, np.array([7 * unit]))
        assert plain.value[0] == 7 and plain.sd[0] == count.sd / unit
        assert plain.low[0] == 7 - count.margin / unit


def test_a_standard_deviation_near_0_has_half_of_its_interval() -> None:
    for square in (-40 * 100, -40 * 100 + 1):
        estimate = variance(STDDEV, parts(STDDEV), int_arrays(0, square, 100), Z)
        half = (estimate.high[0] - estimate.low[0]) / 2
        assert estimate.low[0] == 0 < estimate.high[0] and np.isclose(estimate.sd[0], half)
    assert estimate.value[0] > 0


def test_small_deviations_have_first_order_errors_too() -> None:
    n, noises = 10**7, parts(STDDEV)
    estimate = variance(STDDEV, noises, int_arrays(0, round((0.81 - 40) * n), n), Z)
    sd = np.hypot(noises[1].sd, (40 - 0.81) * noises[2].sd) / n
    assert np.isclose(estimate.value[0], 0.9 * 0.5) and np.isclose(
        estimate.sd[0], sd / (2 * 0.9) * 0.5
    )
    assert variance(VAR, parts(VAR), int_arrays(0, -(10**9), 9), Z).value[0] == 0
