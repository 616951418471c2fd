"""The search for p-identities: its gradient, its formula, and that it beats trees."""

import numpy as np
import pytest

from dpstream.accounting.strategies.geometric import prefix_identity, squared_error
from tests.accounting.strategies.dense import Floats


def dense_error(rows: Floats) -> float:
    """tr(M (A^T A)^-1 M^T) times the squared column norm, from the matrix."""
    size = rows.shape[1]
    prefixes = np.tril(np.ones((size, size)))
    inverse = np.linalg.inv(rows.T @ rows)
    return float(np.trace(prefixes @ inverse @ prefixes.T) * np.abs(rows).sum(axis=0).max() ** 2)


def identity_over(extra: Floats) -> Floats:
    """(T + p, T) [I; P] with columns of norm 1."""
    rows = np.concatenate([np.eye(extra.shape[1]), extra])
    return np.asarray(rows / rows.sum(axis=0))


@pytest.mark.parametrize(("rows", "triggers"), [(1, 2), (3, 7), (5, 20)])
def test_formula_is_that_of_the_matrix(rows: int, triggers: int) -> None:
    extra = np.random.default_rng(rows).random((rows, triggers))
    assert squared_error(extra) == pytest.approx(dense_error(identity_over(extra)), rel=1e-9)


def tree(triggers: int, width: int) -> Floats:
    """All nodes of a tree of that arity, each of weight 1."""
    rows, size = [], 1
    while size <= triggers:
        starts = range(0, triggers, size)
        steps = np.arange(triggers)
        rows += [(steps >= s) & (steps < s + size) for s in starts]
        size *= width
    return np.array(rows, np.float64)


@pytest.mark.parametrize("triggers", [8, 16, 30, 100])
def test_no_tree_and_not_the_identity_is_better(triggers: int) -> None:
    error = squared_error(prefix_identity(triggers))
    assert error <= dense_error(np.eye(triggers)) * (1 + 1e-12)
    assert error <= min(dense_error(tree(triggers, width)) for width in range(2, 33))


def test_a_stream_of_more_than_a_thousand_steps_has_mixed_rows() -> None:
    error = squared_error(prefix_identity(1025))
    assert error <= dense_error(tree(1025, 32)) / 2
    assert error <= dense_error(np.eye(1025)) / 10


def test_few_steps_need_no_mixed_rows() -> None:
    assert prefix_identity(1).shape == (0, 1)
    assert prefix_identity(2).shape[1] == 2
    assert not prefix_identity(16).flags.writeable and (prefix_identity(16) >= 0).all()
