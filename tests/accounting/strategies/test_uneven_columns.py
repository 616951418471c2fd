"""Encoders of uneven columns, whose sensitivity is that of the largest."""

import numpy as np
import pytest

from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.strategies.geometric import IDENTITY, GeometricStrategy
from tests.accounting.strategies.dense import SCALE, fold

#: p = 1, T = 3: S, P and W.  Columns of norm 3, 7 and 4, squared norms 5, 25 and 10.
UNEVEN = np.array([1.0, 1, 4, 3, 2, 3, 1, 0.25, 0.5, 0.5])


def test_sensitivity_is_that_of_the_largest_column() -> None:
    strategy = GeometricStrategy(3, UNEVEN)
    columns = strategy.matrix()
    assert np.abs(columns).sum(axis=0).tolist() == [3, 7, 4]
    assert strategy.column1 == 7
    assert 25 <= strategy.col2 <= 25 * (1 + 1e-9)


@pytest.mark.parametrize(("at", "number"), [(1, 0.0), (1, 1.5), (4, -1.0), (4, 2.5)])
def test_rows_that_are_negative_or_not_whole_are_refused(at: int, number: float) -> None:
    broken = UNEVEN.copy()
    broken[at] = number
    with pytest.raises(ValueError, match="rows"):
        GeometricStrategy(3, broken)


def test_rounding_and_sd_of_noise_for_each_step_are_rounded_up() -> None:
    strategy = GeometricStrategy(100, IDENTITY)
    assert (strategy.rounding * (1 << DECODE_BITS) >= 0.5).all()
    exact = np.arange(1, 101)
    assert (strategy.sd_factors**2 >= exact * (1 + 1e-12)).all()


@pytest.mark.parametrize(("before", "up"), [(0, 1), (63, 1), (65, 0), (1 << 18, 0)])
def test_values_next_to_a_tie_move_by_what_the_input_moves(before: int, up: int) -> None:
    """n(z + A v) = n(z) + M v, which the proof of plain epsilon uses, also where floats decide the
    rounding of the left side and fractions that of the right side: 64 steps before a tie."""
    alone = 3 << 26  # 2^-D / 12288 is 64 / alone
    strategy = GeometricStrategy(2, np.array([1.0, alone, alone, 1, 2, 0, 0.5]))
    inputs = np.arange(40)
    noise = np.zeros((40, 3), np.int64)
    noise[:, 0] = (2 * inputs + 1) * (alone // (2 * SCALE)) - before
    small = fold(strategy, noise)
    assert small[:, 0].tolist() == (inputs + up).tolist()
    moved = np.array([1 << 24, 1 << 23])
    large = fold(strategy, noise + strategy.matrix() @ moved)
    assert (large - small == SCALE * np.cumsum(moved)).all()
    # Where the last step alone is read it is rounded by the same fractions.
    last = fold(strategy, noise + strategy.matrix() @ moved, (1,), width=1)
    assert np.array_equal(last, large)
