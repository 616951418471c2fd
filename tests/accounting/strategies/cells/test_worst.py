"""Least worst variance: figures and certificates."""

import math

import numpy as np
import pytest

from dpstream.accounting.arrays import kron
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.strategies.cells.residual import worst_table
from dpstream.accounting.strategies.cells.worst import rows_of, worst
from dpstream.accounting.workloads.workload import over
from tests.accounting.strategies.cells.shapes import floor, rows, small


def test_the_worst_prefix_of_256() -> None:
    solution = worst(over([256], ["prefix"]))
    assert math.sqrt(solution.error) <= 2.536 and solution.gap <= 1e-3


@pytest.mark.parametrize("name", ["example", "ranges", "prefixes", "range marginals", "a product"])
def test_certificates_hold_by_other_code(name: str) -> None:
    workload = small()[name]
    solution = worst(workload, 2e-2)
    m, p = (kron([side[k] for side in solution.certificate]) for k in (0, 1))
    assert p.min() >= 0 and p.sum() <= 1 + 1e-12 and solution.gap <= 2e-2
    assert solution.floor <= floor(rows(workload) * np.sqrt(p)[:, None], m) * (1 + 1e-9)
    variances = np.concatenate(solution.strategy.variances(workload))
    assert variances.max() == pytest.approx(solution.error, rel=1e-6)


def test_tables_agree_with_their_closed_form() -> None:
    workload = small()["tables"]
    assert worst(workload, 1e-3).error == pytest.approx(worst_table(workload).error, rel=2e-3)


@pytest.mark.parametrize("name", small())
def test_rows_are_written_out(name: str) -> None:
    np.testing.assert_allclose(rows_of(small()[name]), rows(small()[name]), atol=1e-12)


def test_too_many_queries() -> None:
    with pytest.raises(PolicyError, match="query matrix"):
        worst(over([512], ["range"]))
