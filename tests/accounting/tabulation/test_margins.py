"""Margins against sums over integers, 60 digits and draws; and against the normal's."""

import itertools
import math
from typing import Any

import mpmath
import numpy as np
import pytest

from dpstream.accounting.arrays import Int64
from dpstream.accounting.tabulation import margins
from dpstream.accounting.tabulation.margins import (
    Chances,
    chances,
    combine,
    combined_margin,
    margin,
    plus,
    quantile,
    summed,
    tail,
    variance,
    weight,
)
from dpstream.accounting.tabulation.margins import margin as plain_margin
from dpstream.accounting.tabulation.parameters import LawName, Noise
from tests.oracle.published_margins import published_rho

LAWS: list[LawName] = ["discrete gauss", "rounded gauss", "discrete laplace"]


def exact_tail(noise: Noise, m: int) -> float:
    """P(|Z| > m) in 40 digits, from the definition."""
    with mpmath.workdps(40):
        s = mpmath.mpf(noise.scale)
        if noise.law == "rounded gauss":
            return float(2 * mpmath.ncdf(-(m + mpmath.mpf(0.5)) / s))
        if noise.law == "discrete laplace":
            q = mpmath.exp(-1 / s)
            return float(2 * q ** (m + 1) / (1 + q))
        mass = [mpmath.exp(-(mpmath.mpf(k) ** 2) / (2 * s**2)) for k in range(int(20 * s) + 20)]
        return float(2 * sum(mass[m + 1 :]) / (2 * sum(mass) - 1))


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("scale", [0.2, 1.0, 3.3, 25.0, 90.0])
def test_margins_of_one_count(law: LawName, scale: float) -> None:
    noise = Noise(law, scale)
    half_width = margin(noise)
    assert exact_tail(noise, half_width) <= 0.05
    assert half_width == 0 or exact_tail(noise, half_width - 1) > 0.05
    for m in (0, half_width, 2 * half_width + 1):
        assert tail(noise, m) == pytest.approx(exact_tail(noise, m), rel=1e-9, abs=1e-14)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("count", [2, 8, 18, 23, 46])
def test_sums_are_convolutions(law: LawName, count: int) -> None:
    for scale in (0.4, 3.3):
        one = chances(Noise(law, scale))
        direct = np.ones(1)
        for _ in range(count):
            direct = np.convolve(direct, one.mass)
        sum_law, lowest = summed(one, count), count * one.lowest
        inside = direct[sum_law.lowest - lowest :][: len(sum_law.mass)]
        assert np.abs(inside - sum_law.mass).max() < 1e-14
        assert direct.sum() - inside.sum() < 1e-13
        assert sum_law.variance == pytest.approx(count * one.variance)
        reached = [
            m
            for m in range(400)
            if direct[np.abs(lowest + np.arange(len(direct))) > m].sum() <= 0.05
        ]
        assert margin(Noise(law, scale), count) == reached[0]


def test_published_totals_are_sums_of_noisy_cells() -> None:
    """Margins of totals of 46, 18 and 8 cells, as multiples of the level's target."""
    for target in (11, 50):
        noise = Noise("discrete gauss", math.sqrt(1 / (2 * published_rho(target))))
        times = [margin(noise, n) / target for n in (46, 18, 8)]
        assert times == pytest.approx([6.8, 4.2, 2.8], abs=0.08)


def test_margins_hold_in_draws_and_one_less_does_not() -> None:
    rng = np.random.default_rng(0)
    noise = Noise("discrete laplace", 4.0)
    one = chances(noise)
    drawn = rng.choice(one.values, (100_000, 8), p=one.mass)
    held = margin(noise, 8)
    missed = [float((np.abs(drawn.sum(axis=1)) > m).mean()) for m in (held, held - 1)]
    assert missed[0] < 0.05 + 0.003 and missed[1] > 0.05 - 0.003


def test_sums_of_counts_that_are_never_negative() -> None:
    """Of cells that are truly 0 the plain margin is far too small; the other holds for all."""
    rng = np.random.default_rng(1)
    noise = Noise("discrete gauss", 3.0)
    one = chances(noise)
    plain, safe = margin(noise, 46), margin(noise, 46, clipped=True)
    for truth in (np.zeros(46), np.arange(46), np.full(46, 100)):
        drawn = rng.choice(one.values, (20_000, 46), p=one.mass)
        error = np.abs((np.maximum(drawn + truth, 0) - truth).sum(axis=1))
        assert (error > safe).mean() < 0.055
        if not truth.any():
            assert (error > plain).mean() > 0.8
    assert margin(noise, 1, clipped=True) == margin(noise)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("chance", [0.01, 0.5, 0.9, 0.999])
