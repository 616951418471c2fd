"""Noise paths of all strategies: any pieces, the dense decoder, the variance of every prefix."""

import functools
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import flint
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpstream.accounting.arrays import Ids, Int64
from dpstream.accounting.budget.allocation import StreamNoise, encoder_of
from dpstream.accounting.strategies import BltStrategy, TreeStrategy
from dpstream.accounting.strategies.base import ExactNoise
from dpstream.dp_transforms.noise import paths
from dpstream.dp_transforms.noise.continuous import ContinuousGaussian
from dpstream.dp_transforms.noise.paths import NoiseStream, Paths, Sampler
from dpstream.dp_transforms.noise.prf import Prf
from dpstream.dp_transforms.noise.sampler import RoundedGaussian
from dpstream.dp_transforms.perturbation import publish
from dpstream.dp_transforms.step import Stepper
from dpstream.state import open as stores
from tests.golden.refusals import Refused
from tests.streams import KEYS, UNITS, begin, make_plan

RING = KEYS.ring()
STRATEGIES = pytest.mark.parametrize("name", ["tree", "blt", "dense"])


@functools.lru_cache(maxsize=16)
def sampler(sigma: float, rounded: bool = True) -> Sampler:
    return RoundedGaussian(sigma) if rounded else ContinuousGaussian(sigma)


def noise_of(name: str, triggers: int, sigma: float = 3.7) -> StreamNoise:
    """Noise of a sd in counts."""
    return StreamNoise("n", encoder_of(name, triggers), 1.0, 1.0, sigma)


def stream_of(triggers: int, sigma: float = 3.7, name: str = "tree") -> NoiseStream:
    noise = noise_of(name, triggers, sigma)
    drawn = sampler(noise.sigma, noise.strategy_object.rounds_nodes)
    return NoiseStream(RING, (b"run", b"plan"), (0, 100), "value", noise, drawn)


def key_ids(count: int, first: int = 0) -> npt.NDArray[np.uint64]:
    numbers = np.arange(first, first + count, dtype=np.uint64)
    return np.stack([numbers, ~numbers], axis=1)


def prefixes_of(stream: NoiseStream, ids: npt.NDArray[np.uint64]) -> Int64:
    """(n, T) noise of every step, in one go."""
    count, triggers = len(ids), stream.strategy.triggers
    stack = stream.no_state(count)
    ends = np.zeros(count, np.int64), np.full(count, triggers)
    return stream.advance(stream.names(ids), *ends, stack, max(triggers, 2))[:, :triggers]


@STRATEGIES
@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), triggers=st.integers(1, 70), longest=st.integers(1, 70))
def test_any_pieces_give_the_same_path(name: str, seed: int, triggers: int, longest: int) -> None:
    count, rng = 5, np.random.default_rng(seed)
    stream = stream_of(triggers, name=name)
    expected = prefixes_of(stream, key_ids(count))
    table = Paths(stream)
    order = rng.permutation(count) * 300  # rows far apart: growth
    table.start(order, key_ids(count))
    while table.step_index[order].min() < triggers:
        keys = np.flatnonzero(rng.random(count) < 0.6)
        step_index = table.step_index[order[keys]].copy()
        width = int(rng.choice([1, longest]))
        upto = np.minimum(triggers, step_index + rng.integers(width == 1, longest + 1, len(keys)))
        keys, step_index, upto = (
            x[(upto > step_index) | (width > 1)] for x in (keys, step_index, upto)
        )
        got = table.advance(order[keys], upto, width)
        assert got.shape == (len(keys), width)
        for i, key in enumerate(keys):
            drawn = expected[key, step_index[i] : upto[i]]
            if width > 1:
                assert got[i, : len(drawn)].tolist() == drawn.tolist()
            else:
                assert got[i, 0] == drawn[-1]
        assert (table.step_index[order[keys]] == upto).all()


@STRATEGIES
def test_a_path_goes_on_from_any_step_it_sought(name: str) -> None:
    stream = stream_of(30, name=name)
    expected = prefixes_of(stream, key_ids(4))
    for step_index in (0, 1, 7, 16, 29):
        table, rows = Paths(stream), np.arange(4)
        table.start(rows, key_ids(4))
        table.seek(rows, np.full(4, step_index))
        got = table.advance(rows, np.full(4, 30), 30)
        assert (got[:, : 30 - step_index] == expected[:, step_index:]).all()


