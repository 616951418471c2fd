"""Figures of two-sided geometric noise, against sums over its law."""

import itertools
import math
from typing import Any

import mpmath
import numpy as np
import pytest

from dpstream.accounting.arrays import Float64
from dpstream.accounting.balls import precision
from dpstream.accounting.errors import required
from dpstream.accounting.geometric import (
    LEAST,
    MOST,
    geometric_sd,
    staircase,
    staircase_margin,
    staircase_moments,
    truncated_sd,
)
from dpstream.accounting.mechanisms.laws import DiscreteStaircaseLaw
from dpstream.accounting.query.calibration import allocate_query
from dpstream.accounting.query.families import families_of
from dpstream.accounting.query.plan import QueryColumn
from tests.accounting.query.losses import loss
from tests.queries import MEAN, UNITS, query


@pytest.mark.parametrize("scale", [2.0**-10, 0.01, 1 / 6, 1.0, 30.0, 1e9])
def test_sd_is_that_of_the_law(scale: float) -> None:
    with mpmath.workdps(60):
        ratio = mpmath.exp(-1 / mpmath.mpf(scale))
        exact = mpmath.sqrt(2 * ratio) / (1 - ratio)
        assert abs(geometric_sd(scale) / exact - 1) < mpmath.mpf("1e-12")


@pytest.mark.parametrize(("scale", "most"), [(0.4, 1), (1.0, 3), (7.0, 40), (1e6, 5)])
def test_sd_of_truncated_noise_is_that_of_its_law(scale: float, most: int) -> None:
    weights = [math.exp(-abs(k) / scale) for k in range(-most, most + 1)]
    square = math.fsum(k * k * w for k, w in zip(range(-most, most + 1), weights, strict=True))
    assert truncated_sd(scale, most) == pytest.approx(math.sqrt(square / math.fsum(weights)))


CASES = [(0.7, 1, 1), (2.0, 5, 2), (1.5, 7, 1), (9.0, 12, 12), (0.5, 6, 2), (4.0, 3, 1)]
SUM = QueryColumn("s", "sum", -3.0, 8.0, per="group")
ROWS = QueryColumn("n", "count", rows=9)


def masses(scale: float, sensitivity: int, step: int, reach: int = 900) -> Float64:
    """(2 reach + 1,) chances of -reach .. reach, from the definition."""
    size = np.abs(np.arange(-reach, reach + 1))
    level = size // sensitivity + (size % sensitivity >= step)
    mass = np.exp(-level * (sensitivity / scale))
    return np.asarray(mass / mass.sum())


def worst(scale: float, sensitivity: int, step: int, shift: int) -> float:
    """Largest loss of a shift, near 0, where all chances are normal floats."""
    log = np.log(masses(scale, sensitivity, step, 60 + sensitivity))
    return float(np.abs(log[shift:] - log[: len(log) - shift]).max())


@pytest.mark.parametrize(("scale", "sensitivity", "step"), CASES)
def test_no_shift_up_to_the_bound_loses_more_than_b(
    scale: float, sensitivity: int, step: int
) -> None:
    """And one step more does, which a bound that is forgotten would allow."""
    b = sensitivity / scale
    losses = [worst(scale, sensitivity, step, shift) for shift in range(sensitivity + 2)]
    assert max(losses[:-1]) == pytest.approx(b, rel=1e-9)
    assert losses[-1] == pytest.approx(2 * b, rel=1e-9)


@pytest.mark.parametrize(("scale", "sensitivity", "step"), CASES)
def test_moments_and_intervals(scale: float, sensitivity: int, step: int) -> None:
    mass = masses(scale, sensitivity, step)
    size = np.abs(np.arange(-900, 901))
    expected = mass @ size, mass @ size.astype(float) ** 2
    assert staircase_moments(scale, sensitivity, step) == pytest.approx(expected, rel=1e-9)
    for miss in (0.05, 0.3, 0.9):
        k = staircase_margin(scale, sensitivity, step, miss)
        assert mass[size > k].sum() <= miss + 1e-12
        assert k == 0 or mass[size > k - 1].sum() > miss


@pytest.mark.parametrize(("scale", "sensitivity", "step"), CASES)
def test_tails_of_the_law(scale: float, sensitivity: int, step: int) -> None:
    law = DiscreteStaircaseLaw(scale, sensitivity, step)
    sums = np.cumsum(masses(scale, sensitivity, step))[:900][::-1]
    with precision(200):
        tails = list(itertools.islice(law.lower(), 25))
        for k, tail in enumerate(tails, 1):
            assert float(tail) == pytest.approx(sums[k - 1], rel=1e-9)
            assert law.invert(tail * 0.999999) == -k
            assert law.invert(tail * 1.000001) == 1 - k
            assert law.invert(tail.union(tail * 0.9)) is None or sensitivity > 25


