"""Thresholds of key selection: tail bounds, union over triggers, safe rounding.

A key that only one unit touches must not be selected, except with probability b per (key,
round).  With T public triggers the test at trigger t is ``q_t > tau_t`` with

    tau_t = (mu_count + 1) alone + D_t + sd_t * isf(b / T)      (mechanism.md section 4)

with alone = 1 for plain counts, so that each trigger fails with at most b/T and the union over
all T with at most b.  D_t covers the rounding of nodes and of the decoder, so the bound holds
for the integers drawn.

**A person of several units.**  With privacy periods the unit is (person, period), and where
windows meet up to m periods one person is up to m units of one (key, round).  With the tau above
such a person alone passes (m - 1) alone beyond what b is for: with 30-day windows and periods of
a day one person published a key of their own in 1,998 of 2,000 trials.  So the shift becomes

    tau_t = (mu_count + m) alone + D_t + sd_t isf(b / T).

Let D' be D and k units of one person; M the mechanism that sees exact counts only through Gaussian
queries, its tests gated by one data set's counts.  (D' -> D) gate by D's counts: A(D) = M(D), and
A(D') differs from M(D') only where a test that D' makes and D does not succeeds.  There D counts
at most mu_count units and D' at most m more.  Each unit adds at most ``alone`` whatever its weight
index, with or without a bound per key, and also to a combined statistic, so that what is tested is
at most (mu_count + m) alone: with mu_count = 0 these are the keys that nobody else has.  Nothing of
that (key, round)'s noise was seen before (a published count that joins the statistic is published
after selection only), so it succeeds with at most b over all its tests.  (D -> D') gate by the
counts of D': the statistic of D there is at most mu_count alone.  A unit touches at most C (key,
round)s, so both directions fail with at most k C b, on top of M(D) against M(D'), which
``accounting.plan.unit`` bounds: delta of k units is delta_G(epsilon; mu_k) + k C b.  One unit is
the case k = 1, to which a larger tau does no harm; the sharper rule of one trigger below bounds one
unit's b for the same tests, so it stays for one unit, and k units take the sum above with its b.

**All keys of a unit together.**  The union above charges C keys as if each had the unit's largest
weight, but a unit takes each of its weights once: its keys have different indices.  Where one
person is one unit of a window, with a w_i + d the most that a pair of index i adds to what is
tested, ``joint_thresholds`` takes the least tau_t with

    sum over i < C of Q((tau_t - D_t - mu_count (a w_0 + d) - a w_i - d) / sd_t) <= total beta_t

for public shares beta_t of sum 1, total = C b.  (D' -> D) gate by D's counts: A(D') tests no key
that D does not, and by induction over tests it equals M(D') until one of the tests left out would
succeed.  Such a test is of a (key, round) that the unit touches and that D counts at most mu_count
units in, so D never tested it before, and nothing that A published up to that test looked at its
noise.  The unit's pair of the key was decided by then: its index i is a function of the unit's own
records and of what was published before, so of A's outputs, and therefore independent of the key's
noise.  Given i the test succeeds with at most Q of the sum's term i.  On every path of A the
unit's (key, round)s are at most C and have different indices, so the chances add up to at most
total beta_t at test t, on average over paths too, and to total over all tests.  (D -> D') gate by
the counts of D': A(D) tests a (key, round) that D does not only where the unit is in it, at most C
of them, fixed by its records alone, and where the statistic is at most mu_count (a w_0 + d): each
with a smaller chance than any term of the sum.  It rests on indices that never repeat, on weights
that belong to a unit's pairs and not to keys, and on indices that are decided without the key's own
noise.  "Published" is such a status; "far below its threshold" is not (mechanism.md section 9).

**Weights by the number of a unit's pairs** (`accounting.weights`), one test: a unit alone in t of
its n keys adds a w_n + d to each, at most a w_t + d because weights fall.  ``size_thresholds``
takes the least tau with

    t Q((tau - D - mu_count (a w_1 + d) - a w_t - d) / sd) <= total    for all t <= C.

The proof is the one above with the t keys that D counts at most mu_count units in: which they are
and what the unit adds there are functions of its records alone, so that each of them passes with
at most total / t, whichever t it is.  (D -> D'): there the statistic of D is at most mu_count
(a w_1 + d).
"""

import math

import numpy as np

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.gaussian import delta_of
from dpstream.accounting.libraries import special
from dpstream.accounting.limits import DECODE_BITS

