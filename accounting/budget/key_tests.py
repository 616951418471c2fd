"""The tests of keys: their part of delta, the encoder of their noise, and their thresholds.

Of Gaussian noise `budget.thresholds` has the rules and their proofs; here is which of them holds in
a plan.

**Thresholds of counts with two-sided geometric noise** in streams (mechanism.md section 4).  The
noise of a test is n_t, the rounded sum over nodes j of w_j Z_j, row t of the decoder times
independent two-sided geometric draws of one scale s.  A key of one unit alone passes a test iff n_t
> q_t.  The proof of the thresholds needs that the chances of all T' tests of a key add up to at
most b, which is a union over tests and over the C keys of a unit, and nothing of each of them.  So
b is divided in public shares, of which half is the last test's, where most keys are selected, and
q_t is the least number with P[n_t > q_t] <= b beta_t.  There are three bounds of a tail, and the
least q is taken.

**Noise for each step** (w_j = 1 for j <= t) is a whole number, whose chances are convolved.  They
are tilted by e^(theta z) first, so that the chances in the tail have many correct digits: the error
of a convolution in floats is relative to the largest chance, which then is in the tail.  A whole q
uses its share to a part only, because the tails at q and q - 1 differ by a factor of up to
e^(1 / s).  What shares leave is spent on lower thresholds, of late tests first: each q_t falls as
long as the tails still add up to at most b.  In the end no q_t could be one less.  q_t depends on
the plan alone, and the sum is what the proof asks for, however it is divided.

**Chernoff.**  P[X >= x] <= e^(-theta x) prod_j E[e^(theta w_j Z)].

**Log-concave.**  Z = G - G' with G = floor(s E) and E exponential, whose fraction F = s E - G is
independent of G.  So Y = sum_j w_j s (E_j - E'_j) is X plus an independent symmetric sum R = sum_j
w_j (F_j - F'_j), and P[X >= x] P[R >= -r] <= P[Y >= x - r].  P[R >= 0] >= 1/2, and by Hoeffding's
inequality P[R < -c |w|] <= e^(-c^2), because each fraction is in [0, 1).  Y is a sum of Laplace
variables, and log-concave; so is Y tilted by e^(theta y), of variance v(theta), and a log-concave
density is nowhere above d = 1 / sqrt(v(theta)).  Hence P[Y >= x] <= e^(-theta x) M(theta) d / theta
with M the product of the 1 / (1 - (w_j s theta)^2).  Where many nodes count alike, the density is
close to a normal one, 0.4 / sqrt(v), and d is that of its transform: the density is nowhere above
the integral of |M(theta + i u) / M(theta)| over u > 0, divided by pi.  Each factor of it,

    (1 - q) / sqrt((1 - q)^2 + 2 (1 + q) y^2 + y^4),    q = (w_j s theta)^2,  y = w_j s u,

falls, so that the sum of the left ends of intervals is an upper bound.  Beyond a point u' with
y^2 >= 2 it is at most 2 u'^2 / (u^2 + u'^2) times what it is there, whose integral is pi u' / 2.
"""

import functools
import math
from typing import TYPE_CHECKING

import numpy as np

from dpstream.accounting import limits
from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.budget.shares import beyond_hundred, strategy_of
from dpstream.accounting.budget.thresholds import (
    fixed_point,
    joint_thresholds,
    one_trigger_tail,
    size_thresholds,
    thresholds,
)
from dpstream.accounting.errors import instance
from dpstream.accounting.gaussian import mu_of
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.plan.plan import Mechanism, Resolved
from dpstream.accounting.plan.privacy import THETA, Privacy
from dpstream.accounting.plan.timeline import DEFAULT_TESTS, shares_of_tests
from dpstream.accounting.strategies import DenseStrategy, GeometricStrategy, Strategy
from dpstream.accounting.strategies.dense import rising_parameters
from dpstream.accounting.weights import Statistic

if TYPE_CHECKING:
    from dpstream.accounting.budget.allocation import StreamNoise


