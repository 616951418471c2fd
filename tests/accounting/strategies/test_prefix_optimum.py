"""The optimum of all prefixes: its floor by other means, and how near the encoder comes to it.

Prefixes count alike, or more from one to the next, as tests of keys do.
"""

import numpy as np
import pytest

from dpstream.accounting.strategies.prefix_optimum import prefix_optimum, prefix_weights


def root(matrix: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(matrix)
    return np.asarray((vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T)


def rising(triggers: int, last: float) -> np.ndarray:
    """What each prefix counts."""
    return np.geomspace(1, last, triggers) if triggers > 1 else np.ones(1)


def gram_of_prefixes(importance: np.ndarray) -> np.ndarray:
    prefixes = np.tril(np.ones((len(importance), len(importance))))
    return np.asarray(prefixes.T @ np.diag(importance) @ prefixes)


@pytest.mark.parametrize("triggers", [1, 2, 3, 16, 100])
@pytest.mark.parametrize("last", [1.0, 4.0, 0.1])
def test_the_floor_is_the_dual_by_dense_eigenvectors(triggers: int, last: float) -> None:
    """(tr (D^1/2 V D^1/2)^1/2)^2 at the weights that are handed out, whose sum is 1."""
    importance = rising(triggers, last)
    weights, floor = prefix_weights(importance)
    half = np.sqrt(weights)
    dual = np.trace(root(half[:, None] * gram_of_prefixes(importance) * half)) ** 2
    assert weights.min() > 0 and weights.sum() == pytest.approx(1, rel=1e-12)
    assert floor == pytest.approx(dual, rel=1e-8)


@pytest.mark.parametrize("triggers", [2, 5, 40])
@pytest.mark.parametrize("last", [1.0, 4.0])
def test_no_factorisation_is_below_the_floor(triggers: int, last: float) -> None:
    """Weak duality, tried on random X of diagonal 1."""
    importance = rising(triggers, last)
    _, floor = prefix_weights(importance)
    rng = np.random.default_rng(triggers)
    for _ in range(20):
        factor = rng.normal(size=(triggers, 2 * triggers)) + rng.random()
        x = factor @ factor.T
        x /= np.sqrt(np.outer(x.diagonal(), x.diagonal()))
        assert np.trace(np.linalg.solve(x, gram_of_prefixes(importance))) >= floor


@pytest.mark.parametrize(
    ("triggers", "last", "buffers", "most"),
    [(1, 1, 1, 1 + 1e-9), (2, 1, 1, 1.002), (2, 1, 2, 1.00001), (16, 1, 3, 1.0001),
     (100, 1, 4, 1.0002), (100, 1, 6, 1.00001), (500, 1, 5, 1.0002), (2, 4, 2, 1.00001),
     (16, 4, 3, 1.0001), (16, 16, 3, 1.0002), (100, 4, 4, 1.0002), (16, 4, 6, 1.00001)],
)  # fmt: skip
def test_few_buffers_come_near_the_floor(
    triggers: int, last: float, buffers: int, most: float
) -> None:
    importance = rising(triggers, last)
    _, floor = prefix_weights(importance)
    matrix = prefix_optimum(importance, buffers).matrix()
    columns = (matrix**2).sum(axis=0)
    decoder = np.tril(np.ones((triggers, triggers))) @ np.linalg.inv(matrix)
    error = float(importance @ (decoder**2).sum(axis=1) * columns.max())
    assert columns == pytest.approx(np.ones(triggers), abs=1e-9)
    assert floor * (1 - 1e-9) <= error <= floor * most


def test_two_triggers_by_hand() -> None:
    """With X = ((1, r), (r, 1)) the error is (3 - 2 r) / (1 - r^2), smallest at the golden ratio's
    r = (3 - 5^1/2) / 2, where it is phi^2."""
    golden = (1 + np.sqrt(5)) / 2
    assert prefix_weights(np.ones(2))[1] == pytest.approx(golden**2, rel=1e-6)
    matrix = prefix_optimum(np.ones(2), 2).matrix()
    assert (matrix.T @ matrix)[0, 1] == pytest.approx((3 - np.sqrt(5)) / 2, abs=1e-4)