#: Relative error allowed for ndtri_exp, sd_t and the sum; tests check it against mpmath.
_SLACK = 1e-13
#: The typical unit of weights by size has up to this many keys; any is private.
TYPICAL_SIZES = 32
#: Tails that are computed at once.
_TAILS_AT_ONCE = 1 << 20
#: Steps towards a threshold at most; the last one is that short, below a unit of the thresholds.
_STEPS, _NEAR = 200, 1e-4
_UNITS = float(1 << DECODE_BITS)


def isf(log_tail: float) -> float:
    """Return the upper quantile z >= 0 with P[N(0,1) > z] <= e^log_tail, rounded up.

    Args:
        log_tail: natural logarithm of the tail probability, <= 0; far below the range of a
            float is fine.

    Raises:
        ValueError: if it is positive or not a number.
    """
    if not log_tail <= 0:
        raise ValueError("the log of a probability is at most 0")
    return max(0.0, -float(special.ndtri_exp(log_tail)) * (1 + _SLACK))


def _quantiles(log_tails: Float64) -> Float64:
    """``isf`` of each; most of them are equal."""
    different, where = np.unique(log_tails, return_inverse=True)
    return np.array([isf(log_tail) for log_tail in different.tolist()])[where]


def fixed_point(values: Float64) -> Int64:
    """Return (T,) reals to int64 in units of 2^-DECODE_BITS, rounded up.

    Raises:
        OverflowError: if a value does not fit int64.
    """
    scaled = np.ceil(np.asarray(values, np.float64) * (1 << DECODE_BITS))
    if not np.all(np.abs(scaled) < 2.0**62):
        raise OverflowError("a threshold does not fit the decoder's integers")
    return scaled.astype(np.int64)


def thresholds(
    tail: float,
    mu_count: int,
    sd: Float64,
    rounding: Float64,
    alone: int = 1,
    units: int = 1,
    shares: Float64 | None = None,
) -> Int64:
    """Return tau_t for every trigger, a union bound over all T of them, rounded up.

    Args:
        tail: b, the chance a (key, round) of one person may be selected, in (0, 1).
        mu_count: pre-threshold; a key is tested only with more units than this.
        sd: (T,) sd of the statistic at each trigger; rounding: (T,) its D_t.
        alone: the most one unit alone in a key adds to the statistic (1: a plain count).
        units: m, the most units that one person can be in a (key, round).
        shares: (T,) public parts of b, positive, of sum at most 1; ``None``: equal ones.

    Returns:
        (T,) int64 in units of 2^-DECODE_BITS; a key is selected when its decoded statistic
        is strictly larger.
    """
    logs = -math.log(len(sd)) if shares is None else np.log(shares)
    quantile = _quantiles(math.log(tail) + np.atleast_1d(logs))
    return fixed_point(((mu_count + units) * alone + rounding + sd * quantile) * (1 + _SLACK))


def joint_thresholds(
    total: float,
    shares: Float64,
    mu_count: int,
    sd: Float64,
    rounding: Float64,
    adds: Int64,
) -> Int64:
    """Return tau_t for every test, for all keys of a unit together, rounded up.

    Args:
        total: C b, the chance that any key of one person alone may be selected, in (0, 1).
        shares: (tests,) beta_t, positive, of sum at most 1.
        mu_count, sd, rounding: see ``thresholds``.
        adds: (C,) the most that a unit's pair of each index adds to the statistic.

    Returns:
        (tests,) int64 in units of 2^-DECODE_BITS, as for ``thresholds``.
    """
    values, counts = np.unique(np.asarray(adds, np.float64), return_counts=True)
    largest, logs = float(values[-1]), np.log(counts)
    goals = math.log(total) + np.log(shares)
    base = mu_count * largest + rounding
    # Nobody passes at ``low``; C tails of the largest are enough at ``high``.  Between them steps
    # go along tangents, or halve what is left where a tangent leads out of it.
    low = base.copy()
    limit = high = base + largest + sd * _quantiles(goals - math.log(len(adds)))
    for _ in range(_STEPS):
        sums, slopes = _log_tails(limit, base, sd, values, logs)
        low, high = np.where(sums > goals, limit, low), np.where(sums > goals, high, limit)
        nearer = limit - (sums - goals) / slopes
        nearer = np.where((nearer > low) & (nearer <= high), nearer, low + (high - low) / 2)
        step, limit = np.abs(nearer - limit), nearer
        if (step < _NEAR).all():
            break
    tau, goals = fixed_point(limit), goals - _SLACK * np.abs(goals)
    while (over := _log_tails(tau / _UNITS, base, sd, values, logs)[0] > goals).any():
        tau = tau + over
    return tau