def test_quantiles(law: LawName, chance: float) -> None:
    noise = Noise(law, 3.7)
    one, cutoff = chances(noise), quantile(noise, chance)
    assert one.mass[one.values <= cutoff].sum() >= chance
    assert one.mass[one.values <= cutoff - 1].sum() < chance


def test_two_laws_add_up() -> None:
    one, two = Chances(-1, np.array([0.25, 0.5, 0.25])), Chances(0, np.array([0.5, 0.5]))
    sum_law = plus(one, two)
    assert sum_law.lowest == -1 and sum_law.mass == pytest.approx([0.125, 0.375, 0.375, 0.125])
    assert sum_law.at_most(np.array([-5, 0, 99])) == pytest.approx([0, 0.5, 1])


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("count", [2, 3])
def test_margins_of_clipped_sums_are_the_least(law: LawName, count: int) -> None:
    """By convolution: counts that are truly 0 above, counts that are large below."""
    for scale in (0.6, 2.5, 7.0):
        one = chances(Noise(law, scale))
        clipped = np.append(one.mass[one.values <= 0].sum(), one.mass[one.values > 0])
        upper = full_mass = np.ones(1)
        for _ in range(count):
            upper, full_mass = np.convolve(upper, clipped), np.convolve(full_mass, one.mass)
        values = count * one.lowest + np.arange(len(full_mass))

        def missed(
            m: int, upper: Any = upper, full_mass: Any = full_mass, values: Any = values
        ) -> float:
            return float(upper[m + 1 :].sum() + full_mass[values < -m].sum())

        least = next(m for m in range(400) if missed(m) <= 0.05)
        assert margin(Noise(law, scale), count, clipped=True) == least


@pytest.mark.parametrize("law", LAWS)
def test_sums_of_laws_that_are_not_symmetric_are_convolutions(law: LawName) -> None:
    """What is far out must not wrap around: its chances are published margins' last digits."""
    one = chances(Noise(law, 2.5))
    clipped = np.append(one.mass[one.values <= 0].sum(), one.mass[one.values > 0])
    sum_law = summed(Chances(0, clipped), 3)
    direct = np.convolve(np.convolve(clipped, clipped), clipped)
    inside = direct[sum_law.lowest :][: len(sum_law.mass)]
    assert np.abs(inside - sum_law.mass).max() < 1e-14 and direct.sum() - inside.sum() < 1e-13
    assert Chances(5, np.array([0.5, 0.5])).variance == 0.25


@pytest.mark.parametrize("law", LAWS)
def test_a_quantile_that_float_errors_leave_open_is_the_larger_one(law: LawName) -> None:
    noise = Noise(law, 3.7)
    one = chances(noise)
    reached = one.at_most(one.values)
    for k in (-4, 0, 6):
        chance = float(reached[k - one.lowest])
        assert quantile(noise, chance + 5e-12) == quantile(noise, chance) == k + 1
        assert quantile(noise, chance - 5e-11) == k


def steps(law: LawName, scale: float) -> tuple[Noise, Noise]:
    """Noise of step 1 and of the cells at gamma = .1."""
    times = 9 if law == "discrete laplace" else 3
    return Noise(law, times * scale), Noise(law, scale)


def drawn(noise: Noise, shape: tuple[int, ...], seed: int) -> Int64:
    law = chances(noise)
    return np.random.default_rng(seed).choice(law.values, shape, p=law.mass)


@pytest.mark.parametrize(
    ("cells", "part", "gain"),
    [(46, 46, 0.404), (18, 18, 0.577), (8, 8, 0.728), (46, 23, 0.763), (1, 1, 0.949)],
)
def test_the_gain_over_published_totals(cells: int, part: int, gain: float) -> None:
    """Relative to sums of cells; of one cell, and of margins, too."""
    first, detail = steps("discrete gauss", 12.0)
    published = part * chances(detail).variance
    assert math.sqrt(variance(first, detail, cells, part) / published) == pytest.approx(
        gain, abs=6e-4
    )


