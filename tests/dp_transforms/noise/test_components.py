"""Noise of components: names apart from keys', any pieces, the error they announce, their law."""

from fractions import Fraction

import flint
import numpy as np
import pytest

from dpstream.accounting.budget.allocation import StreamNoise, encoder_of
from dpstream.dp_transforms.noise import components, quantile
from dpstream.dp_transforms.noise.components import Components
from dpstream.dp_transforms.noise.continuous import ContinuousGaussian
from dpstream.dp_transforms.noise.paths import NoiseStream
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
    monkeypatch.setattr(components, "_ROWS", 7)
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
        stream.names(np.stack([cells, 0 * cells], axis=1).astype(np.uint64), 0 * cells),
        stream.names(np.stack([cells, 0 * cells], axis=1).astype(np.uint64), 0 * cells + 1),
        stream_of("blt", window=100).component_names(cells),
        stream_of("blt", role="units").component_names(cells),
    ]
    assert len({tuple(name) for names in taken for name in names.tolist()}) == 250


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
@pytest.mark.parametrize("draws", [0.0, quantile.ERROR])
def test_the_announced_error_has_every_operation(
    name: str, draws: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum over steps and buffers in rationals: floats give no less, and hardly more."""
    monkeypatch.setattr(quantile, "ERROR", draws)
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
    announced = Fraction(components.error_in_sds.__wrapped__(strategy))
    assert exact <= announced <= exact * (1 + Fraction(12, 10**7))
