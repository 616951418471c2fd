"""The numbers of a run: what is read back is what was computed, to the bit.

The default share of selection: the knee of the joint condition, for every C.
"""

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest

from dpstream.accounting.budget import shares
from dpstream.accounting.budget.allocation import Budget, StreamNoise, allocate
from dpstream.accounting.budget.calibration import begun, calibrate, calibrated, committed_text
from dpstream.accounting.budget.shares import (
    costs_of,
    direction_of,
    divide,
    knee,
    per_key_squares,
    spared,
)
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.strategies import blt as blt_table
from dpstream.accounting.strategies import make_strategy
from dpstream.accounting.weights import EVEN, MILD, STEEP, SelectionWeights
from tests.accounting.plans import UNITS, Make
from tests.budgets import redesigned
from tests.golden.refusals import Refused

SUM = Aggregate("units", "sum", "x", (-3.0, 9.0))  # another stream's name, on purpose
MEAN = Aggregate("selection", "mean", "x", (-2.0, 6.0), 0.25)
CASES: dict[str, dict[str, Any]] = {
    "tree": {},
    "blt": {"strategy": "blt", "aggregates": (SUM, MEAN)},
    "dense": {"strategy": "dense", "aggregates": (UNITS, SUM)},
    "few": {"triggers": 24, "contributions": 6},
    "public": {"public_keys": "list", "aggregates": (UNITS, SUM)},
    "weights": {"weights": SelectionWeights(), "strategy": "blt", "aggregates": (UNITS, SUM)},
    "combined": {
        "weights": SelectionWeights(), "per_key_bound": 1, "combine": True, "strategy": "blt",
        "triggers": 1000, "refresh_every": 20, "select_every": 5,
    },
    "once": {"triggers": 1},
}  # fmt: skip


def streams(budget: Budget) -> list[StreamNoise | None]:
    return [budget.selection, budget.units, *budget.values]


def check_same(ours: Budget, theirs: Budget) -> None:
    plain = ("epsilon", "delta", "mu", "theta", "b", "has_guarantee")
    assert [getattr(ours, name) for name in plain] == [getattr(theirs, name) for name in plain]
    for a, b in zip(streams(ours), streams(theirs), strict=True):
        assert (a is None) == (b is None)
        if a is None or b is None:
            continue
        numbers = ("name", "strategy", "triggers", "col2", "sensitivity", "share", "sigma")
        assert [getattr(a, name) for name in numbers] == [getattr(b, name) for name in numbers]
        np.testing.assert_array_equal(a.sd, b.sd)
        np.testing.assert_array_equal(a.strategy_object.parameters, b.strategy_object.parameters)
    for mine, other in ((ours.tau, theirs.tau), (ours.weights, theirs.weights)):
        assert (mine is None) == (other is None)
        np.testing.assert_array_equal(mine, other)
    assert (ours.statistic is None) == (theirs.statistic is None)
    if ours.statistic is not None and theirs.statistic is not None:
        for name in ("weighted", "counted", "alone", "sd", "rounding"):
            np.testing.assert_array_equal(
                getattr(ours.statistic, name), getattr(theirs.statistic, name)
            )


@pytest.mark.parametrize("name", CASES)
def test_read_back_to_the_bit(name: str, make_plan: Make) -> None:
    plan = make_plan(**CASES[name])
    given = allocate(plan)
    restored = calibrated(plan, calibrate(plan))
    check_same(restored.budget, given)
    assert (given.units is given.selection) == (restored.budget.units is restored.budget.selection)
    assert (restored.plan.design.refresh_every, restored.plan.design.select_every) == (
        plan.design.refresh_every,
        plan.design.select_every,
    )
    restored.plan.check()


def test_numbers_without_a_guarantee_are_marked(make_plan: Make) -> None:
    """And only they: the text of a sound run does not have the word."""
    plan = make_plan()
    given = msgspec.structs.replace(allocate(plan), has_guarantee=False)
    text = committed_text(plan, given)
    check_same(calibrated(plan, text).budget, given)
    assert '"unsound":true' in text and "unsound" not in calibrate(plan)
    assert text.replace(',"unsound":true', "") == calibrate(plan)


