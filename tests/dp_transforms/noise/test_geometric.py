"""Two-sided geometric noise of nodes: its law, its names, and where floats do not decide."""

import numpy as np
import pytest
from scipy import stats

from dpstream.accounting.arrays import Ids, Int64
from dpstream.accounting.mechanisms.laws import DiscreteLaplaceLaw, settle
from dpstream.dp_transforms.noise import geometric
from dpstream.dp_transforms.noise.geometric import GeometricNodes
from dpstream.dp_transforms.noise.lanes import own_blocks, shared_lanes
from dpstream.dp_transforms.noise.prf import Prf

#: A true sampler fails a test below this in one of a million runs; the keys are fixed anyway.
LEAST_P = 1e-6
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

    monkeypatch.setattr(geometric, "inverse_laplace", undecided)
    assert np.array_equal(drawn(300.0, 3, 40), expected)


def test_further_bits_are_the_nodes_own_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's uniform is its lane and then blocks that no other node has."""
    uniforms = list[tuple[int, int]]()

    def listening(law: DiscreteLaplaceLaw, uniform: object) -> int:
        uniforms.append(uniform(2))  # type: ignore[operator]
        return settle(law, uniform)  # type: ignore[arg-type]

    def undecided(words: Ids, scale: float) -> tuple[Int64, np.ndarray]:
        return np.zeros(len(words), np.int64), np.ones(len(words), np.bool_)

    monkeypatch.setattr(geometric, "inverse_laplace", undecided)
    monkeypatch.setattr(geometric, "settle", listening)
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
