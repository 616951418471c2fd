"""The noise: thresholds in 60 digits, exact decisions, shape, independence, and its sabotage.

Lanes of shared blocks and blocks of a node's own: what is asked for, and what never meets.
"""

import bisect
import functools
import itertools
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import numpy.typing as npt
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from dpstream.accounting.arrays import Ids, Int64
from dpstream.accounting.budget.allocation import StreamNoise, allocate, encoder_of
from dpstream.accounting.limits import MAX_SIGMA
from dpstream.accounting.mechanisms.laws import (
    RoundedGaussianLaw,
    Table,
    discrete_gaussian,
    discrete_laplace,
    rounded_gaussian,
    settle,
)
from dpstream.dp_transforms.noise import sampler as module
from dpstream.dp_transforms.noise.continuous import ContinuousGaussian
from dpstream.dp_transforms.noise.paths import NoiseStream
from dpstream.dp_transforms.noise.prf import KeyRing, Prf
from dpstream.dp_transforms.noise.sampler import RoundedGaussian, TableSampler
from tests.bench.paper.paper import published_thresholds
from tests.dp_transforms.reference import LEAST_P, masses, shape_p
from tests.streams import STEP, make_plan

KEY = b"\x07" * 32


def test_own_blocks_are_no_lanes_of_any_node(monkeypatch: pytest.MonkeyPatch) -> None:
    block_sets: list[set[tuple[int, int]]] = []

    class Recording(Prf):
        def blocks(self, blocks: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
            block_sets.append({(int(a), int(b)) for a, b in blocks})
            return super().blocks(blocks)

    of, name = ContinuousGaussian(1.0), tweaks(1, seed=1)[0]
    of.exact(Recording(KEY), name, 500)
    shared, own = block_sets
    assert len(shared) == 250 and len(own) == 500 and not shared & own
    block_sets.clear()
    monkeypatch.setattr(module, "_OWN_BLOCK", np.uint64(0))
    of.exact(Recording(KEY), name, 500)
    assert block_sets[0] & block_sets[1]  # what the tag is there for


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_a_lane_is_a_part_of_the_block_of_its_number(kind: type[np.unsignedinteger[Any]]) -> None:
    """In rows that begin and end anywhere, empty ones among them."""
    prf, names = Prf(KEY), tweaks(4, seed=2)
    first, last = np.array([0, 5, 3, 17]), np.array([3, 5, 40, 18])
    shared = module.shared_lanes(prf, names, first, last, kind)
    assert shared.starts.tolist() == [0, 3, 3, 40] and shared.size == 41
    per_block = 16 // np.dtype(kind).itemsize
    for row in range(4):
        for node in range(first[row], last[row]):
            name = names[row : row + 1].copy()
            name[0, 0] ^= np.uint64(node // per_block)
            expected = prf.blocks(name).view(kind).reshape(-1)[node % per_block]
            assert shared.lanes[shared.shift[row] + node] == expected


def test_no_block_is_drawn_twice_in_a_row() -> None:
    drawn: list[int] = []

    class Counted(Prf):
        def blocks(self, blocks: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
            drawn.append(len(blocks))
            return super().blocks(blocks)

    ends = np.array([0, 7]), np.array([16, 9])
    module.shared_lanes(Counted(KEY), tweaks(2), *ends, np.uint16)
    assert drawn == [2 + 2]


def test_a_nodes_own_blocks_are_all_different() -> None:
    prf, names = Prf(KEY), np.repeat(tweaks(2, seed=3), 3, axis=0)
    nodes = np.array([0, 1, 7] * 2)
    blocks = [module.own_blocks(prf, names, nodes, further) for further in range(3)]
    assert len({tuple(block) for array in blocks for block in array.tolist()}) == 18
    assert np.array_equal(blocks[0], module.own_blocks(prf, names, nodes))
    name = names[2].copy()
    name ^= np.array([7, (1 << 63) + 2], np.uint64)
    assert blocks[2][2].tolist() == prf.blocks(name.reshape(1, 2))[0].tolist()


SIGMAS = (0.3, 1.0, 3.7, 25.0, 400.0, 5000.0)
FULL = 1 << 128
Make = Callable[[float], Table]
TABLES = pytest.mark.parametrize(
    ("make", "scale"),
    [
        *itertools.product((discrete_laplace, discrete_gaussian), (0.3, 1.0, 3.7, 20.0)),
        *((rounded_gaussian, sigma) for sigma in SIGMAS),
    ],
)


@functools.lru_cache(maxsize=32)
def sampler(sigma: float, make: Make = rounded_gaussian) -> TableSampler:
    return RoundedGaussian(sigma) if make is rounded_gaussian else TableSampler(make(sigma))


def tweaks(count: int, seed: int = 0) -> npt.NDArray[np.uint64]:
    return np.random.default_rng(seed).integers(0, 2**64, (count, 2), np.uint64)


@functools.lru_cache(maxsize=32)
def draws(
    sigma: float, make: Make = rounded_gaussian, rows: int = 4000, nodes: int = 250
) -> npt.NDArray[np.int32]:
    """(rows, nodes) noises: nodes 0 .. of each of many names."""
    first, last = np.zeros(rows, np.int64), np.full(rows, nodes)
    noise, _ = sampler(sigma, make).draw(Prf(KEY), tweaks(rows), first, last)
    return noise.reshape(rows, nodes)


# --- exactness -------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", SIGMAS)
def test_thresholds_in_60_digits(sigma: float) -> None:
    table, low = rounded_gaussian(sigma).thresholds, sampler(sigma).lowest
    assert table == sorted(table) and len(table) % 2 == 0
    rng = np.random.default_rng(1)
    middle = len(table) // 2
    sample = {0, 1, middle - 1, middle, len(table) - 1, *rng.integers(0, len(table), 60).tolist()}
    sample |= set((middle + rng.normal(0, sigma, 60)).astype(int).tolist()) & set(range(len(table)))
    with mpmath.workdps(60):
        scale = mpmath.mpf(sigma)
        for at in sample:
            k = at + low
            exact = mpmath.ncdf((mpmath.mpf(k) + 0.5) / scale) * FULL
            assert abs(table[at] - exact) <= mpmath.mpf("0.5") + mpmath.mpf(10) ** -15
        # What lies beyond the table has no probability at this resolution.
        assert mpmath.ncdf((mpmath.mpf(low) - 0.5) / scale) * FULL <= 0.5


def test_sigmas_outside_the_range_are_refused() -> None:
    for sigma in (0.0, -1.0, float("nan"), MAX_SIGMA * 1.01):
        with pytest.raises(ValueError):
            RoundedGaussian(sigma)


class Chosen:
    """A stand-in for the PRF: row i gets the uniform ``wanted[i]`` of 128 bits, then ``more``."""

    def __init__(self, wanted: list[int], more: int) -> None:
        self.wanted, self.more, self.further = wanted, more, 0

    def blocks(self, blocks: Ids) -> Ids:
        out = np.empty_like(blocks)
        for i, (word, own) in enumerate(blocks.tolist()):
            bits = self.wanted[word] >> 96
            if own:
                bits = (self.wanted[word] & ((1 << 96) - 1)) << 32 | 0xFFFFFFFF
            if own > 1 << 63:
                self.further += 1
                bits = self.more
            out[i] = bits & (2**64 - 1), bits >> 64
        return out


def decided(of: TableSampler, uniforms: list[int], more: int = 0) -> tuple[list[int], int]:
    """The values at some uniforms, and how many further blocks were asked for."""
    prf, ones = Chosen(uniforms, more), np.ones(len(uniforms), np.int64)
    rows = np.arange(len(uniforms), dtype=np.uint64)
    names = np.stack([rows, 0 * rows], axis=1)
    noise, _ = of.draw(prf, names, 0 * ones, ones)  # type: ignore[arg-type]
    values: list[int] = noise.tolist()
    return values, prf.further


@TABLES
def test_decisions_at_and_around_thresholds(make: Make, scale: float) -> None:
    of, table, rng = sampler(scale, make), make(scale), np.random.default_rng(2)
    cuts, middle = table.thresholds, len(table.thresholds) // 2
    near = (middle + rng.normal(0, 2 * scale, 400)).astype(int).clip(0, len(cuts) - 1)
    picked = sorted({*near.tolist(), 0, len(cuts) - 1})
    uniforms = [u for at in picked for u in (cuts[at] - 1, cuts[at], cuts[at] + 1)]
    edges = [top << 96 for top in (0, 1, 2**16, 2**31, 2**32 - 1)]
    uniforms += [0, FULL - 1, *edges, *(e - 1 for e in edges[1:])]
    uniforms += [int.from_bytes(rng.bytes(16), "little") for _ in range(300)]
    # Of an exact law what ends at a threshold, or in a tail, takes further bits.
    open_ = {0, FULL - 1, *(cut - 1 for cut in cuts)} if table.exact else set()
    uniforms = [u for u in uniforms if 0 <= u < FULL and u not in open_]
    expected = [bisect.bisect_right(cuts, u) + of.lowest for u in uniforms]
    assert decided(of, uniforms) == (expected, 0)


@TABLES
def test_draws_equal_a_plain_reference(make: Make, scale: float) -> None:
    """The law's exact inverse at 32 bits of the lane and 96 of the node's own block."""
    names, law = tweaks(4, seed=3), make(scale).law
    first = np.array([0, 7, 9, 1000])
    last = first + np.array([90, 1, 0, 40])
    noise, starts = sampler(scale, make).draw(Prf(KEY), names, first, last)

    def aes(low: int, high: int) -> bytes:
        cipher = Cipher(algorithms.AES(KEY), modes.ECB()).encryptor()
        return cipher.update(low.to_bytes(8, "little") + high.to_bytes(8, "little"))

    for i, (low, high) in enumerate(names.tolist()):
        for node in range(int(first[i]), int(last[i])):
            lane = int.from_bytes(aes(low ^ (node // 4), high)[4 * (node % 4) :][:4], "little")
            own = int.from_bytes(aes(low ^ node, high ^ (1 << 63)), "little") >> 32
            expected = settle(law, lambda _, u=lane << 96 | own: (u, 128))  # type: ignore[misc]
            assert noise[starts[i] + node - first[i]] == expected
    assert len(noise) == (last - first).sum()


@pytest.mark.parametrize("make", [discrete_laplace, discrete_gaussian])
@pytest.mark.parametrize("scale", [0.3, 1.0, 3.7, 20.0])
def test_open_uniforms_take_further_bits(make: Make, scale: float) -> None:
    table = make(scale)
    cuts = table.thresholds[:: max(1, len(table.thresholds) // 20)]
    open_ = [0, FULL - 1, *(t - 1 for t in cuts)]
    values = set()
    for more in (1 << 100, FULL - (1 << 100)):
        noise, further = decided(sampler(scale, make), open_, more)
        assert further >= len(open_)
        for u, value in zip(open_, noise, strict=True):
            exact = settle(table.law, lambda n, u=u, m=more: (u << 128 | m, 256) if n else (u, 128))  # type: ignore[misc]
            assert value == exact
        values.add(tuple(noise))
    assert len(values) == 2


def test_another_law_or_scale_is_another_name() -> None:
    makes = (discrete_laplace, discrete_gaussian, rounded_gaussian)
    assert len({sampler(s, make).digest for make in makes for s in (1.0, 1.0 + 2**-50)}) == 6


def test_a_node_has_one_value_in_every_range_batch_and_order() -> None:
    prf, names = Prf(b"\x05" * 32), tweaks(50, seed=4)
    of, nodes = sampler(3.7), 90
    values = of.draw(prf, names, np.zeros(50, np.int64), np.full(50, nodes))[0].reshape(50, nodes)
    rng = np.random.default_rng(5)
    for _ in range(40):
        rows = rng.integers(0, 50, rng.integers(1, 30))
        first = rng.integers(0, nodes, len(rows))
        last = first + rng.integers(0, nodes - first + 1)
        noise, starts = of.draw(prf, names[rows], first, last)
        for i, row in enumerate(rows):
            piece = noise[starts[i] : starts[i] + last[i] - first[i]]
            assert piece.tolist() == values[row, first[i] : last[i]].tolist()


def test_exact_nodes_of_a_name_are_those_drawn() -> None:
    prf, names = Prf(b"\x05" * 32), tweaks(3, seed=6)
    of, none = sampler(3.7), np.zeros(1, np.int64)
    for name in names:
        drawn = of.draw(prf, name.reshape(1, 2), none, none + 20)[0].tolist()
        assert [int(z.unique_fmpz()) for z in of.exact(prf, name, 20)(53)] == drawn


def test_nothing_drawn() -> None:
    none = np.zeros(0, np.int64)
    noise, starts = sampler(1.0).draw(Prf(b"\x05" * 32), tweaks(0), none, none)
    assert len(noise) == len(starts) == 0


# --- shape -----------------------------------------------------------------------------


@TABLES
def test_shapes(make: Make, scale: float) -> None:
    noise, law = draws(scale, make), make(1.0).law
    assert shape_p(noise, masses(law, scale)) > LEAST_P
    for wrong in (0.98, 1.02):
        if scale > 0.5:
            assert shape_p(noise, masses(law, scale * wrong)) < LEAST_P
    assert shape_p(np.abs(noise), masses(law, scale)) < LEAST_P


def lattice_p(noise: npt.NDArray[np.int32], sigma: float) -> float:
    """p-value of the residues modulo 2 (a coarser lattice shows here at any scale)."""
    width = int(12 * sigma) + 3
    k = np.arange(-width, width + 1)
    mass = stats.norm.cdf((k + 0.5) / sigma) - stats.norm.cdf((k - 0.5) / sigma)
    odd = float(mass[k % 2 == 1].sum())
    return float(stats.binomtest(int((noise & 1).sum()), noise.size, odd).pvalue)


@pytest.mark.parametrize("sigma", SIGMAS)
def test_a_coarser_lattice_and_a_shift_are_rejected(sigma: float) -> None:
    assert lattice_p(draws(sigma), sigma) > LEAST_P > lattice_p(2 * draws(sigma / 2), sigma)
    shift = max(1, round(sigma / 50))
    law = RoundedGaussianLaw(1.0)
    assert shape_p(draws(sigma) + np.int32(shift), masses(law, sigma)) < LEAST_P


def tail_p(noise: npt.NDArray[np.int32], sigma: float, sds: float) -> float:
    cutoff = round(sds * sigma)
    chance = 2 * stats.norm.sf((cutoff + 0.5) / sigma)
    return float(stats.binomtest(int((np.abs(noise) > cutoff).sum()), noise.size, chance).pvalue)


@pytest.mark.parametrize("sigma", SIGMAS[1:])
def test_tails(sigma: float) -> None:
    for sds in (3.0, 4.0):
        assert tail_p(draws(sigma), sigma, sds) > LEAST_P
    cutoff = int(2.5 * sigma)
    assert tail_p(draws(sigma).clip(-cutoff, cutoff), sigma, 3.0) < LEAST_P
    assert tail_p(draws(sigma * 1.1), sigma, 3.0) < LEAST_P


# --- independence ----------------------------------------------------------------------


def correlated(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """Whether two samples are correlated beyond 6 sds of chance."""
    left, right = a.reshape(-1).astype(np.float64), b.reshape(-1).astype(np.float64)
    return bool(abs(np.corrcoef(left, right)[0, 1]) > 6 / np.sqrt(left.size))


@pytest.mark.parametrize("sigma", [1.0, 25.0])
def test_nodes_of_a_name_are_independent(sigma: float) -> None:
    noise = draws(sigma)
    for lag in (1, 2, 7, 8, 9, 16, 64):
        assert not correlated(noise[:, lag:], noise[:, :-lag])
        assert not correlated(np.abs(noise[:, lag:]), np.abs(noise[:, :-lag]))
    assert not correlated(noise[1:], noise[:-1])
    assert correlated(noise, noise + np.roll(noise, 1) // 64 + noise // 64)


def lanes_p(noise: npt.NDArray[np.int32]) -> float:
    """p-value that lane (node mod 4) and value are independent."""
    groups = [noise[:, lane::4].reshape(-1) for lane in range(4)]
    table = [np.bincount(g.clip(-3, 3) + 3, minlength=7) for g in groups]
    return float(stats.chi2_contingency(np.array(table)).pvalue)


def test_all_lanes_are_alike() -> None:
    noise = draws(1.0)[:, :248]
    assert lanes_p(noise) > LEAST_P
    broken = noise.copy()
    broken[:, 3::4] = draws(1.1)[:, :248][:, 3::4]
    assert lanes_p(broken) < LEAST_P


BASE: dict[str, Any] = {
    "run_name": (b"\x22" * 16, (0).to_bytes(8, "little"), b"plan"),
    "window": (0, 100),
    "role": "value",
    "name": "n",
    "strategy": "tree",
    "sigma": 3.7,
    "key": 0,
}
OTHER: dict[str, dict[str, Any]] = {
    "run id": {"run_name": (b"\x23" * 16, (0).to_bytes(8, "little"), b"plan")},
    "epoch": {"run_name": (b"\x22" * 16, (1).to_bytes(8, "little"), b"plan")},
    "plan": {"run_name": (b"\x22" * 16, (0).to_bytes(8, "little"), b"plan2")},
    "window start": {"window": (1, 100)},
    "window end": {"window": (0, 101)},
    "role": {"role": "selection"},
    "column": {"name": "m"},
    "sampler table": {"sigma": 3.7000000001},
    "key": {"key": 5000},
    "role and column swapped": {"role": "n", "name": "value"},
}


def named(ring: KeyRing, **changes: Any) -> Int64:
    """(2000, 40) noise of 2000 keys' paths under a name."""
    parts = BASE | changes
    noise = StreamNoise(str(parts["name"]), encoder_of(str(parts["strategy"]), 40), 1.0, 1.0, 1.0)
    of = RoundedGaussian(float(parts["sigma"]))
    stream = NoiseStream(
        ring,
        parts["run_name"],
        parts["window"],
        str(parts["role"]),
        noise,
        of,
    )
    keys = np.arange(2000, dtype=np.uint64) + np.uint64(parts["key"])
    ids = np.stack([keys, keys[::-1]], axis=1)
    tweak = stream.names(ids)
    flat, _ = of.draw(ring.node, tweak, np.zeros(2000, np.int64), np.full(2000, 40))
    return flat.reshape(2000, 40).astype(np.int64)


@pytest.mark.parametrize("change", OTHER.values(), ids=[n.replace(" ", "-") for n in OTHER])
def test_another_name_is_other_noise(ring: KeyRing, change: dict[str, Any]) -> None:
    noise, other = named(ring), named(ring, **change)
    assert not correlated(noise, other)
    # Equal values are as frequent as chance has it: sum of p^2 = 1 / (2 sqrt(pi) sigma).
    chance = 1 / (2 * np.sqrt(np.pi) * 3.7)
    equal = (noise == other).mean()
    assert abs(equal - chance) < 6 * np.sqrt(chance / noise.size)


def test_the_same_name_is_the_same_noise_and_another_key_is_not(ring: KeyRing) -> None:
    noise = named(ring)
    assert (named(ring) == noise).all() and correlated(named(ring), noise)
    assert not correlated(named(KeyRing(b"\x12" * 32)), noise)


# --- a key of one unit -------------------------------------------------------------------

ONE = make_plan(triggers=4, windows=1, delta=0.2, epsilon=3.0, contributions=1)


def law(sigma: float) -> dict[int, int]:
    """value -> probability in units of 2^-128."""
    of = rounded_gaussian(sigma)
    table = [0, *of.thresholds, FULL]
    return {of.lowest + i: b - a for i, (a, b) in enumerate(itertools.pairwise(table))}


def plus(a: dict[int, int], b: dict[int, int], weight: int = 1) -> dict[int, int]:
    """Law of A + weight * B of independent integers."""
    out: dict[int, int] = {}
    for x, p in a.items():
        for y, q in b.items():
            out[x + weight * y] = out.get(x + weight * y, 0) + p * q
    return out


def release_chances(tau: Int64) -> list[float]:
    """Exact P[one unit + n_t > tau_t], t = 1 .. 4, with the draws' own probabilities."""
    noise = allocate(ONE).selection
    assert noise is not None
    leaf = {k: p for k, p in law(noise.sigma).items() if abs(k) <= 7 * noise.sigma}
    missing = 1 - sum(leaf.values()) / FULL
    pair = plus(plus(leaf, leaf), leaf, 2)

    def decode(total: int, level: int) -> int:
        divisor = (1 << (level + 1)) - 1
        return ((total << 8) + (divisor >> 1)) // divisor

    def chance(laws: dict[int, int], power: int, t: int) -> float:
        return sum(p for n, p in laws.items() if 256 + n > tau[t - 1]) / FULL**power

    one = {decode(k, 0): p for k, p in leaf.items()}
    two: dict[int, int] = {}
    for k, p in pair.items():
        two[decode(k, 1)] = two.get(decode(k, 1), 0) + p
    four: dict[int, int] = {}
    for k, p in plus(plus(pair, pair), leaf, 4).items():
        four[decode(k, 2)] = four.get(decode(k, 2), 0) + p
    laws = [(one, 1), (two, 3), (plus(two, one), 4), (four, 7)]
    return [chance(*each, t) + 7 * missing for t, each in enumerate(laws, 1)]


def test_a_key_of_one_unit_in_exact_arithmetic() -> None:
    budget = allocate(ONE)
    assert budget.tau is not None and budget.selection is not None
    chances = release_chances(budget.tau)
    assert all(c <= budget.b / 4 for c in chances)
    assert sum(chances) > budget.b / 10  # the bound is not idle
    for sabotage in (
        budget.tau - 2 * 256,
        published_thresholds(budget.b, 0, budget.selection.sd),
    ):
        assert sum(release_chances(sabotage)) > budget.b


def released_share(ring: KeyRing, tau: Int64, keys: int = 100_000) -> Callable[[float], float]:
    """p-value of "at most this share of single-unit keys is ever selected" by simulation."""
    noise = allocate(ONE).selection
    assert noise is not None
    bounds = (0, 4 * STEP)
    stream = NoiseStream(ring, (b"run",), bounds, "selection", noise, RoundedGaussian(noise.sigma))
    rows = np.arange(keys, dtype=np.uint64)
    tweak = stream.names(np.stack([rows, rows], axis=1))
    ends = np.zeros(keys, np.int64), np.full(keys, 4)
    path = stream.advance(tweak, *ends, stream.no_state(keys), 4)
    won = int((256 + path > tau).any(axis=1).sum())
    return lambda share: float(stats.binomtest(won, keys, share, alternative="greater").pvalue)


def test_a_key_of_one_unit_by_simulation(ring: KeyRing) -> None:
    budget = allocate(ONE)
    assert budget.tau is not None and budget.selection is not None
    assert released_share(ring, budget.tau)(budget.b) > LEAST_P
    assert released_share(ring, budget.tau)(budget.b / 10) < LEAST_P
    union_missing = published_thresholds(budget.b, 0, budget.selection.sd)
    assert released_share(ring, union_missing)(budget.b) < LEAST_P