#: Tilts that are tried, as shares of the largest tilt with finite means.
_TILTS = np.concatenate([np.geomspace(0.01, 0.5, 24), 1 - np.geomspace(0.5, 1e-3, 40)])
#: Largest number of chances that are convolved; a step's noise is beyond _FAR scales with chance
#: below e^-_FAR.
_MOST_CHANCES, _FAR = 1 << 20, 80
#: Relative error allowed for sums of exponentials and logarithms.
_SUM_SLACK = 1e-9
#: Points of a transform in 1 / sqrt(v(theta)), and tilts on each side of the best whose density is
#: bounded by it, for as many tests as a job has unasked.
_POINTS, _NEAR = np.concatenate([[0.0], np.geomspace(1e-2, 1e2, 200)]), 8
#: c, by which sums of Laplace variables are lower, in |w|, and how many times its tail is the one
#: of whole numbers at most.
_LOWER = ((0.0, 2.0), *((c, 1 / -math.expm1(-c * c)) for c in (2.0, 3.0)))


def tau_of(noise: "StreamNoise", b: float, pre_threshold: int, at: Int64) -> Int64:
    """Return (tests,) thresholds of a stream of counts, in 2^-DECODE_BITS.

    Args:
        noise: two-sided geometric noise of the counts; truncated where there is one test.
        b: largest chance that a key of one unit alone is selected.
        pre_threshold: mu_count; a key is tested only with more units than this.
        at: (tests,) step of the stream at each test.
    """
    if noise.most:
        return np.array([(noise.most + pre_threshold) << DECODE_BITS], np.int64)
    strategy = instance(noise.strategy_object, GeometricStrategy)
    return plain_thresholds(strategy, noise.scale, b, pre_threshold, at)


def plain_thresholds(
    strategy: GeometricStrategy,
    scale: float,
    tail: float,
    pre_threshold: int,
    at: Int64,
) -> Int64:
    """Return tau_t of each test: mu_count + 1 + q_t, rounded up.

    Args:
        strategy: of the count that is tested; scale: of its nodes' noise.
        tail: b, the chance that a key of one unit alone may be selected, by any of the tests.
        pre_threshold: mu_count; a key is tested only with more units than this.
        at: (tests,) step of the count at each test.

    Returns:
        (tests,) int64 in units of 2^-DECODE_BITS.
    """
    goals = math.log(tail) + np.log(shares_of_tests(len(at)))
    rows = strategy.decoder[at - 1]
    bounds = np.minimum(_chernoff(rows, scale, goals), _log_concave(rows, scale, goals))
    if strategy.column1 == 1:  # noise for each step
        bounds = _whole_thresholds(at, scale, math.log(tail), goals, bounds)
    return fixed_point((pre_threshold + 1 + bounds + strategy.rounding[at - 1]) * (1 + _SUM_SLACK))


def _log_moments(rows: Float64, scale: float, theta: Float64) -> Float64:
    """(tilts, tests) log prod_j E[e^(theta w_j Z)]."""
    ratio, steps = math.exp(-1 / scale), np.abs(rows) * theta[..., None]
    up, down = -np.expm1(steps - 1 / scale), 1 - ratio * np.exp(-steps)
    return np.asarray((2 * math.log(-math.expm1(-1 / scale)) - np.log(up) - np.log(down)).sum(-1))


def _tilts(rows: Float64, scale: float) -> Float64:
    """(tilts, tests)."""
    return np.asarray(_TILTS[:, None] / (scale * np.abs(rows).max(axis=1)))


def _chernoff(rows: Float64, scale: float, goals: Float64) -> Float64:
    theta = _tilts(rows, scale)
    bounds = (_log_moments(rows, scale, theta) - goals) / theta
    return np.asarray(bounds.min(axis=0) * (1 + _SUM_SLACK))


