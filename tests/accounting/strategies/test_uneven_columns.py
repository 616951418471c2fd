"""Encoders of uneven columns, whose sensitivity is that of the largest."""

import numpy as np
import pytest

from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.strategies.geometric import IDENTITY, GeometricStrategy

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
