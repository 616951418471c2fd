"""Counts of keys that nobody named before, given once: expected L1 against the raw histogram.

A person has one record in each of at most C keys.  A key that is not given counts its raw size:

* Laplace thresholds: *Lowering the cost of anonymization* (Desfontaines 2020), theorem 12: given if
  and only if the noisy count is at least 1 - C ln(2 - 2 (1 - delta)^(1/C)) / epsilon.
* Geometric thresholds: the same in whole numbers, the least tau with P[Z >= tau] at most
  1 - (1 - delta)^(1/C), given if and only if noisy > tau.
* Truncated geometric noise at (epsilon / C, delta / C): see ``laws``.
* Gaussian thresholds with theta of delta: tau = 1 + sd Q^-1(1 - (1 - theta delta)^(1/C)).
* One test with falling weights: a person's i-th key gets w_i, all weighted counts one noise, the
  published count another.  A person alone in several keys has different i in them, so that what is
  charged for lone keys is the sum over i of Q((tau - a w_i - d) / sd): theta delta.
* One test with weights by size: *Differentially Private Set Union* (Gopi, Gulhane, Kulkarni, Shen,
  Shokouhi, Yekhanin 2020), a person of n keys adds 1 / sqrt(n) to each; one who is alone in t keys
  is charged t Q((tau - a / sqrt(t) - d) / sd) for the worst t.
* PipelineDP and OpenDP, from their sources: selection and count with budgets of their own (any
  split), or a threshold on the noisy count.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import log_ndtr, ndtr

from tests.oracle.rivals.laws import (
    Floats,
    Law,
    cut_of,
    gaussian_mu,
    geometric,
    quantile,
    truncated_geometric,
)

Ints = npt.NDArray[np.int64]
Rival = tuple[str, float]
#: Shares of a budget that are tried.
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
THETAS = (0.02, 0.1, 0.3, 0.5, 0.7)
#: Falling weights w_i = (1 + i / offset)^-power that are tried; power 0: none fall.
WEIGHTS = ((1.0, 0.0), (1.0, 0.5), (1.0, 1.0), (2.0, 1.0), (1.0, 2.0), (3.0, 2.0))
#: Points of a normal law, in sds: sums over them are integrals to 1e-3 where there is a kink.
_NORMAL = np.linspace(-6.5, 6.5, 105)


class Cells(NamedTuple):
    """Keys that have records, alike ones together.

    Attributes:
        raw: (n,) true sizes.
        units: (n,) people after the bound of C.
        by_index: (n, C) how many of these have the key as their i-th.
        times: (n,) how many such keys there are.
    """

    raw: Ints
    units: Ints
    by_index: Ints
    times: Ints

    @property
    def pairs(self) -> "Cells":
        """The same, where indices do not matter."""
        both = np.stack([self.raw, self.units])
        [raw, units], where = np.unique(both, axis=1, return_inverse=True)
        times = np.bincount(where.ravel(), self.times, len(raw)).astype(np.int64)
        return Cells(raw, units, np.zeros((len(raw), 0), np.int64), times)


class Noise(NamedTuple):
    """A law by what lies beyond a point.

    Attributes:
        tail: P[X > c]; mean: E[X; X > c]; both of arrays.
    """

    tail: Callable[[Floats], Floats]
    mean: Callable[[Floats], Floats]

    def beyond(self, c: Floats, m: Floats) -> Floats:
        """E[|X - m|; X > c]."""

        def signed(at: Floats) -> Floats:
            return self.mean(at) - m * self.tail(at)

        return np.asarray(2 * signed(np.maximum(c, m)) - signed(c))


def integer_noise(law: Law) -> Noise:
    """A law of whole numbers."""
    values = np.arange(-law.reach, law.reach + 1.0)
    tails = np.append(np.cumsum(law.mass[::-1])[::-1], 0.0)
    means = np.append(np.cumsum((law.mass * values)[::-1])[::-1], 0.0)

    def after(c: Floats) -> Ints:
        return (np.floor(c) + 1 + law.reach).clip(0, len(values)).astype(np.int64)

    return Noise(lambda c: tails[after(c)], lambda c: means[after(c)])


def laplace(b: float) -> Noise:
    """Laplace noise of scale 1 / b."""

    def tail(c: Floats) -> Floats:
        half = np.exp(-b * np.abs(c)) / 2
        return np.where(c > 0, half, 1 - half)

    return Noise(tail, lambda c: np.exp(-b * np.abs(c)) * (np.abs(c) + 1 / b) / 2)


def gaussian(sd: float) -> Noise:
    """Normal noise."""

    def mean(c: Floats) -> Floats:
        return np.asarray(sd / math.sqrt(2 * math.pi) * np.exp(-((c / sd) ** 2) / 2))

    return Noise(lambda c: np.asarray(ndtr(-c / sd)), mean)


def tested(cells: Cells, noise: Noise, above: float) -> float:
    """Expected L1 where a key is given with the count that is tested, if that is > ``above``."""
    raw, units = cells.raw.astype(np.float64), cells.units.astype(np.float64)
    there = cells.units > 0
    off = noise.beyond(above - units, raw - units) + (1 - noise.tail(above - units)) * raw
    return float(cells.times @ np.where(there, off, raw))


def apart(cells: Cells, chance: Floats, noise: Noise) -> float:
    """Expected L1 where a key is given with ``chance``, and its count has noise of its own."""
    raw, units = cells.raw.astype(np.float64), cells.units.astype(np.float64)
    off = noise.beyond(np.full(len(raw), -1e15), raw - units)
    return float(cells.times @ (chance * off + (1 - chance) * raw))


def both(
    cells: Cells, weighted: Floats | Ints, factors: tuple[float, float], sds: tuple[float, float],
    above: float,
) -> float:  # fmt: skip
    """Expected L1 where a key is given if a (weighted + N) + d (units + M) > above, with units + M.

    Args:
        factors: a, d; sds: of N and M.
    """
    a, d = factors
    reached = a * weighted + d * cells.units
    near = reached > above - 8 * math.hypot(a * sds[0], d * sds[1])
    lost = float(cells.times[~near] @ cells.raw[~near])
    raw, reached, units = cells.raw[near, None], reached[near, None], cells.units[near, None]
    mass = np.exp(-(_NORMAL**2) / 2)
    m = sds[1] * _NORMAL
    chance = ndtr((reached + d * m - above) / (a * sds[0]))
    off = chance * np.abs(units + m - raw) + (1 - chance) * raw
    return lost + float(cells.times[near] @ (off @ (mass / mass.sum())))


def per_key(delta: float, count: int) -> float:
    """1 - (1 - delta)^(1 / C)."""
    return -math.expm1(math.log1p(-delta) / count)


# --- thresholds ----------------------------------------------------------------------------------


def laplace_threshold(epsilon: float, delta: float, count: int) -> float:
    """Theorem 12's tau."""
    return 1 - math.log(2 * per_key(delta, count)) * count / epsilon


