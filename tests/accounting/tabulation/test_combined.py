"""Least squares against a solver, published figures of its gain, margins and bias against draws."""

import itertools
import math

import numpy as np
import pytest

from dpstream.accounting.arrays import Int64
from dpstream.accounting.tabulation import margins
from dpstream.accounting.tabulation.combined import bias, combine, margin, variance, weight
from dpstream.accounting.tabulation.margins import chances
from dpstream.accounting.tabulation.margins import margin as plain_margin
from dpstream.accounting.tabulation.scales import LawName, Noise

LAWS: list[LawName] = ["discrete gauss", "rounded gauss", "discrete laplace"]


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
    half_width = margin(first, detail, cells, part)
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
        assert margin(first, detail, 2, part) == least


def test_a_wrong_weight_has_more_error() -> None:
    first, detail = steps("discrete gauss", 3.0)
    y, c = drawn(first, (20_000,), 5), drawn(detail, (20_000, 18), 6)

    def error(w: float) -> float:
        return float((combine(y, c, w, allow_negative=True).total ** 2).mean())

    w = weight(first, detail, 18)
    assert error(w) == pytest.approx(variance(first, detail, 18, 18), rel=0.04)
    assert min(error(0.0), error(1.0), error(w / 2)) > 1.1 * error(w)


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
    assert weight(none, none, 46) == 0.0 and margin(none, none, 46, 46) == 0


def test_large_scales_are_decided_without_a_table_of_pairs() -> None:
    first, detail = steps("discrete gauss", 2000.0)
    half_width = margin(first, detail, 46, 46)
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
            assert margin(first, detail, cells, part) == least


def test_bias_is_of_totals_from_the_lower_threshold_to_below_the_upper() -> None:
    first = Noise("discrete gauss", 2.0)
    law = chances(first)
    seen = {10 + k: p for k, p in zip(law.values.tolist(), law.mass.tolist(), strict=True)}
    chosen = {y: p for y, p in seen.items() if 11 <= y < 13}
    expected = sum((y - 10) * p for y, p in chosen.items()) / sum(chosen.values())
    assert bias(first, 0.25, 11.0, 13.0, 10) == pytest.approx(0.25 * expected, rel=1e-12)
