"""Counts of keys that nobody named before, given at T triggers: L1 at the last one.

A person has one record in each of at most C keys, each at some step.  A key that is given once is
given until the end; one that never is counts its raw size.  By simulation, with the error of its
mean:

* *Differentially Private Stream Processing at Scale* (Zhang, Doroshenko, Kairouz, Steinke, Thakurta
  et al. 2023), thresholds on the noisy prefixes of trees, made sound by a union over tests and
  keys; with geometric noise, with noise per step, and with the square root of the prefix matrix.
* its baselines: every trigger anew at a part of the budget, and every step by itself, added up.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from scipy.stats import nbinom

from tests.oracle.rivals import keys
from tests.oracle.rivals.laws import Floats, cut_of, gaussian_mu, quantile, truncated_geometric
from tests.oracle.rivals.prefixes import levels

Ints = keys.Ints
#: Name, expected L1, standard error of it.
Rival = tuple[str, float, float]
THETA = 0.3
ARITIES = (2, 4, 11, 32)
#: Numbers of tests that are tried.
TESTS = (4, 16)


class Arrivals(NamedTuple):
    """Admitted records, one for each (person, key).

    Attributes:
        raw: (K,) true sizes of the keys.
        key, step, rank: (n,) of the records; steps from 1 to T, rank among the person's.
    """

    raw: Ints
    key: Ints
    step: Ints
    rank: Ints

    def cells(self, count: int) -> keys.Cells:
        """The same without time."""
        size = len(self.raw)
        flat = np.bincount(self.key * count + self.rank, minlength=size * count)
        table = np.column_stack([self.raw, flat.reshape(size, count)])
        alike, times = np.unique(table[self.raw > 0], axis=0, return_counts=True)
        return keys.Cells(alike[:, 0], alike[:, 1:].sum(axis=1), alike[:, 1:], times)

    def by(self, steps: Ints) -> Ints:
        """(K, tests) people of each key by some steps, in order."""
        column = np.searchsorted(steps, self.step)
        flat = np.bincount(self.key * len(steps) + column, minlength=len(self.raw) * len(steps))
        return np.cumsum(flat.reshape(len(self.raw), len(steps)), axis=1)


def schedule(steps: int, tests: int) -> Ints:
    """Tests at growing distances, the last at T."""
    at = np.ceil(steps * (np.arange(1, tests + 1) / tests) ** 2)
    return np.unique(at.astype(np.int64))


def geometric_tail(b: float, terms: int, most: float) -> int:
    """The least k with P[sum of ``terms`` geometric noises >= k] <= most.

    The sum is the difference of two negative binomial numbers.
    """
    ratio = math.exp(-b)
    y = np.arange(nbinom.isf(1e-30, terms, 1 - ratio) + 2)
    mass = nbinom.pmf(y, terms, 1 - ratio)

    def tail(k: float) -> float:
        return float(mass @ nbinom.sf(y + k - 1, terms, 1 - ratio))

    low, high = 0, 1
    while tail(high) > most:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if tail(middle) > most else (low, middle)
    return high


def nodes_of(steps: int, arity: int, at: Ints) -> Floats:
    """(tests, nodes) which nodes of the k-ary trees cover each prefix; arity 0: the steps."""
    if arity == 0:
        return (np.arange(1, steps + 1) <= at[:, None]).astype(np.float64)
    columns: dict[tuple[int, int], int] = {}
    pairs = []
    for row, t in enumerate(at.tolist()):
        begin = 0
        for level in reversed(range(levels(steps, arity))):
            width = arity**level
            while begin + width <= t:
                node = columns.setdefault((level, begin), len(columns))
                pairs.append((row, node))
                begin += width
    out = np.zeros((len(at), len(columns)))
    out[tuple(np.array(pairs).T)] = 1.0
    return out


def passed(
    stream: Arrivals, at: Ints, tau: Floats, noise: Callable[[np.random.Generator, int], Floats],
    seeds: range,
) -> tuple[float, float]:  # fmt: skip
    """Mean L1 at the end, and its error; a key is given from its first prefix above tau on."""
    counts = stream.by(at)
    held = counts[:, -1] > 0
    counts, raw, l1_errors = counts[held], stream.raw[held], []
    for seed in seeds:
        noisy = counts + noise(np.random.default_rng(seed), len(raw))
        given = ((noisy > tau) & (counts > 0)).any(axis=1)
        errors = np.where(given, np.abs(noisy[:, -1] - raw), raw)
        l1_errors.append(float(errors.sum() + stream.raw[~held].sum()))
    return float(np.mean(l1_errors)), float(np.std(l1_errors) / math.sqrt(len(l1_errors)))


def two_sided(rng: np.random.Generator, b: float, shape: tuple[int, int]) -> Floats:
    """Geometric noise."""
    p = -math.expm1(-b)
    return np.asarray(rng.geometric(p, shape) - rng.geometric(p, shape), np.float64)


def geometric_prefixes(
    stream: Arrivals, arity: int, tests: int, given: tuple[int, int, float, float], seeds: range
) -> tuple[float, float]:  # fmt: skip
    """Thresholds on prefixes with geometric noise a node (arity 0: noise per step)."""
    count, steps, epsilon, delta = given
    at = schedule(steps, tests)
    covers = nodes_of(steps, arity, at)
    b = epsilon / (count * (levels(steps, arity) if arity else 1))
    most = delta / count / len(at)
    terms = covers.sum(axis=1).astype(int)
    tails = {n: geometric_tail(b, n, most) for n in set(terms.tolist())}
    # 1 + noise > tau has the chance of noise >= tau.
    tau = np.array([tails[n] for n in terms.tolist()], np.float64)
    # Nodes that cover the same of the prefixes are drawn once each, as they are in the mechanism.
    return passed(
        stream, at, tau, lambda rng, n: two_sided(rng, b, (n, covers.shape[1])) @ covers.T, seeds
    )


def square_root_decoder(steps: int) -> tuple[Floats, float]:
    """(T, T) the square root of the prefix matrix, and the L2 norm of its first column."""
    c = np.ones(steps)
    for k in range(1, steps):
        c[k] = c[k - 1] * (2 * k - 1) / (2 * k)
    lag = np.subtract.outer(np.arange(steps), np.arange(steps))
    return np.where(lag >= 0, c[np.maximum(lag, 0)], 0.0), float(np.linalg.norm(c))


def gaussian_prefixes(
    stream: Arrivals, tests: int, given: tuple[int, int, float, float], seeds: range
) -> tuple[float, float]:
    """Thresholds on prefixes with Gaussian noise by the square root, what is tested is given."""
    count, steps, epsilon, delta = given
    at = schedule(steps, tests)
    decoder, norm = square_root_decoder(steps)
    sigma = math.sqrt(count) * norm / gaussian_mu(epsilon, (1 - THETA) * delta)
    rows = sigma * decoder[at - 1]
    factor = np.linalg.cholesky(rows @ rows.T)
    sd = np.linalg.norm(rows, axis=1)
    tau = 1 + sd * quantile(THETA * delta / count / len(at))
    return passed(
        stream, at, tau, lambda rng, n: rng.standard_normal((n, len(at))) @ factor.T, seeds
    )


def step_by_step(
    stream: Arrivals, given: tuple[int, int, float, float], seeds: range
) -> tuple[float, float]:
    """Each step by itself with truncated geometric noise, all that is given added up."""
    count, steps, epsilon, delta = given
    law = truncated_geometric(epsilon / count, delta / count)
    cut = cut_of(epsilon / count, delta / count)
    cell, sizes = np.unique(stream.key * steps + stream.step - 1, return_counts=True)
    key, l1_errors = cell // steps, []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        noisy = sizes + rng.choice(np.arange(-law.reach, law.reach + 1), len(sizes), p=law.mass)
        total = np.bincount(key, np.where(noisy > cut, noisy, 0), len(stream.raw))
        l1_errors.append(float(np.abs(total - stream.raw).sum()))
    return float(np.mean(l1_errors)), float(np.std(l1_errors) / math.sqrt(len(l1_errors)))


def split_epsilon(epsilon: float, delta: float, times: int) -> float:
    """mu of one of so many Gaussian releases."""
    return gaussian_mu(epsilon, delta) / math.sqrt(times)


def anew(cells: keys.Cells, given: tuple[int, int, float, float]) -> float:
    """Every trigger anew: the better of geometric noise at a T-th and Gaussian at mu / sqrt(T)."""
    count, steps, epsilon, delta = given
    pairs, b, d = cells.pairs, epsilon / count / steps, delta / count / steps
    noise = keys.integer_noise(truncated_geometric(b, d)) if b > 1e-3 else keys.laplace(b)
    best = keys.tested(pairs, noise, cut_of(b, d))
    sd = math.sqrt(count) / split_epsilon(epsilon, (1 - THETA) * delta, steps)
    tau = 1 + sd * quantile(THETA * delta / count / steps)
    return min(best, keys.tested(pairs, keys.gaussian(sd), tau))


def rivals(stream: Arrivals, given: tuple[int, int, float, float], seeds: range) -> Iterator[Rival]:
    """Name, L1 at the last trigger and its error of each rival.

    Args:
        given: C, T, epsilon, delta.
    """
    count, steps = given[:2]
    tests = sorted({min(t, steps) for t in (*TESTS, steps if steps <= 128 else 100)})
    for name, arities in (("per step", (0,)), ("tree", ARITIES)):
        tried = [
            geometric_prefixes(stream, k, n, given, seeds)
            for k in arities
            if k <= max(2, steps)
            for n in tests
        ]
        yield (f"geometric thresholds {name}", *min(tried))
    gaussian = [gaussian_prefixes(stream, n, given, seeds) for n in tests]
    yield ("Gaussian thresholds square root", *min(gaussian))
    yield ("truncated geometric step by step", *step_by_step(stream, given, seeds))
    cells = stream.cells(count)
    yield "every trigger anew", anew(cells, given), 0.0
