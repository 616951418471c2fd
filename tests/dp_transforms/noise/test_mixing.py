"""Noise of mixed cells: the rounding is that of the exact number, whatever computes it."""

import itertools
from collections.abc import Sequence
from typing import Any

import flint
import numpy as np
import pytest

from dpstream.accounting.arrays import Float64, Int64, kron
from dpstream.accounting.balls import ROUND_UP
from dpstream.accounting.limits import MIXED_BITS
from dpstream.accounting.mixing import Mixing
from dpstream.dp_transforms.noise import mixing as module
from dpstream.dp_transforms.noise.components import Components
from dpstream.dp_transforms.noise.mixing import MixedNoise, mixed
from tests.dp_transforms.noise.test_components import stream_of

SHAPES = [(1,), (7,), (3, 4), (2, 3, 4), (1, 5, 1)]
EVERY = pytest.mark.parametrize("shape", SHAPES, ids=str)


def factors(shape: Sequence[int]) -> list[Float64]:
    rng = np.random.default_rng(len(shape))
    return [np.eye(n) + 0.4 * rng.normal(size=(n, n)) for n in shape]


def components(size: int, step: int = 9, sigma: float = 300.0) -> Components:
    state = Components(stream_of("blt", 20, sigma), size)
    state.advance(step)
    return state


def by_balls(state: Components, mixing: Mixing) -> list[int]:
    """Every cell from the dense product in 300 bits."""
    with flint.ctx.workprec(300):
        noise = [state.exact(j)(300)[0] for j in range(mixing.size)]
        out, up = [], flint.arb(1) / 2 + flint.arb(1) / (3 << 12)
        for cell in itertools.product(*map(range, mixing.shape)):
            total = flint.arb(0)
            for j, part in enumerate(itertools.product(*map(range, mixing.shape))):
                weight = flint.arb(1)
                for factor, c, k in zip(mixing.factors, cell, part, strict=True):
                    weight *= factor[c, k].item()
                total += weight * noise[j]
            out.append(int((total * (1 << MIXED_BITS) + up).floor().unique_fmpz()))
        return out


@EVERY
def test_rounding_is_that_of_the_exact_number(shape: tuple[int, ...]) -> None:
    mixing = Mixing(factors(shape))
    state = components(mixing.size)
    assert mixed(state, mixing).tolist() == by_balls(state, mixing)


