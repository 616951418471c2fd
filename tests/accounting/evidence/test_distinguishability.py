"""What an audit can see: covariances against dense matrices, designs against the budget."""

import numpy as np
import pytest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.budget.shares import per_key_squares
from dpstream.accounting.evidence.distinguishability import (
    MAX_PREFIXES,
    Seen,
    calendar,
    layouts,
    prefix_covariance,
    spread,
)
from dpstream.accounting.strategies import STRATEGIES, make_strategy
from tests.accounting.plans import Make
from tests.accounting.strategies.dense import decode_matrix


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("triggers", [1, 2, 7, 16, 21])
def test_covariance_is_that_of_the_decoder(name: str, triggers: int) -> None:
    decoder = decode_matrix(make_strategy(name, triggers))
    rng = np.random.default_rng(triggers)
    for size in (1, triggers // 2 + 1, triggers):
        at = np.sort(rng.choice(triggers, size, replace=False)) + 1
        dense = (decoder @ decoder.T)[np.ix_(at - 1, at - 1)]
        covariance = prefix_covariance(make_strategy(name, triggers), at)
        assert np.allclose(covariance, dense, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", STRATEGIES)
def test_square_is_at_most_that_of_the_encoder(make_plan: Make, name: str) -> None:
    """Equal where every prefix is released and the decoder is invertible."""
    plan = make_plan(13, public_keys="f" * 32, strategy=name)
    noise = allocate(plan).values[0]
    seen = Seen(plan, noise, np.arange(1, 14))
    encoder = make_strategy(name, 13).matrix()
    for trigger in range(1, 14):
        square = seen.square(seen.moved(np.array([trigger]))) * noise.sigma**2
        column = float((encoder[:, trigger - 1].astype(float) ** 2).sum())
        assert square <= column * (1 + 1e-9)
        assert name in ("tree", "geometric") or square == pytest.approx(column, rel=1e-6)


def test_calendar(make_plan: Make) -> None:
    assert calendar(make_plan(5)).tolist() == [1, 2, 3, 4, 5]
    rare = make_plan(11, select_every=2, refresh_every=4, strategy="blt")
    assert calendar(rare).tolist() == [2, 4, 8, 11]
    assert calendar(make_plan(11, refresh_every=4, public_keys="f" * 32)).tolist() == [4, 8, 11]
    long = calendar(make_plan(1000, refresh_every=1, select_every=1))
    assert len(long) <= MAX_PREFIXES and long[0] == 1 and long[-1] == 1000
    assert (np.diff(long) > 0).all() and len(long) == MAX_PREFIXES
    assert calendar(make_plan(MAX_PREFIXES, refresh_every=1)).tolist() == [*range(1, 129)]


def test_layouts_and_spread(make_plan: Make) -> None:
    for most in (1, 2, 32, 1000):
        counts = layouts(make_plan(8, contributions=most))
        assert counts.dtype == np.int64 and counts[0] == 1 and counts[-1] == most
        # From one key to C, each number at most an eighth above the one before it.
        assert (counts[1:] <= np.maximum(counts[:-1] + 1, np.ceil(counts[:-1] * 1.13))).all()
        assert (np.diff(counts) > 0).all() and len(counts) <= 66
    assert spread(make_plan(8), 5) == (28, 1)
    assert spread(make_plan(8, per_key_bound=1), 5) == (1, 1)


@pytest.mark.parametrize("bound", [1, 2, 3, 5, 16, 31, 32, 40])
@pytest.mark.parametrize("values", [0.0, 0.3, 1.0])
def test_layouts_have_the_one_that_costs_most(make_plan: Make, bound: int, values: float) -> None:
    """Of all ways to spread C pairs, at most k on a key, those that are tried have the worst."""
    plan = make_plan(8, per_key_bound=bound)
    tried = [(int(n), *spread(plan, int(n))) for n in layouts(plan)]
    for keys, first, rest in tried:
        assert 1 <= first <= bound and 1 <= rest <= bound
        assert first + (keys - 1) * rest <= 32
    cost = [n * (1 - values) + values * (a * a + (n - 1) * b * b) for n, a, b in tried]
    n = np.arange(1, 33)
    worst = (n * (1 - values) + values * per_key_squares(bound, 32)).max()
    # Between the two ends some full keys and some single pairs can cost a hundredth more.
    assert (0.99 if 0 < values < 1 else 1 - 1e-12) * worst <= max(cost) <= worst * (1 + 1e-12)


def test_values_move_at_their_own_step(make_plan: Make) -> None:
    """Counts for selection move at the next test, values at once."""
    plan = make_plan(12, select_every=3, refresh_every=3, strategy="blt")
    budget, at = allocate(plan), np.array([3, 6, 9, 12])
    assert budget.selection is not None
    tests, values = Seen(plan, budget.selection, at), Seen(plan, budget.values[0], at)
    when = np.array([1, 4, 12])
    assert tests.moved(when).tolist() == values.moved(when).tolist() == [1, 2, 2, 3]
    apart = Seen(plan, budget.values[0], np.array([1, 2, 3, 5]))
    assert apart.moved(np.array([2, 4])).tolist() == [0, 1, 1, 2]
