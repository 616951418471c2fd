"""The direct simulation: the sd of every prefix, and the fast sweep against it.

The tails of geometric noise are exact.
"""

import dataclasses
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from dpstream.accounting.arrays import Float64
from dpstream.accounting.budget.allocation import Encoder, StreamNoise, allocate
from dpstream.accounting.budget.key_tests import plain_thresholds
from dpstream.accounting.errors import InvariantError
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.plan.timeline import shares_of_tests
from dpstream.accounting.strategies import make_strategy
from dpstream.accounting.strategies.geometric import IDENTITY, GeometricStrategy
from dpstream.accounting.weights import MILD, SPARED, STEEP
from tests.accounting.plans import build
from tests.oracle.geometric_tails import least_exceeded, tail_above
from tests.oracle.simulation import (
    Design,
    admit,
    noise_of,
    ranked,
    simulate,
    table1_plan,
    table1_records,
)
from tests.oracle.sweep import Outcome, Sorted, sweep
from tests.oracle.sweep import noise_of as joint_noise_of

KEYS, TRIGGERS, SIGMA = 20_000, 13, 4.0
#: Sample figures leave this many of their sds in one of 25 million runs; the seed is fixed anyway.
FAR = 5.5


def fits(noise: Float64, sd: float) -> bool:
    return bool(abs((noise**2).mean() / sd**2 - 1) < FAR * np.sqrt(2 / len(noise)))


