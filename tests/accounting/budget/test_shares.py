"""The default share of selection: the knee of the joint condition, for every C."""

import itertools

import numpy as np
import pytest

from dpstream.accounting.budget.shares import (
    costs_of,
    direction_of,
    divide,
    knee,
    per_key_squares,
    spared,
)
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.weights import EVEN, MILD, STEEP, SelectionWeights
from tests.accounting.plans import Make

MEAN = Aggregate("m", "mean", "x", (-60.0, 180.0))
MEAN_2 = Aggregate("m2", "mean", "y", (0.0, 9.0))
STEPS = np.arange(1, 10_000) / 10_000


@pytest.mark.parametrize("power", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("count", [1, 2, 8, 20, 32, 77, 500])
def test_best_of_all_shares(power: float, count: int, make_plan: Make) -> None:
    costs = costs_of(make_plan(contributions=count, weights=SelectionWeights(3, power)))
    worth = [share**2 * costs.largest(share, 0.0, 1.0) for share in STEPS.tolist()]
    best = knee(costs)
    assert best**2 * costs.largest(best, 0.0, 1.0) == pytest.approx(max(worth), rel=1e-9)
    assert costs.most(best, 0.0, costs.largest(best, 0.0, 1.0)) <= 1


@pytest.mark.parametrize("bound", [1, 2, 3, 7, 8])
def test_squares_per_key_are_those_of_the_worst_spread(bound: int) -> None:
    """Against every way to lay 1 .. C pairs on n keys, at most k on each."""
    for count in range(1, 9):
        worst = [0] * count
        for n in range(1, count + 1):
            for parts in itertools.combinations_with_replacement(range(1, bound + 1), n):
                if sum(parts) <= count:
                    worst[n - 1] = max(worst[n - 1], sum(part * part for part in parts))
        assert per_key_squares(bound, count).tolist() == worst


@pytest.mark.parametrize("bound", [2, 3, 5])
def test_a_bound_of_more_than_one_per_key_has_a_bend(bound: int, make_plan: Make) -> None:
    """Where k divides C both shares are k / (k + 1): as without a bound with C in its place."""
    plan = make_plan(24, contributions=30, per_key_bound=bound)
    shares = divide(plan)
    assert shares.selection == pytest.approx(bound / (bound + 1))
    assert shares.values == pytest.approx(bound / (bound + 1))


@pytest.mark.parametrize("bound", [2, 4])
def test_units_and_values_stand_at_the_kink_of_the_bound(bound: int, make_plan: Make) -> None:
    """A unit of full keys costs values k times what one of single pairs does, and units the
    reverse: both in full at k / (k + 1), unless one weighs k times the other."""
    kind = {"contributions": 8, "per_key_bound": bound, "weights": SelectionWeights(3, 0.35)}
    people, kink = Aggregate("u", "units"), bound / (bound + 1)
    plan = make_plan(24, aggregates=(people, Aggregate("n", "count")), **kind)
    assert direction_of(plan) == (kink, kink)
    heavy = Aggregate("n", "count", share=9.0)
    assert direction_of(make_plan(24, aggregates=(people, heavy), **kind)) == pytest.approx(
        (bound * 0.1, 0.9)
    )


@pytest.mark.parametrize("count", [2, 8, 32, 64])
def test_other_kinds_have_no_bend(count: int, make_plan: Make) -> None:
    """What the docstring says of them: the rest falls as 1 - S, for all C, T and columns alike."""
    weights, people = SelectionWeights(3, 0.35), Aggregate("u", "units")
    for kind in (
        {"weights": weights, "aggregates": (people, MEAN)},
        {"weights": weights, "aggregates": (people,)},
        {"weights": weights, "per_key_bound": 1},
        {"per_key_bound": 1},
    ):
        plan = make_plan(24, contributions=count, **kind)
        u, v = direction_of(plan) if plan.design.units_apart else (0.0, 1.0)
        rest = [costs_of(plan).largest(share, u, v) for share in (0.0, 0.2, 2 / 3, 0.8, 0.95)]
        assert rest == pytest.approx([rest[0] * left for left in (1.0, 0.8, 1 / 3, 0.2, 0.05)])
    short, long = (make_plan(t, contributions=count, weights=weights) for t in (1, 250))
    several = make_plan(contributions=count, weights=weights, aggregates=(MEAN, MEAN_2))
    assert knee(costs_of(short)) == knee(costs_of(long)) == knee(costs_of(several))


@pytest.mark.parametrize(
    "kind",
    [
        {"aggregates": (Aggregate("u", "units"),)},
        {"aggregates": (Aggregate("u", "units"),), "public_keys": "list"},
        {"aggregates": (Aggregate("u", "units"),), "weights": SelectionWeights()},
        {"aggregates": (MEAN, Aggregate("u", "units")), "weights": SelectionWeights()},
        {"aggregates": (MEAN, Aggregate("u", "units")), "public_keys": "list"},
        {"public_keys": "list"},
    ],
    ids=str,
)
def test_no_unit_can_exceed_the_whole(make_plan: Make, kind: dict[str, object]) -> None:
    """The shares as they are given, those of streams that are not there included."""
    plan = make_plan(24, contributions=6, **kind)
    shares = divide(plan)
    assert 1 - 1e-6 < costs_of(plan).most(*shares) <= 1
    there = plan.design.selects, plan.design.units_apart, bool(plan.design.streams)
    assert tuple(share > 0 for share in shares) == there


def test_default_shares_of_selection(make_plan: Make) -> None:
    weights, units = SelectionWeights(), Aggregate("u", "units")
    for share, kind in (
        (0.655, {"weights": weights, "per_key_bound": 1, "combine": True}),
        (0.8, {"per_key_bound": 1}),
        (0.8, {"weights": weights, "aggregates": (MEAN, units)}),
        (0.85, {"weights": weights}),
    ):
        plan = make_plan(24, contributions=6, **kind)  # type: ignore[arg-type]
        assert divide(plan).selection == share
    costs = costs_of(plan)
    assert [spared(costs, triggers) for triggers in (1, 24, 100)] == [0.85] * 3
    assert spared(costs, 316) == pytest.approx(0.79, abs=1e-3)
    assert spared(costs, 1_000) == spared(costs, 10_000) == pytest.approx(0.73)
    unskipped = make_plan(24, contributions=6, weights=weights, skip=False)
    assert divide(unskipped).selection == knee(costs_of(unskipped)) > 0.85


@pytest.mark.parametrize("count", [2, 5, 8, 16, 32, 64, 200])
def test_skipping_stops_in_front_of_the_knee(count: int, make_plan: Make) -> None:
    """The knee of few pairs a unit stands; the rest stops where more keys are mostly noise."""
    kind = {"contributions": count, "weights": MILD}
    skipping, other = make_plan(100, **kind), make_plan(100, **kind, skip=False)
    assert skipping.design.skips and not other.design.skips
    bend = knee(costs_of(skipping))
    assert divide(other).selection == bend
    assert divide(skipping).selection == min(bend, 0.85)
    assert (bend < 0.85) == (count <= 5)
    assert divide(skipping, 0.6).selection == 0.6


@pytest.mark.parametrize(("share", "equal"), [(0.2, True), (4.0, True), (5.9, True), (6.1, False)])
def test_columns_and_units_are_both_in_full_up_to_c_times_the_weight(
    make_plan: Make, share: float, equal: bool
) -> None:
    columns = Aggregate("n", "count", share=share), Aggregate("u", "units")
    shares = divide(make_plan(24, contributions=6, aggregates=columns, public_keys="list"))
    assert (shares.units == pytest.approx(shares.values)) == equal
    assert equal or shares.values > shares.units


@pytest.mark.parametrize("weights", [None, MILD, EVEN, STEEP], ids=str)
@pytest.mark.parametrize("triggers", [1, 13, 100])
@pytest.mark.parametrize("columns", [1, 3])
def test_defaults_are_at_the_knee(
    make_plan: Make, weights: SelectionWeights | None, triggers: int, columns: int
) -> None:
    """Over C, T and columns: no share is worth more than the default, where there is a bend."""
    aggregates = (MEAN, MEAN_2)[: columns - 1] or (Aggregate("n", "count"),)
    for count in (2, 3, 5, 8, 10, 15, 20, 30, 64, 200):
        kind = {"contributions": count, "weights": weights, "skip": False}
        plan = make_plan(triggers, aggregates=aggregates, **kind)
        costs, shares = costs_of(plan), divide(plan)
        worth = max(share**2 * costs.largest(share, 0.0, 1.0) for share in STEPS[::10].tolist())
        assert shares.selection**2 * shares.values >= 0.999 * worth


@pytest.mark.parametrize("triggers", [1, 13, 100])
@pytest.mark.parametrize("count", [1, 2, 8, 30])
def test_defaults_away_from_it_are_near(make_plan: Make, triggers: int, count: int) -> None:
    """One pair a unit, a bound per key: flat near the best, 9% of an sd at the most."""
    for kind in ({"per_key_bound": 1}, {"contributions": 1}):
        plan = make_plan(triggers, **{"contributions": count, **kind})
        costs, shares = costs_of(plan), divide(plan)
        worth = max(share**2 * costs.largest(share, 0.0, 1.0) for share in STEPS[::10].tolist())
        assert shares.selection**2 * shares.values >= 0.84 * worth
