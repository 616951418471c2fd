"""Tables from residual tables: exact without noise, and their variances as they are."""

import itertools
from typing import Any

import numpy as np
import pytest

from dpstream.accounting.arrays import kron
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.strategies.cells.bases import Even, difference_matrix, reduced
from dpstream.accounting.workloads.workload import Workload, from_dict
from dpstream.pipelines.workload.estimate import values
from dpstream.pipelines.workload.release import of_arrays, to_arrays
from dpstream.pipelines.workload.tables import TableEstimate

SIZES = (3, 4, 1, 2)
X = np.random.default_rng(8).integers(0, 20, SIZES)


def workload_of(queries: list[dict[str, Any]]) -> Workload:
    domain = [{"name": str(k), "size": n} for k, n in enumerate(SIZES)]
    return from_dict({"domain": domain, "queries": queries})


def estimate(ways: int = 2) -> TableEstimate:
    keys = [k for w in range(ways + 1) for k in itertools.combinations((0, 1, 3), w)]
    reduced_tables = []
    for key in keys:
        table = X.sum(axis=tuple(a for a in range(4) if a not in key))
        reduced_tables.append(reduced(table, [Even(SIZES[a]) for a in key]).astype(np.float64))
    return TableEstimate(
        tuple(map(Even, SIZES)), tuple(keys), np.arange(1.0, len(keys) + 1), tuple(reduced_tables)
    )


WORKLOAD = workload_of(
    [{"ways": 2}, {"factors": {"0": "prefix", "3": "identity"}}, {"factors": {}},
     {"factors": {"1": "range", "2": "identity"}}]
)  # fmt: skip


def test_without_noise_tables_are_exact() -> None:
    [answers] = estimate().answers(WORKLOAD)
    assert (
        np.allclose(answers.estimates, values(WORKLOAD, X.ravel().astype(np.float64)))
        and answers.displayed is answers.estimates
    )


def test_variances_against_matrices() -> None:
    """Of W (sum over R of spread Sub^+) with noise of covariance s_R^2 Sub Sub^T."""
    held = estimate()
    [answers] = held.answers(WORKLOAD)
    rows = np.concatenate(
        [kron([f.dense() for f in WORKLOAD.factors_of(p)]) for p in WORKLOAD.products]
    )
    total = np.zeros(len(rows))
    for key, sd in zip(held.keys, held.sds, strict=True):
        inverses = [
            np.linalg.pinv(difference_matrix(n)) if a in key else np.full((n, 1), 1 / n)
            for a, n in enumerate(SIZES)
        ]
        each = [np.asarray(inverse, np.float64) for inverse in inverses]
        grams = [difference_matrix(SIZES[a]) @ difference_matrix(SIZES[a]).T for a in key]
        root = [np.asarray(np.linalg.cholesky(gram), np.float64) for gram in grams]
        noise = rows @ kron(each) @ (kron(root) if root else np.ones((1, 1)))
        total += sd**2 * (noise**2).sum(1)
    assert np.allclose(answers.sd**2, total)


def test_stored() -> None:
    again = of_arrays(to_arrays(estimate()))
    assert isinstance(again, TableEstimate) and again.keys == estimate().keys
    for one, other in zip(again.measured, estimate().measured, strict=True):
        assert np.array_equal(one, other)
    [answers] = again.answers(WORKLOAD)
    [expected] = estimate().answers(WORKLOAD)
    assert np.array_equal(answers.sd, expected.sd) and again.releases == 1


def test_what_was_not_measured() -> None:
    with pytest.raises(PolicyError, match="not measured"):
        list(estimate(1).answers(WORKLOAD))
    with pytest.raises(PolicyError):
        list(estimate().answers(WORKLOAD, consistent=True))
    with pytest.raises(PolicyError):
        estimate().covariance(WORKLOAD)
