"""Selection weights, their accounting and the statistic a key is tested on."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import norm

from dpstream.accounting.budget.allocation import allocate, lone_chance, plain_count
from dpstream.accounting.budget.shares import costs_of, divide
from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.weights import (
    STEEP,
    WEIGHT_BITS,
    SelectionWeights,
    precision_weighted,
    square_parts,
)
from tests.accounting.plans import COUNT, UNITS, Make, build
from tests.golden.refusals import Refused

ONE = 1 << WEIGHT_BITS
SUM = Aggregate("total", "sum", "x", (0.0, 9.0))


@pytest.mark.parametrize("power", [0.25, 0.5, 1.0, 1.5, 3.0])
@pytest.mark.parametrize("offset", [0.0, 3.0, 6.0])
@pytest.mark.parametrize("contributions", [1, 2, 9, 32])
def test_integers_are_rounded_down_and_normalised(
    power: float, offset: float, contributions: int
) -> None:
    weights = SelectionWeights(offset, power).integers(contributions)
    real = (np.arange(1, contributions + 1) + offset) ** -power
    real *= ONE / np.sqrt((real**2).sum())
    assert weights.shape == (contributions,) and not weights.flags.writeable
    assert np.all(weights <= real * (1 + 1e-12)) and np.all(weights >= real - 1 - 1e-9)
    assert np.all(np.diff(weights) <= 0)
    assert int((weights**2).sum()) <= ONE**2


def test_one_more_on_every_weight_breaks_the_norm() -> None:
    """The check is sharp: weights rounded up instead exceed the sensitivity."""
    up = SelectionWeights().integers(32) + 1
    assert int((up**2).sum()) > ONE**2


def test_square_parts_bound_every_choice_of_indices() -> None:
    weights = SelectionWeights(3.0, 0.7).integers(7)
    parts = square_parts(weights, 7)
    total = int((weights**2).sum())
    for n in range(1, 8):
        chosen = itertools.combinations(weights.tolist(), n)
        most = max(sum(w * w for w in subset) for subset in chosen)
        assert Fraction(float(parts[n - 1])) >= Fraction(most, total)
        assert parts[n - 1] == pytest.approx(most / total)
    assert np.allclose(square_parts(None, 4), [0.25, 0.5, 0.75, 1.0])


@pytest.mark.parametrize(
    ("power", "offset", "values"), [(0.5, 3, 0.81), (1.0, 3, 0.38), (1.5, 6, 0.28)]
)
def test_value_shares_of_the_design(
    make_plan: Make, power: float, offset: float, values: float
) -> None:
    """mechanism.md section 8: with S = .97, V = .81, .38 and .28 (weights on the lattice)."""
    plan = make_plan(weights=SelectionWeights(offset, power))
    assert divide(plan, 0.97).values == pytest.approx(values, abs=0.015)


def test_shares_with_a_bound_per_key_add_up(make_plan: Make) -> None:
    for options in ({}, {"weights": SelectionWeights()}):
        shares = divide(make_plan(per_key_bound=1, **options))
        assert shares.selection == 0.8
        assert shares.selection + shares.values == pytest.approx(1)
    combined = divide(make_plan(per_key_bound=1, weights=SelectionWeights(), combine=True))
    assert combined.selection == 0.655 and combined.values == pytest.approx(0.345)
    apart = divide(make_plan(per_key_bound=1, weights=SelectionWeights(), aggregates=(UNITS, SUM)))
    assert sum(apart) == pytest.approx(1) and min(apart) > 0.05


def test_sensitivities(make_plan: Make) -> None:
    weights = SelectionWeights()
    plan = make_plan(aggregates=(Aggregate("n", "count"), SUM), per_key_bound=1, weights=weights)
    budget = allocate(plan)
    assert budget.selection is not None
    square = int((weights.integers(32) ** 2).sum())
    assert budget.selection.sensitivity == pytest.approx(math.sqrt(square * 5))  # 16 tests
    assert budget.values[0].sensitivity == pytest.approx(math.sqrt(32 * 7))
    assert budget.values[1].sensitivity == pytest.approx(9 * math.sqrt(32 * 7))


@pytest.mark.parametrize("strategy", ["tree", "blt"])
@pytest.mark.parametrize("least", [0, 5])
@pytest.mark.parametrize("combine", [False, True])
def test_a_unit_alone_is_selected_with_chance_b(
    make_plan: Make, strategy: str, least: int, combine: bool
) -> None:
    """Sum over a unit's keys and over tests of the Gaussian tails above what mu_count units and a
    pair of each index can add."""
    weights = SelectionWeights(3.0, 1.0)
    options: dict[str, object] = {"per_key_bound": 1, "combine": True} if combine else {}
    plan = make_plan(strategy=strategy, weights=weights, pre_threshold=least, **options)
    budget = allocate(plan)
    statistic, noise, largest = budget.statistic, budget.selection, weights.integers(32)[0]
    assert statistic is not None and noise is not None and budget.tau is not None
    tau = budget.tau / 2.0**DECODE_BITS
    plain = plain_count(plan, budget.units, budget.values)
    alone, rounding, variance = int(largest), noise.strategy_object.rounding, noise.sd**2
    if combine:
        assert plain is not None and plain is budget.values[0]
        a, d = statistic.weighted, statistic.counted
        alone = a * alone + d
        at = plan.design.test_triggers - 1
        rounding = a * rounding + d * plain.strategy_object.rounding[at]
        variance = a**2 * variance + d**2 * plain.sd[at] ** 2
    else:
        assert plain is None and (statistic.weighted, statistic.counted) == (1, 0)
    assert statistic.alone == alone
    adds = statistic.weighted * weights.integers(32) + statistic.counted
    above = tau - rounding - least * alone
    chance = norm.sf((above[:, None] - adds) / np.sqrt(variance)[:, None]).sum()
    assert 32 * budget.b * 0.98 <= chance <= 32 * budget.b
    all_largest = 32 * norm.sf((above - alone) / np.sqrt(variance)).sum()
    assert all_largest > 2 * chance  # what is won on thresholds for C keys of the largest weight


def test_combined_statistic_sees_more_than_either_stream(make_plan: Make) -> None:
    """Signal over noise of a typical unit, against the weighted stream and the count alone."""
    weights = SelectionWeights()
    budget = allocate(make_plan(per_key_bound=1, weights=weights, combine=True, tests=15))
    s = budget.statistic
    assert s is not None and budget.selection is not None
    typical = weights.integers(32)[:8].mean()
    both = (s.weighted * typical + s.counted) / s.sd[-1]
    assert both > 1.05 * typical / budget.selection.sd[-1]
    assert both > 1.05 / budget.values[0].sd[-1]
    best = math.hypot(typical / budget.selection.sd[-1], 1 / budget.values[0].sd[-1])
    assert both == pytest.approx(best, rel=0.01)
    assert precision_weighted(weights.integers(32), 1e9, 1e-9)[1] >= 1


def test_joint_condition_of_weighted_plans_is_sharp(make_plan: Make) -> None:
    plan = make_plan(weights=SelectionWeights(3.0, 0.5), aggregates=(UNITS, SUM))
    costs, shares = costs_of(plan), divide(plan)
    assert 1 - 1e-9 <= costs.most(*shares) <= 1


def test_refusals(make_plan: Make, refused: Refused) -> None:
    def refuse(**case: object) -> DpstreamError:
        return refused(lambda: allocate(make_plan(**case)))

    for bad in ((-1.0, 1.0), (3.0, 0.0), (3.0, 5.0), (math.nan, 1.0), (3.0, math.inf)):
        refuse(weights=SelectionWeights(*bad))
    refuse(weights=SelectionWeights(0.0, 4.0))
    refuse(weights=SelectionWeights(), public_keys="list")
    refuse(per_key_bound=0)
    refuse(combine=True)
    refuse(combine=True, weights=SelectionWeights())
    refuse(combine=True, weights=SelectionWeights(), per_key_bound=2)
    refuse(combine=True, weights=SelectionWeights(), per_key_bound=1,
            aggregates=(SUM,))  # fmt: skip
    refuse(triggers=2049, strategy="dense")
    wide = (Aggregate("s", "sum", "x", (0.0, 1e4)),)
    refuse(aggregates=wide, strategy="tree")
    assert allocate(make_plan(aggregates=wide, strategy="blt")).values
    refuse(
        strategy="tree",
        weights=SelectionWeights(),
        epsilon=0.01,
    )


# --- weights by the number of a unit's keys ------------------------------------------------------

SHARES = [0.01, 0.1, 0.2, 0.35, 0.99]


def sized(share: float, contributions: int = 32, **privacy: object) -> Plan:
    """A job with one trigger in its one window."""
    settings = {"per_key_bound": 1, "combine": True, **privacy}
    weights = SelectionWeights(size_share=share)
    return build(1, contributions=contributions, weights=weights, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("contributions", [1, 2, 9, 32, 300])
def test_no_unit_exceeds_the_budget_whatever_its_size(share: float, contributions: int) -> None:
    """n (w_n / sigma / mu)^2 of selection and n / C of the columns' share: as exact fractions."""
    budget = allocate(sized(share, contributions, aggregates=(COUNT, SUM)))
    noise, weights = budget.selection, budget.weights
    assert noise is not None and weights is not None and np.all(np.diff(weights) <= 0)
    mu2 = Fraction(budget.mu) ** 2
    worst = Fraction(0)
    for n, w in enumerate(weights.tolist(), start=1):
        spent = Fraction(n * w * w) / Fraction(noise.sigma) ** 2
        for stream, most in zip(budget.values, (1, 9), strict=True):
            spent += Fraction(n * most**2) / Fraction(stream.sigma) ** 2
        worst = max(worst, spent / mu2)
    assert 1 - Fraction(1, 10**3) < worst <= 1
    more = [Fraction(n * (w + 1) ** 2) / Fraction(noise.sigma) ** 2 / mu2
            + n * (1 - Fraction(share)) / contributions
            for n, w in enumerate(weights.tolist(), start=1)]  # fmt: skip
    assert max(more) > 1


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5])
@pytest.mark.parametrize("least", [0, 5])
@pytest.mark.parametrize("combine", [False, True])
def test_a_unit_alone_in_keys_of_any_number(share: float, least: int, combine: bool) -> None:
    """t keys of a unit of n >= t keys pass with at most C b together, some t with nearly that."""
    plan = sized(share, combine=combine, pre_threshold=least)
    budget = allocate(plan)
    statistic, noise, weights = budget.statistic, budget.selection, budget.weights
    assert statistic is not None and noise is not None and budget.tau is not None
    assert weights is not None
    a, d = statistic.weighted, statistic.counted
    variance = (a * noise.sd[0]) ** 2 + (d * budget.values[0].sd[0]) ** 2
    shift = least * (a * int(weights[0]) + d) + float(statistic.rounding[0])
    above = float(budget.tau[0]) / 2.0**DECODE_BITS - shift
    keys = np.arange(1, 33)
    chance = keys * norm.sf((above - a * weights - d) / math.sqrt(variance))
    assert 32 * budget.b * 0.98 <= chance.max() <= 32 * budget.b
    # One sd lower, as if a unit alone in one key were the worst, would not do.
    assert (keys * norm.sf((above - a * weights - d) / math.sqrt(variance) - 1)).max() > (
        32 * budget.b
    )
    assert chance[0] <= lone_chance(plan, budget) * (1 + 1e-9)


def test_weights_by_size_find_more_where_units_have_few_keys() -> None:
    """Units of one key each that a key needs for an even chance, against weights by order."""
    by_size, by_order = (
        allocate(plan)
        for plan in (sized(0.2), build(1, per_key_bound=1, combine=True, weights=STEEP))
    )
    needs = []
    for budget in (by_size, by_order):
        assert budget.tau is not None and budget.statistic is not None
        needs.append(float(budget.tau[0]) / 2.0**DECODE_BITS / budget.statistic.alone)
    assert needs[0] < 0.85 * needs[1]
    assert by_size.values[0].sigma < by_order.values[0].sigma


@pytest.mark.parametrize("share", [0.0, 1.0, math.nan, -0.2])
def test_shares_of_weights_by_size_that_are_refused(share: float) -> None:
    with pytest.raises(UsageError) as caught:
        allocate(sized(share))
    assert caught.value.field == "mechanism.weights.size_share"
    with pytest.raises(UsageError) as caught:
        both = SelectionWeights(1.0, 2.0, size_share=0.2)
        allocate(build(1, per_key_bound=1, weights=both))
    assert caught.value.field == "mechanism.weights.size_share"
