"""Real Gaussian noise: error of the floats, tails, shape, names; prefixes settled exactly.

The quantile as pairs of floats, against balls and rationals, at every kind of place."""

import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import flint
import mpmath
import numpy as np
import numpy.typing as npt
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from dpstream.accounting.arrays import Float64
from dpstream.accounting.budget.allocation import StreamNoise, encoder_of
from dpstream.accounting.limits import MAX_REAL_SIGMA
from dpstream.accounting.strategies import BltStrategy, make_strategy
from dpstream.accounting.strategies.base import ExactNoise
from dpstream.dp_transforms.noise import continuous
from dpstream.dp_transforms.noise.continuous import (
    OPERATION_ERROR,
    ContinuousGaussian,
    plus,
    quantiles,
    scaled,
    times,
    two_product,
    two_sum,
)
from dpstream.dp_transforms.noise.paths import NoiseStream
from dpstream.dp_transforms.noise.prf import Prf
from dpstream.dp_transforms.noise.sampler import RoundedGaussian
from tests.streams import KEYS

FULL = 1 << 128
#: A true sampler fails a test below this in one of a million runs; the keys are fixed anyway.
LEAST_P = 1e-6
KEY = b"\x07" * 32


def tweaks(count: int, seed: int = 0) -> npt.NDArray[np.uint64]:
    return np.random.default_rng(seed).integers(0, 2**64, (count, 2), np.uint64)


SIGMAS = (0.3, 1.0, 25.0, 1e6)


@functools.lru_cache(maxsize=8)
def draws(sigma: float, rows: int = 4000, nodes: int = 250) -> Float64:
    """(rows, nodes) noises in sds: nodes 0 .. of each of many names."""
    first, last = np.zeros(rows, np.int64), np.full(rows, nodes)
    noise, _ = ContinuousGaussian(sigma).draw(Prf(KEY), tweaks(rows), first, last)
    return noise.reshape(rows, nodes) / sigma


def in_digits(uniform: int) -> Any:
    """Phi^-1((u + 1/2) / 2^128) in 70 digits."""
    with mpmath.workdps(70):
        upper = uniform >= FULL // 2
        tail = (mpmath.mpf(FULL - 1 - uniform if upper else uniform) + 0.5) / FULL
        guess = mpmath.mpf(float(stats.norm.ppf(float(tail))))
        # Newton on the logarithm of the tail, which converges from far out too.
        for _ in range(8):
            cdf = mpmath.erfc(-guess / mpmath.sqrt(2)) / 2
            guess -= (mpmath.log(cdf) - mpmath.log(tail)) * cdf / mpmath.npdf(guess)
        return -guess if upper else guess