@STRATEGIES
def test_more_keys_leave_the_paths_that_are_there_as_they_are(name: str) -> None:
    """The table grows three times between two steps of the same paths."""
    stream, rows = stream_of(9, name=name), np.arange(3)
    expected, table = prefixes_of(stream, key_ids(3)), Paths(stream)
    table.start(rows, key_ids(3))
    assert table.advance(rows, np.full(3, 4))[:, 0].tolist() == expected[:, 3].tolist()
    table.start(rows[:0], key_ids(0))
    for more in (1_500, 4_000, 9_000):
        table.start(np.array([more]), key_ids(1))
    assert table.advance(rows, np.full(3, 9))[:, 0].tolist() == expected[:, 8].tolist()
    late = table.advance(np.array([1_500, 4_000, 9_000]), np.full(3, 9))
    assert late[:, 0].tolist() == [expected[0, 8]] * 3


def mac(message: bytes) -> bytes:
    """CBC-MAC under the ring's key of names, by the blocks it encrypts alone."""
    state = bytes(16)
    for at in range(0, len(message), 16):
        block = bytes(a ^ b for a, b in zip(state, message[at : at + 16], strict=True))
        state = RING.tweak.blocks(np.frombuffer(block, np.uint64).reshape(1, 2)).tobytes()
    return state


def test_what_names_a_path() -> None:
    """Byte by byte: a name that changed would draw other noise for the same data."""
    drawn, run_name = sampler(3.7), (b"run", b"epoch", b"plan")
    window = (-86_400_000_000, 5)
    stream = NoiseStream(RING, run_name, window, "value", noise_of("tree", 9), drawn)
    edges = b"".join(edge.to_bytes(16, "little", signed=True) for edge in window)
    prefix = RING.name((*run_name, drawn.digest, edges, b"value", b"n", b"tree")).tobytes()
    ids = key_ids(3, 7)

    def word(number: int) -> bytes:
        return number.to_bytes(8, "little")

    head = word(3) + word(0) + prefix
    names = [row.tobytes() for row in stream.names(ids)]
    assert names == [mac(head + key.tobytes() + word(0) + word(0)) for key in ids]
    numbers = np.array([0, 1, 300])
    components = [row.tobytes() for row in stream.component_names(numbers)]
    assert components == [
        mac(head + word(int(number)) + word(0) + word(0) + word(1)) for number in numbers
    ]


@STRATEGIES
def test_a_restarted_path_begins_anew(name: str) -> None:
    stream, table = stream_of(9, name=name), Paths(stream_of(9, name=name))
    rows = np.arange(3)
    table.start(rows, key_ids(3))
    table.advance(rows, np.array([4, 9, 1]))
    table.start(rows[:2], key_ids(2))
    got = table.advance(rows, np.full(3, 9), 9)
    expected = prefixes_of(stream, key_ids(3))
    assert (got[:2] == expected[:2]).all()
    assert got[2, :8].tolist() == expected[2, 1:].tolist()


@STRATEGIES
def test_a_prefix_is_never_handed_out_without_its_noise(name: str, refused: Refused) -> None:
    """At a step that a path has reached there is nothing to fold: 0 would be the exact count."""
    table, rows = Paths(stream_of(9, name=name)), np.arange(3)
    table.start(rows, key_ids(3))
    table.advance(rows, np.array([4, 5, 4]))
    for upto in ([5, 5, 5], [5, 4, 5], [5, 6, 0]):
        refused(table.advance, rows, np.array(upto))
    # A prediction looks ahead over many steps, and may have all of them for some keys.
    assert table.advance(rows, np.array([6, 5, 6]), 3)[1].tolist() == [0, 0, 0]
    # Nor does a path go back when it is sought at an earlier step.
    table.seek(rows, np.array([2, 7, 2]))
    assert table.step_index[rows].tolist() == [6, 7, 6]
    expected = prefixes_of(stream_of(9, name=name), key_ids(3))
    assert table.advance(rows, np.full(3, 9))[:, 0].tolist() == expected[:, 8].tolist()