@EVERY
@pytest.mark.parametrize("balls", [False, True])
def test_what_floats_leave_open_is_settled_alike(
    shape: tuple[int, ...], balls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With floats that are sure of nothing pairs decide, and with pairs that are not, balls."""
    mixing = Mixing(factors(shape))
    state = components(mixing.size)
    expected = mixed(state, mixing).tolist()

    def unsure(values: Float64, *rest: Any) -> Int64:
        rest[-1].fill(-(10**12))
        return np.arange(mixing.size)

    monkeypatch.setattr(module, "_round", unsure)
    if balls:
        monkeypatch.setattr(module, "_round_pairs", lambda v, r, e, cells, out: cells)
    assert mixed(state, mixing).tolist() == expected


def test_a_large_product_of_few_open_cells() -> None:
    """Slices of a first factor with more rows than are sliced together, and every error bound."""
    mixing = Mixing(factors((150, 9)))
    state = components(mixing.size)
    cells = np.arange(0, mixing.size, 5)
    sums, rest = module._pairs_of(mixing, state.high, state.low, cells)
    matrix = kron(list(mixing.factors))
    size = mixing.row_sum * np.abs(state.high).max()
    for at, cell in enumerate(cells[::30].tolist()):
        with flint.ctx.workprec(300):
            exact = flint.arb(0)
            for j, (h, low) in enumerate(zip(state.high.tolist(), state.low.tolist(), strict=True)):
                first, second = divmod(cell, 9), divmod(j, 9)
                weight = flint.arb(mixing.factors[0][first[0], second[0]].item())
                weight *= mixing.factors[1][first[1], second[1]].item()
                exact += weight * (flint.arb(h) + low)
            off = float((exact - sums[30 * at].item() - rest[30 * at].item()).mid())
        assert abs(off) <= size * 150 * 2.0 ** (5 - 4 * module._slice_bits(150))
        assert sums[30 * at] == pytest.approx(float(matrix[cell] @ state.high), abs=size * 1e-11)


@pytest.mark.parametrize("terms", [1, 2, 1000, 1024, 1025, 8192])
def test_sums_of_products_of_slices_are_exact(terms: int) -> None:
    """Both slices' integers at their largest, as often as they can be summed."""
    bits = module._slice_bits(terms)
    assert terms * (1 << bits - 1) ** 2 <= 1 << 53
    values = np.random.default_rng(terms).normal(size=(3, min(terms, 100)))
    parts = module._slices(values, terms)
    unit = 2.0 ** (np.ceil(np.log2(np.abs(values).max())) + 1)
    for part in parts:
        unit *= 2.0**-bits
        scaled = part / unit
        assert np.array_equal(scaled, np.rint(scaled)) and np.abs(scaled).max() <= 1 << bits - 1
    assert np.abs(values - sum(parts)).max() <= unit


def test_shards_that_come_later_or_again_get_the_same() -> None:
    mixing = Mixing(factors((3, 4)))
    noise, order = MixedNoise(stream_of("dense", 12), mixing), [1, 2, 1, 5, 6, 7, 8, 2, 12, 1]
    alone = {}
    for t in range(1, 13):
        alone[t] = MixedNoise(stream_of("dense", 12), mixing).at(t).tolist()
    for trigger in order:
        assert noise.at(trigger).tolist() == alone[trigger]
    assert len(noise._mixed) <= 3 and len(noise._heads) <= 4
    for trigger in (12, 9, 6, 3, 2, 1, 12, 4):
        assert noise.at(trigger).tolist() == alone[trigger]
    assert len(noise._heads) == 4
    with pytest.raises(ValueError, match="read-only"):
        noise.at(1)[0] = 0


def test_the_identity_rounds_each_component_by_itself() -> None:
    """Then the same number is rounded as for a key, on a lattice that is finer."""
    stream, zero = stream_of("dense", 12), np.zeros(9, np.int64)
    tweaks = stream.component_names(np.arange(9))
    folded = stream.advance(tweaks, zero, zero + 12, stream.no_state(9), 12)
    noise = MixedNoise(stream, Mixing([np.eye(3), np.eye(3)]))
    for t in range(1, 13):
        fine = noise.at(t) / (1 << MIXED_BITS)
        assert np.abs(fine - folded[:, t - 1] / 256).max() <= 2.0**-9 + 2.0**-16


def test_covariance_of_cells_and_steps() -> None:
    """(L L^T) x (B B^T), over many windows; without L, or with its transpose, it is told apart."""
    mixing, runs = Mixing(factors((2, 2))), 1_200
    rows = []
    for window in range(runs):
        noise = MixedNoise(stream_of("blt", 3, window=100 * window), mixing)
        rows.append(np.concatenate([noise.at(t) for t in (1, 3)]))
    values = np.array(rows) / (1 << MIXED_BITS) / 7
    matrix = kron(list(mixing.factors))
    decoder = stream_of("blt", 3).strategy.generators.responses().decoder[[0, 2]]  # type: ignore[union-attr]

    def fits(cells: Float64) -> bool:
        law = np.kron(decoder @ decoder.T, cells @ cells.T)
        spread = np.sqrt((np.outer(law.diagonal(), law.diagonal()) + law**2) / runs)
        return bool(np.abs((values.T @ values / runs - law) / spread).max() < 5)

    assert fits(matrix)
    assert not fits(np.eye(4)) and not fits(matrix.T) and not fits(matrix / 1.25)


def test_pinned() -> None:
    """A run that goes on with another version or processor must draw what it drew before."""
    dyadic = [np.array([[1.0, 0.5], [-0.25, 1.0]]), np.array([[1.0, 0.125], [0.5, 1.0]])]
    noise = MixedNoise(stream_of("blt", 20), Mixing(dyadic))
    assert [noise.at(t).tolist() for t in (1, 2, 20)] == [
        [463965, 368298, -514928, -431641],
        [259166, 937735, -179373, 563237],
        [793579, 885501, 60186, -849215],
    ]


def test_roundings_within_the_error_of_an_edge_are_open_and_no_other() -> None:
    """On either side of a whole number; those are summed again, all others stand."""
    parts = np.array([0.5, 5e-4, 1 - 5e-4, 0.3, 2e-3, 1 - 2e-3, 1e-9])
    wholes = np.array([7, -3, 12, 0, 5, -9, 4])
    values = (wholes + parts - ROUND_UP) / module._SCALE
    out = np.zeros(7, np.int64)
    assert module._round(values, 1e-3, out).tolist() == [1, 2, 6]
    assert out.tolist() == wholes.tolist()
    assert module._round(values[3:6], 1e-3, out[3:6]).tolist() == []
    cells, pairs = np.arange(7) + 1, np.zeros(8, np.int64)
    assert module._round_pairs(values, 0 * values, 1e-3, cells, pairs).tolist() == [2, 3, 7]
    assert pairs.tolist() == [0, *wholes.tolist()]
