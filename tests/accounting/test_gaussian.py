"""Gaussian-DP and zCDP conversions against 60-digit arithmetic, with the direction checked.

Figures of two-sided geometric noise, against sums over its law.

Ball arithmetic: one thread at a time has a precision, and nobody else sets it.
"""

import itertools
import math
import threading
from fractions import Fraction
from pathlib import Path
from statistics import NormalDist
from typing import Any

import dp_accounting
import flint
import mpmath
import numpy as np
import pytest
from dp_accounting import gaussian_mechanism, pld
from scipy.optimize import brentq as reference

from dpstream.accounting import gaussian
from dpstream.accounting.arrays import Float64
from dpstream.accounting.balls import precision, series_quotient, settled
from dpstream.accounting.errors import required
from dpstream.accounting.gaussian import (
    brentq,
    cdp_delta,
    cdp_eps,
    delta_of,
    epsilon_near,
    epsilon_of,
    mu_of,
    sigma_near,
)
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
from tests.bench.paper.paper import cdp_rho
from tests.queries import MEAN, UNITS, query


def test_the_bits_of_scipy_for_budgets() -> None:
    draw = np.random.default_rng(5)
    for _ in range(400):
        epsilon, delta = float(np.exp(draw.uniform(-5, 4))), float(np.exp(draw.uniform(-60, -1)))
        sigma = gaussian.sigma_near(epsilon, delta)

        def off(sigma: float, epsilon: float = epsilon, delta: float = delta) -> float:
            return gaussian.log_delta(sigma, epsilon) - float(np.log(delta))

        low, high = sigma / draw.uniform(1.01, 9), sigma * draw.uniform(1.01, 9)
        assert brentq(off, low, high, xtol=1e-12) == reference(off, low, high, xtol=1e-12)


@pytest.mark.parametrize("xtol", [1e-15, 2e-12, 1e-3])
def test_the_bits_of_scipy_for_other_functions(xtol: float) -> None:
    draw = np.random.default_rng(6)
    for _ in range(300):
        a, b, c = draw.normal(size=3).tolist()

        def wave(x: float, a: float = a, b: float = b, c: float = c) -> float:
            return math.sin(3 * x + a) + b * x**3 + c * math.exp(-x) - 0.1

        low, high = -abs(float(draw.normal())) * 3, abs(float(draw.normal())) * 3
        if wave(low) * wave(high) > 0:
            with pytest.raises(ValueError, match="signs"):
                brentq(wave, low, high, xtol=xtol)
            continue
        assert brentq(wave, low, high, xtol=xtol) == reference(wave, low, high, xtol=xtol)


def test_ends_steps_and_corners() -> None:
    assert brentq(lambda x: x, 0.0, 1.0, xtol=1e-9) == 0.0
    assert brentq(lambda x: x - 1, 0.0, 1.0, xtol=1e-9) == 1.0
    jump = brentq(lambda x: -1.0 if x < 0.3 else 1.0, 0.0, 1.0, xtol=1e-12)
    assert jump == reference(lambda x: -1.0 if x < 0.3 else 1.0, 0.0, 1.0, xtol=1e-12)
    with pytest.raises(RuntimeError):
        brentq(lambda x: math.copysign(1.0, x - 1e-300), -1e300, 1e301, xtol=1e-300)


PAIRS = [
    (6.0, 1e-9),
    (1.0, 1e-5),
    (0.1, 1e-2),
    (1e-3, 1e-12),
    (1e-6, 1e-9),
    (20.0, 1e-30),
    (100.0, 1e-300),
    (1000.0, 1e-9),
    (1e-3, 0.5),
]


def mp_delta(epsilon: float, mu: float) -> mpmath.mpf:
    with mpmath.workdps(60 + int(epsilon)):
        e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)
        return +(mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m))


