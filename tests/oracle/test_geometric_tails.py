"""Tails of prefixes with geometric noise, against exact convolutions and enumerations."""

import math

import msgspec
import numpy as np
import pytest

from dpstream.accounting.arrays import Float64
from dpstream.accounting.budget.allocation import Encoder, StreamNoise, allocate
from dpstream.accounting.budget.key_tests import plain_thresholds
from dpstream.accounting.errors import InvariantError
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.plan.timeline import shares_of_tests
from dpstream.accounting.strategies.geometric import IDENTITY, GeometricStrategy
from tests.accounting.plans import build
from tests.oracle.geometric_tails import least_exceeded, tail_above


def noise_of(triggers: int, contributions: int = 2, epsilon: float = 1.0) -> StreamNoise:
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
    noise = noise_of(3, epsilon=epsilon)
    for step in (1, 2, 3):
        for least in (0, 1, 3, 10, 30):
            exact = sums(noise.scale, step, least)
            if exact > 1e-10:
                assert exact <= tail_above(noise, step, least) <= 1.05 * exact
                assert exact <= tail_above(noise, step, least + 0.9) <= 1.05 * exact


def test_mixed_rows_against_all_draws() -> None:
    noise = noise_of(16, contributions=1)
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
    noise = noise_of(triggers)
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
        noise_of(triggers), encoder=Encoder(strategy, strategy.sd_factors), scale=scale
    )
    at = np.arange(1, triggers + 1)
    thresholds = plain_thresholds(strategy, scale, tail, 0, at) / 2.0**DECODE_BITS - 1
    shares = shares_of_tests(triggers)
    for step in (1, triggers):
        least = least_exceeded(noise, step, tail * shares[step - 1]) / 2.0**DECODE_BITS
        # Whole numbers are up to one lower, where other tests leave enough of the chance.
        assert 0.995 * least - 1 < thresholds[step - 1] <= 1.01 * least
