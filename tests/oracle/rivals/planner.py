"""ResidualPlanner+ in closed form: all k-way tables of a domain, total variance at mu = 1.

*ResidualPlanner+: a scalable matrix mechanism for marginals and beyond* (Xiao, He, Zhang, Kifer
2024).  Each attribute has a residual matrix R of n - 1 rows, orthogonal to the ones, from the
strategy of the centred queries together with the total; a query matrix W is U_0 1^T + U_r R.  With
p = the largest diagonal entry of R^T R, v_0 = |U_0|^2 and v_r = |U_r|^2 a set S of attributes
costs prod_S p / sigma_S^2 and adds sigma_S^2 prod_S v_r prod_(A - S) v_0 to each table A that
contains it, so that the least total is (sum over S of sqrt(cost_S variance_S))^2.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tests.oracle.rivals.laws import Floats


class Attribute(NamedTuple):
    """What a residual basis costs and gives: p, v_0, v_r and the number of queries."""

    cost: float
    total: float
    residual: float
    queries: int


def queries(kind: str, size: int) -> Floats:
    """(m, n) all queries of an attribute."""
    if kind == "identity":
        return np.eye(size)
    if kind == "prefix":
        return np.tril(np.ones((size, size)))
    rows = np.zeros((size * (size + 1) // 2, size))
    spans = ((i, j) for i in range(size) for j in range(i, size))
    for row, (i, j) in zip(rows, spans, strict=True):
        row[i : j + 1] = 1.0
    return rows


def gaussian_strategy(gram: Floats, steps: int = 300) -> Floats:
    """X of diagonal 1 that nearly minimises tr(gram X^-1), by the fixed point of ``prefixes``.

    The convex problem that ResidualPlanner+ hands to its optimiser; its value is at most 1e-6 off.
    """
    v = np.diag(gram).copy()
    v /= v.mean()
    for _ in range(steps):
        root = _root(np.sqrt(v)[:, None] * gram * np.sqrt(v))
        v = np.diag(root) / np.diag(root).mean()
    d = 1 / np.sqrt(v)
    x = d[:, None] * _root(np.sqrt(v)[:, None] * gram * np.sqrt(v)) * d
    return np.asarray(x / np.diag(x).max())


def _root(matrix: Floats) -> Floats:
    values, vectors = np.linalg.eigh(matrix)
    return np.asarray((vectors * np.sqrt(values.clip(0))) @ vectors.T)


@functools.lru_cache(maxsize=32)
def attribute(kind: str, size: int) -> Attribute:
    """The residual basis of an attribute."""
    work = queries(kind, size)
    centre = np.eye(size) - 1 / size
    if kind == "identity":
        # Any basis of the space gives the same: R^T R is the projection.
        projected = centre
    else:
        centred = work @ centre
        x = gaussian_strategy(centred.T @ centred + np.ones((size, size)))
        projected = centre @ x @ centre
    values, vectors = np.linalg.eigh(projected)
    r = (vectors[:, 1:] * np.sqrt(values[1:])).T
    cost = float((r**2).sum(axis=0).max())
    # W = U_0 1^T + U_r R, as R 1 = 0.
    u_0 = work.sum(axis=1) / size
    u_r = work @ (vectors[:, 1:] / np.sqrt(values[1:]))
    return Attribute(cost, float(u_0 @ u_0), float((u_r**2).sum()), len(work))


def rmse(kind: str, sizes: Sequence[int], ways: int) -> float:
    """Root of the mean variance of all queries of all tables of ``ways`` attributes, mu = 1."""
    parts = [attribute(kind, size) for size in sizes]
    variance: dict[tuple[int, ...], float] = {}
    count = 0
    for table in itertools.combinations(range(len(sizes)), ways):
        count += math.prod(parts[i].queries for i in table)
        for chosen in itertools.product((False, True), repeat=ways):
            inside = tuple(i for i, take in zip(table, chosen, strict=True) if take)
            factors = (
                parts[i].residual if take else parts[i].total
                for i, take in zip(table, chosen, strict=True)
            )
            variance[inside] = variance.get(inside, 0.0) + math.prod(factors)
    costs = {chosen: math.prod(parts[i].cost for i in chosen) for chosen in variance}
    total = sum(math.sqrt(costs[s] * variance[s]) for s in variance) ** 2
    return math.sqrt(total / count)
