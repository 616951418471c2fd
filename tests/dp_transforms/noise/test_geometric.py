"""Two-sided geometric noise of nodes: its law, its names, and where floats do not decide.

Truncated geometric draws: a plain reference, exact decisions, shape, names.
"""

import itertools
import struct
from unittest import mock

import flint
import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpstream.accounting.arrays import Float64, Ids, Int64
from dpstream.accounting.balls import precision
from dpstream.accounting.mechanisms.laws import DiscreteLaplaceLaw, TruncatedGeometricLaw, settle
from dpstream.accounting.mechanisms.optimum import SelectionOptimum
from dpstream.dp_transforms.noise import oneshot, sampler
from dpstream.dp_transforms.noise.oneshot import OneShot, numbered
from dpstream.dp_transforms.noise.prf import KeyRing, Prf
from dpstream.dp_transforms.noise.sampler import GeometricNodes, own_blocks, shared_lanes
from tests.dp_transforms.laws import LEAST_P, shape_p
from tests.fixed import INPUTS

#: A true sampler fails a test below this in one of a million runs; the keys are fixed anyway.
PRF = Prf(b"\x05" * 32)


def tweaks(count: int) -> Ids:
    return np.random.default_rng(3).integers(0, 2**64, (count, 2), np.uint64)


def drawn(scale: float, rows: int = 400, nodes: int = 250) -> Int64:
    first = np.zeros(rows, np.int64)
    noise, _ = GeometricNodes(scale).draw(PRF, tweaks(rows), first, first + nodes)
    return noise.reshape(rows, nodes)


@pytest.mark.parametrize("scale", [1 / 6, 1.0, 40.0])
def test_chances_are_those_of_the_law(scale: float) -> None:
    noise = drawn(scale).ravel()
    ratio = np.exp(-1 / scale)
    reach = max(1, int(4 * scale))
    values = np.arange(-reach, reach + 1)
    chances = (1 - ratio) / (1 + ratio) * ratio ** np.abs(values)
    counts = np.array([(noise == value).sum() for value in values])
    seen, expected = (
        np.append(counts, len(noise) - counts.sum()),
        np.append(chances, 1 - chances.sum()),
    )
    assert stats.chisquare(seen, expected * len(noise)).pvalue > LEAST_P
    # Sabotage: the test tells noise of a twentieth more scale.
    wrong = np.exp(-1 / (1.05 * scale))
    others = (1 - wrong) / (1 + wrong) * wrong ** np.abs(values)
    others = np.append(others, 1 - others.sum())
    assert stats.chisquare(seen, others * len(noise)).pvalue < LEAST_P


def test_a_node_has_one_noise_in_whatever_pieces() -> None:
    at_once, names = drawn(9.0, 5, 40), tweaks(5)
    sampler = GeometricNodes(9.0)
    for first, last in ((0, 1), (3, 40), (7, 8), (20, 20)):
        begin = np.full(5, first)
        noise, starts = sampler.draw(PRF, names, begin, np.full(5, last))
        assert np.array_equal(noise.reshape(5, last - first), at_once[:, first:last])
        assert starts.tolist() == [i * (last - first) for i in range(5)]
    balls = sampler.exact(PRF, names[2], 40)(64)
    assert [int(ball.unique_fmpz()) for ball in balls] == at_once[2].tolist()


