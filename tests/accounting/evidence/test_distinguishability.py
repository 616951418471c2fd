"""What an audit can see: covariances against dense matrices, designs against the budget."""

from collections.abc import Callable

import numpy as np
import pytest

from dpstream.accounting.budget import allocate
from dpstream.accounting.evidence.bounds import claim_of
from dpstream.accounting.evidence.design import designs, others_needed
from dpstream.accounting.evidence.distinguishability import (
    MAX_PREFIXES,
    Seen,
    calendar,
    layouts,
    prefix_covariance,
    spread,
)
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.plan.fields import Aggregate
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.strategies import STRATEGIES, make_strategy
from dpstream.accounting.weights import SelectionWeights
from tests.accounting.strategies.test_conformance import decode_matrix

Make = Callable[..., Plan]
COUNT, UNITS = Aggregate("n", "count"), Aggregate("people", "units")
SUM = Aggregate("total", "sum", "v", (-3.0, 7.0), 0.5)
MEAN = Aggregate("level", "mean", "v", (-2.0, 9.0), 0.25)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("triggers", [1, 2, 7, 16, 21])
def test_covariance_is_that_of_the_decoder(name: str, triggers: int) -> None:
    decoder = decode_matrix(make_strategy(name, triggers))
    rng = np.random.default_rng(triggers)
    for size in (1, triggers // 2 + 1, triggers):
        at = np.sort(rng.choice(triggers, size, replace=False)) + 1
        dense = (decoder @ decoder.T)[np.ix_(at - 1, at - 1)]
        found = prefix_covariance(make_strategy(name, triggers), at)
        assert np.allclose(found, dense, rtol=1e-9, atol=1e-9)


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
        assert name == "tree" or square == pytest.approx(column, rel=1e-6)


HEAVY = {"weights": SelectionWeights(3.0, 1.5), "per_key_bound": 1, "combine": True}
PLANS: list[tuple[dict[str, object], float]] = [
    ({"public_keys": "f" * 32, "strategy": "blt"}, 1.0),
    ({"public_keys": "f" * 32, "strategy": "blt", "aggregates": (COUNT, SUM, UNITS)}, 1.0),
    ({"strategy": "blt"}, (32 / 33) ** 0.5),
    ({"strategy": "toeplitz", "aggregates": (COUNT, SUM), "contributions": 8}, (8 / 9) ** 0.5),
    ({"strategy": "blt", "aggregates": (UNITS,)}, 1.0),
    ({"strategy": "blt", "aggregates": (UNITS,), "triggers": 12, "select_every": 3,
      "refresh_every": 3}, 0.5),
    ({"strategy": "blt", "per_key_bound": 1, "selection_share": 0.7}, 0.3**0.5),
    ({"strategy": "blt", "aggregates": (COUNT, UNITS), **HEAVY}, 0.5),
    ({"strategy": "blt", "aggregates": (MEAN,)}, 0.5),
    ({"strategy": "tree"}, 0.6),
    ({"mode": "rounds", "strategy": "tree"}, 0.3),
    ({"mode": "rounds", "strategy": "toeplitz", "final_flush": True}, 0.5),
    ({"contributions": 1, "strategy": "blt"}, 0.5**0.5),
]  # fmt: skip


@pytest.mark.parametrize(("options", "least"), PLANS)
def test_designs_see_what_the_shares_allow(
    make_plan: Make, options: dict[str, object], least: float
) -> None:
    options = dict(options)
    plan = make_plan(options.pop("triggers", 24), **options)
    budget = allocate(plan)
    for number, design in enumerate(designs(plan, budget)):
        assert design.mu <= budget.mu * (1 + 1e-9)
        assert number or design.mu >= least * budget.mu * (1 - 1e-6)
        sent = np.bincount(design.pattern, minlength=design.keys)
        assert len(design.pattern) == len(design.when)
        assert (sent[: design.keys] >= 1).all() and sent[0] >= design.heavy
        # No more than C of the unit's records may count for the design's own figure.
        assert design.heavy + design.keys - 1 <= plan.privacy.contributions
        for shape in design.weights(plan):
            assert shape.shape == (len(design.at), len(design.columns))
        assert design.expected().shape == (len(design.at), len(design.columns))


def test_units_values_lie_beyond_the_clamps(make_plan: Make) -> None:
    plan = make_plan(4, aggregates=(COUNT, SUM, MEAN), strategy="blt")
    design = designs(plan, allocate(plan))[0]
    own, other = design.inputs["v"]
    assert own > 9.0 or own < -3.0
    effects = {c.name: (c.effect, c.other) for c in design.columns}
    assert effects["n"] == (1.0, 1.0)
    assert effects["total"][0] in (14.0, -6.0) and effects["level"][1] == 0.0
    assert other == 3.5


def test_others_bring_a_key_over_its_first_threshold(make_plan: Make) -> None:
    for options in ({}, {"pre_threshold": 500}, HEAVY):
        plan = make_plan(24, strategy="blt", **options)
        budget = allocate(plan)
        assert budget.tau is not None and budget.statistic is not None
        for above in (0.0, 4.0):
            count = others_needed(plan, budget, above)
            goal = budget.tau[0] / (1 << DECODE_BITS) + above * budget.statistic.sd[0]
            assert count * budget.statistic.alone >= goal
            least = max(plan.privacy.pre_threshold + 1, goal / budget.statistic.alone)
            assert count <= least + 1


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
        found = layouts(make_plan(8, contributions=most))
        assert found.dtype == np.int64 and found[0] == 1 and found[-1] == most
        # From one key to C, each number at most an eighth above the one before it.
        assert (found[1:] <= np.maximum(found[:-1] + 1, np.ceil(found[:-1] * 1.13))).all()
        assert (np.diff(found) > 0).all() and len(found) <= 66
    assert spread(make_plan(8), 5) == (28, 1)
    assert spread(make_plan(8, per_key_bound=1), 5) == (1, 1)


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


def test_claims(make_plan: Make) -> None:
    plan = make_plan(8)
    budget = allocate(plan)
    claim = claim_of(plan, budget)
    assert claim.slack == pytest.approx(0.4e-9) and claim.delta_gaussian == pytest.approx(0.6e-9)
    assert claim.mu == budget.mu and claim.tail == budget.b
    assert (claim.epsilon, claim.delta) == (6.0, 1e-9)
    public = make_plan(8, public_keys="f" * 32)
    assert claim_of(public, allocate(public)).slack == 0.0
