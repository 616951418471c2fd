"""The table of exponentials: in range, one row for each power of two, near the best error known."""

import numpy as np
import pytest

from dpstream.accounting.limits import MAX_TRIGGERS
from dpstream.accounting.strategies import make_strategy
from dpstream.accounting.strategies.toeplitz import EXPONENTIALS


@pytest.mark.parametrize("power", range(2, 17))
def test_blt_is_near_the_square_root_toeplitz_matrix(power: int) -> None:
    """Every row of the table, at its power of two and just above the one before."""
    for triggers in (1 << power, (1 << power - 1) + 1):
        strategy = make_strategy("blt", triggers)
        k = np.arange(1, triggers)
        root = np.cumprod(np.concatenate([[1.0], (2 * k - 1) / (2 * k)]))
        ideal = np.sqrt(np.cumsum(root**2) * (root**2).sum())
        ours = strategy.sd_factors * np.sqrt(strategy.col2)
        assert ours.mean() <= 1.005 * ideal.mean()
        assert ours[-1] <= 1.03 * ideal[-1]


def test_rows_are_encoders_of_every_length() -> None:
    """One row for each ceil(log2 T) up to the most triggers; exponentials that decay and add."""
    assert list(EXPONENTIALS) == [*range(2, MAX_TRIGGERS.bit_length())]
    for theta, omega in EXPONENTIALS.values():
        assert len(theta) == len(omega) <= 4
        assert all(0 < t < 1 for t in theta) and list(theta) == sorted(theta)
        assert all(o > 0 for o in omega)
        # Coefficients begin at 1 and never rise: `worst_split` needs both.
        assert sum(omega) <= 1


@pytest.mark.parametrize(("power", "largest", "mean"), [(10, 1.016, 1.003), (17, 1.016, 1.003)])
def test_the_error_is_what_is_said_of_it(power: int, largest: float, mean: float) -> None:
    """Against the square-root Toeplitz matrix: largest and mean error as `blt` states them."""
    triggers = 1 << power
    k = np.arange(1, triggers)
    root = np.cumprod(np.concatenate([[1.0], (2 * k - 1) / (2 * k)]))
    ideal = np.sqrt(np.cumsum(root**2) * (root**2).sum())
    strategy = make_strategy("blt", triggers)
    ours = strategy.sd_factors * np.sqrt(strategy.col2)
    assert ours.max() <= largest * ideal.max()
    assert 0.98 * ideal.mean() <= ours.mean() <= mean * ideal.mean()
