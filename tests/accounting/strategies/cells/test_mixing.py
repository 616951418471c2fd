"""Mixes of noise: bounds against balls and fractions, and singular ones refused."""

from fractions import Fraction

import flint
import numpy as np
import pytest

from dpstream.accounting import mixing as engine
from dpstream.accounting.arrays import Float64, kron
from dpstream.accounting.balls import precision
from dpstream.accounting.errors import UsageError
from dpstream.accounting.strategies.cells.auto import auto
from dpstream.accounting.strategies.cells.mixing import inverse_norm2, matrices, mixed
from dpstream.accounting.strategies.cells.residual import Residual, residual
from dpstream.accounting.strategies.cells.strategy import CellStrategy, dense_gram, identity
from dpstream.accounting.workloads.workload import marginals, over
from tests.accounting.strategies.cells.shapes import attributes, rows, small


def by_balls(mix: Float64) -> float:
    """Largest squared column norm of the inverse, in balls, rounded up."""
    with precision(200):
        inverse = flint.arb_mat(mix.tolist()).inv()
        n = len(mix)
        sums = [
            sum((inverse[i, j] * inverse[i, j] for i in range(n)), flint.arb(0)) for j in range(n)
        ]
        return max(float(s.upper()) for s in sums)


@pytest.mark.parametrize("name", small())
def test_bounds_hold_in_balls(name: str) -> None:
    workload = small()[name]
    done = mixed(auto(workload).strategy, workload.sizes)
    exact = 1.0
    for factor in done.factors:
        exact *= by_balls(factor)
    assert exact <= done.inverse_norm2 * (1 + 1e-15)
    assert 1 - 1e-9 <= done.inverse_norm2 <= exact * (1 + 1e-6)


@pytest.mark.parametrize("name", small())
def test_the_mix_has_the_strategys_error_but_for_a_thousandth(name: str) -> None:
    workload = small()[name]
    plan = auto(workload)
    done = mixed(plan.strategy, workload.sizes)
    matrix = kron(list(done.factors))
    assert np.linalg.matrix_rank(matrix) == workload.cells
    error = done.inverse_norm2 * np.linalg.norm(rows(workload) @ matrix) ** 2
    gram = dense_gram(np.asarray(np.linalg.inv(matrix @ matrix.T), np.float64), workload.sizes)
    assert error == pytest.approx(gram.sensitivity2 * gram.trace(workload), rel=1e-6)
    axes = len(done.factors)
    assert plan.error * (1 - 1e-9) <= error <= plan.error * (1 + 1.01e-3) ** axes


@pytest.mark.parametrize("upper", [True, False])
def test_bounds_are_true_for_exact_inverses(upper: bool) -> None:
    rng = np.random.default_rng(5)
    mix = np.triu(rng.integers(1, 9, (6, 6))) if upper else rng.integers(-9, 9, (6, 6))
    exact = by_fractions(mix.tolist())
    bound = inverse_norm2(mix.astype(float))
    assert exact <= Fraction(bound) <= exact * Fraction(1 + 1e-6)


def by_fractions(mix: list[list[int]]) -> Fraction:
    """Gauss and Jordan on fractions."""
    n = len(mix)
    table = [
        [Fraction(v) for v in row] + [Fraction(i == j) for j in range(n)]
        for i, row in enumerate(mix)
    ]
    for k in range(n):
        pivot = next(i for i in range(k, n) if table[i][k])
        table[k], table[pivot] = table[pivot], table[k]
        table[k] = [v / table[k][k] for v in table[k]]
        for i in range(n):
            if i != k:
                table[i] = [a - table[i][k] * b for a, b in zip(table[i], table[k], strict=True)]
    return max(sum((table[i][n + j] ** 2 for i in range(n)), Fraction(0)) for j in range(n))


@pytest.mark.parametrize("seed", range(4))
def test_the_engines_own_bound_is_the_same(seed: int) -> None:
    """Plans are certified here, mixes that come from elsewhere by ``accounting.mixing``: both bound
    the same number from above, closely, and refuse the same matrices."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(9, 9)) * 2.0 ** rng.integers(-3, 4, 9)
    mix = np.triu(mix) if seed % 2 else mix
    exact = by_balls(mix)
    for bound in (inverse_norm2(mix), engine.inverse_norm2(mix)):
        assert exact <= bound <= exact * (1 + 1e-6)
    singular = mix.copy()
    singular[:, 3] = singular[:, 5]
    with pytest.raises(UsageError):
        inverse_norm2(singular)
    with pytest.raises(UsageError):
        engine.inverse_norm2(singular)


def test_a_mix_that_is_no_inverse_is_refused() -> None:
    """With it part of the exact counts would be published."""
    thin = np.random.default_rng(0).normal(size=(5, 3))
    bad = [
        np.zeros((3, 3)),
        np.diag([1.0, 0.0]),
        thin @ thin.T,
        np.diag([1.0, np.nan]),
        np.ones((2, 2)),
        np.ones((2, 3)),
        np.triu(np.ones((4, 4))) * [[1], [1], [1], [0]],
        np.diag([1, 1e-200]),
    ]
    for mix in bad[:-1]:
        with pytest.raises(UsageError, match="invertible"):
            inverse_norm2(mix)
    nearly = np.eye(40) * 1e-3 + np.triu(np.full((40, 40), 1.0), 1)
    with pytest.raises(UsageError, match="invertible"):
        inverse_norm2(nearly)


def test_the_bound_is_of_the_matrix_that_is_used() -> None:
    mix = mixed(auto(over([8], ["range"])).strategy, (8,)).factors[0]
    smaller = mix / 1.25
    assert inverse_norm2(smaller) == pytest.approx(1.25**2 * inverse_norm2(mix), rel=1e-9)


def mixed_in(strategy: CellStrategy, sizes: tuple[int, ...]) -> bool:
    """Whether X of a factor is another than the strategy's: the identity is mixed in."""
    given = [matrix / matrix.diagonal().max() for matrix in matrices(strategy, sizes)]
    used = [np.linalg.inv(factor @ factor.T) for factor in mixed(strategy, sizes).factors]
    return any(not np.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(given, used, strict=True))


