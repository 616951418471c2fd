"""Counts of public keys at T triggers, given at each: mean sd over the triggers.

All C records of a person may fall on one step of one key, so that y = A x + z moves by C times a
column of A.  With Laplace or geometric noise its L1 norm counts, with Gaussian noise its L2 norm:

* noise per step, A = 1: the simplest; sd grows as the root of t.
* noise per trigger, A = prefixes: each prefix anew at epsilon / T, or mu / sqrt(T).
* k-ary trees (*Private and Continual Release of Statistics*, Chan, Shi, Song 2011), the nodes that
  cover a prefix added up; *Efficient Use of Differentially Private Binary Trees* (Honaker 2015),
  bottom-up; and least squares on all nodes, as *Boosting the Accuracy of Differentially Private
  Histograms Through Consistency* (Hay, Rastogi, Miklau, Suciu 2010).
* square root of the prefix matrix: *Constant Matters: Fine-grained Error Bound on Differentially
  Private Continual Observation* (Fichtenberger, Henzinger, Upadhyay 2023).
* the optimum of *Improved Differential Privacy for SGD via Optimal Private Linear Operators on
  Adaptive Streams* (Denisov, McMahan, Rush, Smith, Thakurta 2022), by its fixed point.
* p-identity: *Optimizing error of high-dimensional statistical queries under differential privacy*
  (McKenna, Miklau, Hay, Machanavajjhala 2018), A = [I; P] diag(1 / (1 + column sums of P)).
"""

import functools
import math
from collections.abc import Iterator

import numpy as np
from scipy.optimize import minimize

from tests.oracle.rivals.laws import Floats, gaussian_mu, geometric_sd, laplace_sd

Rival = tuple[str, float]
#: Arities of trees.
ARITIES = (2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 14, 16, 20, 32, 36)
#: Steps up to which every arity and start is tried; beyond, those that are best at T = 1000.
MOST_DENSE = 128
_LARGE_ARITIES = (11, 14, 15)
#: Arities of the trees that the search of a p-identity begins at.
_STARTS = (4, 8, 11, 16)


def of_map(decoder: Floats) -> float:
    """Mean over the rows of their L2 norms: mean sd of the prefixes where nodes have sd 1."""
    return float(np.linalg.norm(decoder, axis=1).mean())


def per_step(steps: int) -> float:
    """Mean sd of sums of 1, 2, .. T noises of sd 1."""
    return float(np.sqrt(np.arange(1, steps + 1)).mean())


def levels(steps: int, arity: int) -> int:
    """Nodes that hold a leaf, of trees that cover T steps and have no root beyond it."""
    depth = 1
    while arity**depth <= steps:
        depth += 1
    return depth


def tree_matrix(steps: int, arity: int) -> Floats:
    """(nodes, T) nodes of the k-ary trees over T steps that are complete by T."""
    rows = []
    for level in range(levels(steps, arity)):
        width = arity**level
        for start in range(0, steps - width + 1, width):
            row = np.zeros(steps)
            row[start : start + width] = 1.0
            rows.append(row)
    return np.array(rows)


def tree_sums(steps: int, arity: int) -> float:
    """Mean sd where a prefix adds up the fewest nodes: the digit sum of t in base k."""
    digits, quotients = np.zeros(steps), np.arange(1, steps + 1)
    while quotients.any():
        digits += quotients % arity
        quotients //= arity
    return float(np.sqrt(digits).mean())


def honaker(steps: int) -> float:
    """Mean sd of the binary tree, bottom-up: variance 1 / (2 (1 - 2^-l)) of a tree of l levels."""
    variance, quotients = np.zeros(steps), np.arange(1, steps + 1)
    level = 1
    while quotients.any():
        variance += (quotients % 2) / (2 * (1 - 2.0**-level))
        quotients, level = quotients // 2, level + 1
    return float(np.sqrt(variance).mean())


@functools.lru_cache(maxsize=64)
def tree_least_squares(steps: int, arity: int) -> float:
    """Mean sd of the best linear estimate from all nodes, those to come included."""
    nodes = tree_matrix(steps, arity)
    prefixes = np.tril(np.ones((steps, steps)))
    return of_map(prefixes @ np.linalg.pinv(nodes))


@functools.lru_cache(maxsize=16)
def square_root(steps: int) -> float:
    """Mean sd for A = B = the square root of the prefix matrix, L2 norm of a column 1."""
    c = np.ones(steps)
    for k in range(1, steps):
        c[k] = c[k - 1] * (2 * k - 1) / (2 * k)
    squares = np.cumsum(c**2)
    return float(math.sqrt(squares[-1]) * np.sqrt(squares).mean())


@functools.lru_cache(maxsize=16)
def optimum(steps: int) -> float:
    """Mean sd of the factorisation of least total variance, by Denisov et al.'s fixed point.

    v -> diag((D V D)^1/2) with D = diag(v^1/2) and V = prefixes^T prefixes; then X = D^-1 (D V
    D)^1/2 D^-1 has diagonal 1 and tr(V X^-1) is least.
    """
    prefixes = np.tril(np.ones((steps, steps)))
    gram = prefixes.T @ prefixes
    v, before = np.ones(steps), np.zeros(steps)
    while np.abs(v / v.mean() - before).max() > (1e-3 if steps <= MOST_DENSE else 2e-2):
        before = v / v.mean()
        v = np.diag(_root(np.sqrt(v)[:, None] * gram * np.sqrt(v))).copy()
    d = 1 / np.sqrt(v)
    x = d[:, None] * _root(np.sqrt(v)[:, None] * gram * np.sqrt(v)) * d
    x /= np.diag(x).max()
    variance = np.einsum("ij,ji->i", prefixes, np.linalg.solve(x, prefixes.T))
    return float(np.sqrt(variance).mean())