def test_weights_are_those_of_least_squares() -> None:
    first, detail = steps("discrete laplace", 2.0)
    n = 8
    u, v = chances(first).variance, chances(detail).variance
    design = np.vstack([np.ones(n), np.eye(n)])
    precision = np.diag([1 / u, *([1 / v] * n)])
    solved = np.linalg.solve(design.T @ precision @ design, design.T @ precision)
    w = weight(first, detail, n)
    for part in (1, 4, 8):
        rows = solved[:part].sum(axis=0)
        assert rows[0] == pytest.approx(part * w / n)
        cost = float(rows**2 @ np.array([u, *([v] * n)]))
        assert variance(first, detail, n, part) == pytest.approx(cost)


@pytest.mark.parametrize("cells", [1, 8, 18, 46])
def test_published_figures_are_whole_and_consistent(cells: int) -> None:
    first, detail = steps("discrete gauss", 3.0)
    y, c = drawn(first, (500,), 1) + 40, drawn(detail, (500, cells), 2)
    w = weight(first, detail, cells)
    combined = combine(y, c, w, allow_negative=True)
    exact = c.sum(axis=1) + w * (y - c.sum(axis=1))
    assert (combined.total == combined.cells.sum(axis=1)).all()
    assert np.abs(combined.total - exact).max() <= 0.5
    assert np.abs(combined.cells - c - ((exact - c.sum(axis=1)) / cells)[:, None]).max() <= 1
    if cells > 1:
        assert combined.sexes is not None and (combined.sexes.sum(axis=1) == combined.total).all()
        half = c.reshape(500, 2, -1).sum(axis=2) + ((exact - c.sum(axis=1)) / 2)[:, None]
        assert np.abs(combined.sexes - half).max() <= 1
    else:
        assert combined.sexes is None


def test_figures_below_zero_become_zero_at_the_end() -> None:
    y, c = np.array([-5]), np.array([[-3, 4, -2, -4]])
    free = combine(y, c, 0.5, allow_negative=True)
    combined = combine(y, c, 0.5, allow_negative=False)
    assert free.total.tolist() == [-5] and combined.total.tolist() == [0]
    assert free.sexes is not None and combined.sexes is not None
    assert combined.sexes.tolist() == np.maximum(free.sexes, 0).tolist()
    assert combined.cells.tolist() == [[0, 4, 0, 0]]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("cells", "part"), [(1, 1), (8, 8), (8, 4), (8, 1), (46, 46), (46, 23)])
def test_margins_hold_in_draws_and_are_not_too_large(law: LawName, cells: int, part: int) -> None:
    first, detail = steps(law, 2.0)
    half_width = combined_margin(first, detail, cells, part)
    runs = 40_000
    y, c = drawn(first, (runs,), 3), drawn(detail, (runs, cells), 4)
    estimates = combine(y, c, weight(first, detail, cells), allow_negative=True)
    assert part == cells or estimates.sexes is not None
    figures = {1: estimates.cells, cells: estimates.total[:, None]}.get(part, estimates.sexes)
    assert figures is not None
    missed = (np.abs(figures) > half_width).mean(axis=0)
    assert missed.max() < 0.05 + 0.005
    assert (np.abs(figures) > half_width - 1).mean(axis=0).max() > 0.05 - 0.005


def test_margins_by_enumeration() -> None:
    """Every outcome of two cells and a total with few values each."""
    first, detail = Noise("discrete gauss", 1.0), Noise("discrete gauss", 0.5)
    w = weight(first, detail, 2)
    one, cell = chances(first), chances(detail)
    outcomes = np.array(list(itertools.product(one.values, cell.values, cell.values)))
    mass = np.array([a * b * c for a, b, c in itertools.product(one.mass, cell.mass, cell.mass)])
    combined = combine(outcomes[:, 0], outcomes[:, 1:], w, allow_negative=True)
    for part, errors in ((2, combined.total[:, None]), (1, combined.cells)):
        worst = [max(mass[np.abs(e) > m].sum() for e in errors.T) for m in range(5)]
        least = next(m for m, missed in enumerate(worst) if missed <= 0.05)
        assert combined_margin(first, detail, 2, part) == least