def _log_concave(rows: Float64, scale: float, goals: Float64) -> Float64:
    theta = _tilts(rows, scale)
    squares = (rows * scale * theta[..., None]) ** 2
    log_moments = -np.log1p(-squares).sum(-1)
    # theta^2 v(theta)
    variance = (2 * squares * (1 + squares) / (1 - squares) ** 2).sum(-1)
    log_tails = log_moments - np.log(variance) / 2 - goals
    for test in range(max(0, len(rows) - DEFAULT_TESTS), len(rows)):
        best = int((log_tails[:, test] / theta[:, test]).argmin())
        near = slice(max(0, best - _NEAR), best + _NEAR)
        densities = _log_densities(squares[near, test], variance[near, test])
        refined = log_moments[near, test] + densities - goals[test]
        log_tails[near, test] = np.minimum(log_tails[near, test], refined)
    lengths = np.sqrt((rows**2).sum(axis=1))
    bounds = [
        c * lengths + ((log_tails + math.log(times)) / theta).min(axis=0) for c, times in _LOWER
    ]
    return np.asarray(np.min(bounds, axis=0) * (1 + _SUM_SLACK))


def _log_densities(squares: Float64, variance: Float64) -> Float64:
    """(tilts,) logarithms of a bound of the tilted density over theta, from its transform.

    Args:
        squares: (tilts, nodes) of w_j s theta; variance: (tilts,) theta^2 v(theta).
    """
    at = _POINTS[:, None] / np.sqrt(variance)
    turned = squares * at[..., None] ** 2
    logs = np.log((1 - squares) ** 2 + 2 * (1 + squares) * turned + turned**2) / 2
    sizes = np.exp((np.log1p(-squares) - logs).sum(-1))
    area = (sizes[:-1] * np.diff(at, axis=0)).sum(axis=0) + sizes[-1] * at[-1] * math.pi / 2
    return np.where(turned[-1].max(-1) >= 2, np.log(area / math.pi), math.inf)


def _whole_thresholds(
    at: Int64, scale: float, log_total: float, goals: Float64, bounds: Float64
) -> Float64:
    """(tests,) whole q_t of noise for each step, whose tails add up to at most e^log_total; see the
    module.

    Args:
        goals: (tests,) logarithms of the tests' shares; bounds: of those with too many chances to
            convolve, which keep theirs.
    """
    tails = [_tails_of_steps(*test, scale) for test in zip(at.tolist(), goals, strict=True)]
    out, parts = bounds.copy(), np.exp(goals - log_total)
    for test, logs in enumerate(tails):
        if logs is not None:
            out[test] = np.flatnonzero(logs <= goals[test])[0]
            parts[test] = math.exp(logs[int(out[test])] - log_total)
    for test, logs in reversed(list(enumerate(tails))):
        while logs is not None and out[test] > 0:
            lower = parts.copy()
            lower[test] = math.exp(min(logs[int(out[test]) - 1] - log_total, 0.0))
            if math.fsum(lower) > 1 - _SLACK:
                break
            out[test], parts = out[test] - 1, lower
    return out


