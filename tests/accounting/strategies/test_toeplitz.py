"""Square-root Toeplitz on integers: its coefficients, and those of a run begun before."""

import numpy as np
import pytest

from dpstream.accounting.limits import MAX_TOEPLITZ_TRIGGERS
from dpstream.accounting.strategies import make_strategy
from dpstream.accounting.strategies.base import ExactNoise, Ranges
from dpstream.accounting.strategies.toeplitz import (
    EXPONENTIALS,
    BltStrategy,
    ToeplitzStrategy,
    _groups,
)
from tests.accounting.strategies.dense import (
    SCALE,
    balls,
    convolving,
    fold,
    noise_of,
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


def test_prefixes_that_noise_error_leaves_open_are_reported() -> None:
    """With noise known only to 1e-3 of a lattice step about 2e-3 of all roundings are open."""
    strategy = make_strategy("blt", 50)
    noise = noise_of(strategy, 200, 300.0)
    expected, open_rows = fold(strategy, noise), []
    zero, end, out = np.zeros(200, np.int64), np.full(200, 50), np.zeros((200, 50), np.int64)

    def exact(row: int, nodes: int) -> ExactNoise:
        open_rows.append(row)
        return balls(noise[row, :nodes])

    for error, least, most in ((0.0, 0, 0), (1e-3 / SCALE / strategy.reach, 5, 50)):
        stack = np.zeros((200, strategy.state_columns))
        open_rows.clear()
        path = (noise.reshape(-1), np.arange(200) * 50, zero, end, stack, out, exact)
        strategy.fold(Ranges(*path, error))
        assert least <= len(open_rows) <= most
        assert np.array_equal(out, expected)


@pytest.mark.parametrize("triggers", [1 << 13, 1 << 17])
def test_sd_of_long_streams_is_that_of_the_exact_decoder(triggers: int) -> None:
    """Poles near 1 cost a direct-form filter 1e-5 here; sd_t must not be too small."""
    strategy = convolving("blt", triggers)
    exact = np.array([float(b) for b in strategy.decoder_balls(1024)])
    assert np.abs(strategy.decoder / exact - 1).max() < 1e-10
    assert np.all(strategy.sd_factors >= np.sqrt(np.cumsum(exact**2)))


def test_a_run_keeps_the_exponentials_that_it_was_begun_with() -> None:
    parameters = np.array([0.5, 0.9, 0.25, 0.125])
    strategy = BltStrategy(4, parameters)
    assert strategy.parameters.tolist() == parameters.tolist()
    column = [1.0] + [0.25 * 0.5**k + 0.125 * 0.9**k for k in range(3)]
    assert strategy.coefficients() == pytest.approx(column, rel=1e-15)
    assert BltStrategy(1).coefficients().tolist() == [1.0]
    for size in (0, 1, 3, 10):
        with pytest.raises(ValueError, match="one to four pairs"):
            BltStrategy(4, np.full(size, 0.5))


def test_the_row_of_a_stream_is_that_of_the_next_power_of_two() -> None:
    rows = {t: BltStrategy(t).parameters.tolist() for t in (1, 4, 5, 8, 9, 1 << 20)}
    assert rows[1] == rows[4] and rows[5] == rows[8] and rows[4] != rows[5] != rows[9]
    assert rows[1 << 20] == [*EXPONENTIALS[20][0], *EXPONENTIALS[20][1]]