@pytest.mark.parametrize("epsilon", [0.0, 1e-6, 0.01, 0.5, 2.0, 6.0, 30.0, -0.3, -5.0])
@pytest.mark.parametrize("mu", [1e-4, 0.01, 0.3, 0.9744339, 3.0, 20.0])
def test_delta_is_rounded_up_and_close(epsilon: float, mu: float) -> None:
    exact = mp_delta(epsilon, mu)
    delta = delta_of(epsilon, mu)
    assert delta >= exact or delta == 1.0 == float(exact)
    if exact > 1e-300:
        assert delta <= exact * (1 + 1e-6) + 1e-14


def test_delta_edges() -> None:
    assert delta_of(1.0, 0.0) == 0.0
    assert delta_of(-1.0, 0.0) == pytest.approx(1 - math.exp(-1))
    assert delta_of(0.0, 1e3) == 1.0
    assert delta_of(1e300, 1e-300) == 0.0
    for bad in (-1.0, math.nan):
        with pytest.raises(ValueError, match="mu"):
            delta_of(1.0, bad)


@pytest.mark.parametrize(("epsilon", "delta"), PAIRS)
def test_mu_is_the_largest_that_holds(epsilon: float, delta: float) -> None:
    mu = mu_of(epsilon, delta)
    assert mp_delta(epsilon, mu) <= delta
    assert mp_delta(epsilon, mu * (1 + 1e-6)) > delta
    assert mu == pytest.approx(1 / gaussian_mechanism.get_sigma_gaussian(epsilon, delta), rel=1e-6)


@pytest.mark.parametrize(("epsilon", "delta"), PAIRS)
def test_epsilon_inverts_mu(epsilon: float, delta: float) -> None:
    mu = mu_of(epsilon, delta)
    back = epsilon_of(mu, delta)
    assert mp_delta(back, mu) <= delta
    assert back == pytest.approx(epsilon, rel=1e-6)


def test_figures_of_the_design() -> None:
    assert 1 / mu_of(6, 1e-9) == pytest.approx(1.0262369, abs=1e-6)
    assert mu_of(6, 1e-9) == pytest.approx(0.9744339, abs=1e-6)
    # Redrawing the noise of open windows after a restore: epsilon 6 becomes 8.83.
    assert epsilon_of(math.sqrt(2) * mu_of(6, 1e-9), 1e-9) == pytest.approx(8.83, abs=0.01)
    assert epsilon_of(1e-12, 0.5) == 0.0


def test_composition_agrees_with_pld() -> None:
    """Gaussian events whose squared mus add to mu^2 cost what mu_of says; 1% more does not."""
    mu = mu_of(2.0, 1e-6)
    parts = [mu * math.sqrt(share) for share in (0.5, 0.3, 0.2)]
    accountant = pld.PLDAccountant()
    for part in parts:
        accountant.compose(dp_accounting.GaussianDpEvent(1 / part))
    assert accountant.get_epsilon(1e-6) == pytest.approx(2.0, rel=2e-3)
    assert delta_of(2.0, 1.01 * mu) > 1e-6 * 1.05


def test_arguments_are_checked() -> None:
    for epsilon, delta in ((0, 0.1), (-1, 0.1), (math.inf, 0.1), (1, 0), (1, 1), (1, math.nan)):
        with pytest.raises(ValueError, match="must be"):
            mu_of(epsilon, delta)
    for mu, delta in ((-1, 0.1), (math.inf, 0.1), (1, 0), (1, 1)):
        with pytest.raises(ValueError, match="must be"):
            epsilon_of(mu, delta)


def mp_cdp_delta(rho: float, epsilon: float) -> float:
    """Minimum over a fine grid of alpha of the same bound, in high precision."""

    def bound(alpha: mpmath.mpf) -> mpmath.mpf:
        inner = (alpha - 1) * (alpha * rho - epsilon) + alpha * mpmath.log1p(-1 / alpha)
        return mpmath.exp(inner) / (alpha - 1)

    high = (epsilon + 1) / (2 * rho) + 2
    grid = [mpmath.mpf(1.01) + (high - 1.01) * i / 4000 for i in range(1, 4001)]
    return float(min(bound(alpha) for alpha in grid))


