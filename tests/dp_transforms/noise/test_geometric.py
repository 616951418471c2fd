"""Two-sided geometric noise of nodes, truncated or not: law, names, coin, undecided floats."""

import itertools

import numpy as np
import pytest
from scipy import stats

from dpstream.accounting.arrays import Bool, Ids, Int64
from dpstream.accounting.errors import InvariantError
from dpstream.accounting.mechanisms.laws import DiscreteLaplaceLaw, TruncatedGeometricLaw, settle
from dpstream.dp_transforms.noise import sampler
from dpstream.dp_transforms.noise.oneshot import MAX_SCALE
from dpstream.dp_transforms.noise.prf import Prf
from dpstream.dp_transforms.noise.sampler import (
    GeometricNodes,
    TruncatedNodes,
    own_blocks,
    shared_lanes,
)
from tests.dp_transforms.reference import LEAST_P

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
    with pytest.raises(ValueError):
        GeometricNodes(scale)
    assert GeometricNodes(1.0).digest != GeometricNodes(np.nextafter(1.0, 2.0)).digest


NAMES = np.random.default_rng(3).integers(0, 2**64, (20_000, 2), np.uint64)
ZEROS = np.zeros(len(NAMES), np.int64)


def test_a_test_reads_the_published_noise_and_its_coin() -> None:
    half = 1 << 31
    published, _ = TruncatedNodes(0.5, 2, half).draw(PRF, NAMES, ZEROS, ZEROS + 1)
    read, _ = TruncatedNodes(0.5, 2, half, tested=True).draw(PRF, NAMES, ZEROS, ZEROS + 1)
    coin = read - published
    assert set(coin.tolist()) == {0, 1} and abs(coin.mean() - 0.5) < 0.02
    assert np.abs(published[coin == 1]).max() == 1 and np.abs(published).max() == 2
    never = TruncatedNodes(0.5, 2, 0, tested=True).draw(PRF, NAMES, ZEROS, ZEROS + 1)[0]
    assert np.abs(never).max() == 2


def test_each_number_of_the_law_names_its_noise() -> None:
    laws = itertools.product((0.5, 0.75), (3, 4), (0, 7))
    assert len({TruncatedNodes(*law).digest for law in laws}) == 8


def test_a_key_has_one_node() -> None:
    zero, one = ZEROS[:1], ZEROS[:1] + 1
    for first, last in ((one, one + 1), (zero, one + 1), (one, one)):
        with pytest.raises(InvariantError):
            TruncatedNodes(0.5, 2, 0).draw(PRF, NAMES[:1], first, last)
        # Also where the other rows ask for theirs alone.
        mixed = np.concatenate([zero, first]), np.concatenate([one, last])
        with pytest.raises(InvariantError):
            TruncatedNodes(0.5, 2, 0).draw(PRF, NAMES[:2], *mixed)


def left_open(words: Ids, scale: float, most: Int64) -> tuple[Int64, Bool]:
    return np.zeros(len(words), np.int64), np.ones(len(words), np.bool_)


@pytest.mark.parametrize("tested", [False, True])
def test_the_coin_says_by_which_law_further_bits_decide(
    monkeypatch: pytest.MonkeyPatch, tested: bool
) -> None:
    """With every draw left open the noise is the same, by the k that the row's coin chose."""
    drawing, few = TruncatedNodes(3.0, 3, 1 << 31, tested), NAMES[:200]
    expected, _ = drawing.draw(PRF, few, ZEROS[:200], ZEROS[:200] + 1)
    monkeypatch.setattr(sampler, "inverse_truncated", left_open)
    settled, _ = drawing.draw(PRF, few, ZEROS[:200], ZEROS[:200] + 1)
    assert np.array_equal(settled, expected)


def test_noise_and_coin_are_of_the_nodes_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0's lane and its further blocks are the uniform; the coin is node 1's first 32 bits."""
    named_nodes = list[tuple[int, int, int]]()

    def listening(law: TruncatedGeometricLaw, uniform: object) -> int:
        named_nodes.append((law.most, *uniform(2)))  # type: ignore[operator]
        return settle(law, uniform)  # type: ignore[arg-type]

    names, zeros, sooner = NAMES[:60], ZEROS[:60], 1 << 30
    monkeypatch.setattr(sampler, "inverse_truncated", left_open)
    monkeypatch.setattr(sampler, "settle", listening)
    TruncatedNodes(3.0, 5, sooner).draw(PRF, names, zeros, zeros + 1)
    shared = shared_lanes(PRF, names, zeros, zeros + 2, np.uint64)
    coins = 0
    for row, (most, value, bits) in enumerate(named_nodes):
        word, coin = (int(shared.lanes[shared.shift[row] + node]) for node in (0, 1))
        for block in range(2):
            low, high = own_blocks(PRF, names[row : row + 1], zeros[:1], block)[0].tolist()
            word = word << 128 | high << 64 | low
        assert (value, bits) == (word, 64 + 2 * 128)
        assert most == 5 - ((coin >> 32) < sooner)
        coins += most == 4
    assert len(named_nodes) == 60 and 5 < coins < 30


@pytest.mark.parametrize("tested", [False, True])
def test_rows_that_draw_nothing_change_no_others(tested: bool) -> None:
    drawing, names = TruncatedNodes(2.0, 9, 1 << 31, tested), NAMES[:50]
    every, starts = drawing.draw(PRF, names, ZEROS[:50], ZEROS[:50] + 1)
    assert starts.tolist() == list(range(50)) and len(every) == 50
    last = (np.arange(50) % 3 == 0).astype(np.int64)
    values, starts = drawing.draw(PRF, names, ZEROS[:50], last)
    assert np.array_equal(values, every[last == 1])
    assert starts.tolist() == (np.cumsum(last) - last).tolist()
    for row in range(5):
        assert [int(ball.unique_fmpz()) for ball in drawing.exact(PRF, names[row], 1)(64)] == [
            every[row]
        ]
        assert not drawing.exact(PRF, names[row], 0)(64)


@pytest.mark.parametrize(
    ("scale", "most", "sooner"),
    [
        (2.0**-11, 2, 0),
        (2.0**41, 2, 0),
        (np.nan, 2, 0),
        (1.0, 0, 0),
        (1.0, 2, -1),
        (1.0, 2, 1 << 32),
    ],
)
def test_laws_beyond_the_range_are_refused(scale: float, most: int, sooner: int) -> None:
    with pytest.raises(ValueError):
        TruncatedNodes(scale, most, sooner)
    for end in (2.0**-10, MAX_SCALE):
        TruncatedNodes(end, 1, (1 << 32) - 1)
