"""Estimates of quotients: NULL, bounds, first-order errors.

Quantiles from noisy trees: exact without noise, in order, intervals that hold.
"""

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest

from dpstream.accounting.query.calibration import allocate_query
from dpstream.accounting.query.parts import cells_of, centre_of, middle_of, tree_of, windows_of
from dpstream.accounting.query.plan import QueryColumn
from dpstream.dp_transforms.noise.oneshot import OneShot, numbered
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.one_shot import estimates
from dpstream.dp_transforms.one_shot.bounding import bounded
from dpstream.dp_transforms.one_shot.estimates import (
    Estimate,
    direct,
    mean,
    noisy_prefixes,
    quantiles,
    read_off,
    variance,
)
from tests.fixed import INPUTS
from tests.queries import (
    COUNT,
    MEAN,
    QUANTILES,
    RUN,
    STDDEV,
    SUM,
    VAR,
    generated,
    ids,
    query,
    stage_one,
)

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
    assert far.value[0] == far.high[0] > 20 and far.low[0] >= 10  # a mean is not clipped
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


def test_an_interval_of_a_mean_is_every_mean_that_noise_explains() -> None:
    """Fieller's set, by a grid: also where the count may be none and the set has two parts."""
    noises = parts(MEAN)
    unit, middle = noises[0].part.unit, middle_of(MEAN)
    random = np.random.default_rng(6)
    count = random.integers(1, 4 * int(noises[1].sd), 4_000)
    total = random.integers(-8 * int(noises[0].sd), 8 * int(noises[0].sd), 4_000)
    estimate = mean(MEAN, noises, [total, count], Z)
    first, last = (float(bound) for bound in MEAN.grid_bounds())
    means = np.linspace(first, last, 1_001)
    apart = np.abs(total[:, None] - (means - middle) * count[:, None]) / unit
    spread = np.hypot(noises[0].sd, (means - middle) * noises[1].sd) / unit
    explained = apart <= Z * spread
    both = explained[:, 0] & explained[:, -1] & ~explained.all(1)
    one = explained.any(1) & ~explained.all(1) & ~both
    assert both.sum() > 20 and one.sum() > 1_000 and explained.all(1).sum() > 100
    step = (means[1] - means[0]) * MEAN.grid
    for rows in (one, both, explained.all(1)):
        low = means[explained[rows].argmax(1)] * MEAN.grid
        high = means[-1 - explained[rows, ::-1].argmax(1)] * MEAN.grid
        assert np.allclose(estimate.low[rows], np.minimum(low, estimate.value[rows]), atol=step)
        assert np.allclose(estimate.high[rows], np.maximum(high, estimate.value[rows]), atol=step)


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
            drawn = m * n * n / (n * n + sds[1] ** 2)  # to the middle
            sd = np.hypot(sds[0], drawn * sds[1]) / n * 0.25
            assert np.isclose(made.value[0], (60 + drawn) * 0.25) and np.isclose(made.sd[0], sd)
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


AT = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
WIDE = QueryColumn("q", "quantiles", 0, 1, grid=0.001, at=AT)


def prefixes_of(column: QueryColumn, values: np.ndarray) -> np.ndarray:
    cells = np.histogram(values, np.linspace(0, 1, cells_of(column) + 1))[0]
    return np.cumsum(cells)[None].astype(np.float64)


def test_without_noise_quantiles_are_exact_to_a_cell() -> None:
    values = np.random.default_rng(1).beta(2, 5, 5_000)
    estimate = read_off(WIDE, prefixes_of(WIDE, values), 0.0, 1.96)
    wanted = np.quantile(values, AT)
    assert np.abs(estimate.value[0] - wanted).max() < 2 / 256
    assert (estimate.low <= estimate.value).all() and (estimate.value <= estimate.high).all()


