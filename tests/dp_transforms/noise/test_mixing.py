"""Noise of mixed cells and of residual tables: rounding of the exact number, whatever computes it.

Noise of components: names apart from keys', any pieces, the error they announce, their law."""

import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any
from unittest import mock

import flint
import numpy as np
import pytest

from dpstream.accounting.arrays import Float64, Int64, kron
from dpstream.accounting.balls import ROUND_UP
from dpstream.accounting.budget.allocation import StreamNoise, encoder_of
from dpstream.accounting.limits import MIXED_BITS
from dpstream.accounting.mixing import Mixing
from dpstream.accounting.strategies.cells.bases import Even, difference_matrix, fitted, reduced
from dpstream.dp_transforms import residual
from dpstream.dp_transforms.noise import continuous
from dpstream.dp_transforms.noise import mixing as module
from dpstream.dp_transforms.noise.continuous import ContinuousGaussian
from dpstream.dp_transforms.noise.mixing import Components, MixedNoise, mixed
from dpstream.dp_transforms.noise.paths import NoiseStream
from dpstream.dp_transforms.residual import check_range, published, spent2
from tests.fixed import held_noise
from tests.golden.refusals import Refused
from tests.streams import KEYS

RING = KEYS.ring()
STRATEGIES = pytest.mark.parametrize("name", ["blt", "dense"])


def stream_of(
    name: str, triggers: int = 40, sigma: float = 7.0, window: int = 0, role: str = "value"
) -> NoiseStream:
    encoder = encoder_of(name, triggers)
    noise = StreamNoise("n", encoder, encoder.strategy.col2, 1.0, 1.0, sigma)
    bounds = (window, window + 100)
    return NoiseStream(RING, (b"run", b"plan"), bounds, role, noise, ContinuousGaussian(sigma))


def numbers(state: Components) -> list[float]:
    return [*state.high.tolist(), *state.low.tolist()]


@STRATEGIES
def test_any_pieces_and_any_blocks_give_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (Components(stream_of(name), 30) for _ in range(2))
    one.advance(17)
    monkeypatch.setattr(module, "_COMPONENT_ROWS", 7)
    for upto in (1, 2, 2, 9, 17):
        other.advance(upto)
    assert numbers(one) == numbers(other) and one.step_index == other.step_index == 17
    # Whoever draws more components draws the same first ones.
    more = Components(stream_of(name), 40)
    more.advance(17)
    assert more.high[:30].tolist() == one.high.tolist()


