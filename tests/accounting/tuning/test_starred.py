"""The starred way to noise a job: never worse in both figures, and close to the best of a grid."""

import itertools
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.plan.plan import with_privacy
from dpstream.accounting.tuning import starred as tuning
from dpstream.accounting.tuning.reference import DENSITY, SIZES, reference_figures
from dpstream.accounting.tuning.starred import (
    Way,
    mean_loss,
    resolved,
    starred_of,
)
from dpstream.accounting.weights import EVEN, MILD, STEEP, SelectionWeights
from tests.accounting.plans import COUNT, MEAN, SECOND, SUM, UNITS, Make, build
from tests.bench.starred import BOUNDS, ERROR_ABOVE, KEYS_KEPT, KEYS_OF_SHARES, SHAPES, starred

JOBS: list[dict[str, object]] = [
    {"contributions": 10, "weights": MILD, "strategy": "blt"},
    {"contributions": 30, "weights": MILD},
    {"contributions": 20, "weights": STEEP},
    {"contributions": 3},
    {"contributions": 1, "aggregates": (COUNT,)},
    {"aggregates": (UNITS,), "contributions": 8},
    {"aggregates": (UNITS, MEAN), "weights": EVEN},
    {"per_key_bound": 1},
    {"per_key_bound": 1, "weights": STEEP, "combine": True},
    {"public_keys": "list"},
    {"contributions": 50_000, "epsilon": 50.0, "strategy": "blt"},
    {"pre_threshold": 2_000_000},
]


@pytest.mark.parametrize("kind", JOBS, ids=str)
def test_never_worse_than_the_job(make_plan: Make, kind: dict[str, object]) -> None:
    """No fewer keys than the job, and not more noise at as many; what is said is what is given."""
    plan = make_plan(24, **{"aggregates": (COUNT, MEAN), **kind})
    own, best = reference_figures(plan, allocate(plan)), tuning.starred(plan)
    other = with_privacy(plan, **best.settings)
    performance = reference_figures(other, allocate(other))
    assert best.noise == performance.noise_against(own)
    if plan.design.selects and own.keys:
        assert best.keys == performance.keys_against(own)
    assert best.keys >= 1 and (best.keys > 1 or best.noise <= 1)
    assert best.noise <= max(best.keys**3, 1)
    assert {"contributions", "per_key_bound", "combine", "epsilon"}.isdisjoint(best.settings)


def test_the_starred_job_is_starred_itself(make_plan: Make) -> None:
    plan = make_plan(24, aggregates=(COUNT, MEAN), contributions=10, weights=MILD)
    best = tuning.starred(plan)
    assert best.settings and best.keys > 1.1
    assert tuning.starred(with_privacy(plan, **best.settings)).settings == {}


def test_a_strategy_that_the_job_cannot_use_is_no_way(make_plan: Make) -> None:
    """``dense`` ends before the others; the tree needs more noise."""
    plan = make_plan(96, epsilon=0.05, strategy="tree")
    best = tuning.starred(plan)
    assert best.settings["strategy"] in ("blt", "dense")
    long = tuning.starred(make_plan(5_000, strategy="tree", epsilon=1.0))
    assert long.settings["strategy"] == "blt"


def way(keys: float, noise: float) -> Way:
    """A way with these figures."""
    return Way({"strategy": f"{keys} {noise}"}, keys, noise)


@pytest.mark.parametrize(
    ("others", "best"),
    [
        ([], 0),
        ([way(0.99, 0.5)], 0),  # fewer keys, however exact
        ([way(1.0, 0.9), way(1.001, 0.97)], 1),
        ([way(1.0, 0.97)], 0),  # the job is as good as that
        ([way(1.2, 1.3), way(1.19, 1.2), way(1.18, 1.0)], 3),  # the last keys cost the most noise
        ([way(1.1, 1.5), way(1.05, 0.9)], 2),  # 10% more keys are not worth that
        ([way(2.0, 7.9)], 0),
        ([way(2.0, 7.5)], 1),
    ],
)
def test_the_rule(others: list[Way], best: int) -> None:
    options = [Way({}, 1.0, 1.0), *others]
    assert starred_of(options) is options[best]


def test_where_keys_are_cheap_noise_has_a_limit(make_plan: Make) -> None:
    """A job that skips could have 79% more keys at 2.7 times the noise, below the price."""
    best = tuning.starred(make_plan(100, contributions=32, weights=MILD, strategy="blt"))
    assert best.keys > 1.4 and 1.2 < best.noise <= 1.65


@pytest.mark.parametrize("count", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_close_to_the_best_of_a_grid_on_data(shape: str, count: int) -> None:
    """What is starred without any data, on flights and two heavy-tailed shapes."""
    comparison = starred(shape, count)
    assert comparison.keys >= KEYS_KEPT and comparison.error <= ERROR_ABOVE
    assert comparison.keys_of_shares >= KEYS_OF_SHARES
    assert comparison.keys_of_job > 1


def test_a_poor_way_is_seen_on_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: equal weights, and weights that fall too fast."""
    for settings, keys, error in (
        ({"weights": None}, 0.8, 2.0),
        ({"weights": SelectionWeights(3, 4)}, 1.1, 9.0),
    ):
        poor = Way(settings, 1.0, 1.0)
        monkeypatch.setattr(tuning, "starred", lambda job, poor=poor: poor)
        comparison = starred("1,000 units", 20)
        assert comparison.keys < keys and (comparison.keys < 0.95 or 1.1 < comparison.error < error)


def test_four_triggers_are_not_noised_by_a_tree(make_plan: Make) -> None:
    """Its last trigger has the least noise of all strategies, the third twice that of others."""
    best = tuning.starred(make_plan(4, aggregates=(COUNT, MEAN), strategy="blt"))
    assert best.settings.get("strategy") != "tree"


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
        {"weights": EVEN, "contributions": 2}, {"optimise": "lifetime"},
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