def test_values_with_a_cell_each_are_exact() -> None:
    ages = QueryColumn("q", "quantiles", 0, 15, at=(0.1, 0.5, 0.9))
    values = np.random.default_rng(1).integers(0, 16, 2_001)
    exact = np.cumsum(np.bincount(values, minlength=16))[None].astype(float)
    estimate = read_off(ages, exact, 0.0, 1.96)
    assert (
        estimate.value[0].tolist() == np.quantile(values, ages.at, method="inverted_cdf").tolist()
    )


def test_no_count_has_no_quantiles() -> None:
    estimate = read_off(WIDE, np.zeros((2, 256)), 3.0, 1.96)
    assert all(np.isnan(part).all() for part in estimate)


@pytest.mark.parametrize("order", [AT, AT[::-1], (0.5, 0.1, 0.9)])
def test_quantiles_are_in_order_whatever_the_noise(order: tuple[float, ...]) -> None:
    column = QueryColumn("q", "quantiles", 0, 1, grid=0.001, at=order)
    random = np.random.default_rng(2)
    noisy = random.normal(0, 40, (500, 256)) + np.linspace(0, 60, 256)
    estimate = read_off(column, noisy, 40.0, 1.96)
    defined = ~np.isnan(estimate.value[:, 0])
    assert defined.sum() > 100
    ranked = np.argsort(order, kind="stable")
    for part in (estimate.value, estimate.low, estimate.high):
        assert (np.diff(part[defined][:, ranked], axis=1) >= 0).all()
        assert (part[defined] >= 0).all() and (part[defined] <= 1).all()


def test_least_and_most_are_not_drowned_by_noise() -> None:
    """MIN and MAX of values between .4 and .6 stay near them."""
    random = np.random.default_rng(3)
    tree = tree_of(256)
    exact = np.bincount((random.uniform(0.4, 0.6, 3_000) * 256).astype(int), minlength=256)
    noisy = exact @ tree.matrix.T + random.normal(0, 6, (400, len(tree.matrix)))
    estimate = read_off(WIDE, noisy @ tree.prefixes.T, 6.0, 1.96)
    assert (np.abs(estimate.value[:, 0] - 0.4) < 0.05).mean() > 0.95
    assert (np.abs(estimate.value[:, -1] - 0.6) < 0.05).mean() > 0.95
    naive = (noisy @ tree.prefixes.T >= 0).argmax(axis=1) / 256
    assert (np.abs(naive - 0.4) < 0.05).mean() < 0.2


def test_intervals_hold_the_quantile(ring: KeyRing) -> None:
    values = np.random.default_rng(4).beta(2, 5, 2_000)
    column = QueryColumn("q", "quantiles", 0, 1, grid=0.001, rows=1, at=(0.25, 0.5, 0.9))
    plan = query(column, groups=1, selects=False, epsilon=1.0)
    [noise] = allocate_query(plan).parts
    tree = tree_of(256)
    exact = np.histogram(values, np.linspace(0, 1, 257))[0] @ tree.matrix.T
    drawn = OneShot(ring, (b"test",), INPUTS).rounded_gaussian(
        numbered(4_000 * len(exact)), noise.scale
    )
    estimate = read_off(
        column, (exact + drawn.reshape(4_000, -1)) @ tree.prefixes.T, noise.sd, 1.96
    )
    wanted = np.sort(values)[[500, 1_000, 1_800]]
    inside = ((estimate.low <= wanted) & (wanted <= estimate.high)).mean(axis=0)
    assert (inside > 0.94).all() and (inside < 0.999).all()