def test_singular_strategies_are_mixed_with_the_identity() -> None:
    workload = marginals(attributes(3, 4, 2), [1])
    strategy = residual(workload)[0]
    assert mixed_in(strategy, workload.sizes)
    assert len(mixed(strategy, workload.sizes).factors) == 1
    assert not mixed_in(auto(over([8], ["range"])).strategy, (8,))
    strategy = auto(over([6, 4], ["range", "total"])).strategy
    assert mixed_in(strategy, (6, 4)) and len(mixed(strategy, (6, 4)).factors) == 2


def test_nearly_singular_strategies_are_too() -> None:
    """A completed optimum can be inverted, but what it hardly measures would drown in noise."""
    workload = small()["example"]
    strategy = auto(workload).strategy
    assert mixed_in(strategy, workload.sizes)
    assert np.abs(mixed(strategy, workload.sizes).factors[0]).max() <= 1e-3**-0.5


def test_what_rounding_may_hide_is_part_of_the_bound() -> None:
    steep = np.diag([1.0] * 20 + [1e-10])
    steep[:20, 20] = 1.0
    assert inverse_norm2(steep) >= by_balls(steep) * (1 + 1e-5)


def test_identity_is_itself() -> None:
    workload = over([3, 2], ["identity"] * 2)
    done = mixed(identity(workload), (3, 2))
    assert done.identity and done.inverse_norm2 == pytest.approx(1, abs=1e-9)


def test_too_many_cells_for_one_matrix() -> None:
    workload = marginals(attributes(100, 100), [1])
    with pytest.raises(UsageError, match="mixed over"):
        mixed(residual(workload)[0], workload.sizes)
    with pytest.raises(UsageError, match="mixed over"):
        mixed(identity(over([9000], ["identity"])), (9000,))
    scaled = CellStrategy("x", dense_gram(7 * np.eye(3)))
    assert mixed(scaled, (3,)).inverse_norm2 == pytest.approx(1, abs=1e-9)


def test_an_inverse_that_is_less_exact_gives_no_smaller_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it leaves of the identity shortens the longest column by as much as may be."""
    mix = np.diag([0.25, 1.0, 1.0])[:, [1, 2, 0]]
    left = np.zeros((3, 3))
    left[2, 2] = 0.009  # row 2 of the inverse has the longest column's only number
    near = (np.eye(3) - left) @ np.linalg.inv(mix)
    assert (near**2).sum(axis=0).max() == pytest.approx(16 * 0.991**2)
    monkeypatch.setattr(np.linalg, "inv", lambda _: near)
    assert 16 <= inverse_norm2(mix) <= 16 * (1 + 1e-9)


def test_what_floats_may_hide_of_the_rest_is_in_the_bound() -> None:
    """The inverse is exact, the rest found is 0: what is added are n units of |Y| |L|."""
    size, far = 40, 2.0**20
    mix = np.eye(size)
    mix[0, -1] = far
    hidden = size * 2.0**-53 * (size + far**2)
    assert inverse_norm2(mix) >= (1 + far**2) / (1 - hidden) ** 2


def test_below_the_diagonal_is_seen() -> None:
    assert inverse_norm2(np.array([[1.0, 0.0], [1.0, 1.0]])) == pytest.approx(2)


def test_what_is_mixed_in_is_a_thousandth_of_sensitivity_one() -> None:
    workload = marginals(attributes(3, 4, 2), [1])
    strategy = residual(workload)[0]
    assert isinstance(strategy.gram, Residual)
    done, matrix = mixed(strategy, workload.sizes), strategy.gram.dense()
    mixture = 0.999 * matrix / matrix.diagonal().max() + 0.001 * np.eye(24)
    [factor] = done.factors
    np.testing.assert_allclose(np.linalg.inv(factor @ factor.T), mixture, atol=1e-10)
    assert mixture.diagonal().max() == pytest.approx(1)
    with pytest.raises(UsageError, match="mixed over"):
        matrices(identity(over([9000, 2], ["identity"] * 2)), (9000, 2))