@pytest.mark.parametrize(("rho", "epsilon"), [(0.1, 1.0), (0.23, 3.0), (1.0, 6.0), (1e-4, 0.05)])
def test_zcdp(rho: float, epsilon: float) -> None:
    delta = cdp_delta(rho, epsilon)
    assert delta <= mp_cdp_delta(rho, epsilon) * (1 + 1e-9)
    assert delta == pytest.approx(mp_cdp_delta(rho, epsilon), rel=1e-3)
    # A Gaussian of mu = sqrt(2 rho) is rho-zCDP, so the bound is above its exact curve.
    assert delta >= delta_of(epsilon, math.sqrt(2 * rho))
    assert cdp_eps(rho, delta) == pytest.approx(epsilon, rel=1e-9)
    assert cdp_delta(rho, cdp_eps(rho, delta)) <= delta
    assert cdp_rho(epsilon, delta) == pytest.approx(rho, rel=1e-9)
    assert cdp_delta(cdp_rho(epsilon, delta), epsilon) <= delta


def test_zcdp_edges() -> None:
    assert cdp_delta(0, 1) == 0
    assert cdp_delta(1e3, 0) == 1
    assert cdp_eps(0, 0.1) < 1e-12
    assert cdp_rho(0, 0.1) < 0.1 and cdp_rho(0.5, 0.1) > 0
    for rho, epsilon in ((-1, 1), (1, -1)):
        with pytest.raises(ValueError, match=r"^rho and epsilon must be"):
            cdp_delta(rho, epsilon)
    for first, delta in ((-1, 0.1), (1, 0), (1, 1), (1, 1.5), (0, 1)):
        with pytest.raises(ValueError, match=r"^rho must be >= 0 and delta"):
            cdp_eps(first, delta)
        with pytest.raises(ValueError, match=r"^epsilon must be >= 0 and delta"):
            cdp_rho(first, delta)


@pytest.mark.parametrize(("rho", "epsilon"), [(0.1, 1.0), (0.23, 3.0), (1.0, 6.0), (1e-4, 0.05)])
def test_zcdp_is_never_below_the_best_bound(rho: float, epsilon: float) -> None:
    """Its own alpha is the best there is, and what the floats lose there is added."""
    with mpmath.workdps(40):
        low, high = mpmath.mpf("1.0000001"), mpmath.mpf(epsilon + 1) / (2 * rho) + 5
        for _ in range(150):
            alpha = (low + high) / 2
            falls = (2 * alpha - 1) * rho - epsilon + mpmath.log1p(-1 / alpha) < 0
            low, high = (alpha, high) if falls else (low, alpha)
        inner = (low - 1) * (low * rho - epsilon) + low * mpmath.log1p(-1 / low)
        least = mpmath.exp(inner) / (low - 1)
        assert least <= cdp_delta(rho, epsilon) <= least * (1 + mpmath.mpf(10) ** -11)


def test_the_searches_begin_where_the_reference_implementation_ends() -> None:
    # Bit for bit: sigma is part of noise names, and stores were begun with the reference's.
    draw = np.random.default_rng(7)
    with np.errstate(all="ignore"):
        for _ in range(200):
            epsilon, sigma, delta = 10.0 ** draw.uniform([-6, -3, -15], [3, 5, -0.01])
            assert sigma_near(epsilon, delta) == gaussian_mechanism.get_sigma_gaussian(
                epsilon, delta
            )
            reference = max(0.0, gaussian_mechanism.get_epsilon_gaussian(sigma, delta))
            assert epsilon_near(sigma, delta) == reference


