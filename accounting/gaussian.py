"""Gaussian differential privacy and zCDP: conversions, each rounded in the safe direction.

A mechanism is mu-GDP when telling two neighbours apart is no easier than N(0, 1) from
N(mu, 1).  Its exact curve (Balle and Wang 2018, theorem 8; mechanism.md section 4) is

    delta_G(epsilon; mu) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu).

With a = epsilon/mu - mu/2, b = epsilon/mu + mu/2 and R the Mills ratio it is phi(a) (R(a) -
R(b)): no term overflows and no two exponentials cancel.  ``delta_of`` adds a bound of the
remaining float error, so it is never below the true value; the inverses are checked with it.
The zCDP helpers follow Canonne, Kamath and Steinke's cdp2adp: the composition of spends with a rho
reads its delta off them.

**Roots** are found by Brent's method, bit for bit that of SciPy.  ``scipy.optimize`` takes a
quarter of a second to import, more than a whole plan, and what is needed of it are these lines.
Roots enter digests of plans and the names of noise, so that the steps, their order and both
tolerances are those of ``scipy.optimize.brentq`` (Brent 1973, chapter 4; a test compares the bits).
A root found here is a start: whoever relies on it checks it.
"""

import functools
import math
from collections.abc import Callable

import numpy as np

from dpstream.accounting.libraries import special

#: Relative tolerance and most steps, as SciPy's defaults.
_RELATIVE = 4 * 2.0**-52
_STEPS = 100


def bisected(
    fits: Callable[[float], bool], low: float, high: float, steps: int
) -> tuple[float, float]:
    """Return (low, high) after ``steps`` bisections.

    Args:
        fits: of a number; where it holds of ``high`` and not of ``low``, it still does afterwards.
    """
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low, high


def brentq(function: Callable[[float], float], low: float, high: float, *, xtol: float) -> float:
    """Return a zero between ``low`` and ``high``, where the signs of the function differ.

    Args:
        xtol: absolute tolerance of the place, > 0.

    Raises:
        ValueError: the signs are the same.
        RuntimeError: no convergence within 100 steps.
    """
    before, now = float(low), float(high)
    f_before, f_now = float(function(before)), float(function(now))
    if f_before == 0:
        return before
    if f_now == 0:
        return now
    if (f_before < 0) == (f_now < 0):
        raise ValueError("f(low) and f(high) must have different signs")
    other = f_other = step_before = step = 0.0
    for _ in range(_STEPS):
        if f_before != 0 and f_now != 0 and (f_before < 0) != (f_now < 0):
            other, f_other = before, f_before
            step_before = step = now - before
        if abs(f_other) < abs(f_now):
            before, now, other = now, other, now
            f_before, f_now, f_other = f_now, f_other, f_now
        least = (xtol + _RELATIVE * abs(now)) / 2
        half = (other - now) / 2
        if f_now == 0 or abs(half) < least:
            return now
        if abs(step_before) > least and abs(f_now) < abs(f_before):
            tried = _interpolated((before, f_before), (now, f_now), (other, f_other))
            if 2 * abs(tried) < min(abs(step_before), 3 * abs(half) - least):
                step_before, step = step, tried
            else:
                step_before = step = half
        else:
            step_before = step = half
        before, f_before = now, f_now
        now += step if abs(step) > least else (least if half > 0 else -least)
        f_now = float(function(now))
    raise RuntimeError("no root found")


def _interpolated(
    before: tuple[float, float], now: tuple[float, float], other: tuple[float, float]
) -> float:
    """Step from ``now`` to the zero of the secant, or of the inverse parabola, through (x, f)."""
    (x_before, f_before), (x_now, f_now), (x_other, f_other) = before, now, other
    if x_before == x_other:
        return -f_now * (x_now - x_before) / (f_now - f_before)
    first = (f_before - f_now) / (x_before - x_now)
    second = (f_other - f_now) / (x_other - x_now)
    return -f_now * (f_other * second - f_before * first) / (second * first * (f_other - f_before))


#: Relative float error allowed for erfcx, exp and their arguments (a few ulps each).
_SLACK = 16 * 2.0**-53
#: Of the root searches that the exact checks begin at; digests of plans depend on their bits.
_TOLERANCE = 1e-12


def delta_of(epsilon: float, mu: float) -> float:
    """Return delta_G(epsilon; mu), rounded up.

    Args:
        epsilon: any finite number; negative values occur in the one-trigger rule.
        mu: Gaussian-DP parameter, >= 0.

    Raises:
        ValueError: if mu is negative or an argument is not a number.
    """
    if not mu >= 0 or math.isnan(epsilon):
        raise ValueError("mu must be >= 0 and epsilon a number")
    at_zero = -math.expm1(epsilon) if epsilon < 0 else 0.0
    if mu == 0 or math.isinf(epsilon / mu):
        return min(1.0, at_zero * (1 + _SLACK))
    a, b = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    if a < -5 or b < -5:
        # delta is within 1e-6 of its largest value; the plain difference is accurate enough.
        if math.isinf(_exp(epsilon)):
            return 1.0
        plain = special.ndtr(-a) - _exp(epsilon) * special.ndtr(-b)
        return float(
            min(1.0, max(plain, at_zero) + _SLACK * (1 + _exp(epsilon) * special.ndtr(-b)))
        )
    mills_a, mills_b = (
        float(special.erfcx(a / math.sqrt(2))),
        float(special.erfcx(b / math.sqrt(2))),
    )
    # Rounding of a and b moves R by at most |R'| <= 1 + |x| R times the absolute error.
    shift = _SLACK * (abs(epsilon) / mu + mu) * (2 + abs(a) * mills_a + abs(b) * mills_b)
    bracket = max(mills_a - mills_b, 0.0) + _SLACK * (mills_a + mills_b) + shift
    log_delta = -a * a / 2 + math.log(bracket / 2) + _SLACK * (1 + a * a)
    return min(1.0, math.nextafter(_exp(log_delta), math.inf))