def test_the_step_of_least_variance() -> None:
    for sensitivity, b in itertools.product((2, 3, 10, 57), (0.7, 1.0, 2.0, 4.0, 9.0)):
        scale = sensitivity / b
        square = {r: staircase_moments(scale, sensitivity, r)[1] for r in range(1, sensitivity + 1)}
        plain = staircase_moments(scale / sensitivity * 1.0, 1, 1)[1] if sensitivity == 1 else None
        assert plain is None
        stairs = staircase(scale, sensitivity)
        ratio = math.exp(-1 / scale)
        geometric = 2 * ratio / (1 - ratio) ** 2
        if stairs is None:
            assert min(square.values()) >= geometric * (1 - 1e-12)
        else:
            assert stairs[0] == scale and square[stairs[1]] < geometric
            assert square[stairs[1]] == pytest.approx(min(square.values()), rel=1e-9)


def test_where_there_is_none() -> None:
    assert staircase(1.0, 1) is None
    assert staircase(10.0 / LEAST + 1, 10) is None
    assert staircase(1000 / 40.0, 1000) == staircase(1000 / MOST, 1000)


def test_what_it_saves() -> None:
    """The table of the module: sd below that of geometric noise, of a bound of 2^20."""
    print("\n  b  geometric  staircase   less")
    for b, less in ((0.5, 0.005), (1, 0.02), (2, 0.08), (3, 0.17), (4, 0.27), (6, 0.49)):
        stairs = staircase((1 << 20) / b, 1 << 20)
        assert stairs is not None
        sd = math.sqrt(staircase_moments(stairs[0], 1 << 20, stairs[1])[1]) / (1 << 20)
        saved = 1 - sd * b / math.sqrt(2)
        print(f"{b:3g}  {math.sqrt(2) / b:9.4f}  {sd:9.4f}  {saved:.1%}")
        assert less < saved < less + 0.02


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_a_question_with_staircases_loses_no_more_than_epsilon(groups: int) -> None:
    """Enumerated over all that a unit can add to each group."""
    plan = query(SUM, ROWS, UNITS, MEAN, epsilon=12.0, mechanism="geometric", groups=groups,
                 selects=False)  # fmt: skip
    budget, total = allocate_query(plan), 0.0
    laws = {noise.part.column: noise.law for noise in budget.parts if noise.part.what != "count"}
    assert laws == {"s": "staircase", "m": "geometric"}
    for noise in budget.parts:
        part = noise.part
        if noise.step is None:
            total += groups * part.most / noise.scale
            continue
        shifts = range(part.low, part.high + 1)
        total += groups * max(worst(noise.scale, part.most, noise.step, abs(v)) for v in shifts)
        # What a bound of half of it, which is not held to, would lose.
        assert worst(noise.scale, part.most // 2, max(1, noise.step // 2), part.most) > 1.2 * (
            part.most // 2 / noise.scale
        )
    assert 12 * 0.999 < total <= 12 * (1 + 1e-9)
    assert loss(budget, groups) <= 1


# --- finer steps of whole numbers ------------------------------------------------------------


def stepped(most: float, epsilon: float, **settings: Any) -> tuple[float, float]:
    """(step, sd) of a sum of whole numbers, public groups, geometric noise."""
    column = QueryColumn("s", "sum", 0.0, most, per="group", **settings)
    plan = query(column, epsilon=epsilon, mechanism="geometric", groups=1, selects=False)
    option = families_of(lambda bits: plan, "answer").taken()
    [noise] = option.budget(option.plan).parts
    step = option.plan.columns[0].grid
    assert noise.part.most == most / step  # L in steps, or a unit would move the sum by more
    return step, noise.sd * step


@pytest.mark.parametrize(
    ("most", "epsilon", "step", "gain"),
    [(10, 6, 1 / 8, 0.974), (5, 4, 1 / 16, 0.963), (64, 12, 1 / 4, 0.920),
     (10, 3, 1, 1), (10, 8, 1, 1), (1, 6, 1, 1)],
)  # fmt: skip
def test_whole_numbers_take_finer_steps_where_the_sd_falls(
    most: int, epsilon: float, step: float, gain: float
) -> None:
    """A scale for L of steps of 1 on finer steps would lose 1 / step times epsilon."""
    coarse, r = required(staircase(most / epsilon, most), "ok") if most > 1 else (1 / epsilon, 1)
    sd = math.sqrt(staircase_moments(coarse, most, r)[1])
    chosen_step, finest_sd = stepped(most, epsilon)
    assert chosen_step == step and finest_sd == pytest.approx(gain * sd, rel=2e-3)
    if step < 1:
        fine = round(most / step)
        scale, r = required(staircase(fine / epsilon, fine), "a staircase")
        assert max(worst(scale, fine, r, v) for v in range(fine + 1)) <= epsilon * (1 + 1e-9)
        wrong = fine / round(1 / step) / epsilon
        assert worst(wrong, fine, r, fine) > 1.9 * epsilon


def test_bounds_and_rows_that_the_question_chooses_keep_steps_of_one() -> None:
    assert stepped(10, 6, automatic_rows=True)[0] == 1