@pytest.mark.parametrize("name", ["tree", "blt"])
@pytest.mark.parametrize("step_index", [0, 5])
def test_prefixes_before_and_after_a_restart(name: str, step_index: int) -> None:
    strategy = make_strategy(name, TRIGGERS)
    sd = SIGMA * strategy.sd_factors
    noise = noise_of(np.random.default_rng(4), KEYS, strategy, SIGMA)
    before = [noise.advance() for _ in range(8)]
    assert all(fits(drawn, sd[t]) for t, drawn in enumerate(before))
    again, others = np.arange(KEYS // 2), slice(KEYS // 2, None)
    noise.restart(again, step_index)
    for t in range(8, TRIGGERS):
        drawn = noise.advance()
        fresh = step_index + t - 8
        assert noise.step_index[0] == fresh + 1 and noise.step_index[-1] == t + 1
        assert fits(drawn[again], sd[fresh]) and fits(drawn[others], sd[t])
        for past in before:
            correlation = np.corrcoef(past[again], drawn[again])[0, 1]
            assert abs(correlation) < FAR / np.sqrt(len(again))
    # What goes on is not new: neighbouring prefixes share their nodes.
    assert np.corrcoef(before[7][others], drawn[others])[0, 1] > 0.2


SWEPT_KEYS, SWEPT_TRIGGERS = 3_000, 20
COMBINED: dict[str, Any] = {"per_key_bound": 1, "combine": True}
KINDS: list[dict[str, Any]] = [
    {"weights": MILD},
    {"weights": MILD, "skip": False},
    {"weights": SPARED, "skip": True, "tests": (3, 4, 11, 20), **COMBINED},
    {"weights": STEEP, "skip": False, **COMBINED},
    {"per_key_bound": 1},
    {"fused": True},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_without_noise_both_are_the_same(kind: dict[str, Any]) -> None:
    """Hardly any noise: which pairs are admitted, what they weigh, and what is published when."""
    settings = {"contributions": 12, "strategy": "blt", "delta": 1e-4, **kind}
    plan = table1_plan(SWEPT_TRIGGERS, **settings)
    exact = Design.of(plan, allocate(plan))
    least = 1e-9 if exact.value_sigma else None
    exact = dataclasses.replace(exact, selection_sigma=1e-9, value_sigma=least)
    raw = table1_records(30_000, SWEPT_KEYS, 3)
    figures = sweep(exact, Sorted.of(raw, SWEPT_KEYS, 12), seed=1)
    want = simulate(exact, admit(ranked(raw), 12), raw, SWEPT_KEYS, seed=1)
    assert 50 < want.keys == figures.published[-1] < SWEPT_KEYS
    assert figures.l1 == pytest.approx(want.l1, rel=1e-6)
    assert figures.l2 == pytest.approx(want.l2, rel=1e-6)
    other = dataclasses.replace(exact, skip=not exact.skip)
    if kind.get("weights"):
        assert sweep(other, Sorted.of(raw, SWEPT_KEYS, 12), seed=1) != figures


def test_noise_is_joint() -> None:
    """Each prefix has the strategy's sd, and two of them its correlation."""
    plan = table1_plan(SWEPT_TRIGGERS, strategy="blt", weights=MILD)
    budget = allocate(plan)
    at = np.array([4, 11, 20])
    strategy, sigma = budget.values[0].strategy_object, budget.values[0].sigma
    drawn = joint_noise_of(np.random.default_rng(2), 40_000, strategy, at, sigma)
    assert drawn.std(axis=1) == pytest.approx(budget.values[0].sd[at - 1], rel=0.02)
    decoder = np.tril(np.ones((20, 20))) @ np.linalg.inv(strategy.matrix().astype(float))
    rows = decoder[at - 1]
    want = (rows @ rows.T) / np.outer(*2 * [np.linalg.norm(rows, axis=1)])
    assert np.corrcoef(drawn) == pytest.approx(want, abs=0.02)
    assert want[0, 2] > 0.1


def test_keys_by_a_trigger() -> None:
    outcome = Outcome((2, 5, 9), (1, 4, 6), 0.0, 0.0)
    assert [outcome.by(t) for t in (1, 2, 4.9, 5, 9)] == [0, 1, 1, 4, 6]


def stream_noise_of(triggers: int, contributions: int = 2, epsilon: float = 1.0) -> StreamNoise:
    plan = build(
        triggers, public_keys="list", strategy="geometric", contributions=contributions,
        epsilon=epsilon,
    )  # fmt: skip
    return allocate(plan).values[0]


def sums(scale: float, count: int, least: int) -> float:
    """P[sum of ``count`` geometric noises > least], by convolution."""
    reach = int(70 * scale * math.sqrt(count)) + 20
    ratio = math.exp(-1 / scale)
    one = (1 - ratio) / (1 + ratio) * ratio ** np.abs(np.arange(-reach, reach + 1))
    law = one
    for _ in range(count - 1):
        law = np.convolve(law, one)
    return float(law[(len(law) - 1) // 2 + least + 1 :].sum())


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 6.0])
def test_noise_of_each_step_has_its_own_tail(epsilon: float) -> None:
    noise = stream_noise_of(3, epsilon=epsilon)
    for step in (1, 2, 3):
        for least in (0, 1, 3, 10, 30):
            exact = sums(noise.scale, step, least)
            if exact > 1e-10:
                assert exact <= tail_above(noise, step, least) <= 1.05 * exact
                assert exact <= tail_above(noise, step, least + 0.9) <= 1.05 * exact


def test_mixed_rows_against_all_draws() -> None:
    noise = stream_noise_of(16, contributions=1)
    matrix = noise.strategy_object.matrix()
    rng = np.random.default_rng(0)
    keep = 1 - math.exp(-1 / noise.scale)
    drawn = rng.geometric(keep, (200_000, len(matrix))) - rng.geometric(
        keep, (200_000, len(matrix))
    )
    inverse = np.linalg.pinv(matrix.astype(np.float64))
    prefix = drawn @ (np.tril(np.ones((16, 16))) @ inverse)[9]
    for many in (0.5, 1.0, 2.0, 3.0):
        share = float((prefix > many * noise.sd[9]).mean())
        slack = 5 * math.sqrt(share / 200_000)
        assert (
            share - slack <= tail_above(noise, 10, many * float(noise.sd[9])) <= 1.2 * share + slack
        )


@pytest.mark.parametrize("triggers", [3, 16])
@pytest.mark.parametrize("chance", [1e-3, 1e-9, 1e-14])
def test_least_number_of_a_chance(triggers: int, chance: float) -> None:
    noise = stream_noise_of(triggers)
    number = least_exceeded(noise, triggers, chance)
    assert tail_above(noise, triggers, number / 256) <= chance
    step = 256 if triggers == 3 else 1
    assert tail_above(noise, triggers, (number - step) / 256) > chance


def test_gaussian_noise_has_no_such_tail() -> None:
    with pytest.raises(InvariantError):
        tail_above(allocate(build(4)).values[0], 1, 3.0)


@pytest.mark.parametrize(("triggers", "parameters"), [(3, IDENTITY), (16, None)])
def test_thresholds_of_plans_are_close_to_these(triggers: int, parameters: Float64 | None) -> None:
    strategy, tail = GeometricStrategy(triggers, parameters), 1e-8
    scale = 2.0 * strategy.column1
    noise = msgspec.structs.replace(
        stream_noise_of(triggers), encoder=Encoder(strategy, strategy.sd_factors), scale=scale
    )
    at = np.arange(1, triggers + 1)
    thresholds = plain_thresholds(strategy, scale, tail, 0, at) / 2.0**DECODE_BITS - 1
    shares = shares_of_tests(triggers)
    for step in (1, triggers):
        least = least_exceeded(noise, step, tail * shares[step - 1]) / 2.0**DECODE_BITS
        # Whole numbers are up to one lower, where other tests leave enough of the chance.
        assert 0.995 * least - 1 < thresholds[step - 1] <= 1.01 * least