def _tails_of_steps(steps: int, log_tail: float, scale: float) -> Float64 | None:
    """Logarithms of P[Z_1 + ... + Z_t > q] for q = 0, 1, ... until they are below ``log_tail``,
    rounded up; ``None`` where there are too many chances to convolve."""
    row = np.ones((1, steps))
    theta = _tilts(row, scale)
    logs = _log_moments(row, scale, theta)
    bounds = (logs - log_tail) / theta
    best = int(bounds.argmin())
    tilt, log_moment, first = float(theta[best, 0]), float(logs[best, 0]), float(bounds[best, 0])
    # Beyond ``most`` a step, or their sum, is less often than e^-_FAR of the tail, by Chernoff at
    # the same tilt.
    most = math.ceil(first + _FAR / tilt)
    size = 1 << (2 * most + 2).bit_length()
    if size > _MOST_CHANCES:
        return None
    value = np.arange(size) - size // 2
    zero = math.log(math.tanh(0.5 / scale)) - log_moment / steps
    chance = np.exp(tilt * value - np.abs(value) / scale + zero)
    summed = np.fft.irfft(np.fft.rfft(np.fft.ifftshift(chance)) ** steps, size)
    near = value[size // 2 : size // 2 + most + 1]
    parts = np.maximum(summed[: most + 1], 0) * np.exp(-tilt * (near - first))
    tails = np.cumsum(parts[::-1])[::-1] + (1 + steps) * math.exp(-_FAR)
    # log P[N >= z] = log M - tilt first + log tails
    log_tails = np.asarray(log_moment - tilt * first + np.log(tails) + _SUM_SLACK)[1:]
    return log_tails if log_tails.min() <= log_tail else None


_SLACK = 1e-12
#: What the last test's squared error counts in the selection stream's encoder, the first one's
#: counting 1: late tests select most keys (mechanism.md section 9).  More of it finds more keys in
#: all and fewer by T/10.  A combined statistic has more to spare there; with 1,000 triggers, whose
#: values have more noise, the last keys of other jobs are worth less, and all tests count alike.
LAST_TEST, LAST_COMBINED = 3.5, 4.5


def delta_split(plan: Mechanism) -> tuple[float, float, float]:
    """Return (mu, theta, b)."""
    privacy = plan.privacy
    epsilon, delta, count = privacy.epsilon, privacy.delta, privacy.contributions
    if not plan.design.selects:
        return mu_of(epsilon, delta), 0.0, 0.0
    if _one_test(plan):
        mu = mu_of(epsilon, delta)
        return mu, 0.0, one_trigger_tail(epsilon, delta, mu, count)
    mu_delta = delta * (1 - THETA) * (1 - _SLACK)
    return mu_of(epsilon, mu_delta), THETA, THETA * delta / count * (1 - _SLACK)


def _one_test(plan: Mechanism) -> bool:
    """Whether the sharper rule of one test holds (mechanism.md section 4).

    Its proof takes j of a unit's C pairs away from the one test of their keys, and needs that the
    others cost (C-j)/C of the whole: not with weights, which differ by pair, nor where a bound per
    key leaves fewer pairs a larger part.  It also needs that what a unit adds to a key's statistic
    depends on no other test: not where pairs on published keys take no weight (``skips``), nor
    where what another window published is not tested any more (``remembers``).
    """
    design = plan.design
    uniform = design.weights is None and _even(plan.privacy)
    return plan.once and uniform and not design.skips and not design.remembers


def _even(privacy: Privacy) -> bool:
    """Whether a bound per key divides C.

    Else fewer pairs can cost more than their part: of C = 3 with at most 2 of a key, 2 pairs of one
    key have 4 of the 5 that all can have.
    """
    bound = privacy.per_key_bound
    return bound is None or privacy.contributions % min(bound, privacy.contributions) == 0


@functools.lru_cache(maxsize=64)
def testing_strategy(name: str, tests: int, last: float) -> Strategy:
    """Return the encoder of a selection stream that only tests read, for a run that begins now.

    Late tests select most keys, so they get the smaller error: of all encoders the one with the
    smallest squared error of the tests, the first of which counts 1 and the last ``last``.  It is
    chosen where noise is real anyway; ``tree`` keeps its own.
    """
    if name not in ("blt", "dense") or not 1 < tests <= limits.MAX_DENSE_TRIGGERS:
        return strategy_of(name, tests)
    return DenseStrategy(tests, rising_parameters(tests, last))


def last_test(plan: Resolved) -> float:
    """Return the weight of the last test in a plan."""
    if plan.privacy.combine:
        return LAST_COMBINED
    return float(LAST_TEST ** (1 - beyond_hundred(plan.design.triggers)))


def thresholds_of_tests(plan: Mechanism, tail: float, statistic: Statistic) -> Int64:
    """Return thresholds of the tests, for all keys of a unit together where that is proven.

    Not where one person is several units of a window, whose indices repeat; nor where the selection
    stream goes on as a published count (its units weigh alike, so that nothing is won).
    """
    privacy, design = plan.privacy, plan.design
    mu_count, sd, rounding = privacy.pre_threshold, statistic.sd, statistic.rounding
    alone = statistic.alone, design.units_alone
    if design.selection_published:
        return thresholds(tail, mu_count, sd, rounding, *alone)
    shares = shares_of_tests(design.tests)
    if design.weights is None or design.units_alone > 1:
        return thresholds(tail, mu_count, sd, rounding, *alone, shares)
    integers = design.weights.integers(privacy.contributions)
    adds = statistic.weighted * integers + statistic.counted
    total = tail * privacy.contributions * (1 - _SLACK)
    if design.weights.by_size:
        return size_thresholds(total, mu_count, sd, rounding, adds)
    return joint_thresholds(total, shares, mu_count, sd, rounding, adds)
