"""One suite for every noise strategy: against its own dense matrix, and streaming."""

import itertools
from typing import Any

import numpy as np
import pytest

from dpstream.accounting.limits import MAX_DENSE_TRIGGERS
from dpstream.accounting.strategies import (
    STRATEGIES,
    BltStrategy,
    DenseStrategy,
    make_strategy,
)
from dpstream.accounting.strategies.base import ExactNoise, Ranges
from tests.accounting.strategies.dense import (
    SCALE,
    balls,
    decode_matrix,
    fold,
    noise_of,
)

SIZES = (1, 2, 3, 5, 8, 31, 64, 100)
EVERY: list[Any] = [pytest.param(name, t, id=f"{name}-{t}") for name in STRATEGIES for t in SIZES]


@pytest.mark.parametrize(("name", "triggers"), EVERY)
def test_decoder_inverts_its_own_matrix(name: str, triggers: int) -> None:
    """R A = prefix sums: the released prefix is unbiased, for the encoder that is used."""
    strategy = make_strategy(name, triggers)
    prefixes = np.tril(np.ones((triggers, triggers)))
    assert np.allclose(decode_matrix(strategy) @ strategy.matrix(), prefixes, atol=1e-6)


@pytest.mark.parametrize(("name", "triggers"), EVERY)
def test_figures_are_those_of_the_matrix(name: str, triggers: int) -> None:
    strategy, decoder = make_strategy(name, triggers), decode_matrix(make_strategy(name, triggers))
    dense = strategy.matrix().astype(np.float64)
    assert dense.shape == (int(strategy.nodes_through(triggers)), triggers)
    if strategy.rounds_nodes:
        assert np.array_equal(dense, np.rint(dense))
    column = float((dense**2).sum(axis=0).max())
    assert column <= strategy.col2 <= column * (1 + 1e-9)
    sd = np.sqrt((decoder**2).sum(axis=1))
    assert np.all(sd <= strategy.sd_factors + 1e-7) and np.allclose(sd, strategy.sd_factors)
    assert np.abs(decoder).sum(axis=1).max() <= strategy.reach * (1 + 1e-6)
    gaussian = strategy.rounds_nodes and strategy.law == "gaussian"
    rounded = np.abs(decoder).sum(axis=1) / 2 if gaussian else 0.0
    assert np.all(strategy.rounding >= rounded)
    assert np.all(strategy.rounding <= rounded + strategy.triggers.bit_length() / SCALE + 1e-5)


@pytest.mark.parametrize(
    ("name", "triggers"), [case for case in EVERY if case.values[0] != "geometric"]
)
def test_nodes_complete_in_order(name: str, triggers: int) -> None:
    """A prefix uses complete nodes only, and encoders are lower-triangular in time: without this
    nothing is Gaussian-DP.  Geometric noise does without, at plain epsilon."""
    strategy = make_strategy(name, triggers)
    dense, decoder = strategy.matrix(), decode_matrix(strategy)
    for t in range(1, triggers + 1):
        complete = int(strategy.nodes_through(t))
        assert not dense[:complete, t:].any()
        assert not decoder[t - 1, complete:].any()


@pytest.mark.parametrize(("name", "triggers"), EVERY)
def test_any_pieces_give_the_same_path(name: str, triggers: int) -> None:
    strategy = make_strategy(name, triggers)
    noise = noise_of(strategy, 7, 400.0, triggers)
    prefixes = fold(strategy, noise)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        ends = tuple(sorted(set(rng.integers(1, triggers + 1, 4).tolist()) - {triggers}))
        assert np.array_equal(fold(strategy, noise, ends), prefixes)
    every = fold(strategy, noise, tuple(range(1, triggers)), width=1)
    assert np.array_equal(every, prefixes)


@pytest.mark.parametrize(
    ("name", "triggers", "mean", "final"),
    [
        ("tree", 100, 3.66, 3.33),
        ("tree", 1000, 5.28, 5.52),
        ("blt", 100, 2.34, 2.54),
        ("blt", 1000, 3.05, 3.30),
        ("dense", 100, 2.23, 2.45),
        ("dense", 1000, 2.95, 3.19),
    ],
)
def test_error_figures(name: str, triggers: int, mean: float, final: float) -> None:
    """Mean and final sd of the prefix in units of C L / mu (mechanism.md section 3)."""
    strategy = make_strategy(name, triggers)
    unit = strategy.sd_factors * np.sqrt(strategy.col2)
    assert float(unit.mean()) == pytest.approx(mean, abs=0.006)
    assert float(unit[-1]) == pytest.approx(final, abs=0.006)


def test_names_and_refusals() -> None:
    for name, kind in STRATEGIES.items():
        assert isinstance(make_strategy(name, 3), kind) and kind.name == name
        with pytest.raises(ValueError, match="at least one"):
            kind(0)
    with pytest.raises(ValueError, match="unknown"):
        make_strategy("other", 3)
    with pytest.raises(ValueError, match="too many"):
        make_strategy("dense", MAX_DENSE_TRIGGERS + 1)
    assert make_strategy("blt", 1 << 20).sd_factors[-1] < 6


#: Strategies with real nodes, whose floats are settled exactly.
REAL = pytest.mark.parametrize("kind", [BltStrategy, DenseStrategy], ids=["blt", "dense"])


@REAL
def test_float_error_is_within_what_fold_assumes(kind: type[BltStrategy | DenseStrategy]) -> None:
    """Every prefix settled exactly equals the one the floats gave, also far along a path."""
    strategy = kind(700)
    noise = noise_of(strategy, 3, 5000.0)
    prefixes = fold(strategy, noise)
    for row, t in itertools.product(range(3), (1, 2, 333, 699, 700)):
        assert strategy.exact(balls(noise[row]), t) == prefixes[row, t - 1]


@REAL
def test_prefixes_that_noise_error_leaves_open_are_reported(
    kind: type[BltStrategy | DenseStrategy],
) -> None:
    """With noise known only to 1e-3 of a lattice step about 2e-3 of all roundings are open."""
    strategy = kind(50)
    noise = noise_of(strategy, 200, 300.0)
    expected, open_rows = fold(strategy, noise), []
    zero, end, out = np.zeros(200, np.int64), np.full(200, 50), np.zeros((200, 50), np.int64)

    def exact(row: int, nodes: int) -> ExactNoise:
        open_rows.append(row)
        return balls(noise[row, :nodes])

    for error, least, most in ((0.0, 0, 0), (1e-3 / SCALE / strategy.reach, 5, 50)):
        stack = np.zeros((200, strategy.state_columns))
        open_rows.clear()
        path = (noise.reshape(-1), np.arange(200) * 50, zero, end, stack, out, exact)
        strategy.fold(Ranges(*path, error))
        assert least <= len(open_rows) <= most
        assert np.array_equal(out, expected)
