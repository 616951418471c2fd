"""Thresholds against high precision, and against the exact law of the rounded noise."""

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest

from dpstream.accounting.budget.thresholds import (
    fixed_point,
    isf,
    one_trigger_tail,
    thresholds,
)
from dpstream.accounting.gaussian import delta_of, mu_of
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.strategies import TreeStrategy
from tests.bench.paper.paper import published_thresholds

SCALE = 1 << DECODE_BITS
mpmath.mp.dps = 50


def mp_tail(z: float) -> mpmath.mpf:
    with mpmath.workdps(50):
        return mpmath.erfc(mpmath.mpf(z) / mpmath.sqrt(2)) / 2


@pytest.mark.parametrize("tail", [0.4, 0.1, 1e-3, 1e-9, 1e-13, 1e-20, 1e-30, 1e-100, 1e-300])
def test_isf_is_rounded_up_and_close(tail: float) -> None:
    z = isf(math.log(tail))
    assert mp_tail(z) <= tail
    assert mp_tail(z * (1 - 1e-12)) > tail * (1 - 1e-13)


def test_isf_edges() -> None:
    assert isf(math.log(0.9)) == 0.0  # never below the mean: safe
    assert 40_000 < isf(-1e9) < 50_000  # far below the smallest float
    for bad in (0.1, math.nan):
        with pytest.raises(ValueError, match="log"):
            isf(bad)


def test_fixed_point_rounds_up() -> None:
    values = np.array([0.0, 1.0, 1.0 + 2**-20, -0.3, 1e9 + 0.001])
    integers = fixed_point(values)
    assert integers.dtype == np.int64
    for value, integer in zip(values, integers.tolist(), strict=True):
        assert 0 <= Fraction(integer, SCALE) - Fraction(float(value)) < Fraction(1, SCALE)
    for bad in (1e18, math.nan, math.inf):
        with pytest.raises(OverflowError):
            fixed_point(np.array([bad]))


@pytest.mark.parametrize("triggers", [1, 7, 100])
def test_formula(triggers: int) -> None:
    strategy, b, mu_count = TreeStrategy(triggers), 1e-12, 3
    sd = 20.0 * strategy.sd_factors
    tau = thresholds(b, mu_count, sd, strategy.rounding)
    with mpmath.workdps(40):
        z = mpmath.findroot(lambda x: mp_tail(x) - mpmath.mpf(b) / triggers, 7)
        for t in range(triggers):
            real = mu_count + 1 + mpmath.mpf(strategy.rounding[t]) + mpmath.mpf(sd[t]) * z
            assert 0 <= mpmath.mpf(int(tau[t])) / SCALE - real <= mpmath.mpf(1.01) / SCALE


def test_published_thresholds_have_no_union() -> None:
    strategy = TreeStrategy(100)
    sd = 20.0 * strategy.sd_factors
    published = published_thresholds(1e-12, 0, sd)
    assert np.all(published < thresholds(1e-12, 0, sd, strategy.rounding))
    assert np.allclose(published / SCALE, sd * isf(math.log(1e-12)), atol=1.01 / SCALE)


Law = dict[int, mpmath.mpf]


def rounded_gaussian(sigma: float, reach: int) -> Law:
    """Exact law of a rounded Gaussian on -reach..reach (the rest is added to the ends)."""

    def upper(x: mpmath.mpf) -> mpmath.mpf:
        return mp_tail(x / mpmath.mpf(sigma))

    half = mpmath.mpf(1) / 2
    law = {k: upper(k - half) - upper(k + half) for k in range(1, reach)}
    law[reach] = upper(reach - half)
    law |= {-k: p for k, p in law.items()}
    law[0] = 1 - 2 * upper(half)
    return law


def convolve(a: Law, b: Law) -> Law:
    out: dict[int, mpmath.mpf] = {}
    for i, p in a.items():
        for j, q in b.items():
            out[i + j] = out.get(i + j, mpmath.mpf(0)) + p * q
    return out


def prefix_laws(sigma: float) -> list[Law]:
    """Laws of 2^D n_t for t = 1, 2, 3 of the tree, with the nodes and decoding as drawn."""
    node = rounded_gaussian(sigma, math.ceil(12 * sigma))
    pair = convolve(convolve(node, node), {2 * k: p for k, p in node.items()})
    one = {SCALE * k: p for k, p in node.items()}
    two: Law = {}
    for total, p in pair.items():
        decoded = round(Fraction(SCALE * total, 3))
        two[decoded] = two.get(decoded, mpmath.mpf(0)) + p
    three: Law = {}
    for i, p in two.items():  # tails only: convolve the block with one more leaf
        for j, q in one.items():
            if i + j > 0:
                three[i + j] = three.get(i + j, mpmath.mpf(0)) + p * q
    return [one, two, three]


