"""Boxes of cells against queries written out."""

import numpy as np

from dpstream.accounting.arrays import Int64
from tests.bench.boxes import box_sums, box_variances


def boxes(sizes: tuple[int, ...], k: int = 50) -> tuple[Int64, Int64]:
    ends = np.sort(np.random.default_rng(3).integers(0, sizes, (2, k, len(sizes))), axis=0)
    return ends[0], ends[1]


def test_sums_and_variances_equal_the_queries_written_out() -> None:
    sizes = (4, 3, 5)
    rng = np.random.default_rng(4)
    lo, hi = boxes(sizes)
    x = rng.integers(-9, 9, sizes)
    roots = [rng.normal(size=(n, n)) for n in sizes]
    covariances = [root @ root.T for root in roots]
    covariance = np.kron(np.kron(*covariances[:2]), covariances[2])
    inside = [
        (lo[:, k, None] <= np.arange(n)) & (np.arange(n) <= hi[:, k, None])
        for k, n in enumerate(sizes)
    ]
    rows = np.einsum("qa,qb,qc->qabc", *(part.astype(float) for part in inside)).reshape(
        len(lo), -1
    )
    assert (box_sums(x, lo, hi) == rows @ x.ravel()).all()
    np.testing.assert_allclose(
        box_variances(covariances, lo, hi), np.diag(rows @ covariance @ rows.T)
    )


def test_integers_stay_exact() -> None:
    x = np.array([2**53 + 1, 1])
    assert box_sums(x, np.array([[0]]), np.array([[0]]))[0] == 2**53 + 1