def test_a_later_program_changes_nothing(make_plan: Make) -> None:
    """Other defaults, another table of coefficients, another calibration: the text decides."""
    plan = make_plan(weights=SelectionWeights(), strategy="blt", triggers=250, skip=False)
    text, given = calibrate(plan), allocate(plan)
    other = {row: ((0.5,), (0.3,)) for row in blt_table.EXPONENTIALS}
    with (
        mock.patch.dict(blt_table.EXPONENTIALS, other),
        mock.patch.object(shares, "knee", lambda costs: 0.5),
        redesigned(refresh_every=7, select_every=7),
    ):
        assert make_strategy("blt", 250).parameters.tolist() == [0.5, 0.3]
        calibrated.cache_clear()
        restored = calibrated(plan, text)
    check_same(restored.budget, given)
    assert restored.plan.privacy.refresh_every == restored.plan.privacy.select_every == 2


def test_a_run_keeps_the_weights_it_was_begun_with(make_plan: Make) -> None:
    """A job that names the weights that are usual without skipping has the hash of one that names
    none, and goes on with that one's run."""
    kind = {"per_key_bound": 1, "combine": True, "weights": STEEP}
    named, unnamed = (make_plan(usual_weights=usual, **kind) for usual in (False, True))
    assert named.hash == unnamed.hash and named.design.weights != unnamed.design.weights
    for begun_with, later in ((named, unnamed), (unnamed, named)):
        text = calibrate(begun_with)
        assert begun(later, text) == begun(begun_with, text) == begun_with
        assert calibrated(later, text).plan.design.weights == begun_with.design.weights


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[:-9],
        lambda text: text.replace('"format":1', '"format":2,"rules":4'),
        lambda text: text.replace('"format":1', '"format":2'),
        lambda text: text.replace('"format":1', '"format":0'),
        lambda text: text.replace('"tau":"', '"tau":"0'),
        lambda text: text.replace('"encoder":0', '"encoder":5', 1),
        lambda text: text.replace('"strategy":"tree"', '"strategy":"oak"'),
        lambda text: text.replace('"theta"', '"thet"'),
    ],
)
def test_damage(spoil: Callable[[str], str], make_plan: Make, refused: Refused) -> None:
    plan = make_plan()
    caught = refused(lambda: calibrated(plan, spoil(calibrate(plan))))
    assert caught.__cause__ is None


def test_a_run_skips_as_it_was_begun(make_plan: Make, refused: Refused) -> None:
    """Whatever a job with the same hash says later: in its store indices lie as they were taken."""
    plans = [make_plan(weights=SelectionWeights(), skip=skip) for skip in (None, False)]
    assert [plan.design.skips for plan in plans] == [True, False]
    assert plans[0].hash == plans[1].hash
    for plan in plans:
        text = calibrate(plan)
        for other in plans:
            mine, restored = begun(other, text), calibrated(other, text)
            assert mine.hash == other.hash and mine.design.skips == plan.design.skips
            assert restored.plan.design.skips == plan.design.skips
            assert restored.plan.design.test_triggers.tolist() == plan.design.test_triggers.tolist()
    calibration = calibrate(make_plan(weights=SelectionWeights(), skip=True))
    refused(lambda: begun(make_plan(skip=False), calibration))


SHARES_MEAN = Aggregate("m", "mean", "x", (-60.0, 180.0))
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
        {"weights": weights, "aggregates": (people, SHARES_MEAN)},
        {"weights": weights, "aggregates": (people,)},
        {"weights": weights, "per_key_bound": 1},
        {"per_key_bound": 1},
    ):
        plan = make_plan(24, contributions=count, **kind)
        u, v = direction_of(plan) if plan.design.units_apart else (0.0, 1.0)
        rest = [costs_of(plan).largest(share, u, v) for share in (0.0, 0.2, 2 / 3, 0.8, 0.95)]
        assert rest == pytest.approx([rest[0] * part for part in (1.0, 0.8, 1 / 3, 0.2, 0.05)])
    short, long = (make_plan(t, contributions=count, weights=weights) for t in (1, 250))
    several = make_plan(contributions=count, weights=weights, aggregates=(SHARES_MEAN, MEAN_2))
    assert knee(costs_of(short)) == knee(costs_of(long)) == knee(costs_of(several))


@pytest.mark.parametrize(
    "kind",
    [
        {"aggregates": (Aggregate("u", "units"),)},
        {"aggregates": (Aggregate("u", "units"),), "public_keys": "list"},
        {"aggregates": (Aggregate("u", "units"),), "weights": SelectionWeights()},
        {"aggregates": (SHARES_MEAN, Aggregate("u", "units")), "weights": SelectionWeights()},
        {"aggregates": (SHARES_MEAN, Aggregate("u", "units")), "public_keys": "list"},
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
        (0.8, {"weights": weights, "aggregates": (SHARES_MEAN, units)}),
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
    aggregates = (SHARES_MEAN, MEAN_2)[: columns - 1] or (Aggregate("n", "count"),)
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
