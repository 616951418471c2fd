"""Pairs of floats against rationals: every operation within its announced error."""

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from dpstream.dp_transforms.noise.doubles import ERROR, plus, scaled, times, two_product, two_sum

SIZES = (-60, 0, 3, 60)


def pairs(seed: int, count: int = 300) -> list[tuple[float, float]]:
    rng = np.random.default_rng(seed)
    high = rng.normal(size=count) * 2.0 ** rng.choice(SIZES, count)
    low = high * 2.0**-53 * rng.uniform(-0.5, 0.5, count)
    return [(float(h), float(low_)) for h, low_ in zip(high, low, strict=True)]


def value(pair: tuple[float, float]) -> Fraction:
    return Fraction(pair[0]) + Fraction(pair[1])


def test_nothing_is_lost_of_two_floats() -> None:
    for (a, _), (b, _) in zip(pairs(1), pairs(2), strict=True):
        assert value(two_sum(a, b)) == Fraction(a) + Fraction(b)
        assert value(two_product(a, b)) == Fraction(a) * Fraction(b)


@pytest.mark.parametrize("cancel", [False, True])
def test_a_sum_is_within_its_error_of_the_magnitudes(cancel: bool) -> None:
    for a, other in zip(pairs(3), pairs(4), strict=True):
        b = (-a[0], a[1] * 0.7) if cancel else other
        total = plus(*a, *b)
        assert abs(value(total) - value(a) - value(b)) <= Fraction(ERROR) * (
            abs(value(a)) + abs(value(b))
        )
        assert abs(total[1]) <= abs(total[0]) * 2.0**-52


def checked(operation: Callable[..., tuple[float, float]], both_parts: bool) -> None:
    for a, b in zip(pairs(5), pairs(6), strict=True):
        left = a if both_parts else (a[0],)
        product = operation(*left, *b)
        exact = sum(map(Fraction, left)) * value(b)
        assert abs(value(product) - exact) <= Fraction(ERROR) * abs(exact)
        assert abs(product[1]) <= abs(product[0]) * 2.0**-52


def test_products_are_within_their_error() -> None:
    checked(times, both_parts=True)
    checked(scaled, both_parts=False)
