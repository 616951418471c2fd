"""p-identities: gradient, sensitivity, lattice and published figures."""

import math

import numpy as np
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.strategies.cells import pure as module
from dpstream.accounting.strategies.cells.pure import (
    PureStrategy,
    p_identity,
    pure,
    value_and_gradient,
)
from dpstream.accounting.strategies.cells.strategy import tree, wavelet
from dpstream.accounting.workloads.workload import marginals, of_matrix, over
from tests.accounting.strategies.cells.shapes import attributes, rows, small


def test_the_gradient_is_that_of_the_value() -> None:
    gram, flat = over([6], ["range"]).gram(), np.random.default_rng(0).random(12)
    _, slope = value_and_gradient(flat, gram, 2)
    for k in (0, 7, 11):
        step = np.eye(12)[k] * 1e-6
        rise = (
            value_and_gradient(flat + step, gram, 2)[0]
            - value_and_gradient(flat - step, gram, 2)[0]
        ) / 2e-6
        assert rise == pytest.approx(slope[k], rel=1e-6)


def test_p_identities_have_norm_one_and_the_error_of_the_formula() -> None:
    workload = over([64], ["range"])
    matrix = p_identity(workload.gram(), 4)
    np.testing.assert_allclose(np.abs(matrix).sum(0), 1.0)
    queries = rows(workload)
    inverse = np.linalg.inv(matrix.T @ matrix)
    strategy = PureStrategy("x", (matrix,))
    assert strategy.error(workload) == pytest.approx(np.trace(queries @ inverse @ queries.T))
    assert strategy.error(workload) < PureStrategy("x", (np.eye(64),)).error(workload)


def test_sensitivity_is_the_largest_column_over_all_axes() -> None:
    strategy = PureStrategy("x", (np.array([[1.0, -2.0]]), np.array([[1.0], [3.0]])))
    matrix = np.kron(*strategy.factors)
    assert np.abs(matrix).sum(0).max() <= strategy.sensitivity1 <= 8 * (1 + 1e-9)


@pytest.mark.parametrize("size", [40, 64])
def test_a_lattice_measures_every_cell(size: int) -> None:
    workload = of_matrix(np.ones((1, size)))
    lattice = pure(workload).lattice()
    assert np.linalg.matrix_rank(lattice.factors[0].astype(float)) == size
    assert math.isfinite(lattice.floats().error(workload))


def test_the_lattice_is_whole_and_its_sensitivity_exact() -> None:
    workload = over([64, 8], ["range", "prefix"])
    strategy = pure(workload)
    assert strategy.name == "product" and len(strategy.factors[0]) > 64
    lattice = strategy.lattice()
    matrix = np.kron(*lattice.factors)
    assert matrix.dtype == np.int64 and lattice.sensitivity1 == np.abs(matrix).sum(0).max()
    assert lattice.floats().error(workload) == pytest.approx(strategy.error(workload), rel=5e-3)


@pytest.mark.parametrize("bits", [4, 12])
def test_the_choice_is_by_what_is_left_after_rounding(bits: int) -> None:
    """Nearly rank one: the best real strategy hardly measures cells, and rounds to far too much."""
    rows = np.concatenate([np.ones((1, 64)), 1e-4 * np.eye(64)])
    workload = of_matrix(rows)
    errors = [
        pure(workload, given).lattice(bits).floats().error(workload) for given in (bits, None)
    ]
    others = [
        PureStrategy("x", (made,)).lattice(bits).floats().error(workload)
        for made in (np.eye(64), tree(64), wavelet(64))
    ]
    assert errors[0] <= min(errors[1], *others) * (1 + 1e-12)
    assert errors[0] < 0.9 * errors[1] or bits == 12


def test_a_total_is_one_query_and_cells_are_cells() -> None:
    assert pure(over([5, 4], ["total", "identity"])).error(
        over([5, 4], ["total", "identity"])
    ) == pytest.approx(4)


def test_refusals() -> None:
    with pytest.raises(UsageError, match="one product"):
        pure(small()["range marginals"])
    with pytest.raises(UsageError, match="cells"):
        pure(over([1025], ["range"]))
    assert pure(marginals(attributes(8), [0, 1], "range")).sensitivity1 == pytest.approx(
        1, rel=1e-9
    )


def test_an_attribute_of_the_most_cells_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PURE_CELLS", 9)
    assert pure(over([9], ["range"])).factors[0].shape[1] == 9
    with pytest.raises(UsageError, match="cells"):
        pure(over([10], ["range"]))


@pytest.mark.slow
def test_figures_of_hdmm() -> None:
    for sizes, most in (([256], 5.74), ([256, 256], 32.7)):
        workload = over(sizes, ["range"] * len(sizes))
        strategy = pure(workload)
        assert math.sqrt(strategy.error(workload) / workload.queries) <= most
        lattice = strategy.lattice().floats()
        assert math.sqrt(lattice.error(workload) / workload.queries) <= most