def test_further_bits_decide_what_floats_leave_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every draw left open the noise is the same: balls and floats agree on the one law."""
    expected = drawn(300.0, 3, 40)

    def undecided(words: Ids, scale: float) -> tuple[Int64, np.ndarray]:
        return np.zeros(len(words), np.int64), np.ones(len(words), np.bool_)

    monkeypatch.setattr(sampler, "inverse_laplace", undecided)
    assert np.array_equal(drawn(300.0, 3, 40), expected)


def test_further_bits_are_the_nodes_own_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's uniform is its lane and then blocks that no other node has."""
    uniforms = list[tuple[int, int]]()

    def listening(law: DiscreteLaplaceLaw, uniform: object) -> int:
        uniforms.append(uniform(2))  # type: ignore[operator]
        return settle(law, uniform)  # type: ignore[arg-type]

    def undecided(words: Ids, scale: float) -> tuple[Int64, np.ndarray]:
        return np.zeros(len(words), np.int64), np.ones(len(words), np.bool_)

    monkeypatch.setattr(sampler, "inverse_laplace", undecided)
    monkeypatch.setattr(sampler, "settle", listening)
    drawn(2.0, 2, 3)
    names, zeros = tweaks(2), np.zeros(2, np.int64)
    shared = shared_lanes(PRF, names, zeros, zeros + 3, np.uint64)
    for at, (value, bits) in enumerate(uniforms):
        row, node = divmod(at, 3)
        word = int(shared.lanes[shared.shift[row] + node])
        for block in range(2):
            number, name = np.array([node]), names[row].reshape(1, 2)
            low, high = own_blocks(PRF, name, number, block)[0].tolist()
            word = word << 128 | high << 64 | low
        assert (value, bits) == (word, 64 + 2 * 128)


@pytest.mark.parametrize("scale", [0.0, -1.0, 2.0**-11, 2.0**41, np.inf, np.nan])
def test_scales_beyond_are_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="scale"):
        GeometricNodes(scale)
    assert GeometricNodes(1.0).digest != GeometricNodes(np.nextafter(1.0, 2.0)).digest


RUN = (b"\x22" * 16, b"question")
SETTINGS = [(0.3, 1), (1.0, 12), (3.7, 9), (60.0, 1200), (60.0, 20)]


def truncated(ring: KeyRing, scale: float, most: int, count: int, run: object = RUN) -> Int64:
    shot = OneShot(ring, run, INPUTS)  # type: ignore[arg-type]
    noise, sooner = shot.truncated_geometric(numbered(count), scale, most)
    assert not sooner.any()
    return noise


def masses(scale: float, most: int) -> Float64:
    weight = np.exp(-np.abs(np.arange(-most, most + 1)) / scale)
    return np.asarray(weight / weight.sum())


@pytest.mark.parametrize(("scale", "most"), SETTINGS)
def test_draws_are_the_inverse_of_the_law(ring: KeyRing, scale: float, most: int) -> None:
    """The name is a CBC-MAC, and Z the place of its uniform in the law's sums."""
    prefix = ring.name((
        b"one-shot noise", b"truncated geo", struct.pack("<qq", most, 0), *RUN, INPUTS,
    ))  # fmt: skip
    bits = int(np.float64(scale).view(np.uint64))
    noise = truncated(ring, scale, most, 60)
    with mpmath.workdps(40):
        weight = [mpmath.exp(-abs(z) / mpmath.mpf(scale)) for z in range(-most, most + 1)]
        tails = itertools.accumulate(weight[:most])  # P[Z <= -most] first
        sums = [tail / mpmath.fsum(weight) for tail in tails]
    for item, value in enumerate(noise.tolist()):
        message = np.array([(3, 0), prefix, (item, 0), (bits, 1)], np.uint64)
        name = ring.tweak.mac(message, np.array([4]))
        word = int(ring.node.blocks(name)[0, 0])
        uniform = (mpmath.mpf(min(word, 2**64 - 1 - word)) + mpmath.mpf("0.5")) / 2**64
        size = sum(bool(uniform <= tail) for tail in sums)
        assert value == (size if word >= 2**63 else -size)


@pytest.mark.parametrize(("scale", "most"), SETTINGS)
def test_shapes_and_ends(scale: float, most: int) -> None:
    noise = truncated(KeyRing(b"\x09" * 32), scale, most, 300_000)
    assert np.abs(noise).max() <= most
    assert shape_p(noise, masses(scale, most)) > LEAST_P
    if scale > 0.5:
        assert shape_p(noise, masses(0.8 * scale, most)) < LEAST_P
    if most < 4 * scale:  # the ends have mass enough to be seen
        assert shape_p(noise, masses(scale, most + 3)) < LEAST_P