def geometric_threshold(epsilon: float, delta: float, count: int) -> int:
    """The least whole tau with P[Z >= tau] <= 1 - (1 - delta)^(1/C)."""
    b, most = epsilon / count, per_key(delta, count)
    # P[Z >= tau] = e^(-b tau) / (1 + e^-b) for tau >= 1.
    return max(1, math.ceil(-(math.log(most) + math.log1p(math.exp(-b))) / b - 1e-9))


def gaussian_threshold(
    epsilon: float, delta: float, count: int, theta: float
) -> tuple[float, float]:
    """(sd, tau)."""
    sd = math.sqrt(count) / gaussian_mu(epsilon, (1 - theta) * delta)
    return sd, 1 + sd * quantile(per_key(theta * delta, count))


# --- one test with falling weights ---------------------------------------------------------------


def index_weights(count: int, offset: float, power: float) -> Floats:
    """(C,) w_i, the first 1."""
    return np.asarray((1 + np.arange(count) / offset) ** -power)


def lone_threshold(alone: Floats, sd: float, delta: float) -> float:
    """tau with sum over i of Q((tau - alone_i) / sd) = delta."""
    low = float(alone.max())
    high = low + sd * quantile(delta / len(alone)) + 1e-9
    for _ in range(80):
        middle = (low + high) / 2
        mass = float(np.exp(log_ndtr(-(middle - alone) / sd)).sum())
        low, high = (middle, high) if mass > delta else (low, middle)
    return high


