"""The Gaussian quantile as pairs of floats, against balls, at every kind of place.

Pairs of floats against rationals: every operation within its announced error.
"""

from collections.abc import Callable
from fractions import Fraction

import flint
import numpy as np
import pytest

from dpstream.dp_transforms.noise import quantile
from dpstream.dp_transforms.noise.quantile import (
    OPERATION_ERROR,
    plus,
    quantiles,
    scaled,
    times,
    two_product,
    two_sum,
)

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
        assert abs(value(total) - value(a) - value(b)) <= Fraction(OPERATION_ERROR) * (
            abs(value(a)) + abs(value(b))
        )
        assert abs(total[1]) <= abs(total[0]) * 2.0**-52


def checked(operation: Callable[..., tuple[float, float]], both_parts: bool) -> None:
    for a, b in zip(pairs(5), pairs(6), strict=True):
        left = a if both_parts else (a[0],)
        product = operation(*left, *b)
        exact = sum(map(Fraction, left)) * value(b)
        assert abs(value(product) - exact) <= Fraction(OPERATION_ERROR) * abs(exact)
        assert abs(product[1]) <= abs(product[0]) * 2.0**-52


def test_products_are_within_their_error() -> None:
    checked(times, both_parts=True)
    checked(scaled, both_parts=False)


LAST = 2**64 - 1


def off(high: list[int], low: list[int]) -> float:
    """The farthest that quantiles are from balls of 256 bits."""
    values, rest = quantiles(np.array(high, np.uint64), np.array(low, np.uint64))
    # What is no number is no small error; and the first of a pair is the nearest float.
    assert np.isfinite(values).all() and (np.abs(rest) <= np.spacing(np.abs(values))).all()
    worst = 0.0
    with flint.ctx.workprec(256):
        for h, low_, x, y in zip(high, low, values.tolist(), rest.tolist(), strict=True):
            uniform = flint.arb(2 * (h << 64 | low_) + 1 - (1 << 128)) / (1 << 128)
            exact = flint.arb(2).sqrt() * uniform.erfinv()
            worst = max(worst, abs(float((exact - x - y).mid())))
    return worst


@pytest.mark.parametrize("octaves", [0, 20, 40])
def test_random_places(octaves: int) -> None:
    """As they come, and in the tails, on both sides."""
    rng = np.random.default_rng(octaves)
    high = rng.integers(0, 2**64, 400, dtype=np.uint64)
    high >>= rng.integers(0, octaves + 1, 400).astype(np.uint64)
    low = rng.integers(0, 2**64, 400, dtype=np.uint64).tolist()
    assert off(high.tolist(), low) <= quantile.ERROR
    assert off((~high).tolist(), low) <= quantile.ERROR


def test_edges_of_the_table() -> None:
    """Both sides of parts' and octaves' edges, the middle and the ends."""
    high, low = [0, LAST, 2**63, 2**63 - 1], [0, LAST, 0, LAST]
    for octave in range(26):
        for part in (0, 1, 64, 127):
            edge = (128 + part) << (55 - octave)
            high += [edge, edge - 1, LAST - edge]
            low += [0, LAST, 5]
    assert off(high, low) <= quantile.ERROR


def test_all_128_bits_count() -> None:
    """Neighbours at the 80th bit differ by as much as the density says."""
    high = np.full(2, 3 << 60, np.uint64)
    values, rest = quantiles(high, np.array([0, 1 << 48], np.uint64))
    step = (values[1] - values[0]) + (rest[1] - rest[0])
    slope = np.sqrt(2 * np.pi) * np.exp(values[0] ** 2 / 2)
    assert step == pytest.approx(2.0**-80 * slope, rel=1e-3)


def test_a_table_that_is_off_is_seen() -> None:
    """One coefficient changed by a part in 2^60 moves a quantile beyond its error."""
    table = quantile._table().copy()
    part = 64  # of the first octave, [1/4, 1/2)
    table[part, 2] *= 1 + 2.0**-45
    high = np.full(1, (128 + part) << 55 | 1 << 54 | 1 << 53, np.uint64)
    values, rest, far = np.empty(1), np.empty(1), np.empty(1, np.int64)
    quantile._evaluate(high, np.zeros(1, np.uint64), table, values, rest, far)
    honest, honest_rest = quantiles(high, np.zeros(1, np.uint64))
    assert abs((values - honest) + (rest - honest_rest)) > quantile.ERROR


def test_what_lies_beyond_the_table() -> None:
    """Below 2^-25 and nothing else: a ball for each would take ten thousand times as long."""
    edge = 1 << 39
    inside = [edge, 2**62, 2**63 - 1, LAST - edge, 2**63, 5 << 50]
    beyond = [edge - 1, 0, LAST - edge + 1, LAST]
    high = np.array(inside + beyond, np.uint64)
    empty, far = np.empty(len(high)), np.empty(len(high), np.int64)
    low = np.zeros(len(high), np.uint64)
    count = quantile._evaluate(high, low, quantile._table(), empty, empty.copy(), far)
    assert far[:count].tolist() == list(range(len(inside), len(high)))


def test_the_table_is_everybodys() -> None:
    assert quantile._table() is quantile._table() and not quantile._table().flags.writeable