def failure(laws: list[Law], tau: np.ndarray, count: int) -> list[mpmath.mpf]:
    """P[count + n_t > tau_t] at each trigger."""
    return [
        mpmath.fsum(p for k, p in law.items() if SCALE * count + k > int(limit))
        for law, limit in zip(laws, tau, strict=True)
    ]


@pytest.mark.parametrize("sigma", [1.0, 2.5])
@pytest.mark.parametrize("mu_count", [0, 2])
def test_a_lone_units_key_is_released_with_chance_at_most_b(sigma: float, mu_count: int) -> None:
    """T = 3, union over triggers, on the law of the integers actually drawn."""
    b = 1e-7
    strategy, laws = TreeStrategy(3), prefix_laws(sigma)
    tau = thresholds(b, mu_count, sigma * strategy.sd_factors, strategy.rounding)
    chances = failure(laws, tau, mu_count + 1)
    assert all(chance <= b / 3 for chance in chances)
    assert sum(chances) <= b
    # Sabotage: thresholds for a hundredfold b, or a sigma 20% too small, must be caught.
    loose = thresholds(100 * b, mu_count, sigma * strategy.sd_factors, strategy.rounding)
    assert sum(failure(laws, loose, mu_count + 1)) > b
    small = thresholds(b, mu_count, 0.8 * sigma * strategy.sd_factors, 0 * strategy.rounding)
    assert sum(failure(laws, small, mu_count + 1)) > b


CASES = [
    (6.0, 1e-9, 32),
    (1.0, 1e-6, 8),
    (0.1, 1e-2, 32),
    (0.01, 0.05, 5),
    (0.5, 0.3, 4),
    (6, 1e-9, 1),
]


@pytest.mark.parametrize(("epsilon", "delta", "count"), CASES)
def test_one_trigger_rule_in_high_precision(epsilon: float, delta: float, count: int) -> None:
    mu = mu_of(epsilon, delta)
    b = one_trigger_tail(epsilon, delta, mu, count)
    assert 0 < b <= delta / count

    def curve(e: mpmath.mpf, m: mpmath.mpf) -> mpmath.mpf:
        if m == 0:
            return max(mpmath.mpf(0), 1 - mpmath.exp(e))
        return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)

    with mpmath.workdps(40):
        for j in range(1, count + 1):
            m = mpmath.mpf(mu) * mpmath.sqrt(mpmath.mpf(count - j) / count)
            assert curve(mpmath.mpf(epsilon), m) + j * mpmath.mpf(b) <= delta
            assert curve(mpmath.mpf(epsilon) + mpmath.log1p(-j * mpmath.mpf(b)), m) <= delta


def test_delta_over_c_unchecked_fails_at_small_epsilon() -> None:
    epsilon, delta, count = 0.01, 0.3, 8
    mu = mu_of(epsilon, delta)
    b = one_trigger_tail(epsilon, delta, mu, count)
    assert b < 0.999 * delta / count
    broken = [
        delta_of(epsilon, mu * math.sqrt((count - j) / count)) + j * delta / count > delta
        or delta_of(epsilon + math.log1p(-j * delta / count), mu * math.sqrt((count - j) / count))
        > delta
        for j in range(1, count + 1)
    ]
    assert any(broken)


@pytest.mark.parametrize(("epsilon", "mu", "count"), [(1.0, 0.5, 4), (6.0, 0.3, 32)])
def test_one_trigger_rule_at_a_mu_that_spends_all_of_delta(
    epsilon: float, mu: float, count: int
) -> None:
    """A unit with a key of its own spends less on noise: that part is the thresholds'."""
    delta = delta_of(epsilon, mu)
    assert one_trigger_tail(epsilon, delta, mu, count) > 0
    with pytest.raises(ValueError, match="mu alone"):
        one_trigger_tail(epsilon, math.nextafter(delta, 0), mu, count)


def test_one_trigger_rule_refuses_a_mu_too_large() -> None:
    with pytest.raises(ValueError, match="mu alone"):
        one_trigger_tail(6, 1e-9, 1.0, 32)