@pytest.mark.parametrize(("scale", "most"), [(0.3, 1), (1.0, 3), (3.7, 30), (1e6, 10**7)])
def test_edges_and_ends_are_settled_from_both_sides(scale: float, most: int) -> None:
    law, bits = TruncatedGeometricLaw(scale, most), 64 + 2 * 128

    def of(value: int) -> int:
        return settle(law, lambda further: (value >> (256 - 128 * further), 64 + 128 * further))

    full = (1 << bits) - 1
    assert (of(1 << 100), of(full - (1 << 100)), of(full >> 1)) == (-most, most, 0)
    q = mpmath.mpf
    with mpmath.workdps(140):
        ratio = mpmath.exp(-1 / q(scale))
        total = 1 + ratio - 2 * ratio ** (most + 1)
        for at in {1, min(2, most), most}:
            edge = int((ratio**at - ratio ** (most + 1)) / total * q(2) ** bits)
            assert (of(edge - 2**70), of(edge + 2**70)) == (-at, 1 - at)
            assert (of(full - edge + 2**70), of(full - edge - 2**70)) == (at, at - 1)


@settings(max_examples=60)
@given(
    word=st.integers(0, 2**63 - 1) | st.integers(0, 63).map(lambda k: (1 << k) - 1),
    scale=st.floats(2.0**-3, 2.0**40),
    scales=st.floats(0.01, 700),
)
def test_float_errors_are_a_quarter_of_what_is_allowed(
    word: int, scale: float, scales: float
) -> None:
    most, seen = max(1, int(scale * scales)), []
    with mock.patch.object(oneshot, "_floor", side_effect=lambda noise, *_: seen.append(noise)):
        shot, names = object.__new__(OneShot), np.zeros((1, 2), np.uint64)
        with pytest.raises(TypeError):  # nothing is floored
            words = np.array([word], np.uint64)
            shot._truncated(names, np.array([scale]), words, np.array([most]))
    with precision(2000):
        tail, wide = (flint.arb(word) + flint.arb("0.5")) / flint.arb(2) ** 64, flint.arb(scale)
        ratio = (-1 / wide).exp()
        beyond = (-flint.arb(most + 1) / wide).exp()
        exact = -wide * (tail * (1 + ratio - 2 * beyond) + beyond).log()
        error = abs(exact - flint.arb(float(seen[0][0]))) / wide
        assert float(error) < oneshot.LOG_ERROR / 4


def test_a_coin_takes_one_less_and_is_drawn_apart() -> None:
    ring, items = KeyRing(b"\x09" * 32), numbered(300_000)
    shot = OneShot(ring, RUN, INPUTS)
    noise, sooner = shot.truncated_geometric(items, 3.0, 4, 3 << 30)
    assert abs(sooner.mean() - 0.75) < 5 * np.sqrt(0.1875 / 300_000)
    for less, most in ((1, 3), (0, 4)):
        mine = noise[sooner == less]
        assert np.abs(mine).max() == most and shape_p(mine, masses(3.0, most)) > LEAST_P
    with mock.patch.object(oneshot, "_AT_ONCE", 7):
        again = shot.truncated_geometric(items[:100], 3.0, 4, 3 << 30)
    assert (again[0] == noise[:100]).all() and (again[1] == sooner[:100]).all()
    other = shot.truncated_geometric(items, 3.0, 4, (3 << 30) + 1)[0]
    assert abs(np.corrcoef(noise, other)[0, 1]) < 6 / np.sqrt(noise.size)


def test_balls_decide_what_floats_leave_open(ring: KeyRing) -> None:
    """With errors claimed far larger, more is settled and nothing changes."""
    plain = truncated(ring, 40.0, 300, 20_000)
    calls = mock.Mock(side_effect=settle)
    with mock.patch.multiple(oneshot, LOG_ERROR=2.0**-20, settle=calls):
        assert (truncated(ring, 40.0, 300, 20_000) == plain).all()
    assert calls.call_count > 0