def of_values(
    values: np.ndarray, epsilon: float, at: tuple[float, ...], ring: KeyRing, draws: int
) -> tuple[Estimate, np.ndarray]:
    """So many answers about values between 0 and 1, and which hold the values' own quantiles."""
    column = QueryColumn("q", "quantiles", 0, 1, grid=0.001, rows=1, at=at)
    [noise] = allocate_query(query(column, groups=1, selects=False, epsilon=epsilon)).parts
    tree = tree_of(256)
    exact = np.histogram(values, np.linspace(0, 1, 257))[0] @ tree.matrix.T
    drawn = OneShot(ring, (b"test",), INPUTS).rounded_gaussian(
        numbered(draws * len(exact)), noise.scale
    )
    prefixes = (exact + drawn.reshape(draws, -1)) @ tree.prefixes.T
    estimate = read_off(column, prefixes, noise.sd, 1.96)
    wanted = np.floor(np.quantile(values, at, method="inverted_cdf") * 1_000) / 1_000
    return estimate, (estimate.low <= wanted + 1e-9) & (wanted - 1e-9 <= estimate.high)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "epsilon"), [(40, 1.0), (200, 1.0), (2_000, 1.0), (2_000, 0.3),
                                              (200, 4.0)])  # fmt: skip
def test_intervals_cover_whatever_the_values(rows: int, epsilon: float, ring: KeyRing) -> None:
    at, random = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95), np.random.default_rng(rows)
    for values in (random.beta(2, 5, rows), random.uniform(0, 1, rows),
                   random.integers(0, 20, rows) / 20 + 0.001,
                   random.choice([0.1, 0.5, 0.9], rows),
                   np.maximum(random.uniform(0, 1, rows), 0.4)):  # fmt: skip
        _, inside = of_values(values, epsilon, at, ring, 2_000)
        assert (inside.mean(axis=0) > 0.94).all(), inside.mean(axis=0)


