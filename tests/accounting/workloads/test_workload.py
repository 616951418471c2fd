"""Workloads against what they are written out; weights, norms, hashes and limits."""

from typing import Any

import numpy as np
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.workloads.attributes import of_size, of_values
from dpstream.accounting.workloads.factors import interval
from dpstream.accounting.workloads.workload import (
    codes,
    marginals,
    of_matrix,
    over,
    workload_of,
)
from tests.accounting.strategies.cells.shapes import attributes, rows, small


@pytest.mark.parametrize("name", small())
def test_implicit_equals_written_out(name: str) -> None:
    workload = small()[name]
    matrix = rows(workload)
    x = np.random.default_rng(0).integers(0, 50, workload.cells)
    np.testing.assert_allclose(workload.gram(), matrix.T @ matrix, atol=1e-9)
    answers = np.concatenate([answer.ravel() for answer in workload.apply(x)])
    np.testing.assert_allclose(answers, matrix @ x, atol=1e-9)
    assert workload.queries == len(matrix) and workload.weight == len(matrix)


def test_weights_count_in_squares() -> None:
    a = attributes(3, 2)
    workload = workload_of(a, [(2.5, {0: interval("range", 3)}), (1, {1: interval("identity", 2)})])
    matrix = rows(workload)
    np.testing.assert_allclose(workload.gram(), matrix.T @ matrix)
    assert workload.weight == 2.5 * 6 + 2 and workload.queries == 8


@pytest.mark.parametrize("name", small())
def test_relative_queries_have_norm_one(name: str) -> None:
    norms = np.linalg.norm(rows(small()[name].relative()), axis=1)
    np.testing.assert_allclose(norms, 1.0)


def test_large_unions_stay_implicit() -> None:
    workload = marginals(attributes(*[10] * 100), [3])
    assert len(workload.products) == 161_700 and workload.queries == 161_700_000
    assert workload.cells == 10**100 and workload.marginal
    assert over([64] * 4, ["range"] * 4).queries == 2080**4
    with pytest.raises(PolicyError, match="histogram"):
        workload.apply(np.zeros(1))


def test_hashes_are_stable_and_tell_workloads_apart() -> None:
    # Names of files on disk: a change makes every cached strategy a new one.
    assert over([4], ["range"]).structure == over([4], ["range"]).structure
    assert over([4], ["range"]).structure.startswith("531f8d43854ae419")
    different = [over([4], [kind]) for kind in ("range", "prefix", "identity", "total")]
    different += [
        over([2, 2], ["range"] * 2),
        over([4, 1], ["range", "total"]),
        of_matrix(np.eye(4)),
    ]
    different += [workload_of(attributes(4), [(2.0, {0: interval("range", 4)})])]
    assert len({workload.structure for workload in different}) == len(different)
    renamed = workload_of([of_values("b", "wxyz")], [(1, {0: interval("range", 4)})])
    assert renamed.structure == different[0].structure and renamed.digest != different[0].digest


@pytest.mark.parametrize(
    "weight", [0, -1, float("nan"), float("inf"), True, "1", None, 1e-300, 1e300]
)
def test_weights_that_are_refused(weight: Any) -> None:
    with pytest.raises(PolicyError, match="weight"):
        workload_of(attributes(2), [(weight, {})])


def test_a_workload_asks_something() -> None:
    with pytest.raises(PolicyError, match="1 to"):
        workload_of([of_size("a", 2)], [])


def test_codes_of_records() -> None:
    cells = np.array([[0, 1, 2, -1], [3, 0, -1, 2]])
    assert codes((3, 4), cells).tolist() == [3, 4, -1, -1]


def test_the_same_factor_has_the_same_axis_workload() -> None:
    workload = marginals(attributes(3, 4, 5), [2], "range")
    first, second = (workload.axes(product) for product in workload.products[:2])
    assert first[0] is second[0] and first[1] is not second[1]