def test_another_truncation_or_scale_is_other_noise(ring: KeyRing) -> None:
    """One uniform under two laws would be noise that can be solved for."""
    plain = truncated(ring, 25.0, 600, 20_000)
    others = [
        truncated(ring, 25.0, 601, 20_000),
        truncated(ring, 25.0 + 2.0**-40, 600, 20_000),
        truncated(ring, 25.0, 600, 20_000, (RUN[0], b"other")),
        OneShot(ring, RUN, INPUTS).discrete_laplace(numbered(20_000), 25.0),
    ]
    for other in others:
        assert abs(np.corrcoef(plain, other)[0, 1]) < 6 / np.sqrt(plain.size)
    assert (truncated(ring, 25.0, 600, 20_000) == plain).all()


def test_numbers_outside_their_range_are_refused(ring: KeyRing) -> None:
    for scale, most in ((0.0, 3), (2.0**41, 3), (float("nan"), 3), (1.0, 0), (1.0, 1 << 61)):
        with pytest.raises(ValueError, match="range"):
            truncated(ring, scale, most, 0)
    for most, sooner in ((1, 1), (2, 1 << 32), (2, -1)):
        with pytest.raises(ValueError, match="range"):
            OneShot(ring, RUN, INPUTS).truncated_geometric(numbered(0), 1.0, most, sooner)


def test_known_answers() -> None:
    """Under a fixed key: an answer that was begun before must be given again to the bit."""
    ring = KeyRing(bytes(range(32)))
    noise = [int(truncated(ring, scale, most, 3)[2]) for scale, most in SETTINGS]
    assert noise == [0, 2, 1, 18, 18]


@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 1e-3), (0.4, 1e-9), (2.0, 0.2)])
def test_least_counts_have_the_chances_of_the_optimum(epsilon: float, delta: float) -> None:
    """P[M <= n] = p_n, each within 5 sds of chance; another epsilon or delta has other uniforms."""
    ring, items, optimum = (
        KeyRing(b"\x09" * 32),
        numbered(200_000),
        SelectionOptimum(epsilon, delta),
    )
    least = OneShot(ring, RUN, INPUTS).least_counts(items, optimum)
    grown, chance = np.exp(epsilon), 0.0
    for n in range(1, len(optimum.edges) + 2):
        chance = min(grown * chance + delta, 1 - (1 - chance - delta) / grown, 1.0)
        error = np.sqrt(max(chance * (1 - chance), 1e-9) / items.shape[0])
        assert abs((least <= n).mean() - chance) <= 5 * error + 1e-12
    assert (OneShot(ring, RUN, INPUTS).least_counts(items, optimum) == least).all()
    other = SelectionOptimum(epsilon, delta * (1 + 2**-40))
    differs = OneShot(ring, RUN, INPUTS).least_counts(items, other)
    assert abs(np.corrcoef(least, differs)[0, 1]) < 6 / np.sqrt(items.shape[0])


def test_a_word_that_is_a_chance_is_settled(ring: KeyRing) -> None:
    """The first 64 bits are those of a chance: the further ones decide, as the optimum has it."""
    optimum, shot = SelectionOptimum(1.0, 1e-9), OneShot(ring, RUN, INPUTS)
    plain = shot.least_counts(numbered(3), optimum)
    calls = mock.Mock(side_effect=[7, 8, 9])
    spoiled = mock.Mock(edges=_words(ring, optimum), settle=calls)
    spoiled.epsilon, spoiled.delta = optimum.epsilon, optimum.delta
    assert sorted(shot.least_counts(numbered(3), spoiled).tolist()) == [7, 8, 9]
    assert (shot.least_counts(numbered(3), optimum) == plain).all()


def _words(ring: KeyRing, optimum: SelectionOptimum) -> Ids:
    """First words of the uniforms of items 0 .. 2, from the name's definition."""
    numbers = struct.pack("<dd", optimum.epsilon, optimum.delta)
    prefix = ring.name((b"one-shot noise", b"key optimum", numbers, *RUN, INPUTS))
    one = int(np.float64(1.0).view(np.uint64))
    blocks = [[(3, 0), prefix, (item, 0), (one, 1)] for item in range(3)]
    names = [ring.tweak.mac(np.array(each, np.uint64), np.array([4])) for each in blocks]
    return np.sort(np.array([ring.node.blocks(name)[0, 0] for name in names], np.uint64))
