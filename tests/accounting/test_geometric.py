"""Figures of two-sided geometric noise, against sums over its law."""

import math

import mpmath
import pytest

from dpstream.accounting.geometric import geometric_sd, truncated_sd


@pytest.mark.parametrize("scale", [2.0**-10, 0.01, 1 / 6, 1.0, 30.0, 1e9])
def test_sd_is_that_of_the_law(scale: float) -> None:
    with mpmath.workdps(60):
        ratio = mpmath.exp(-1 / mpmath.mpf(scale))
        exact = mpmath.sqrt(2 * ratio) / (1 - ratio)
        assert abs(geometric_sd(scale) / exact - 1) < mpmath.mpf("1e-12")


@pytest.mark.parametrize(("scale", "most"), [(0.4, 1), (1.0, 3), (7.0, 40), (1e6, 5)])
def test_sd_of_truncated_noise_is_that_of_its_law(scale: float, most: int) -> None:
    weights = [math.exp(-abs(k) / scale) for k in range(-most, most + 1)]
    square = math.fsum(k * k * w for k, w in zip(range(-most, most + 1), weights, strict=True))
    assert truncated_sd(scale, most) == pytest.approx(math.sqrt(square / math.fsum(weights)))