@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.3])
def test_epsilon_of_a_huge_mu(delta: float) -> None:
    """Above any use, but whoever asks for it gets a figure: at least the smallest, and close."""
    mus = [2.0**k for k in (10, 19.99, 20, 20.01, 30, 100, 500)]
    values = [epsilon_of(mu, delta) for mu in mus]
    assert values == sorted(values)
    z = NormalDist().inv_cdf(1 - delta)
    for mu, epsilon in zip(mus, values, strict=True):
        smallest = mu**2 / 2 + z * mu  # up to (epsilon-term) e^epsilon Q(..), which lowers it
        assert epsilon >= smallest * (1 - 5 / mu) and epsilon <= smallest * (1 + 10 / mu + 2e-12)
    assert epsilon_of(1e300, delta) == math.inf


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


def test_a_precision_waits_for_another_threads() -> None:
    inside, before = threading.Event(), flint.ctx.prec

    def other() -> None:
        with precision(300):
            inside.set()

    with precision(100):
        thread = threading.Thread(target=other)
        thread.start()
        assert not inside.wait(0.1) and flint.ctx.prec == 100
        with precision(200):  # the same thread may go on
            assert flint.arb(2).sqrt().rad() < flint.arb(2) ** -195
        assert flint.ctx.prec == 100
    assert inside.wait(10)
    thread.join()
    assert flint.ctx.prec == before


def test_an_error_gives_the_precision_back() -> None:
    before = flint.ctx.prec
    with pytest.raises(ZeroDivisionError), precision(77):
        raise ZeroDivisionError
    assert flint.ctx.prec == before


@pytest.mark.parametrize("terms", [1, 2, 50])
def test_quotients_of_series(terms: int) -> None:
    """(1 + x) / (4 - 2x): 1/4, then 3/8 halved each time; also beyond the usual ten terms."""
    before = flint.ctx.cap
    with precision(100):
        quotient = series_quotient([1, 1], [4, -2], terms)
    expected = [Fraction(1, 4), *(Fraction(3, 8) / 2**k for k in range(terms - 1))]
    assert [Fraction(float(ball)) for ball in quotient] == expected
    assert flint.ctx.cap == before
    with precision(100), pytest.raises((ArithmeticError, ValueError)):
        series_quotient([1], [0, 1], max(terms, 2))


def test_settings_are_those_of_this_module_alone() -> None:
    root = Path(__file__).parents[2]
    product = [root / name for name in ("accounting", "state", "dp_transforms", "pipelines")]
    files = [path for folder in product for path in folder.rglob("*.py")]
    users = {path.name for path in files if "flint.ctx" in path.read_text(encoding="utf-8")}
    assert users == {"balls.py"}


def of(number: Fraction) -> Any:
    return lambda bits: flint.arb(flint.fmpq(number.numerator, number.denominator))


@pytest.mark.parametrize("bits", [0, 8, 16])
@pytest.mark.parametrize("beside", [Fraction(-1, 1 << 60), Fraction(0), Fraction(1, 1 << 60)])
def test_rounded_at_the_announced_boundary(bits: int, beside: Fraction) -> None:
    up = Fraction(1, 2) + Fraction(1, 3 << 12)
    for number in (Fraction(5, 7) + beside, -up / (1 << bits) + Fraction(1, 1 << 70), Fraction(-9)):
        assert settled(of(number), bits) == (number * (1 << bits) + up).__floor__()


def test_precision_grows_until_it_is_enough() -> None:
    precisions = []

    def number(bits: int) -> Any:
        precisions.append(bits)
        boundary = flint.arb(-1) / 2 - flint.arb(1) / (3 << 12)
        return boundary + flint.arb(2) ** -900

    assert settled(number, 0) == 0
    assert precisions == [256, 1024]


def test_a_number_on_the_boundary_is_not_settled() -> None:
    with pytest.raises(ArithmeticError, match="boundary"):
        settled(lambda bits: flint.arb(-1) / 2 - flint.arb(1) / (3 << 12), 0)