def _root(matrix: Floats) -> Floats:
    values, vectors = np.linalg.eigh(matrix)
    return np.asarray((vectors * np.sqrt(values.clip(0))) @ vectors.T)


class PIdentity:
    """Weighted total variance of prefixes under a p-identity, and its gradient.

    With s = 1 + column sums of P and K = (I + P P^T)^-1 the inverse of A^T A is diag(s) (I - P^T K
    P) diag(s).  With y_t = sum over j <= t of s_j P_j, prefix t has variance
    sum over j <= t of s_j^2 - y_t^T K y_t.
    """

    def __init__(self, steps: int, rows: int, weights: Floats) -> None:
        self.steps, self.rows, self.weights = steps, rows, weights
        self.later = np.cumsum(weights[::-1])[::-1]

    def variances(self, flat: Floats) -> Floats:
        """(T,) of the prefixes."""
        p = flat.reshape(self.rows, self.steps)
        s = 1 + p.sum(axis=0)
        y = np.cumsum(p * s, axis=1)
        k = np.linalg.inv(np.eye(self.rows) + p @ p.T)
        return np.asarray(np.cumsum(s**2) - np.einsum("kt,kl,lt->t", y, k, y, optimize=True))

    def total(self, flat: Floats) -> tuple[float, Floats]:
        """The weighted total, and its gradient by P."""
        p = flat.reshape(self.rows, self.steps)
        s = 1 + p.sum(axis=0)
        y = np.cumsum(p * s, axis=1)
        k = np.linalg.inv(np.eye(self.rows) + p @ p.T)
        ky = k @ y
        total = float(self.later @ s**2 - self.weights @ (ky * y).sum(axis=0))
        after = np.cumsum((ky * self.weights)[:, ::-1], axis=1)[:, ::-1]
        by_s = 2 * s * self.later - 2 * (after * p).sum(axis=0)
        by_k = 2 * ((ky * self.weights) @ ky.T) @ p
        return total, (by_k - 2 * after * s + by_s).ravel()

    def matrix(self, flat: Floats) -> Floats:
        """(T + p, T) the strategy, every column of L1 norm 1."""
        p = flat.reshape(self.rows, self.steps)
        return np.asarray(np.vstack([np.eye(self.steps), p]) / (1 + p.sum(axis=0)))


@functools.lru_cache(maxsize=16)
def p_identity(steps: int) -> float:
    """Mean sd of the prefixes where a node of L1 sensitivity 1 has noise of sd 1: best of several.

    It begins at random and at the upper nodes of k-ary trees; then prefixes are weighted by 1 / sd,
    so that the mean sd falls and not the mean variance.
    """
    starts = [tree_matrix(steps, k)[steps:] for k in _STARTS if k <= steps]
    starts = [start for start in starts if 0 < len(start) <= steps // 3]
    starts += [np.random.default_rng(1).random((max(1, steps // 16), steps))]
    if steps > MOST_DENSE:  # one search: the best of trees that are looked at
        starts = starts[:1] if len(starts) == 1 else [tree_matrix(steps, 16)[steps:]]
    best = math.inf
    for start in starts:
        flat, weights = start.ravel().astype(np.float64), np.ones(steps)
        for _ in range(2):
            problem = PIdentity(steps, len(start), weights)
            flat = minimize(
                problem.total, flat, jac=True, method="L-BFGS-B",
                bounds=[(0, None)] * flat.size, options={"maxiter": 400, "maxcor": 20},
            ).x  # fmt: skip
            sd = np.sqrt(problem.variances(flat))
            best = min(best, float(sd.mean()))
            weights = sd.mean() / sd
    return best


def rivals(steps: int, contributions: int, epsilon: float, delta: float) -> Iterator[Rival]:
    """Name and mean sd of each rival; trees at their best arity."""
    count = contributions
    for law, sd in (("Laplace", laplace_sd), ("geometric", geometric_sd)):
        # A of whole numbers: the geometric law at epsilon / (C a), a the L1 norm of a column.
        yield f"{law} per step", sd(epsilon / count) * per_step(steps)
        yield f"{law} per trigger", sd(epsilon / count / steps)
        deep = {k: sd(epsilon / (count * levels(steps, k))) for k in ARITIES if k <= max(2, steps)}
        yield f"{law} tree", min(noise * tree_sums(steps, k) for k, noise in deep.items())
        yield f"{law} tree, Honaker", deep[2] * honaker(steps)
        tried = ARITIES if steps <= MOST_DENSE else _LARGE_ARITIES
        squares = (deep[k] * tree_least_squares(steps, k) for k in tried if k in deep)
        yield f"{law} tree, least squares", min(squares)
    if steps > 1:
        yield "p-identity", laplace_sd(epsilon / count) * p_identity(steps)
    if delta == 0:
        return
    unit = count / gaussian_mu(epsilon, delta)
    yield "Gaussian per step", unit * per_step(steps)
    yield "Gaussian per trigger", unit * math.sqrt(steps)
    trees = (math.sqrt(levels(steps, k)) * tree_sums(steps, k) for k in ARITIES)
    yield "Gaussian tree", unit * min(trees)
    yield "Gaussian tree, Honaker", unit * math.sqrt(levels(steps, 2)) * honaker(steps)
    yield "Gaussian square root", unit * square_root(steps)
    yield "Gaussian optimum", unit * optimum(steps)
