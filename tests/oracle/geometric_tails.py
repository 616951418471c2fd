"""Upper bounds of P[n_t > x], n_t the noise of a prefix made of two-sided geometric node noise.

Tighter than the bounds of ``budget.key_tests``, and too slow for a plan: an independent
check of them.

n_t = sum of b_j z_j has the moment generating function M(s) = prod of m(b_j s), m(s) = (1 - q)^2 /
((1 - q e^s) (1 - q e^-s)) with q = e^(-1 / scale).  A Gaussian g of sd ``blur`` is added, so that
P[n > x] <= P[n + g > x - a] / P[g > -a], and with M' that of n + g and any theta > 0

    P[n + g > c] = 1 / (2 pi) integral over u of  M'(s) e^(-s c) / s,    s = theta + i u.

By Poisson's summation the trapezoid rule of step h gives sum over all whole k of
e^(2 pi k theta / h) P[n + g > c + 2 pi k / h]: the tail itself and other terms that are not
negative, so that it is an upper bound for every h.  The part beyond |u| = U is at most the integral
of M(theta) e^(blur^2 (theta^2 - u^2) / 2 - theta c) / u, because |M(theta + i u)| <= M(theta).  It
is added.  For float errors the result is raised by 1e-9 of M'(theta) e^(-theta c).
"""

import math

import numpy as np
import numpy.typing as npt

from dpstream.accounting.arrays import Float64
from dpstream.accounting.balls import ROUND_UP
from dpstream.accounting.budget.allocation import StreamNoise
from dpstream.accounting.errors import InvariantError
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.strategies import GeometricStrategy

Complex = npt.NDArray[np.complex128]
#: blur in sds of the prefix, and a in blurs; where prefixes are whole numbers, both as numbers.
_BLUR, _AHEAD = 0.01, 3.0
_WHOLE_BLUR, _WHOLE_AHEAD = 0.12, 0.45
#: Where the integral is cut off, in 1 / blur; the trapezoid's period in sds.
_CUT, _PERIOD = 7.5, 25.0
_FLOAT_ERROR = 1e-9
_STEPS = 30
#: Number of factors that are multiplied before a logarithm is taken.
_AT_ONCE = 16


def tail_above(noise: StreamNoise, step_index: int, least: float) -> float:
    """Upper bound of P[n_t > least], n_t as it is published at step ``step_index``.

    Args:
        noise: of a stream with two-sided geometric noise.
        step_index: t, from 1 to T.
        least: in grid units of the stream, not negative.

    Raises:
        InvariantError: the stream has other noise.
    """
    weights, is_whole = _weights(noise, step_index)
    rounded = 0.0 if is_whole else ROUND_UP / (1 << DECODE_BITS)
    return _above(weights, noise.scale, max(0.0, least - rounded), is_whole)


def least_exceeded(noise: StreamNoise, step_index: int, chance: float) -> int:
    """The least x with P[n_t > x] <= chance by the bound of ``tail_above``, in 2^-DECODE_BITS.

    Args:
        noise: of a stream with two-sided geometric noise.
        step_index: t, from 1 to T.
        chance: 0 < chance < 1/2.

    Raises:
        InvariantError: the stream has other noise.
    """
    weights, is_whole = _weights(noise, step_index)
    rounded = 0.0 if is_whole else ROUND_UP / (1 << DECODE_BITS)
    unit = 1 if is_whole else 1 << DECODE_BITS
    high = max(1, math.ceil(unit * float(noise.sd[step_index - 1])))

    def fits(number: int) -> bool:
        return _above(weights, noise.scale, max(0.0, number / unit - rounded), is_whole) <= chance

    while not fits(high):
        high *= 2
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high * ((1 << DECODE_BITS) // unit)


def _weights(noise: StreamNoise, step_index: int) -> tuple[Float64, bool]:
    """Weights of the node noises in n_t, and whether n_t is a whole number."""
    strategy = noise.strategy_object
    if not isinstance(strategy, GeometricStrategy) or not noise.scale:
        raise InvariantError("the stream has two-sided geometric noise")
    row = strategy.decoder[step_index - 1]
    used = np.asarray(np.abs(row[row != 0]))
    return used, bool((used == 1).all())


def _above(weights: Float64, scale: float, least: float, is_whole: bool) -> float:
    """P[sum of weights z > least], rounded up; see the module."""
    sd = math.sqrt(float((weights**2).sum())) * math.sqrt(2) * max(scale, 0.5)
    blur, ahead = (_WHOLE_BLUR, _WHOLE_AHEAD) if is_whole else (_BLUR * sd, _AHEAD * _BLUR * sd)
    # Whole numbers above ``least`` are at least floor(least) + 1.
    start = (math.floor(least) + 1 if is_whole else least) - ahead
    theta = _tilt(weights, scale, start)
    cut, period = _CUT / blur, _PERIOD * sd + 40 / theta
    step = 2 * math.pi / period
    points = np.asarray(theta + 1j * step * np.arange(1, math.ceil(cut / step) + 1), np.complex128)
    top = (
        float(_log_moment(weights, scale, np.array([theta]))[0])
        + (blur * theta) ** 2 / 2
        - theta * start
    )
    logs = _log_moments(weights, scale, points) + (blur * points) ** 2 / 2
    terms = np.exp(logs - points * start - top) / points
    total = (1 / theta + 2 * float(terms.real.sum())) * step / (2 * math.pi)
    # exp(-blur^2 u^2 / 2) / u beyond the cut, and half a step of the last term.
    cut_off = math.exp(-(_CUT**2) / 2) * (1 + step / cut) / math.pi
    caught = 0.5 * math.erfc(-ahead / blur / math.sqrt(2))
    return min(1.0, math.exp(min(top, 50.0)) * (total + cut_off + _FLOAT_ERROR) / caught)


def _log_moment(weights: Float64, scale: float, at: Float64) -> Float64:
    """(n,) logarithms of M at real points within its range."""
    decay = -np.expm1(weights[:, None] * at - 1 / scale) * -np.expm1(
        -weights[:, None] * at - 1 / scale
    )
    return np.asarray((2 * math.log(-math.expm1(-1 / scale)) - np.log(decay)).sum(axis=0))


def _log_moments(weights: Float64, scale: float, at: Complex) -> Complex:
    """The same at complex points."""
    start, top = -1 / scale, math.expm1(-1 / scale) ** 2
    total = np.zeros(len(at), np.complex128)
    for first in range(0, len(weights), _AT_ONCE):
        product = np.ones(len(at), np.complex128)
        for weight in weights[first : first + _AT_ONCE].tolist():
            product *= np.expm1(weight * at + start) * np.expm1(start - weight * at) / top
        total -= np.log(product)
    return total


def _tilt(weights: Float64, scale: float, start: float) -> float:
    """A theta close to the minimum of M(theta) e^(-theta c); every theta gives a bound."""
    high = (1 - 1e-9) / (scale * float(weights.max()))
    low, last = 0.0, high
    for _ in range(_STEPS):
        points = np.linspace(low, high, 8)[1:-1]
        values = _log_moment(weights, scale, points) - points * start
        best = int(np.argmin(values))
        gap = points[1] - points[0]
        low, high = points[best] - gap, points[best] + gap
        if gap < 1e-6 * last:
            break
    return max(float(low + high) / 2, 1e-3 * last)
