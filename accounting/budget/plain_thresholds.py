"""Thresholds of counts with two-sided geometric noise in streams (mechanism.md section 4).

The noise of a test is n_t, the rounded sum over nodes j of w_j Z_j, row t of the decoder times
independent two-sided geometric draws of one scale s.  A key of one unit alone passes a test iff
n_t > q.  So q is the least number with P[n_t > q] <= b / T' for T' tests of a key: a union over
tests and over the C keys of a unit.  There are three bounds of a tail, and the least q is taken.

**Noise for each step** (w_j = 1 for j <= t) is a whole number, whose chances are convolved.  They
are tilted by e^(theta z) first, so that the chances in the tail have many correct digits: the error
of a convolution in floats is relative to the largest chance, which then is in the tail.

**Chernoff.**  P[X >= x] <= e^(-theta x) prod_j E[e^(theta w_j Z)].

**Log-concave.**  Z = G - G' with G = floor(s E) and E exponential, whose fraction s E - G is
independent of G.  So Y = sum_j w_j s (E_j - E'_j) is X plus an independent symmetric sum, and
P[X >= x] <= 2 P[Y >= x].  Y is a sum of Laplace variables, and log-concave; so is Y tilted by
e^(theta y), of variance v(theta), and a log-concave density is nowhere above 1 / sqrt(variance).
Hence P[Y >= x] <= e^(-theta x) M(theta) / (theta sqrt(v(theta))) with M the product of the
1 / (1 - (w_j s theta)^2).
"""

import math
from typing import TYPE_CHECKING

import numpy as np

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.budget.thresholds import fixed_point
from dpstream.accounting.errors import InvariantError
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.strategies import GeometricStrategy

if TYPE_CHECKING:
    from dpstream.accounting.budget.allocation import StreamNoise

#: Tilts that are tried, as shares of the largest tilt with finite means.
_TILTS = np.concatenate([np.geomspace(0.01, 0.5, 24), 1 - np.geomspace(0.5, 1e-3, 40)])
#: Largest number of chances that are convolved; a step's noise is beyond _FAR scales with chance
#: below e^-_FAR.
_MOST_CHANCES, _FAR = 1 << 20, 80
#: Relative error allowed for sums of exponentials and logarithms.
_SLACK = 1e-9


def tau_of(noise: "StreamNoise", b: float, pre_threshold: int, at: Int64) -> Int64:
    """(tests,) thresholds of a stream of counts, in 2^-DECODE_BITS.

    Args:
        noise: two-sided geometric noise of the counts; truncated where there is one test.
        b: largest chance that a key of one unit alone is selected.
        pre_threshold: mu_count; a key is tested only with more units than this.
        at: (tests,) step of the stream at each test.
    """
    if noise.most:
        return np.array([(noise.most + pre_threshold) << DECODE_BITS], np.int64)
    strategy = noise.strategy_object
    if not isinstance(strategy, GeometricStrategy):
        raise InvariantError("isinstance(strategy, GeometricStrategy)")
    return plain_thresholds(strategy, noise.scale, b, pre_threshold, at)


def plain_thresholds(
    strategy: GeometricStrategy,
    scale: float,
    tail: float,
    pre_threshold: int,
    at: Int64,
) -> Int64:
    """tau_t of each test: mu_count + 1 + q_t, a union over the tests, rounded up.

    Args:
        strategy: of the count that is tested; scale: of its nodes' noise.
        tail: b, the chance that a key of one unit alone may be selected.
        pre_threshold: mu_count; a key is tested only with more units than this.
        at: (tests,) step of the count at each test.

    Returns:
        (tests,) int64 in units of 2^-DECODE_BITS.
    """
    log_tail = math.log(tail) - math.log(len(at))
    rows = strategy.decoder[at - 1]
    bounds = np.minimum(_chernoff(rows, scale, log_tail), _log_concave(rows, scale, log_tail))
    if strategy.column1 == 1:  # noise for each step
        exact = [_of_steps(step, scale, log_tail) for step in at.tolist()]
        bounds = np.minimum(bounds, exact)
    return fixed_point((pre_threshold + 1 + bounds + strategy.rounding[at - 1]) * (1 + _SLACK))


def _log_moments(rows: Float64, scale: float, theta: Float64) -> Float64:
    """(tilts, tests) log prod_j E[e^(theta w_j Z)]."""
    ratio, steps = math.exp(-1 / scale), np.abs(rows) * theta[..., None]
    up, down = -np.expm1(steps - 1 / scale), 1 - ratio * np.exp(-steps)
    return np.asarray((2 * math.log(-math.expm1(-1 / scale)) - np.log(up) - np.log(down)).sum(-1))


def _tilts(rows: Float64, scale: float) -> Float64:
    """(tilts, tests)."""
    return np.asarray(_TILTS[:, None] / (scale * np.abs(rows).max(axis=1)))


def _chernoff(rows: Float64, scale: float, log_tail: float) -> Float64:
    theta = _tilts(rows, scale)
    bounds = (_log_moments(rows, scale, theta) - log_tail) / theta
    return np.asarray(bounds.min(axis=0) * (1 + _SLACK))


def _log_concave(rows: Float64, scale: float, log_tail: float) -> Float64:
    theta = _tilts(rows, scale)
    squares = (rows * scale * theta[..., None]) ** 2
    log_moments = -np.log1p(-squares).sum(-1)
    # theta^2 v(theta)
    variance = (2 * squares * (1 + squares) / (1 - squares) ** 2).sum(-1)
    twice = math.log(2) + log_moments - np.log(variance) / 2
    return np.asarray(((twice - log_tail) / theta).min(axis=0) * (1 + _SLACK))


def _of_steps(steps: int, scale: float, log_tail: float) -> float:
    """The least whole q with P[Z_1 + ... + Z_t > q] <= e^log_tail, infinite where there are too
    many chances to convolve."""
    row = np.ones((1, steps))
    theta = _tilts(row, scale)
    logs = _log_moments(row, scale, theta)
    bounds = (logs - log_tail) / theta
    best = int(bounds.argmin())
    tilt, log_moment, first = float(theta[best, 0]), float(logs[best, 0]), float(bounds[best, 0])
    # Beyond ``most`` there is less than e^-_FAR of the tail, by Chernoff at the same tilt.
    most = math.ceil(first + _FAR / tilt)
    size = 1 << (2 * most + 2).bit_length()
    if size > _MOST_CHANCES:
        return math.inf
    value = np.arange(size) - size // 2
    chance = np.exp(tilt * value - np.abs(value) / scale)
    chance /= chance.sum()
    summed = np.fft.irfft(np.fft.rfft(np.fft.ifftshift(chance)) ** steps, size)
    near = value[size // 2 : size // 2 + most + 1]
    parts = np.maximum(summed[: most + 1], 0) * np.exp(-tilt * (near - first))
    tails = np.cumsum(parts[::-1])[::-1] + math.exp(-_FAR)
    # log P[N >= z] = log M - tilt first + log tails
    passed = log_moment - tilt * first + np.log(tails) + _SLACK <= log_tail
    return float(np.flatnonzero(passed)[0] - 1) if passed.any() else math.inf
