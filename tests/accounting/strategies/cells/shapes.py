"""Workloads of the tests, and what is known of them by other code: dense matrices and singular
values."""

import itertools
import math

import numpy as np

from dpstream.accounting.arrays import Float64
from dpstream.accounting.workloads.attributes import Attribute, of_size
from dpstream.accounting.workloads.workload import Workload, marginals, of_matrix, over

#: Figure 1(b) of the eigen-design paper, up to the order of cells.
EXAMPLE4 = np.array(
    [
        [1, 1, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 1, 1, 1],
        [1, 1, 0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0, 0, 1, 1],
        [0, 0, 0, 0, 0, 0, 1, 1],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, -1, -1, -1, -1],
    ]
)
#: Sizes of the attributes of the Adult data.
ADULT = (85, 9, 100, 16, 7, 15, 6, 5, 2, 100, 100, 99, 42, 2)


def attributes(*sizes: int) -> list[Attribute]:
    """Attributes named by their numbers."""
    return [of_size(str(axis), size) for axis, size in enumerate(sizes)]


def predicates(size: int, seed: int = 0) -> Workload:
    """As many random predicates as cells."""
    return of_matrix(np.random.default_rng(seed).integers(0, 2, (size, size)) + 0.0)


def small() -> dict[str, Workload]:
    """One workload of each kind of structure."""
    return {
        "example": of_matrix(EXAMPLE4),
        "ranges": over([16], ["range"]),
        "odd ranges": over([7], ["range"]),
        "prefixes": over([12], ["prefix"]),
        "a product": over([5, 4, 3], ["range", "identity", "prefix"]),
        "with a total": over([6, 4], ["range", "total"]),
        "range marginals": marginals(attributes(3, 4, 5), [2], "range"),
        "tables": marginals(attributes(3, 4, 2), [1, 2]),
        "predicates": predicates(10),
    }


def rows(workload: Workload) -> Float64:
    """(queries, n) every query written out, cell by cell, times the root of its weight."""
    query_rows = []
    for product in workload.products:
        each = []
        for axis, size in enumerate(workload.sizes):
            factor = dict(zip(product.axes, product.factors, strict=True)).get(axis)
            each.append([np.ones(size)] if factor is None else list(listed(factor)))
        for chosen in itertools.product(*each):
            row = np.ones(1)
            for part in chosen:
                row = np.multiply.outer(row, part).ravel()
            query_rows.append(math.sqrt(product.weight) * row)
    return np.array(query_rows)


def listed(factor):  # type: ignore[no-untyped-def]
    """Rows of a factor, from its kind alone."""
    n = factor.size
    if factor.matrix is not None:
        spans = factor.matrix
    else:
        pairs = {
            "identity": [(i, i) for i in range(n)],
            "total": [(0, n - 1)],
            "prefix": [(0, i) for i in range(n)],
            "range": [(i, j) for i in range(n) for j in range(i, n)],
            "width": [(i, i + factor.width - 1) for i in range(n - factor.width + 1)],
        }[factor.kind]
        spans = np.array([[float(i <= c <= j) for c in range(n)] for i, j in pairs])
    return [row / np.linalg.norm(row) if factor.relative else row for row in spans]


def floor(queries: Float64, certificate: Float64) -> float:
    """The squared sum of singular values of W diag(m)^1/2: no strategy has less total error."""
    assert certificate.min() >= 0 and certificate.sum() <= 1 + 1e-12
    return float(np.linalg.svd(queries * np.sqrt(certificate), compute_uv=False).sum()) ** 2


def singular_bound(queries: Float64) -> float:
    """The paper's bound: the same with equal weights."""
    n = queries.shape[1]
    return floor(queries, np.full(n, 1 / n))