def one_test(
    cells: Cells,
    epsilon: float,
    delta: float,
    shares: tuple[float, ...] = SHARES[2:],
) -> float:
    """Least expected L1 over weights, shares and theta."""
    count = cells.by_index.shape[1]

    def error(falling: tuple[float, float], share: float, theta: float) -> float:
        mu = gaussian_mu(epsilon, (1 - theta) * delta)
        w = index_weights(count, *falling)
        sds = (
            math.sqrt(float(w @ w) / (1 - share)) / mu,
            math.sqrt(count / share) / mu,
        )
        d = sds[0] ** 2 / sds[1] ** 2 / float(w.mean())
        tau = lone_threshold(w + d, math.hypot(sds[0], d * sds[1]), theta * delta)
        return both(cells, cells.by_index @ w, (1.0, d), sds, tau)

    falls = WEIGHTS if count > 1 else WEIGHTS[:1]
    tried = {(w, v): error(w, v, THETAS[2]) for w in falls for v in shares}
    best = min(tried, key=lambda at: tried[at])
    return min(tried[best], *(error(*best, theta) for theta in THETAS))


def size_threshold(alone: Floats, sd: float, delta: float) -> float:
    """tau with t Q((tau - alone_t) / sd) <= delta for all t."""
    return max(
        float(most) + sd * quantile(delta / t) for t, most in enumerate(alone.tolist(), start=1)
    )


def by_size(sizes: Cells, epsilon: float, delta: float) -> float:
    """Least expected L1 with weights 1 / sqrt(n), over shares, caps and theta.

    Args:
        sizes: ``by_index`` says how many people of a key have 1, 2, .. keys.
    """
    count = sizes.by_index.shape[1]
    roots = 1 / np.sqrt(np.arange(1, count + 1))

    def error(cap: int, share: float, theta: float) -> float:
        mu = gaussian_mu(epsilon, (1 - theta) * delta)
        w = np.minimum(roots, roots[cap - 1])
        sds = 1 / (math.sqrt(1 - share) * mu), math.sqrt(count / share) / mu
        d = sds[0] ** 2 / sds[1] ** 2 / float(w.mean())
        tau = size_threshold(w + d, math.hypot(sds[0], d * sds[1]), theta * delta)
        return both(sizes, sizes.by_index @ w, (1.0, d), sds, tau)

    caps = sorted({c for c in (1, 2, 4) if c <= count})
    tried = {(cap, v): error(cap, v, THETAS[2]) for cap in caps for v in SHARES[2:]}
    best = min(tried, key=lambda at: tried[at])
    return min(tried[best], *(error(*best, theta) for theta in THETAS))


# --- other programs ------------------------------------------------------------------------------


def pipelinedp_keep(name: str, epsilon: float, delta: float, count: int, units: Ints) -> Floats:
    """Chance that PipelineDP selects a key of so many people, by its name of the strategy.

    Its library has epsilon / C and 1 - (1 - delta)^(1/C) a key; its Gaussian threshold has half of
    delta for the threshold.
    """
    d = per_key(delta, count)
    n = np.asarray(units, np.float64)
    if name == "truncated_geometric":
        law = truncated_geometric(epsilon / count, d)
        return optimal_keep(epsilon / count, d, int(units.max(initial=1)) + law.reach)[units]
    if name == "laplace":
        off = epsilon / count * (n - laplace_threshold(epsilon, delta, count))
        chance = np.where(off < 0, np.exp(np.minimum(off, 0)) / 2, 1 - np.exp(-np.abs(off)) / 2)
    else:
        sd = math.sqrt(count) / gaussian_mu(epsilon, delta / 2)
        tau = 1 + sd * quantile(per_key(delta / 2, count))
        chance = ndtr((n - tau) / sd)
    return np.where(n > 0, chance, 0.0)


