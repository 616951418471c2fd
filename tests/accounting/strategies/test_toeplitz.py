"""Square-root Toeplitz on integers: its coefficients, and those of a run begun before."""

import numpy as np
import pytest

from dpstream.accounting.limits import MAX_TOEPLITZ_TRIGGERS
from dpstream.accounting.strategies.toeplitz import ToeplitzStrategy, _groups
from tests.accounting.strategies.dense import (
    convolving,
)


@pytest.mark.parametrize("triggers", [1000, MAX_TOEPLITZ_TRIGGERS])
def test_toeplitz_coefficients_are_rounded_exactly(triggers: int) -> None:
    """rint(2^g C(2k, k) / 4^k), ties to even, from whole binomials."""
    scale, binomial, expected = 64 if triggers <= 1000 else 256, 1, []
    for k in range(triggers):
        quotient, rest = divmod(scale * binomial, 1 << 2 * k)
        up = 2 * rest > 1 << 2 * k or (2 * rest == 1 << 2 * k and quotient % 2 == 1)
        expected.append(quotient + up)
        binomial = binomial * 2 * (2 * k + 1) // (k + 1)
    assert convolving("toeplitz", triggers).coefficients().tolist() == expected


def test_a_run_keeps_the_coefficients_that_it_was_begun_with() -> None:
    coefficients = np.array([64.0, 31.0, 24.0])
    strategy = ToeplitzStrategy(3, coefficients)
    assert strategy.parameters.tolist() == strategy.coefficients().tolist() == coefficients.tolist()
    assert strategy.col2 == 64**2 + 31**2 + 24**2
    assert strategy.matrix().dtype == np.int64 and strategy.matrix()[2].tolist() == [24, 31, 64]
    for wrong in (coefficients[:2], np.array([64.0, 31.5, 24.0])):
        with pytest.raises(ValueError, match="whole number for each trigger"):
            ToeplitzStrategy(3, wrong)


def test_it_ends_where_its_matrix_would_cost_more_than_it_saves() -> None:
    with pytest.raises(ValueError, match="too many triggers"):
        ToeplitzStrategy(MAX_TOEPLITZ_TRIGGERS + 1)


def test_a_path_is_a_product_over_groups_of_rows() -> None:
    """Rows that begin and end alike share a product; a row that stands still is in none."""
    steps, upto = np.array([0, 2, 0, 5, 2]), np.array([3, 3, 3, 5, 3])
    groups = [(begin, end, rows.tolist()) for begin, end, rows in _groups(steps, upto)]
    assert groups == [(0, 3, [0, 2]), (2, 3, [1, 4])]
    most = MAX_TOEPLITZ_TRIGGERS  # no two pairs share a name
    groups_of_two = _groups(np.array([0, 1, 1, 0]), np.array([most, 1, 2, most - 1]))
    assert sorted(g[:2] for g in groups_of_two) == [(0, most - 1), (0, most), (1, 2)]
    assert all(len(rows) == 1 for *_, rows in groups_of_two)