def size_thresholds(
    total: float, mu_count: int, sd: Float64, rounding: Float64, adds: Int64
) -> Int64:
    """Return tau of the one test where weights go by the number of a unit's pairs, rounded up.

    Args:
        total: C b, the chance that any key of one person alone may be selected, in (0, 1).
        mu_count, sd, rounding: see ``thresholds``, of one test.
        adds: (C,) the most that a unit of 1, 2, .. pairs adds to each key's statistic, falling.

    Returns:
        (1,) int64 in units of 2^-DECODE_BITS, as for ``thresholds``.
    """
    keys = np.arange(1, len(adds) + 1)
    worst = adds + sd * _quantiles(math.log(total) - np.log(keys))
    return fixed_point((mu_count * float(adds[0]) + worst.max() + rounding) * (1 + _SLACK))


def _log_tails(
    limit: Float64, base: Float64, sd: Float64, values: Float64, logs: Float64
) -> tuple[Float64, Float64]:
    """(tests,) logs of sum over values of count Q((limit - base - value) / sd), rounded up, and
    their slopes in ``limit``."""
    out, slopes = np.empty(len(limit)), np.empty(len(limit))
    rows = max(1, _TAILS_AT_ONCE // len(values))
    for begin in range(0, len(limit), rows):
        chunk = slice(begin, begin + rows)
        size = (np.abs(limit[chunk]) + np.abs(base[chunk]))[:, None] + values
        gap = (limit[chunk] - base[chunk])[:, None] - values - _SLACK * size
        gap /= sd[chunk, None]
        tails = special.log_ndtr(-gap)
        most = (tails + logs).max(axis=1)
        parts = np.exp(tails + logs - most[:, None])
        total = parts.sum(axis=1)
        out[chunk] = most + np.log(total)
        hazards = np.exp(-(gap**2) / 2 - tails) / math.sqrt(2 * math.pi)
        slopes[chunk] = -(parts * hazards).sum(axis=1) / total / sd[chunk]
    return out + _SLACK * (10 + np.abs(out)), slopes


def lone_tail(tau: Int64, mu_count: int, sd: Float64, rounding: Float64, alone: int) -> float:
    """Return an upper bound of the chance that a key of one unit is ever selected, rounded up.

    Args:
        tau: (tests,) as ``thresholds`` and ``joint_thresholds`` give it.
        mu_count, sd, rounding, alone: see ``thresholds``.
    """
    base, one = mu_count * alone + rounding, np.zeros(1)
    logs, _ = _log_tails(tau / _UNITS, base, sd, np.array([float(alone)]), one)
    return min(1.0, float(np.exp(logs).sum()) * (1 + 1e-9))


def one_trigger_tail(epsilon: float, delta: float, mu: float, contributions: int) -> float:
    """Return the largest proven b for T = 1, rounded down (mechanism.md section 4, the sharper
    rule).

    j of the unit's C pairs go to keys it touches alone, the rest to a Gaussian mechanism of
    mu_j = mu sqrt((C-j)/C).  Adding a unit needs delta_G(epsilon; mu_j) + j b <= delta for
    every j, removing it delta_G(epsilon + ln(1 - j b); mu_j) <= delta.  b is the minimum of
    the first rule, and the second follows from it: let d = delta_G(epsilon; mu_j), so that j b <=
    delta - d < 1, and S the event at which P(S) - (1 - j b) e^epsilon Q(S) is the second's left
    side.  That is (1 - j b) (P(S) - e^epsilon Q(S)) + j b P(S) <= (1 - j b) d + j b <= d + j b,
    at most delta.

    Args:
        epsilon, delta: the whole guarantee; mu: calibrated so that delta_G(epsilon; mu) <=
            delta; contributions: C.

    Raises:
        ValueError: if mu alone exceeds the guarantee.
    """
    if delta_of(epsilon, mu) > delta:
        raise ValueError("mu alone exceeds (epsilon, delta)")
    mus = [mu * math.sqrt((contributions - j) / contributions) for j in range(contributions + 1)]
    return min(
        (delta - delta_of(epsilon, mus[j])) / j * (1 - _SLACK) for j in range(1, contributions + 1)
    )