@STRATEGIES
@pytest.mark.parametrize("triggers", [1, 2, 40, 300])
def test_pairs_are_within_their_error_of_balls(name: str, triggers: int) -> None:
    state = Components(stream_of(name, triggers), 6)
    assert state.error < 7 * 2.0**-70
    for upto in sorted({1, 2, triggers // 2, triggers} - {0}):
        if upto > triggers:
            continue
        state.advance(upto)
        with flint.ctx.workprec(256):
            for j in range(6):
                ball = state.exact(j)(256)[0] - state.high[j].item() - state.low[j].item()
                assert abs(float(ball.mid())) <= state.error


@STRATEGIES
def test_they_are_paths_of_the_time_strategy(name: str) -> None:
    """The same nodes folded as a key's: rounded alike to 2^-8."""
    stream, state = stream_of(name), Components(stream_of(name), 50)
    tweaks, out = stream.component_names(np.arange(50)), []
    for t in range(1, 41):
        state.advance(t)
        out.append(np.floor(state.high * 256 + 0.5 + 2.0**-12 / 3))
    zero = np.zeros(50, np.int64)
    folded = stream.advance(tweaks, zero, zero + 40, stream.no_state(50), 40)
    assert np.array_equal(np.array(out).T, folded)


def test_names_are_apart_from_keys_and_from_each_other() -> None:
    """No key id, whatever it is, and no other number, window or role gives the same name."""
    stream, cells = stream_of("blt"), np.arange(50)
    taken = [
        stream.component_names(cells),
        stream.names(np.stack([cells, 0 * cells], axis=1).astype(np.uint64)),
        stream_of("blt", window=100).component_names(cells),
        stream_of("blt", role="units").component_names(cells),
    ]
    assert len({tuple(name) for names in taken for name in names.tolist()}) == 200


@STRATEGIES
def test_their_law(name: str) -> None:
    """The sd of every prefix, and covariances over time, of independent components."""
    state, rows = Components(stream_of(name, 12), 20_000), []
    for t in range(1, 13):
        state.advance(t)
        rows.append(state.high.copy())
    noise = np.array(rows) / 7
    decoder = stream_of(name, 12).strategy.generators.responses().decoder  # type: ignore[union-attr]
    sampled, law = noise @ noise.T / 20_000, decoder @ decoder.T
    spread = np.sqrt((np.outer(law.diagonal(), law.diagonal()) + law**2) / 20_000)
    assert np.abs((sampled - law) / spread).max() < 5.5
    assert np.abs((sampled - law / 1.25**2) / spread).max() > 5.5
    beside = (noise[:, :-1] * noise[:, 1:]).mean(axis=1) / law.diagonal()
    assert np.abs(beside).max() < 5.5 / np.sqrt(20_000)


def test_a_step_that_was_passed_is_not_drawn_again() -> None:
    state = Components(stream_of("blt"), 5)
    state.advance(9)
    before = numbers(state)
    state.advance(4)
    assert state.step_index == 9 and numbers(state) == before


@STRATEGIES
@pytest.mark.parametrize("draws", [0.0, continuous.QUANTILE_ERROR])
def test_the_announced_error_has_every_operation(
    name: str, draws: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum over steps and buffers in rationals: floats give no less, and hardly more."""
    monkeypatch.setattr(continuous, "QUANTILE_ERROR", draws)
    strategy = encoder_of(name, 60).strategy
    generators = strategy.generators
    assert generators is not None
    responses, local = generators.responses(), Fraction()
    size, reach, steps = len(responses.filled), Fraction(strategy.reach), Fraction(responses.steps)
    filled = [Fraction(x) for x in responses.filled.tolist()]
    moved = [Fraction(x) for x in responses.buffers.tolist()]
    for theta, out, into, gain in zip(*(part.tolist() for part in generators), strict=True):
        # The node is scaled, each buffer is weighed and taken off, and the gain multiplies.
        around = 1 + sum(abs(Fraction(o)) * f for o, f in zip(out, filled, strict=True))
        local += (3 * size + 4) * Fraction(responses.step) * Fraction(gain) * around
        for k in range(size):
            magnitude = abs(Fraction(theta[k])) * filled[k] + abs(Fraction(into[k])) * steps
            local += 4 * moved[k] * magnitude
        local += reach + steps
    exact = reach * Fraction(draws) + local * Fraction(2) ** -101 * 14
    announced = Fraction(module.error_in_sds.__wrapped__(strategy))
    assert exact <= announced <= exact * (1 + Fraction(12, 10**7))


SHAPES = [(1,), (7,), (3, 4), (2, 3, 4), (1, 5, 1)]
EVERY = pytest.mark.parametrize("shape", SHAPES, ids=str)


def factors(shape: Sequence[int]) -> list[Float64]:
    rng = np.random.default_rng(len(shape))
    return [np.eye(n) + 0.4 * rng.normal(size=(n, n)) for n in shape]


def components_of(size: int, step: int = 9, sigma: float = 300.0) -> Components:
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
    state = components_of(mixing.size)
    assert mixed(state, mixing).tolist() == by_balls(state, mixing)


@EVERY
@pytest.mark.parametrize("balls", [False, True])
def test_what_floats_leave_open_is_settled_alike(
    shape: tuple[int, ...], balls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With floats that are sure of nothing pairs decide, and with pairs that are not, balls."""
    mixing = Mixing(factors(shape))
    state = components_of(mixing.size)
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
    state = components_of(mixing.size)
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
    with pytest.raises(ValueError):
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


TABLE = np.random.default_rng(4).integers(0, 50, (3, 4))
#: Noise of the table and of a total, in units of 2^-MIXED_BITS, of run 7.
RECORDED = [[-1323320, -349192, -778774], [-870427, -1212939, 1205391]]
RECORDED_TOTAL = 1069780


def drawn(run: int, table: np.ndarray = TABLE, axes: tuple[int, ...] = (0, 2)) -> np.ndarray:
    bases = [Even(n) for n in table.shape]
    return published([table], [axes], [bases], [10.0], RING, (b"%d" % run,))[0]


def differences(table: np.ndarray) -> np.ndarray:
    return reduced(table, [Even(n) for n in table.shape])


def test_without_noise() -> None:
    with mock.patch.object(residual, "mixed", lambda c, m: np.zeros(m.size, np.int64)):
        assert np.array_equal(drawn(0), differences(TABLE))
        assert drawn(0, np.array(7), ()) == 7


def test_noise_is_added_before_floats_round() -> None:
    far = -(2**54) - 2  # as a float it would be a multiple of 4 first
    with mock.patch.object(residual, "mixed", lambda c, m: np.full(m.size, far)):
        assert drawn(0, np.array(1), ()) == ((1 << MIXED_BITS) + far) / 2.0**MIXED_BITS


def test_named_by_run_and_table() -> None:
    first = drawn(1)
    assert np.array_equal(drawn(1), first)
    others = drawn(1, TABLE * 0), drawn(1, TABLE + np.eye(3, 4, dtype=np.int64))
    assert not any(np.isclose(other - first, np.rint(other - first)).any() for other in others)
    assert not np.array_equal(drawn(2), first) and not np.array_equal(drawn(1, axes=(0, 1)), first)
    assert np.array_equal(first * 2**MIXED_BITS, np.rint(first * 2**MIXED_BITS))


def test_one_name_adds_the_same_noise() -> None:
    with held_noise():
        assert np.array_equal(drawn(1, TABLE * 0) + differences(TABLE), drawn(1))


def test_covariance() -> None:
    """As if each cell had noise of its own before differences were taken."""
    noise = np.array([drawn(run).ravel() for run in range(3000)]) - differences(TABLE).ravel()
    expected = 100 * np.kron(
        difference_matrix(3) @ difference_matrix(3).T, difference_matrix(4) @ difference_matrix(4).T
    )
    assert np.abs(np.cov(noise.T) - expected).max() < 0.15 * expected.max()
    assert np.abs(noise.mean(0)).max() < 4 * np.sqrt(expected.max() / 3000)


FITTED = [fitted(np.eye(3) * 0.4 + 0.6, 12), fitted(np.tri(4).T @ np.tri(4) / 4, 12)]


def of_fitted(run: int, table: np.ndarray) -> np.ndarray:
    return published([table], [(0, 2)], [FITTED], [10.0], RING, (b"%d" % run,))[0]


def test_fitted_tables_have_the_noise_of_their_bases() -> None:
    exact = reduced(TABLE, FITTED) / 2.0**24
    noise = np.array([of_fitted(run, TABLE).ravel() for run in range(2000)]) - exact.ravel()
    root = np.kron(FITTED[0].root, FITTED[1].root)
    expected = 100 * root @ root.T
    assert np.abs(np.cov(noise.T) - expected).max() < 0.15 * expected.max()
    assert np.abs(noise.mean(0)).max() < 4 * np.sqrt(expected.max() / 2000)


def test_noise_is_rounded_no_coarser_than_what_is_measured() -> None:
    """Else the last bits of what is measured would be published without noise."""
    with held_noise():
        units = of_fitted(1, TABLE) * 2.0**24
        assert np.array_equal(units, np.rint(units))
        drawn = units - reduced(TABLE, FITTED)
        assert np.array_equal(of_fitted(1, TABLE * 0) * 2.0**24, drawn)
    assert len(set((drawn.ravel() % 256).tolist())) > 4  # noise in units of 2^-24 itself


def test_noise_beyond_whole_units_is_refused(refused: Refused) -> None:
    check_range([FITTED], np.array([1e6]))
    refused(lambda: check_range([FITTED], np.array([2.0**40])))


def test_what_fitted_tables_spend() -> None:
    """No record moves them by more, in the metric of their noise."""
    root = 10 * np.kron(FITTED[0].root, FITTED[1].root)
    moved = []
    for cell in np.eye(12, dtype=np.int64):
        column = reduced(cell.reshape(3, 4), FITTED).ravel() / 2.0**24
        moved.append(float((np.linalg.solve(root, column) ** 2).sum()))
    spent = spent2([FITTED], np.array([10.0]), 1)
    assert max(moved) <= spent <= max(moved) * (1 + 1e-9)


def test_what_is_spent() -> None:
    """One record of C moves each table by sqrt(prod (1 - 1/n)); twice C is twice that."""
    sds = np.array([10.0, 5.0])
    one = spent2([[Even(3), Even(4)], []], sds, 1)
    assert one == pytest.approx(2 / 3 * 3 / 4 / 100 + 1 / 25) and one >= 0.5 / 100 + 1 / 25
    assert spent2([[Even(3), Even(4)], []], sds, 3) == pytest.approx(9 * one)
    record = np.zeros((3, 4), np.int64)
    record[1, 2] = 1
    moved = differences(record).ravel()
    covariance = 100 * np.kron(
        difference_matrix(3) @ difference_matrix(3).T, difference_matrix(4) @ difference_matrix(4).T
    )
    assert moved @ np.linalg.solve(covariance, moved) <= spent2([[Even(3), Even(4)]], sds[:1], 1)


def test_every_table_has_a_noise_of_its_own() -> None:
    with pytest.raises(ValueError):
        spent2([[Even(3), Even(4)]], np.array([10.0, 5.0]), 1)


def test_the_same_run_draws_the_same_in_every_version() -> None:
    """A run that was cut off goes on under the same names: these numbers are recorded."""
    draws = (drawn(7, TABLE * 0) * 2**MIXED_BITS).astype(int).tolist()
    assert draws == RECORDED
    assert drawn(7, np.array(0), ()) * 2**MIXED_BITS == RECORDED_TOTAL