def test_a_wrong_weight_has_more_error() -> None:
    first, detail = steps("discrete gauss", 3.0)
    y, c = drawn(first, (20_000,), 5), drawn(detail, (20_000, 18), 6)

    def error(w: float) -> float:
        return float((combine(y, c, w, allow_negative=True).total ** 2).mean())

    w = weight(first, detail, 18)
    assert error(w) == pytest.approx(variance(first, detail, 18, 18), rel=0.04)
    assert min(error(0.0), error(1.0), error(w / 2)) > 1.1 * error(w)


def bias(first: Noise, weight: float, low: float, high: float, truth: int) -> float:
    """The expected error of a total whose detail was chosen because ``low`` <= y < ``high``.

    0 where that has no chance.
    """
    law = chances(first)
    seen = truth + law.values
    chosen = (seen >= low) & (seen < high)
    chance = float(law.mass[chosen].sum())
    return weight * float(law.mass[chosen] @ law.values[chosen]) / chance if chance > 0 else 0.0


def test_bias_of_the_choice() -> None:
    """Measured over groups that came to the detail; the published sum of cells has none."""
    first, detail = steps("discrete gauss", 3.0)
    truth, low, high = 95, 100.0, 400.0
    y = truth + drawn(first, (60_000,), 7)
    c = drawn(detail, (60_000, 8), 8)
    c[:, 0] += truth
    chosen = (y >= low) & (y < high)
    w = weight(first, detail, 8)
    expected = bias(first, w, low, high, truth)
    measured = combine(y[chosen], c[chosen], w, allow_negative=True).total.mean() - truth
    spread = 5 * math.sqrt(100 / chosen.sum())
    assert expected > 3 and abs(measured - expected) < spread
    assert abs(c[chosen].sum(axis=1).mean() - truth) < spread
    assert abs(bias(first, w, low, high, 250)) < 1e-9
    assert bias(first, w, 10**6, 10**7, 5) == 0.0


def test_no_noise_needs_no_weight() -> None:
    none = Noise("discrete gauss", 0.0)
    assert weight(none, none, 46) == 0.0 and combined_margin(none, none, 46, 46) == 0


def test_large_scales_are_decided_without_a_table_of_pairs() -> None:
    first, detail = steps("discrete gauss", 2000.0)
    half_width = combined_margin(first, detail, 46, 46)
    assert half_width < 0.45 * plain_margin(detail, 46)
    assert half_width == pytest.approx(1.96 * math.sqrt(variance(first, detail, 46, 46)), rel=1e-3)


@pytest.mark.parametrize(("cells", "scales"), [(2, (3.0, 1.3)), (2, (0.6, 1.3)), (4, (1.0, 0.4)),
                                               (1, (2.0, 2.0))])  # fmt: skip
def test_margins_of_every_coverage_by_enumeration(
    cells: int, scales: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every chance that a margin is decided by, not only that of the published coverage."""
    first, detail = (Noise("discrete gauss", scale) for scale in scales)
    one, cell = chances(first), chances(detail)
    outcomes = np.array(list(itertools.product(one.values, *[cell.values] * cells)))
    mass = np.ones(1)
    for law in (one, *[cell] * cells):
        mass = np.outer(mass, law.mass).reshape(-1)
    combined = combine(
        outcomes[:, 0], outcomes[:, 1:], weight(first, detail, cells), allow_negative=True
    )
    figures = {1: combined.cells, cells // 2: combined.sexes, cells: combined.total[:, None]}
    for part, errors in figures.items():
        if errors is None or not part:
            continue
        missed = [max(mass[np.abs(e) > m].sum() for e in errors.T) for m in range(25)]
        for coverage in (0.2, 0.5, 0.8, 0.95, 0.999, 0.99999):
            monkeypatch.setattr(margins, "COVERAGE", coverage)
            least = next(m for m, chance in enumerate(missed) if chance <= 1 - coverage)
            assert combined_margin(first, detail, cells, part) == least


def test_bias_is_of_totals_from_the_lower_threshold_to_below_the_upper() -> None:
    first = Noise("discrete gauss", 2.0)
    law = chances(first)
    seen = {10 + k: p for k, p in zip(law.values.tolist(), law.mass.tolist(), strict=True)}
    chosen = {y: p for y, p in seen.items() if 11 <= y < 13}
    expected = sum((y - 10) * p for y, p in chosen.items()) / sum(chosen.values())
    assert bias(first, 0.25, 11.0, 13.0, 10) == pytest.approx(0.25 * expected, rel=1e-12)
