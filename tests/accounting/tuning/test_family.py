"""Which family a stream with private keys takes, and what it goes by."""

import itertools
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.tuning.family import mean_loss, resolved
from dpstream.accounting.tuning.reference import DENSITY, SIZES
from dpstream.accounting.weights import EVEN
from tests.accounting.plans import COUNT, SECOND, SUM, UNITS, build

FEW: dict[str, Any] = {"per_key_bound": 1, "epsilon": 2.0, "delta": 1e-7}


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


@pytest.mark.parametrize("slide", [SECOND, 2 * SECOND])
def test_windows_that_overlap_take_the_smaller_loss_too(slide: int) -> None:
    settings: dict[str, Any] = {
        "contributions": 2, "per_key_bound": 1, "epsilon": 6.0, "delta": 1e-6, "windows": 4,
    }  # fmt: skip
    plans = {}
    for name in ("auto", "blt", "geometric"):
        plan = build(2, strategy=name, **settings)
        line = msgspec.structs.replace(plan.timeline, slide=slide)
        plans[name] = msgspec.structs.replace(plan, timeline=line)
    losses = {name: mean_loss(plans[name], allocate(plans[name])) for name in ("blt", "geometric")}
    assert losses["geometric"] < losses["blt"]
    assert resolved(plans["auto"]).privacy.strategy == "geometric"


@pytest.mark.parametrize("triggers", [1, 2, 4, 16])
@pytest.mark.parametrize("aggregates", [(COUNT,), (UNITS, SUM)])
def test_the_family_with_the_smaller_loss_is_taken(
    triggers: int, aggregates: tuple[Aggregate, ...]
) -> None:
    """Of both, though the encoders of geometric noise are not searched where it cannot win."""
    strategies = set()
    for contributions, epsilon, bound in itertools.product((1, 2, 4), (0.5, 4.0, 12.0), (None, 1)):
        settings: dict[str, Any] = {
            "contributions": contributions, "epsilon": epsilon, "delta": 1e-7,
            "per_key_bound": bound, "aggregates": aggregates,
        }  # fmt: skip
        plans = [build(triggers, strategy=name, **settings) for name in ("blt", "geometric")]
        losses = [mean_loss(plan, allocate(plan)) for plan in plans]
        best = plans[int(np.argmin(losses))]
        assert resolved(build(triggers, strategy="auto", **settings)) == best
        strategies.add(best.privacy.strategy)
    assert len(strategies) == 2


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
        published = np.floor(size) + noise > count.most - sooner
        losses.append(np.where(published, math.sqrt(2 / math.pi) * count.sd[-1], size).mean())
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