def optimal_keep(b: float, d: float, most: int) -> Floats:
    """(most + 1,) the largest chances of selection of 0, 1, .. people that are (b, d)-DP.

    pi_0 = 0 and pi_n = min(e^b pi + d, 1 - e^-b (1 - pi - d), 1) with pi = pi_(n-1): theorem 1 of
    Desfontaines, Voss, Gipson, Mandayam.
    """
    out = np.zeros(most + 1)
    for n in range(1, most + 1):
        before = out[n - 1]
        if before >= 1:
            out[n:] = 1.0
            break
        up = math.exp(min(b, 700.0)) * before + d
        out[n] = min(up, 1 - math.exp(-b) * (1 - before - d), 1.0)
    return out


def pipelinedp(cells: Cells, epsilon: float, delta: float, count: int) -> float:
    """Least expected L1 over its strategies, its noises and splits of the budget."""
    best = math.inf
    for share in SHARES:
        for name in ("truncated_geometric", "laplace", "gaussian"):
            chance = pipelinedp_keep(name, share * epsilon, delta, count, cells.units)
            best = min(best, apart(cells, chance, laplace((1 - share) * epsilon / count)))
            chance = pipelinedp_keep(name, share * epsilon, delta / 2, count, cells.units)
            sd = math.sqrt(count) / gaussian_mu((1 - share) * epsilon, delta / 2)
            best = min(best, apart(cells, chance, gaussian(sd)))
    # A threshold on the noisy count itself.
    tau = laplace_threshold(epsilon, delta, count)
    best = min(best, tested(cells, laplace(epsilon / count), np.nextafter(tau, 0)))
    sd, tau = gaussian_threshold(epsilon, delta, count, 0.5)
    return min(best, tested(cells, gaussian(sd), tau))


def opendp_threshold(epsilon: float, delta: float, count: int) -> int:
    """The least threshold of whole counts that OpenDP 0.16 accepts: given iff noisy >= it.

    Its noise has scale C / epsilon; delta of one key is P[Z > tau - 1], of C of them 1 - (1 - delta
    of one)^C.  But a lone key is given with P[Z >= tau - 1], e^(epsilon / C) times as much: what it
    promises holds from tau + 1 on, and there the rival is taken (`rivals`).
    """
    return geometric_threshold(epsilon, delta, count)


# --- all -----------------------------------------------------------------------------------------


def rivals(cells: Cells, sizes: Cells, count: int, epsilon: float, delta: float) -> Iterator[Rival]:
    """Name and expected L1 of each rival.

    Args:
        sizes: the same keys, their people by how many keys they have.
    """
    pairs, b = cells.pairs, epsilon / count
    tau = laplace_threshold(epsilon, delta, count)
    yield "Laplace thresholds", tested(pairs, laplace(b), np.nextafter(tau, 0))
    noise = integer_noise(geometric(b))
    yield "geometric thresholds", tested(pairs, noise, geometric_threshold(epsilon, delta, count))
    at_least = opendp_threshold(epsilon, delta, count) + 1
    yield "OpenDP", tested(pairs, noise, at_least - 1)
    cut = cut_of(b, delta / count)
    yield (
        "truncated geometric",
        tested(pairs, integer_noise(truncated_geometric(b, delta / count)), cut),
    )
    gaussians = [gaussian_threshold(epsilon, delta, count, theta) for theta in THETAS]
    yield "Gaussian thresholds", min(tested(pairs, gaussian(sd), tau) for sd, tau in gaussians)
    yield "one test, falling weights", one_test(cells, epsilon, delta)
    yield "one test, weights by size", by_size(sizes, epsilon, delta)
    yield "PipelineDP", pipelinedp(pairs, epsilon, delta, count)
