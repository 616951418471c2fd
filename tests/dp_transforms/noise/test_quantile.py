"""The Gaussian quantile as pairs of floats, against balls, at every kind of place."""

import flint
import numpy as np
import pytest

from dpstream.dp_transforms.noise import quantile
from dpstream.dp_transforms.noise.quantile import quantiles

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