@STRATEGIES
def test_publishing_a_count_twice_at_one_step_is_refused(
    name: str, tmp_path: Path, refused: Refused
) -> None:
    """As a refresh between two tests of a key would, were it not refused when planning."""
    plan = make_plan(triggers=4, aggregates=(UNITS,), strategy=name)
    run = begin(plan, tmp_path / "s.db", 1)
    stepper = Stepper(plan, RING, run.open())
    states = run.open().key_shard(0, 0)
    pages = [f"p{n}" for n in range(64)]
    slots = states.intern(key_ids(64), pa.record_batch({"page": pages}))
    table = stepper._paths(states, 0)
    first = publish(plan, stepper.budget, states, table, slots, 1).values["people"]
    assert np.count_nonzero(first) > 16  # the exact counts are 0, and noise is 0 now and then
    refused(publish, plan, stepper.budget, states, table, slots, 1)
    stores.close_all()


@STRATEGIES
def test_drawing_in_chunks_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = stream_of(50, name=name)
    expected = prefixes_of(stream, key_ids(40))
    for most in (1, 95, 100, 1000):
        monkeypatch.setattr(paths, "MAX_DRAWS_AT_ONCE", most)
        assert (prefixes_of(stream, key_ids(40)) == expected).all()


# --- against the dense matrix --------------------------------------------------------------


def nodes_of(stream: NoiseStream, ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.int32]:
    """(n, nodes) node noises as the sampler draws them."""
    count = len(ids)
    last = np.full(count, int(stream.strategy.nodes_through(stream.strategy.triggers)))
    tweaks = stream.names(ids)
    flat, _ = stream.sampler.draw(RING.node, tweaks, np.zeros(count, np.int64), last)
    return np.asarray(flat, np.int32).reshape(count, -1)


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
    return np.asarray(~matrix[:, outside].any(axis=1))


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
    got = prefixes_of(stream, key_ids(count))
    assert noise.shape[1] == len(matrix)
    for key in range(count):
        expected = [dense_decode(matrix, noise[key], t) for t in range(1, triggers + 1)]
        assert got[key].tolist() == expected


def test_is_the_least_squares_estimate_of_the_blocks() -> None:
    """Honaker's bottom-up estimate is the best linear one from the nodes of a block."""
    stream = stream_of(13)
    matrix = TreeStrategy(13).matrix()
    noise = nodes_of(stream, key_ids(20))
    got = prefixes_of(stream, key_ids(20))
    for t in range(1, 14):
        best = np.zeros(20)
        for block in blocks(t):
            within = inside(matrix, block)
            design = matrix[within][:, block[0] : block[1]]
            best += np.linalg.lstsq(design, noise[:, within].T, rcond=None)[0].sum(axis=0)
        assert np.abs(got[:, t - 1] / 256 - best).max() <= len(blocks(t)) / 512 + 1e-9


def coefficients(triggers: int) -> list[object]:
    """First column of the encoder: balls of the exponentials' sums."""
    blt = BltStrategy(triggers)
    powers = list(zip(map(flint.arb, blt.omega), map(flint.arb, blt.theta), strict=True))
    tail = [sum((o * t**k for o, t in powers), flint.arb(0)) for k in range(triggers - 1)]
    return [flint.arb(1), *tail]


@pytest.mark.parametrize("triggers", [1, 2, 3, 8, 33])
def test_blt_equals_solving_for_the_inputs(triggers: int) -> None:
    """A x = z solved step by step in 400 bits, summed, rounded to 2^-8 just above the half."""
    stream, count = stream_of(triggers, name="blt"), 6
    got = prefixes_of(stream, key_ids(count))
    tweaks = stream.names(key_ids(count))
    with flint.ctx.workprec(400):
        column = coefficients(triggers)
        for key in range(count):
            z = stream.sampler.exact(RING.node, tweaks[key], triggers)(400)
            x: list[flint.arb] = []
            for t in range(triggers):
                partial_sum = sum((column[t - k] * x[k] for k in range(t)), flint.arb(0))
                x.append((z[t] - partial_sum) / column[0])
            up = flint.arb(1) / 2 + flint.arb(1) / (3 << 12)
            for t in range(triggers):
                released = (sum(x[: t + 1], flint.arb(0)) * 256 + up).floor().unique_fmpz()
                assert got[key, t] == int(released)


