"""Noise paths: any pieces, the dense decoder, and the variance of every prefix."""

import functools
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting.budget import StreamNoise
from accounting.strategies.tree import TreeStrategy
from dp_transforms.noise import paths
from dp_transforms.noise.paths import NoiseStream, Paths
from dp_transforms.noise.sampler import RoundedGaussian
from tests.streams import KEYS

Int64 = npt.NDArray[np.int64]
RING = KEYS.ring()


@functools.lru_cache(maxsize=8)
def sampler(sigma: float) -> RoundedGaussian:
    return RoundedGaussian(sigma)


def stream_of(triggers: int, sigma: float = 3.7) -> NoiseStream:
    noise = StreamNoise("n", "tree", triggers, triggers.bit_length(), 1.0, 1.0, sigma)
    return NoiseStream(RING, (b"run", b"plan"), (0, 100), "value", noise, sampler(sigma))


def key_ids(count: int, first: int = 0) -> npt.NDArray[np.uint64]:
    numbers = np.arange(first, first + count, dtype=np.uint64)
    return np.stack([numbers, ~numbers], axis=1)


def whole(stream: NoiseStream, ids: npt.NDArray[np.uint64], rounds: Int64) -> Int64:
    """(n, T) noise of every leaf, in one go."""
    count, triggers = len(ids), stream.strategy.triggers
    stack = stream.no_state(count)
    ends = np.zeros(count, np.int64), np.full(count, triggers)
    return stream.advance(stream.names(ids, rounds), *ends, stack, max(triggers, 2))[:, :triggers]


@settings(max_examples=80)
@given(seed=st.integers(0, 2**32), triggers=st.integers(1, 70), longest=st.integers(1, 70))
def test_any_pieces_give_the_same_path(seed: int, triggers: int, longest: int) -> None:
    count, rng = 5, np.random.default_rng(seed)
    stream = stream_of(triggers)
    rounds = np.array([0, 0, 1, 2, 7])
    expected = whole(stream, key_ids(count), rounds)
    table = Paths(stream)
    order = rng.permutation(count) * 300  # rows far apart: growth
    table.start(order, key_ids(count), rounds)
    while table.leaf[order].min() < triggers:
        some = np.flatnonzero(rng.random(count) < 0.6)
        leaf = table.leaf[order[some]].copy()
        upto = np.minimum(triggers, leaf + rng.integers(0, longest + 1, len(some)))
        width = int(rng.choice([1, longest]))
        got = table.advance(order[some], upto, width)
        assert got.shape == (len(some), width)
        for i, key in enumerate(some):
            drawn = expected[key, leaf[i] : upto[i]]
            if width > 1:
                assert got[i, : len(drawn)].tolist() == drawn.tolist()
            elif len(drawn):
                assert got[i, 0] == drawn[-1]
        assert (table.leaf[order[some]] == upto).all()


def test_a_restarted_path_begins_anew() -> None:
    stream, table = stream_of(9), Paths(stream_of(9))
    rows = np.arange(3)
    table.start(rows, key_ids(3), np.zeros(3, np.int64))
    table.advance(rows, np.array([4, 9, 1]))
    table.start(rows[:2], key_ids(2), np.array([1, 0]))
    got = table.advance(rows, np.full(3, 9), 9)
    expected = whole(stream, key_ids(3), np.array([1, 0, 0]))
    assert (got[:2] == expected[:2]).all()
    assert got[2, :8].tolist() == expected[2, 1:].tolist()


def test_drawing_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, rounds = stream_of(50), np.arange(40)
    expected = whole(stream, key_ids(40), rounds)
    for most in (1, 95, 100, 1000):
        monkeypatch.setattr(paths, "MAX_DRAWS_AT_ONCE", most)
        assert (whole(stream, key_ids(40), rounds) == expected).all()


# --- against the dense matrix --------------------------------------------------------------


def nodes_of(stream: NoiseStream, ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.int32]:
    """(n, nodes) node noises as the sampler draws them."""
    count = len(ids)
    last = np.full(count, int(stream.strategy.nodes_through(stream.strategy.triggers)))
    tweaks = stream.names(ids, np.zeros(count, np.int64))
    flat, _ = stream.sampler.draw(RING.node, tweaks, np.zeros(count, np.int64), last)
    return flat.reshape(count, -1)


def blocks(t: int) -> list[tuple[int, int]]:
    """Leaf ranges [a, b) of the complete blocks whose union is the prefix of t leaves."""
    out, begin = [], 0
    for level in reversed(range(t.bit_length())):
        if (t >> level) & 1:
            out.append((begin, begin + (1 << level)))
            begin += 1 << level
    return out


def inside(matrix: Int64, block: tuple[int, int]) -> npt.NDArray[np.bool_]:
    """Nodes whose leaves all lie in the block."""
    outside = np.ones(matrix.shape[1], np.bool_)
    outside[block[0] : block[1]] = False
    return ~matrix[:, outside].any(axis=1)