def _exp(x: float) -> float:
    return math.exp(x) if x < 709 else math.inf


def log_delta(sigma: float, epsilon: float) -> float:
    """Return ln delta_G(epsilon; 1/sigma) to a float's accuracy; -inf where it is less."""
    middle = epsilon * sigma + 1 / (2 * sigma)
    more, less = (
        special.log_ndtr(1 / sigma - middle),
        epsilon + special.log_ndtr(-middle),
    )
    if less > more:
        return -math.inf
    with np.errstate(divide="ignore"):
        return float(more + np.log1p(-np.exp(less - more)))


def sigma_near(epsilon: float, delta: float) -> float:
    """Return nearly the sigma at which noise has this epsilon and delta; ``mu_of`` begins there."""
    wanted = np.log(delta)
    low, high = 0.1, 1.0
    while log_delta(low, epsilon) < wanted:
        low, high = low / 10, low
    while log_delta(high, epsilon) > wanted:
        low, high = high, high * 10
    return brentq(lambda sigma: log_delta(sigma, epsilon) - wanted, low, high, xtol=_TOLERANCE)


def epsilon_near(sigma: float, delta: float) -> float:
    """Return nearly the least epsilon >= 0 of noise with ``sigma`` at ``delta``."""
    wanted = np.log(delta)
    if log_delta(sigma, 0) < wanted:
        return 0.0
    low, high = 0.0, 1.0
    while log_delta(sigma, high) > wanted:
        low, high = high, high * 10
    return brentq(lambda epsilon: log_delta(sigma, epsilon) - wanted, low, high, xtol=_TOLERANCE)


@functools.lru_cache(maxsize=256)
def mu_of(epsilon: float, delta: float) -> float:
    """Return the largest mu with delta_G(epsilon; mu) <= delta, rounded down.

    Args:
        epsilon: > 0; delta: in (0, 1).

    Raises:
        ValueError: for arguments outside these ranges.
    """
    if not (0 < epsilon < math.inf and 0 < delta < 1):
        raise ValueError("epsilon must be positive and delta in (0, 1)")
    mu = 1 / sigma_near(epsilon, delta)
    step = 2.0**-50
    while delta_of(epsilon, mu) > delta:
        mu *= 1 - step
        step = min(2 * step, 0.5)
    return mu


def epsilon_of(mu: float, delta: float) -> float:
    """Return the smallest epsilon >= 0 with delta_G(epsilon; mu) <= delta, rounded up.

    It is infinite where no float is as large.

    For mu above 2^20, where differences of tails lose all digits: delta_G(epsilon; mu) is at most
    Q(epsilon / mu - mu / 2), and Q(z) at most exp(-z^2 / 2), so that mu^2 / 2 + mu z is enough with
    z = sqrt(2 ln(1 / delta)); at most a share 2 z / mu too large.

    Args:
        mu: >= 0; delta: in (0, 1).

    Raises:
        ValueError: for arguments outside these ranges.
    """
    if not (0 <= mu < math.inf and 0 < delta < 1):
        raise ValueError("mu must be finite and >= 0 and delta in (0, 1)")
    if delta_of(0.0, mu) <= delta:
        return 0.0
    if mu > 2.0**20:
        return (mu / 2 + math.sqrt(-2 * math.log(delta))) * mu * (1 + 1e-12)
    epsilon = epsilon_near(1 / mu, delta)
    step = max(epsilon, 2.0**-40) * 2.0**-50
    while delta_of(epsilon, mu) > delta:
        epsilon += step
        step *= 2
    return epsilon


def cdp_delta(rho: float, epsilon: float) -> float:
    """Return delta for which rho-zCDP implies (epsilon, delta)-DP, rounded up.

    Canonne, Kamath and Steinke 2020, proposition 7 (``cdp2adp.py``, cited by the paper's
    section 4.4 and Appendix B).  Every alpha > 1 gives a valid bound; the best is bisected.
    """
    if rho < 0 or epsilon < 0:
        raise ValueError("rho and epsilon must be >= 0")
    if rho == 0:
        return 0.0
    low, high = 1.01, (epsilon + 1) / (2 * rho) + 2
    for _ in range(200):
        alpha = (low + high) / 2
        if (2 * alpha - 1) * rho - epsilon + math.log1p(-1 / alpha) < 0:
            low = alpha
        else:
            high = alpha
    alpha = (low + high) / 2
    exponent = (alpha - 1) * (alpha * rho - epsilon) + alpha * math.log1p(-1 / alpha)
    return min(1.0, _exp(exponent) / (alpha - 1) * (1 + 1e-12))


def cdp_eps(rho: float, delta: float) -> float:
    """Return the smallest epsilon such that rho-zCDP implies (epsilon, delta)-DP, rounded up."""
    if rho < 0 or not 0 < delta < 1:
        raise ValueError("rho must be >= 0 and delta in (0, 1)")
    low, high = 0.0, rho + 2 * math.sqrt(rho * math.log(1 / delta))
    while cdp_delta(rho, high) > delta:
        high = 2 * high + 1e-300
    return bisected(lambda epsilon: cdp_delta(rho, epsilon) <= delta, low, high, 200)[1]
