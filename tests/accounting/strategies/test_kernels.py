"""The compiled loops against rationals and against scipy.signal."""

from fractions import Fraction

import numpy as np
import pytest
from scipy.signal import lfilter

from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.strategies.blt import BltStrategy
from dpstream.accounting.strategies.kernels import decode_block, largest_response

SCALE = 1 << DECODE_BITS


def test_a_response_is_that_of_the_filter() -> None:
    decoder = BltStrategy(300).decoder
    for theta, omega in ((0.5, 0.25), (0.999, 0.01), (0.0, 1.0)):
        expected = np.abs(lfilter([0.0, -omega], [1.0, -theta], decoder)).max()
        assert largest_response(theta, omega, decoder) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("level", [0, 1, 5, 20])
def test_decode_block_rounds_to_nearest(level: int) -> None:
    for total in (0, 1, -1, 12345, -12345, 10**9, -(10**9)):
        assert decode_block(total, level) == round(Fraction(total * SCALE, 2 ** (level + 1) - 1))