class Chosen:
    """A stand-in for the PRF under which node 0 of row i gets the uniform ``wanted[i]``."""

    def __init__(self, wanted: list[int]) -> None:
        self.wanted = wanted

    def blocks(self, blocks: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        out = np.empty_like(blocks)
        for i, (word, own) in enumerate(blocks.tolist()):
            uniform = self.wanted[word]
            out[i] = (uniform >> 64 if own == 0 else uniform & (2**64 - 1)), 0x5555
        return out


def decided(of: ContinuousGaussian, uniforms: list[int]) -> list[float]:
    rows = np.arange(len(uniforms), dtype=np.uint64)
    names = np.stack([rows, np.zeros_like(rows)], axis=1)
    ones = np.ones(len(uniforms), np.int64)
    noise, _ = of.draw(Chosen(uniforms), names, 0 * ones, ones)  # type: ignore[arg-type]
    result: list[float] = noise.tolist()
    return result


def forced() -> list[int]:
    """Uniforms everywhere: the ends, every power of two in both tails, the middle, random ones."""
    rng = np.random.default_rng(2)
    powers = [1 << k for k in range(128)]
    words = {0, 1, 2, 3, 5, 100, 12345, FULL // 2 - 1, FULL // 2, *powers, *(p - 1 for p in powers)}
    words |= {int.from_bytes(rng.bytes(16), "little") for _ in range(150)}
    words |= {int.from_bytes(rng.bytes(16), "little") >> int(s) for s in rng.integers(1, 120, 150)}
    return sorted(words | {FULL - 1 - u for u in words})


@pytest.mark.parametrize("sigma", [1.0, 1e6])
def test_floats_are_within_their_error(sigma: float) -> None:
    of, uniforms = ContinuousGaussian(sigma), forced()
    values = decided(of, uniforms)
    with mpmath.workdps(70):
        wrong = {
            f"{uniform:#x}": float((value - sigma * in_digits(uniform)) / sigma)
            for uniform, value in zip(uniforms, values, strict=True)
            if abs(value - sigma * in_digits(uniform)) > of.error
        }
    assert wrong == {}


def test_exact_draws_are_balls_around_the_same_numbers() -> None:
    of, prf, name = ContinuousGaussian(3.7), Prf(KEY), tweaks(1, seed=9)[0]
    none = np.zeros(1, np.int64)
    floats, _ = of.draw(prf, name.reshape(1, 2), none, none + 400)
    balls = of.exact(prf, name, 400)(256)
    for value, ball in zip(floats.tolist(), balls, strict=True):
        assert float(ball.rad()) < 1e-60
        assert abs(value - float(ball.mid())) <= of.error
    wide = of.exact(prf, name, 5)(1024)
    assert all(a.contains(b) for a, b in zip(balls, wide, strict=False))


def uniforms_of(key: bytes, name: tuple[int, int], node: int) -> int:
    """Upper 64 bits: a lane of the shared block; lower: the first word of the node's own."""

    def aes(low: int, high: int) -> bytes:
        cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
        return cipher.update(low.to_bytes(8, "little") + high.to_bytes(8, "little"))

    low, high = name
    lane = aes(low ^ (node // 2), high)[8 * (node % 2) :][:8]
    own = aes(low ^ node, high ^ (1 << 63))[:8]
    return int.from_bytes(lane, "little") << 64 | int.from_bytes(own, "little")


def test_draws_equal_a_plain_reference() -> None:
    of, names = ContinuousGaussian(25.0), tweaks(6, seed=3)
    first = np.array([0, 1, 7, 8, 63, 1000])
    last = first + np.array([40, 7, 1, 16, 0, 33])
    noise, starts = of.draw(Prf(KEY), names, first, last)
    assert len(noise) == (last - first).sum()
    for i, name in enumerate(names.tolist()):
        exact = of.exact(Prf(KEY), names[i], int(last[i]))(256)
        with mpmath.workdps(70):
            for node in range(int(first[i]), int(last[i])):
                expected = 25 * in_digits(uniforms_of(KEY, tuple(name), node))
                assert abs(noise[starts[i] + node - first[i]] - expected) <= of.error
                # Equal far below the 2^-64 that the lane alone would leave open.
                middle = mpmath.mpf(exact[node].mid().str(60, radius=False))
                assert abs(middle - expected) < 1e-45


def test_a_node_has_one_value_in_every_range_batch_and_order() -> None:
    prf, names, of, nodes = Prf(KEY), tweaks(50, seed=4), ContinuousGaussian(3.7), 90
    ends = np.zeros(50, np.int64), np.full(50, nodes)
    values = of.draw(prf, names, *ends)[0].reshape(50, nodes)
    assert len(np.unique(values)) == values.size
    rng = np.random.default_rng(5)
    for _ in range(40):
        rows = rng.integers(0, 50, rng.integers(1, 30))
        first = rng.integers(0, nodes + 1, len(rows))
        last = first + (rng.random(len(rows)) * (nodes + 1 - first)).astype(np.int64)
        noise, starts = of.draw(prf, names[rows], first, last)
        for i, row in enumerate(rows):
            drawn = noise[starts[i] : starts[i] + last[i] - first[i]]
            assert drawn.tobytes() == values[row, first[i] : last[i]].tobytes()


def test_other_names_keys_and_sds_give_other_noise() -> None:
    digests = {ContinuousGaussian(s).digest for s in SIGMAS}
    assert len(digests | {RoundedGaussian(1.0).digest}) == len(SIGMAS) + 1
    one = np.ones(1, np.int64)
    values = {
        float(ContinuousGaussian(1.0).draw(Prf(key), name, 0 * one, one)[0][0])
        for key in (KEY, b"\x08" * 32)
        for name in (tweaks(1, 1), tweaks(1, 2))
    }
    assert len(values) == 4


def test_sigmas_outside_the_range_are_refused() -> None:
    for sigma in (0.0, -1.0, float("nan"), float("inf"), MAX_REAL_SIGMA * 1.01):
        with pytest.raises(ValueError):
            ContinuousGaussian(sigma)


def fits(noise: Float64) -> bool:
    """Shape, variance, tails and independence of neighbours against Normal(0, 1)."""
    flat = noise.reshape(-1)
    total = float((flat**2).sum())
    p = [stats.kstest(flat[:200_000], "norm").pvalue]
    p += [2 * stats.norm.sf(abs(float(flat.mean())) * np.sqrt(flat.size))]
    p += [2 * min(stats.chi2.sf(total, flat.size), stats.chi2.cdf(total, flat.size))]
    for edge in (2.0, 3.0, 4.0):
        for tail in (flat > edge, flat < -edge):
            chance = float(stats.norm.sf(edge))
            p.append(stats.binomtest(int(tail.sum()), flat.size, chance).pvalue)
    for a, b in ((noise[:, 1:], noise[:, :-1]), (noise[1:], noise[:-1])):
        p.append(stats.pearsonr(a.reshape(-1)[:500_000], b.reshape(-1)[:500_000]).pvalue)
    return min(p) > LEAST_P


@pytest.mark.parametrize("sigma", SIGMAS)
def test_shape_and_tails(sigma: float) -> None:
    assert fits(draws(sigma))


def test_other_shapes_are_rejected() -> None:
    honest = draws(1.0)
    reused = honest.copy()
    reused[:, 1::2] = honest[:, ::2]  # both nodes of a block from one lane
    for sabotaged in (
        honest * 1.01,
        honest / 1.01,
        honest + 0.01,
        np.clip(honest, -3.9, 3.9),
        reused,
    ):
        assert not fits(sabotaged)


# --- prefixes that floats leave open -------------------------------------------------------

TRIGGERS, ROWS = 40, 30


def stream_of(name: str, triggers: int = TRIGGERS) -> NoiseStream:
    strategy = make_strategy(name, triggers)
    sigma = 3.7 if name == "blt" else 300.0
    sampler = RoundedGaussian(sigma) if strategy.rounds_nodes else ContinuousGaussian(sigma)
    noise = StreamNoise("n", encoder_of(name, triggers), strategy.col2, 1.0, 1.0, sigma)
    return NoiseStream(KEYS.ring(), (b"run",), (0, 1), "value", noise, sampler)


def paths_of(stream: NoiseStream, width: int, rows: int = ROWS) -> npt.NDArray[np.int64]:
    ids = np.arange(2 * rows, dtype=np.uint64).reshape(rows, 2)
    names = stream.names(ids)
    step_index, pieces = np.zeros(rows, np.int64), []
    stack = stream.no_state(rows)
    while step_index[0] < stream.strategy.triggers:
        upto = np.minimum(step_index + width, stream.strategy.triggers)
        pieces.append(
            stream.advance(names, step_index, upto, stack, width)[:, : upto[0] - step_index[0]]
        )
        step_index = upto
    return np.concatenate(pieces, axis=1)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    honest = BltStrategy.exact

    def exact(self: BltStrategy, noise: ExactNoise, step_index: int) -> int:
        calls.append(step_index)
        return honest(self, noise, step_index)

    monkeypatch.setattr(BltStrategy, "exact", exact)
    return calls


@pytest.mark.parametrize("width", [1, 7, TRIGGERS])
def test_settling_every_prefix_exactly_changes_nothing(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, calls = stream_of("blt"), counted(monkeypatch)
    expected = paths_of(stream, width)
    assert len(calls) < 5
    calls.clear()
    # Errors so large that no float is sure of its rounding.
    stream.sampler.error = 1e6
    assert (paths_of(stream, width) == expected).all()
    assert sorted(calls) == sorted(list(range(1, TRIGGERS + 1)) * ROWS)


def shifted(of: ContinuousGaussian, by: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Floats that are off by up to ``by``, in any direction."""
    honest = ContinuousGaussian.draw
    rng = np.random.default_rng(3)

    def draw(self: ContinuousGaussian, *args: Any) -> Any:
        noise, starts = honest(self, *args)
        return noise + rng.uniform(-by, by, len(noise)), starts

    monkeypatch.setattr(ContinuousGaussian, "draw", draw)


@pytest.mark.parametrize("announced", [True, False])
def test_announced_errors_never_show(announced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Floats off by 1e-5 give the same bytes when their error is known, and others if not."""
    stream = stream_of("blt")
    expected = paths_of(stream, 7, 200)
    calls = counted(monkeypatch)
    assert isinstance(stream.sampler, ContinuousGaussian)
    shifted(stream.sampler, 1e-5, monkeypatch)
    if announced:
        stream.sampler.error = 1e-5
    got = paths_of(stream, 7, 200)
    assert (got == expected).all() == announced
    assert announced == (0 < len(calls) < got.size / 2)


def test_long_paths_stay_within_their_error_bound() -> None:
    """Buffers of 3,000 steps: every prefix that floats decide is the exact one."""
    stream = stream_of("blt", 3000)
    assert isinstance(stream.strategy, BltStrategy)
    got = paths_of(stream, 100, 2)
    ids = np.arange(4, dtype=np.uint64).reshape(2, 2)
    names = stream.names(ids)
    for step_index in (1, 2, 999, 1000, 2048, 2999, 3000):
        for row in range(2):
            nodes = stream.sampler.exact(KEYS.ring().node, names[row], step_index)
            assert got[row, step_index - 1] == stream.strategy.exact(nodes, step_index)


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
        first_parts = a if both_parts else (a[0],)
        product = operation(*first_parts, *b)
        exact = sum(map(Fraction, first_parts)) * value(b)
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
    assert off(high.tolist(), low) <= continuous.QUANTILE_ERROR
    assert off((~high).tolist(), low) <= continuous.QUANTILE_ERROR


def test_edges_of_the_table() -> None:
    """Both sides of parts' and octaves' edges, the middle and the ends."""
    high, low = [0, LAST, 2**63, 2**63 - 1], [0, LAST, 0, LAST]
    for octave in range(26):
        for part in (0, 1, 64, 127):
            edge = (128 + part) << (55 - octave)
            high += [edge, edge - 1, LAST - edge]
            low += [0, LAST, 5]
    assert off(high, low) <= continuous.QUANTILE_ERROR


def test_all_128_bits_count() -> None:
    """Neighbours at the 80th bit differ by as much as the density says."""
    high = np.full(2, 3 << 60, np.uint64)
    values, rest = quantiles(high, np.array([0, 1 << 48], np.uint64))
    step = (values[1] - values[0]) + (rest[1] - rest[0])
    slope = np.sqrt(2 * np.pi) * np.exp(values[0] ** 2 / 2)
    assert step == pytest.approx(2.0**-80 * slope, rel=1e-3)


def test_a_table_that_is_off_is_seen() -> None:
    """One coefficient changed by a part in 2^60 moves a quantile beyond its error."""
    table = continuous._table().copy()
    part = 64  # of the first octave, [1/4, 1/2)
    table[part, 2] *= 1 + 2.0**-45
    high = np.full(1, (128 + part) << 55 | 1 << 54 | 1 << 53, np.uint64)
    values, rest, far = np.empty(1), np.empty(1), np.empty(1, np.int64)
    continuous._evaluate(high, np.zeros(1, np.uint64), table, values, rest, far)
    honest, honest_rest = quantiles(high, np.zeros(1, np.uint64))
    assert abs((values - honest) + (rest - honest_rest)) > continuous.QUANTILE_ERROR


def test_what_lies_beyond_the_table() -> None:
    """Below 2^-25 and nothing else: a ball for each would take ten thousand times as long."""
    edge = 1 << 39
    inside = [edge, 2**62, 2**63 - 1, LAST - edge, 2**63, 5 << 50]
    beyond = [edge - 1, 0, LAST - edge + 1, LAST]
    high = np.array(inside + beyond, np.uint64)
    empty, far = np.empty(len(high)), np.empty(len(high), np.int64)
    low = np.zeros(len(high), np.uint64)
    count = continuous._evaluate(high, low, continuous._table(), empty, empty.copy(), far)
    assert far[:count].tolist() == list(range(len(inside), len(high)))


def test_the_table_is_everybodys() -> None:
    assert continuous._table() is continuous._table() and not continuous._table().flags.writeable
