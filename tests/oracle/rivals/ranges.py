"""All ranges or prefixes of one public attribute at (epsilon, delta): root mean squared error.

* p-identity with Laplace noise: *Optimizing error of high-dimensional statistical queries under
  differential privacy* (McKenna, Miklau, Hay, Machanavajjhala 2018), at pure epsilon.
* noise per cell, with geometric noise (a range of m cells has m of them).
* the matrix mechanism's optimum with Gaussian noise (Li, Miklau, Hay, McGregor, Rastogi 2015),
  found by a fixed point.
"""

import functools
import math
from collections.abc import Iterator

import numpy as np
from scipy.optimize import minimize

from tests.oracle.rivals.laws import Floats, gaussian_mu, geometric_sd, laplace_sd
from tests.oracle.rivals.planner import gaussian_strategy, queries

Rival = tuple[str, float]


@functools.lru_cache(maxsize=8)
def gram_of(kind: str, size: int) -> tuple[Floats, int]:
    """W^T W of all queries, and how many there are."""
    work = queries(kind, size)
    return work.T @ work, len(work)


def p_identity_total(flat: Floats, gram: Floats, rows: int) -> tuple[float, Floats]:
    """tr(gram (A^T A)^-1) for A = [I; P] diag(1 / s), s = 1 + column sums of P, and its gradient.

    With K = (I + P P^T)^-1, S = diag(s) gram diag(s): tr(S) - tr(K P S P^T).
    """
    size = len(gram)
    p = flat.reshape(rows, size)
    s = 1 + p.sum(axis=0)
    k = np.linalg.inv(np.eye(rows) + p @ p.T)
    scaled = s[:, None] * gram * s
    kps = k @ (p @ scaled)
    total = float(np.trace(scaled) - np.vdot(kps, p))
    by_p = -2 * (kps - (kps @ p.T) @ (k @ p))
    # By s: twice the row sums of (I - P^T K P) * (gram diag(s)).
    inner = (gram * s) * (np.eye(size) - p.T @ (k @ p))
    return total, (by_p + 2 * inner.sum(axis=1)).ravel()


@functools.lru_cache(maxsize=8)
def p_identity(kind: str, size: int) -> float:
    """Root mean squared error where a node of L1 sensitivity 1 has noise of sd 1."""
    gram, count = gram_of(kind, size)
    best = math.inf
    for rows in (max(1, size // 16), max(1, size // 8)):
        for seed in range(2):
            start = np.random.default_rng(seed).random(rows * size)
            least = minimize(
                p_identity_total, start, args=(gram, rows), jac=True, method="L-BFGS-B",
                bounds=[(0, None)] * start.size, options={"maxiter": 300},
            )  # fmt: skip
            best = min(best, float(least.fun))
    return math.sqrt(best / count)


@functools.lru_cache(maxsize=8)
def optimum(kind: str, size: int) -> float:
    """Root mean squared error at mu = 1."""
    gram, count = gram_of(kind, size)
    x = gaussian_strategy(gram, steps=60)
    return math.sqrt(float(np.trace(np.linalg.solve(x, gram))) / count)


def rivals(
    kind: str, size: int, contributions: int, epsilon: float, delta: float
) -> Iterator[Rival]:
    """Name and root mean squared error of each rival; all C records may fall into one cell."""
    b = epsilon / contributions
    gram, count = gram_of(kind, size)
    yield "p-identity", laplace_sd(b) * p_identity(kind, size)
    yield "geometric per cell", geometric_sd(b) * math.sqrt(float(np.trace(gram)) / count)
    if delta:
        unit = contributions / gaussian_mu(epsilon, delta)
        yield "Gaussian optimum", unit * optimum(kind, size)