@pytest.mark.parametrize("name", ["blt", "dense"])
def test_what_floats_leave_open_is_settled_as_floats_would(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an error of a thousand lattice steps nothing can be rounded in floats."""
    stream = stream_of(9, name=name)
    expected = prefixes_of(stream, key_ids(3))
    calls, real = list[int](), stream.sampler.exact

    def exact(prf: Prf, tweak: Ids, nodes: int) -> ExactNoise:
        calls.append(nodes)
        return real(prf, tweak, nodes)

    monkeypatch.setattr(stream.sampler, "exact", exact)
    assert (prefixes_of(stream, key_ids(3)) == expected).all() and not calls
    monkeypatch.setattr(stream.sampler, "error", 4.0)
    assert (prefixes_of(stream, key_ids(3)) == expected).all()
    assert len(calls) >= 9


# --- variance ------------------------------------------------------------------------------

PATHS, TRIGGERS = 20_000, 37


@functools.lru_cache(maxsize=6)
def many(sigma: float, name: str = "tree") -> npt.NDArray[np.float64]:
    stream = stream_of(TRIGGERS, sigma, name)
    return prefixes_of(stream, key_ids(PATHS)) / 256


def variance_fits(noise: npt.NDArray[np.float64], sd: npt.NDArray[np.float64]) -> bool:
    """Whether every step's sample variance is within 5.5 sds of sd^2."""
    ratio = (noise**2).mean(axis=0) / sd**2
    return bool((np.abs(ratio - 1) < 5.5 * np.sqrt(2 / len(noise))).all())


def announced(sigma: float, name: str = "tree") -> npt.NDArray[np.float64]:
    """The sd that plan and releases show, plus the nodes' rounding (variance 1/12 each)."""
    noise = noise_of(name, TRIGGERS, sigma)
    rounding = 1 / (12 * noise.sigma**2) if noise.strategy_object.rounds_nodes else 0.0
    return noise.sd * np.sqrt(1 + rounding)


@STRATEGIES
@pytest.mark.parametrize("sigma", [3.7, 25.0])
def test_the_variance_of_every_prefix(name: str, sigma: float) -> None:
    noise, sd = many(sigma, name), announced(sigma, name)
    assert variance_fits(noise, sd)
    assert (np.abs(noise.mean(axis=0)) < 5.5 * sd / np.sqrt(PATHS)).all()
    for factor in (0.95, 1.05):
        assert not variance_fits(noise * factor, sd)
    # Nor is it the law of another strategy, or of the neighbouring step.
    other = "blt" if name == "tree" else "tree"
    scaled = announced(sigma, other) / announced(sigma, other)[0] * sd[0]
    assert not variance_fits(noise, scaled)
    assert not variance_fits(noise, np.roll(sd, 1))


def no_honaker(t: int) -> float:
    """Variance without the bottom-up estimate: one node per block."""
    return float(len(blocks(t)))


def as_at_the_next_step(t: int) -> float:
    return float(TreeStrategy(TRIGGERS + 1).sd_factors[t] ** 2)


@pytest.mark.parametrize("law", [no_honaker, as_at_the_next_step])
def test_other_laws_are_rejected(law: Callable[[int], float]) -> None:
    sd = 25.0 * np.sqrt([law(t) for t in range(1, TRIGGERS + 1)])
    assert not variance_fits(many(25.0), sd)


@STRATEGIES
def test_paths_of_keys_are_uncorrelated(name: str) -> None:
    noise, stream = many(25.0, name), stream_of(TRIGGERS, 25.0, name)
    other = prefixes_of(stream, key_ids(PATHS, PATHS)) / 256
    bound = 5.5 / np.sqrt(PATHS)
    for a, b in ((noise, other), (noise[1:], noise[:-1])):
        for step_index in (0, 16, 36):
            assert abs(np.corrcoef(a[:, step_index], b[:, step_index])[0, 1]) < bound
    # Steps of one path share nodes: the same figure is far beyond chance there.
    assert abs(np.corrcoef(noise[:, 31], noise[:, 32])[0, 1]) > 10 * bound