def test_means_of_prefixes_make_intervals_shorter(
    ring: KeyRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of single prefixes some are on the other side by chance, far away."""
    values = np.random.default_rng(4).beta(2, 5, 200)

    def widths() -> np.ndarray:
        estimate, inside = of_values(values, 1.0, (0.25, 0.5, 0.75), ring, 500)
        assert (inside.mean(axis=0) > 0.95).all()
        return np.asarray((estimate.high - estimate.low).mean(axis=0))

    shorter = widths()
    monkeypatch.setattr(estimates, "windows_of", lambda cells, size: windows_of(cells, 1))
    assert (shorter < 0.87 * widths()).all()


def test_noise_is_drawn_once_for_each_node(ring: KeyRing) -> None:
    plan = query(QUANTILES, selects=False)
    [noise] = allocate_query(plan).parts
    partials = stage_one(plan, generated(1))
    rows = bounded(plan, partials, ring, RUN)
    items = []

    def draw(given: np.ndarray, scale: float) -> np.ndarray:
        assert scale == noise.scale
        items.append(given)
        return np.zeros(len(given), np.int64)

    for group_ids in (partials.group_ids, numbered(64)):
        items.clear()
        quantiles(QUANTILES, noise, [rows], np.arange(64), group_ids, draw, 1.96)
        every = np.concatenate(items)
        assert len(np.unique(every, axis=0)) == len(every) == 64 * 31
    prefixes = noisy_prefixes(QUANTILES, noise, [rows], np.arange(3), ids(64, 2), draw)
    assert np.allclose(prefixes, np.round(prefixes)) and prefixes[0, -1] > 10


def test_a_rank_at_the_end_of_a_cell_is_in_it() -> None:
    """Half of two values is the first of them, as the inverse of the distribution says."""
    ages = QueryColumn("q", "quantiles", 0, 15, at=(0.25, 0.5, 0.75, 1.0))
    exact = np.cumsum(np.bincount([3, 9], minlength=16))[None].astype(float)
    assert read_off(ages, exact, 0.0, 1.96).value[0].tolist() == [3, 3, 9, 9]


def test_a_sd_is_its_intervals_half_width_over_the_quantile() -> None:
    noisy = np.cumsum(np.full((3, 256), 40.0), axis=1)
    estimate = read_off(WIDE, noisy, 30.0, 1.5)
    assert (estimate.high > estimate.low).all() and (estimate.low > 0).any()
    assert np.allclose(estimate.sd, (estimate.high - estimate.low) / 3.0)


def test_a_groups_quantiles_are_of_its_own_tree() -> None:
    random = np.random.default_rng(7)
    noisy = random.normal(0, 20, (6, 256)) + np.linspace(0, 1, 256) * [
        [20 * 3**n] for n in range(6)
    ]
    all_groups = read_off(WIDE, noisy, 20.0, 1.96)
    for row in range(6):
        alone = read_off(WIDE, noisy[row : row + 1], 20.0, 1.96)
        for one, other in zip(all_groups, alone, strict=True):
            assert np.array_equal(one[row], other[0], equal_nan=True)


def test_scaled_trees_have_noise_in_counts_of_rows(ring: KeyRing) -> None:
    plan = query(QUANTILES, groups=None, norm=3.0, selects=False, epsilon=20.0)
    [noise] = allocate_query(plan).parts
    assert noise.part.unit == 1 << 16
    partials = stage_one(plan, generated(1))
    rows, groups = [bounded(plan, partials, ring, RUN)], np.arange(9)

    def draw(items: np.ndarray, scale: float) -> np.ndarray:
        return OneShot(ring, (b"test",), INPUTS).rounded_gaussian(items, scale)

    estimate = quantiles(QUANTILES, noise, rows, groups, partials.group_ids, draw, 1.96)
    prefixes = noisy_prefixes(QUANTILES, noise, rows, groups, partials.group_ids, draw)
    assert 1 < prefixes[:, -1].max() < 100
    wanted = read_off(QUANTILES, prefixes, noise.sd / (1 << 16), 1.96)
    for one, other in zip(estimate, wanted, strict=True):
        assert np.array_equal(one, other, equal_nan=True)


def test_a_quantile_is_in_the_middle_of_its_cell_where_its_rows_are() -> None:
    """Straight within a cell: three quarters of the rows of 256 grid values, from the first on."""
    column = QueryColumn("q", "quantiles", 0, (1 << 16) - 1, at=(0.25, 0.375, 0.75))
    first, third = np.full(256, 80.0), np.repeat([0.0, 40.0, 80.0], [2, 1, 253])
    estimate = read_off(column, np.stack([first, third]), 0.0, 1.96)
    assert estimate.value.tolist() == [[64, 96, 192], [512 + 128, 512 + 192, 768 + 128]]


def test_one_row_is_enough_to_read_off() -> None:
    estimate = read_off(WIDE, np.stack([np.full(256, 1.5), np.full(256, 0.9)]), 0.0, 1.96)
    assert not np.isnan(estimate.value[0]).any() and np.isnan(estimate.value[1]).all()


def test_however_many_groups_are_worked_on_at_once(
    ring: KeyRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = query(QUANTILES, groups=64)
    rows = bounded(plan, stage_one(plan, generated(5)), ring, RUN)
    noise, groups = allocate_query(plan).parts[0], np.arange(64)
    draw = OneShot(ring, (b"many", *RUN), INPUTS).rounded_gaussian

    def estimated() -> Estimate:
        return quantiles(QUANTILES, noise, [rows], groups, ids(64, 2), draw, 1.96)

    expected = estimated()
    monkeypatch.setattr(estimates, "_AT_ONCE", 5)
    for one, other in zip(expected, estimated(), strict=True):
        assert not np.isnan(one).all() and np.array_equal(one, other, equal_nan=True)


def test_nodes_keep_their_names(ring: KeyRing) -> None:
    """A run that goes on under a later version of the program draws the same noise."""
    plan, names = query(QUANTILES), list[np.ndarray]()
    rows = bounded(plan, stage_one(plan, generated(5)), ring, RUN)

    def draw(items: np.ndarray, _: float) -> np.ndarray:
        names.append(items)
        return np.zeros(len(items), np.int64)

    group_ids = ids(64, 2)
    noisy_prefixes(QUANTILES, allocate_query(plan).parts[0], [rows], np.array([7]), group_ids, draw)
    [items] = names
    assert (items[:, 0] == group_ids[7, 0]).all()
    node = (items[:, 1] ^ group_ids[7, 1]).tolist()
    assert node == [i << 40 for i in range(len(items))]