def dense_decode(matrix: Int64, noise: npt.NDArray[np.int32], t: int) -> int:
    """n_t * 256 from the definition: nodes weighted by their size, rounded per block."""
    total = 0
    for block in blocks(t):
        within = inside(matrix, block)
        weighted = int((matrix[within].sum(axis=1) * noise[within]).sum())
        divisor = 2 * (block[1] - block[0]) - 1
        total += round(Fraction(256 * weighted, divisor))
    return total


@pytest.mark.parametrize("triggers", [1, 2, 3, 7, 8, 21, 32])
def test_equals_the_dense_decode_of_the_drawn_nodes(triggers: int) -> None:
    stream, count = stream_of(triggers), 6
    matrix = TreeStrategy(triggers).matrix()
    noise = nodes_of(stream, key_ids(count))
    got = whole(stream, key_ids(count), np.zeros(count, np.int64))
    assert noise.shape[1] == len(matrix)
    for key in range(count):
        expected = [dense_decode(matrix, noise[key], t) for t in range(1, triggers + 1)]
        assert got[key].tolist() == expected


def test_is_the_least_squares_estimate_of_the_blocks() -> None:
    """Honaker's bottom-up estimate is the best linear one from the nodes of a block."""
    stream = stream_of(13)
    matrix = TreeStrategy(13).matrix()
    noise = nodes_of(stream, key_ids(20))
    got = whole(stream, key_ids(20), np.zeros(20, np.int64))
    for t in range(1, 14):
        best = np.zeros(20)
        for block in blocks(t):
            within = inside(matrix, block)
            design = matrix[within][:, block[0] : block[1]]
            best += np.linalg.lstsq(design, noise[:, within].T, rcond=None)[0].sum(axis=0)
        assert np.abs(got[:, t - 1] / 256 - best).max() <= len(blocks(t)) / 512 + 1e-9


# --- variance ------------------------------------------------------------------------------

PATHS, TRIGGERS = 20_000, 37


@functools.lru_cache(maxsize=2)
def many(sigma: float) -> npt.NDArray[np.float64]:
    return whole(stream_of(TRIGGERS, sigma), key_ids(PATHS), np.zeros(PATHS, np.int64)) / 256


def variance_fits(noise: npt.NDArray[np.float64], sd: npt.NDArray[np.float64]) -> bool:
    """Whether every leaf's sample variance is within 5.5 sds of sd^2."""
    ratio = (noise**2).mean(axis=0) / sd**2
    return bool((np.abs(ratio - 1) < 5.5 * np.sqrt(2 / len(noise))).all())


def announced(sigma: float) -> npt.NDArray[np.float64]:
    """The sd that plan and releases show, plus the nodes' rounding (variance 1/12 each)."""
    noise = StreamNoise("n", "tree", TRIGGERS, 6, 1.0, 1.0, sigma)
    return noise.sd * np.sqrt(1 + 1 / (12 * sigma**2))


@pytest.mark.parametrize("sigma", [3.7, 25.0])
def test_the_variance_of_every_prefix(sigma: float) -> None:
    assert variance_fits(many(sigma), announced(sigma))
    assert (np.abs(many(sigma).mean(axis=0)) < 5.5 * announced(sigma) / np.sqrt(PATHS)).all()


def no_honaker(t: int) -> float:
    """Variance without the bottom-up estimate: one node per block."""
    return float(len(blocks(t)))


def as_at_the_next_leaf(t: int) -> float:
    return float(TreeStrategy(TRIGGERS + 1).sd_factors[t] ** 2)


@pytest.mark.parametrize("law", [no_honaker, as_at_the_next_leaf])
def test_other_laws_are_rejected(law: Callable[[int], float]) -> None:
    sd = 25.0 * np.sqrt([law(t) for t in range(1, TRIGGERS + 1)])
    assert not variance_fits(many(25.0), sd)


@pytest.mark.parametrize("factor", [0.95, 1.05])
def test_other_scales_are_rejected(factor: float) -> None:
    assert not variance_fits(many(25.0) * factor, announced(25.0))
    assert not variance_fits(many(3.7) * factor, announced(3.7))


def test_paths_of_keys_and_rounds_are_uncorrelated() -> None:
    noise = many(25.0)
    other = whole(stream_of(TRIGGERS, 25.0), key_ids(PATHS), np.ones(PATHS, np.int64)) / 256
    bound = 5.5 / np.sqrt(PATHS)
    for a, b in ((noise, other), (noise[1:], noise[:-1])):
        for leaf in (0, 16, 36):
            assert abs(np.corrcoef(a[:, leaf], b[:, leaf])[0, 1]) < bound
    # Leaves of one path share nodes: the same figure is far beyond chance there.
    assert abs(np.corrcoef(noise[:, 31], noise[:, 32])[0, 1]) > 10 * bound
