"""Which family a stream with private keys takes, and what it goes by."""

import math

import numpy as np
import pytest

from dpstream.accounting.budget import allocate
from dpstream.accounting.tuning.family import mean_loss, resolved
from dpstream.accounting.tuning.reference import DENSITY, SIZES
from dpstream.accounting.weights import EVEN
from tests.accounting.plans import COUNT, SUM, build

FEW = {"per_key_bound": 1, "epsilon": 2.0, "delta": 1e-7}


@pytest.mark.parametrize(("triggers", "contributions", "strategy"), [
    (1, 1, "geometric"), (1, 2, "geometric"), (1, 32, "blt"), (16, 1, "geometric"), (16, 16, "blt"),
])  # fmt: skip
def test_few_keys_of_a_unit_take_geometric_noise(
    triggers: int, contributions: int, strategy: str
) -> None:
    plan = build(triggers, strategy="auto", contributions=contributions, **FEW)
    taken = resolved(plan)
    assert taken.privacy.strategy == strategy
    other = {"blt": "geometric", "geometric": "blt"}[strategy]
    losses = [
        mean_loss(one, allocate(one))
        for one in (
            build(triggers, strategy=name, contributions=contributions, **FEW)
            for name in (strategy, other)
        )
    ]
    assert losses[0] < losses[1]


def test_the_loss_is_that_of_the_law() -> None:
    """Drawn by the definition: released - true where a key is released, else its truth."""
    plan = build(1, strategy="geometric", contributions=2, **FEW)
    budget, random = allocate(plan), np.random.default_rng(2)
    [count] = budget.values
    sooner = random.random(20_000) < count.sooner / 2**32
    steps = np.arange(-count.most, count.most + 1)
    weight = np.exp(-np.abs(steps) / count.scale)
    noise = random.choice(steps, len(sooner), p=weight / weight.sum())
    losses = []
    for size in SIZES[SIZES < 100]:
        shown = np.floor(size) + noise > count.most - sooner
        losses.append(np.where(shown, math.sqrt(2 / math.pi) * count.sd[-1], size).mean())
    losses += [math.sqrt(2 / math.pi) * count.sd[-1]] * int((SIZES >= 100).sum())
    density = SIZES**DENSITY
    expected = np.trapezoid(density * np.array(losses), SIZES) / np.trapezoid(density, SIZES)
    assert mean_loss(plan, budget) == pytest.approx(float(expected), rel=0.02)


def test_what_is_made_for_gaussian_noise_stays_gaussian() -> None:
    fixed = build(1, strategy="tree", contributions=1)
    assert resolved(fixed) is fixed
    public = build(1, strategy="auto", contributions=1, public_keys="list")
    assert resolved(public) is public
    for settings in (
        {"weights": EVEN, "contributions": 2}, {"mode": "rounds"}, {"optimise": "lifetime"},
        {"periods_share_windows": True},
    ):  # fmt: skip
        given = {"contributions": 1, "epsilon": 2.0, "delta": 1e-7} | settings
        assert resolved(build(1, strategy="auto", **given)).privacy.strategy == "blt"


def test_usual_weights_give_way() -> None:
    plan = build(1, strategy="auto", contributions=2, weights=EVEN, usual_weights=True, **FEW)
    taken = resolved(plan)
    assert taken.privacy.strategy == "geometric" and taken.privacy.weights is None
    two = build(1, strategy="auto", contributions=1, aggregates=(COUNT, SUM), delta=1e-7)
    assert resolved(two).check() is not None
