"""The division of the budget: every way a unit can spread its pairs, every mode, refusals."""

import functools
import math
from fractions import Fraction
from typing import Any

import dp_accounting
import msgspec
import numpy as np
import pytest
from dp_accounting import pld

from dpstream.accounting import limits
from dpstream.accounting.budget.allocation import Budget, StreamNoise, allocate, check_needs
from dpstream.accounting.budget.shares import costs_of
from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.gaussian import delta_of
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.privacy import THETA
from dpstream.accounting.weights import SelectionWeights
from tests.accounting.plans import UNITS, Make, allocate_sharing, build
from tests.golden.refusals import Refused

MIXED = (
    Aggregate("n", "count"),
    Aggregate("delay", "mean", "d", (-60.0, 180.0), 5.0),
    Aggregate("total", "sum", "x", (0.0, 9.0), 1.0, 3.0),
)
SOUND = [
    {},
    {"contributions": 1},
    {"contributions": 2, "triggers": 1},
    {"triggers": 1000},
    {"selection_share": 0.5},
    {"aggregates": MIXED},
    {"aggregates": (*MIXED, UNITS)},
    {"aggregates": (UNITS,)},
    {"public_keys": "list"},
    {"public_keys": "list", "aggregates": (*MIXED, UNITS)},
    {"public_keys": "list", "aggregates": (UNITS,)},
    {"public_keys": "list", "aggregates": (*MIXED, UNITS), "contributions": 1},
    {"triggers": 5, "contributions": 12, "windows": 3},
    {"pre_threshold": 4, "triggers": 64},
    {"strategy": "blt"},
    {"strategy": "dense"},
    {"strategy": "blt", "triggers": 1000, "aggregates": MIXED},
    {"per_key_bound": 1, "aggregates": MIXED},
    {"per_key_bound": 1, "aggregates": (UNITS,)},
    {"per_key_bound": 1, "aggregates": MIXED, "public_keys": "list"},
    {"per_key_bound": 2},
    {"per_key_bound": 3, "aggregates": MIXED},
    {"per_key_bound": 3, "aggregates": (*MIXED, UNITS), "weights": SelectionWeights(3.0, 0.5)},
    {"per_key_bound": 5, "weights": SelectionWeights(), "triggers": 7},
    {"per_key_bound": 4, "aggregates": (*MIXED, UNITS), "public_keys": "list"},
    {"per_key_bound": 2, "contributions": 3, "triggers": 1},
    {"per_key_bound": 4, "contributions": 8, "triggers": 1, "aggregates": MIXED},
    {"per_key_bound": 40, "aggregates": MIXED},
    {"weights": SelectionWeights()},
    {"weights": SelectionWeights(6.0, 1.5), "aggregates": MIXED, "strategy": "blt"},
    {"weights": SelectionWeights(3.0, 0.5), "aggregates": (UNITS, *MIXED), "triggers": 1},
    {"weights": SelectionWeights(), "aggregates": (UNITS,), "selection_share": 0.9},
    {"weights": SelectionWeights(), "per_key_bound": 1, "aggregates": MIXED},
    {"weights": SelectionWeights(), "per_key_bound": 1, "combine": True},
    {"weights": SelectionWeights(3.0, 0.5), "per_key_bound": 1, "combine": True,
     "aggregates": (UNITS, *MIXED), "strategy": "blt", "pre_threshold": 2,
     "selection_share": 0.65},
]  # fmt: skip


def made(make_plan: Make, case: dict[str, Any]) -> tuple[Plan, Budget]:
    """The plan of a case, and its budget with the case's share of selection, if it has one."""
    plan = make_plan(**{name: value for name, value in case.items() if name != "selection_share"})
    return plan, allocate_sharing(plan, case.get("selection_share"))


@functools.cache
def most_squares(keys: int, pairs: int, bound: int) -> int:
    """Largest sum of squares of 1 .. ``bound`` pairs on each key, at most ``pairs`` in all."""
    if keys == 0:
        return 0
    first = range(1, min(bound, pairs - keys + 1) + 1)
    return max(j * j + most_squares(keys - 1, min(pairs - j, (keys - 1) * bound), bound)
               for j in first)  # fmt: skip


def split_cost(plan: Plan, budget: Budget, n: int) -> Fraction:
    """Exact squared mu of the worst unit with n selections, from the sigmas as floats."""
    count, cost = plan.privacy.contributions, Fraction(0)
    streams = {id(s): s for s in (budget.selection, budget.units) if s is not None}
    for stream in streams.values():
        squares = Fraction(n)
        if plan.privacy.weights is not None and stream is budget.selection:
            weights = plan.privacy.weights.integers(count).tolist()
            squares = Fraction(sum(w * w for w in sorted(weights)[::-1][:n]))
        cost += squares * Fraction(stream.col2) / Fraction(stream.sigma) ** 2
    for value, noise in zip(plan.design.streams, budget.values, strict=bool(budget.values)):
        spread = most_squares(n, count, plan.privacy.per_key_bound or count)
        square = spread * Fraction(noise.col2)
        cost += square * value.sensitivity**2 / Fraction(noise.sigma) ** 2
    return cost


@pytest.mark.parametrize("case", SOUND, ids=str)
def test_joint_condition_for_every_n(make_plan: Make, case: dict[str, Any]) -> None:
    """Holds exactly, with less than a millionth to spare, and fails for a sigma 0.1% smaller."""
    plan, budget = made(make_plan, case)
    squared = Fraction(budget.mu) ** 2
    spent = [split_cost(plan, budget, n) for n in range(1, plan.privacy.contributions + 1)]
    assert max(spent) <= squared
    assert max(spent) >= squared * Fraction(999_999, 1_000_000)

    def smaller(noise: StreamNoise | None) -> StreamNoise | None:
        return msgspec.structs.replace(noise, sigma=noise.sigma * 0.999) if noise else None

    sabotaged = msgspec.structs.replace(
        budget,
        selection=smaller(budget.selection),
        units=None if budget.units is budget.selection else smaller(budget.units),
        values=tuple(smaller(v) for v in budget.values),
    )
    worst = max(split_cost(plan, sabotaged, n) for n in range(1, plan.privacy.contributions + 1))
    assert worst > squared


@pytest.mark.parametrize("case", SOUND, ids=str)
def test_delta_is_not_exceeded(make_plan: Make, case: dict[str, Any]) -> None:
    plan, budget = made(make_plan, case)
    privacy = plan.privacy
    gaussian, failures = delta_of(privacy.epsilon, budget.mu), budget.b * privacy.contributions
    uneven = privacy.contributions % min(privacy.per_key_bound or 1, privacy.contributions)
    several = plan.timeline.triggers > 1 or privacy.weights is not None or uneven
    if plan.design.selects and several:
        assert budget.theta == 0.4
        assert gaussian + failures <= privacy.delta
        assert failures == pytest.approx(0.4 * privacy.delta)
        spent_delta = Fraction(budget.b) * privacy.contributions
        assert spent_delta <= Fraction(THETA) * Fraction(privacy.delta)
    else:
        assert budget.theta == 0
        assert gaussian <= privacy.delta
        assert failures <= privacy.delta
    assert (budget.tau is None) == (not plan.design.selects) == (budget.selection is None)
    assert len(budget.values) == len(plan.design.streams)


@pytest.mark.parametrize("n", [1, 2, 7, 31, 32])
def test_composition_agrees_with_pld(make_plan: Make, n: int) -> None:
    """dp_accounting's own accountant on the Gaussian events of one split."""
    plan = make_plan(aggregates=MIXED, epsilon=2.0, delta=1e-6)
    budget = allocate(plan)
    assert budget.selection is not None
    events = [budget.selection.sigma / math.sqrt(n * budget.selection.col2)]
    for value, noise in zip(plan.design.streams, budget.values, strict=True):
        square = ((33 - n) ** 2 + n - 1) * noise.col2
        events.append(noise.sigma / (value.sensitivity * math.sqrt(square)))
    accountant = pld.PLDAccountant()
    for multiplier in events:
        accountant.compose(dp_accounting.GaussianDpEvent(multiplier))
    spent = accountant.get_delta(2.0)
    assert spent <= 0.6e-6 * 1.01
    if n in (1, 32):
        assert spent >= 0.6e-6 * 0.97


def test_figures_of_the_design(make_plan: Make) -> None:
    sticky = allocate(make_plan())
    assert sticky.selection is not None
    assert sticky.selection.share == pytest.approx(32 / 33)
    assert sticky.values[0].share == pytest.approx(32 / 33)
    # Mean / final sd of the prefix in units of C L / mu.
    for triggers, mean, final in ((100, 3.66, 3.33), (1000, 5.28, 5.52)):
        alone = allocate(make_plan(triggers, public_keys="list"))
        unit = alone.values[0].sd * alone.mu / 32
        assert float(unit.mean()) == pytest.approx(mean, abs=0.01)
        assert float(unit[-1]) == pytest.approx(final, abs=0.01)


def test_selection_share_leaves_the_largest_value_share(make_plan: Make) -> None:
    for options in ({}, {"per_key_bound": 1}, {"weights": SelectionWeights()}):
        costs = costs_of(make_plan(**options))
        for share in (0.01, 0.3, 0.9, 0.999):
            values = costs.largest(share, 0.0, 1.0)
            assert costs.most(share, 0.0, values) <= 1
            assert costs.most(share, 0.0, values * 1.000001) > 1
    budget = allocate_sharing(make_plan(), 0.2)
    assert budget.selection is not None and budget.selection.share == 0.2


def test_value_share_is_divided_by_weight(make_plan: Make) -> None:
    values = allocate(make_plan(aggregates=MIXED)).values
    assert [v.name for v in values] == ["count", "delay", "total"]
    total = sum(v.share for v in values)
    assert [v.share / total for v in values] == pytest.approx([0.2, 0.2, 0.6])
    assert [v.sensitivity / values[0].sensitivity for v in values] == pytest.approx([1, 24, 9])
    for noise in values:
        assert noise.sigma == pytest.approx(
            noise.sensitivity / math.sqrt(noise.share) / allocate(make_plan()).mu
        )


def test_units_continue_the_selection_stream(make_plan: Make) -> None:
    budget = allocate(make_plan(aggregates=(*MIXED, UNITS)))
    assert budget.units is budget.selection
    public = allocate(make_plan(aggregates=(*MIXED, UNITS), public_keys="list"))
    assert public.selection is None and public.tau is None
    assert public.units is not None and public.units.share == pytest.approx(32 / 33)
    single = (Aggregate("n", "count"), Aggregate("people", "units", share=3.0))
    lone = allocate(make_plan(aggregates=single, public_keys="list", contributions=1))
    assert lone.units is not None
    assert (lone.units.share, lone.values[0].share) == pytest.approx((0.75, 0.25))
    heavy = (Aggregate("n", "count", share=1000.0), UNITS)
    values = allocate(make_plan(aggregates=heavy, public_keys="list"))
    assert values.values[0].share > 0.99
    light = (Aggregate("n", "count"), Aggregate("people", "units", share=1000.0))
    counted = allocate(make_plan(aggregates=light, public_keys="list"))
    assert counted.units is not None and counted.units.share > 0.99


@pytest.mark.parametrize("share", [None, 0.1, 0.9])
def test_one_trigger_rule_may_assume_what_is_left(make_plan: Make, share: float | None) -> None:
    """With j pairs on lone keys the other C-j cost at most (C-j)/C of mu^2, however spread."""
    count = 12
    plan = make_plan(1, contributions=count)
    budget = allocate_sharing(plan, share)
    assert budget.selection is not None
    selection, values = (Fraction(s.sigma) ** 2 for s in (budget.selection, budget.values[0]))
    for left in range(1, count + 1):
        for n in range(1, left + 1):
            cost = n / selection + ((left - n + 1) ** 2 + n - 1) / values
            assert cost <= Fraction(budget.mu) ** 2 * left / count


@pytest.mark.parametrize(
    "case", [{"windows": 2}, {"weights": SelectionWeights(), "contributions": 4}], ids=str
)
def test_the_one_trigger_rule_is_for_one_window_without_weights(
    make_plan: Make, case: dict[str, Any]
) -> None:
    """Elsewhere noise and thresholds share delta: what pairs a unit has left is not known."""
    plan = make_plan(1, **case)
    budget = allocate(plan)
    count, delta = plan.privacy.contributions, plan.privacy.delta
    assert budget.theta == THETA
    assert delta_of(plan.privacy.epsilon, budget.mu) + count * budget.b <= delta
    alone = allocate(make_plan(1, contributions=count))
    assert alone.theta == 0
    assert delta_of(plan.privacy.epsilon, alone.mu) + count * alone.b > 1.5 * delta
    endless = msgspec.structs.replace(
        plan, timeline=msgspec.structs.replace(plan.timeline, end=None, period=1_000_000)
    )
    with_period = allocate(endless)
    assert delta_of(plan.privacy.epsilon, with_period.mu) + count * with_period.b <= delta


@pytest.mark.parametrize("every", [1, 7])
def test_what_a_key_is_tested_on(make_plan: Make, every: int) -> None:
    """A plain count; the weighted count; both, with the count's noise of the test's own trigger."""
    options = {"triggers": 20, "select_every": every, "weights": SelectionWeights(3.0, 1.0)}
    plain = allocate(make_plan(20, select_every=every))
    weighted = allocate(make_plan(**options))
    both = allocate(make_plan(**options, per_key_bound=1, combine=True))
    largest = int(options["weights"].integers(32).max())  # type: ignore[attr-defined]
    for budget, alone in ((plain, 1), (weighted, largest)):
        statistic, selection = budget.statistic, budget.selection
        assert statistic is not None and selection is not None
        assert (statistic.weighted, statistic.counted, statistic.alone) == (1, 0, alone)
        assert statistic.sd.tolist() == selection.sd.tolist()
        exact = selection.strategy_object.rounding
        assert (statistic.rounding >= exact).all() and statistic.rounding == pytest.approx(exact)
    statistic, selection, count = both.statistic, both.selection, both.values[0]
    assert statistic is not None and selection is not None and count.name == "count"
    a, d = statistic.weighted, statistic.counted
    assert a > 1 and d > 1 and statistic.alone == a * largest + d
    steps = [min(every * test, 20) - 1 for test in range(1, len(statistic.sd) + 1)]
    assert steps[-1] == 19 and len(set(count.strategy_object.rounding[steps])) > 1
    rounding = a * selection.strategy_object.rounding + d * count.strategy_object.rounding[steps]
    sd = np.sqrt((a * selection.sd) ** 2 + (d * count.sd[steps]) ** 2)
    assert (statistic.rounding >= rounding).all() and statistic.rounding == pytest.approx(rounding)
    assert (statistic.sd >= sd * (1 - 1e-15)).all() and statistic.sd == pytest.approx(sd, rel=1e-9)


def test_arrays_are_read_only_and_rounded_up(make_plan: Make) -> None:
    budget = allocate(make_plan())
    assert budget.selection is not None
    sd = budget.selection.sd
    assert sd.shape == (100,) and not sd.flags.writeable
    assert not budget.selection.encoder.sd_factors.flags.writeable, "shared by all runs"
    assert np.all(sd > budget.selection.sigma * budget.selection.strategy_object.sd_factors)


def test_refusals(make_plan: Make, refused: Refused) -> None:
    def refuse(**case: object) -> DpstreamError:
        return refused(lambda: allocate(make_plan(**case)))

    assert "epsilon" in refuse(epsilon=1e-5).fix
    # A count of units of its own, beside weights that take nearly all.
    apart = {"aggregates": (UNITS,), "weights": SelectionWeights(3.0, 0.5), "epsilon": 0.1}
    refused(lambda: allocate_sharing(make_plan(**apart), 0.99999))
    fine = (Aggregate("s", "sum", "x", (0.0, 1e6), 1e-3),)
    assert refuse(aggregates=fine).fix == (
        "choose a coarser grid or narrower bounds, or a larger epsilon or fewer contributions, "
        "or strategy 'blt'"
    )
    coarse = (Aggregate("s", "sum", "x", (0.0, 1e6), 1e4),)
    assert allocate(make_plan(aggregates=coarse)).values[0].sigma < limits.MAX_SIGMA


def test_real_noise_too_wide_for_floats_is_refused(make_plan: Make, refused: Refused) -> None:
    wide = (Aggregate("s", "sum", "x", (0.0, 1e5)),)
    assert allocate(make_plan(1000, strategy="blt", aggregates=wide)).values
    refused(lambda: allocate(make_plan(100_000, strategy="blt", aggregates=wide)))


def test_integers_that_could_wrap(
    make_plan: Make, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.setattr(limits, "MAX_PAIRS", 1 << 56)
    refused(lambda: allocate(make_plan()))
    most = 1 << (31 + limits.DECODE_BITS)
    refused(lambda: check_needs(most, 0.0))
    check_needs(most - 1, 0.0)


def test_records_and_noise_together_stay_inside_the_decoders_integers(
    make_plan: Make, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """Draws end at 27 sds: what is left for records beside them is the limit, to the record."""
    coarse = Aggregate("s", "sum", "x", (0.0, 9.0))
    for aggregates, bound in (((Aggregate("n", "count"),), 1), ((coarse,), 9)):
        plan = make_plan(aggregates=aggregates)
        (noise,) = allocate(plan).values
        widest = noise.sigma * noise.strategy_object.reach
        room = (1 << 63 - limits.DECODE_BITS) - int(32 * widest + 64)
        assert room + 27 * widest < 1 << 63 - limits.DECODE_BITS
        with monkeypatch.context() as patch:
            patch.setattr(limits, "MAX_PAIRS", -(-room // bound))
            refused(allocate, plan)
            patch.setattr(limits, "MAX_PAIRS", -(-room // bound) - 1)
            allocate(plan)


def test_a_need_is_at_most_31_bits(refused: Refused) -> None:
    """A threshold, and 16 sds of noise, in 2^-8 of a count."""
    first = 1 << 31 + limits.DECODE_BITS
    for tau, sd in ((first, 0.0), (first - 16 * 256, 1.0), (0, 2.0**27)):
        check_needs(tau - 1, sd)
        refused(check_needs, tau, sd)


def test_needs_stay_within_32_bits_whatever_the_noise(
    make_plan: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clipped need would compare exact counts; weighted statistics come near it first."""
    monkeypatch.setattr(limits, "MAX_OPEN_DRAWS", 1e9)
    refused = near = 0
    for epsilon in np.geomspace(1e-4, 1e-2, 60):
        options = {"strategy": "blt", "epsilon": float(epsilon), "weights": SelectionWeights()}
        try:
            budget = allocate(make_plan(**options, per_key_bound=1, combine=True))
        except UsageError as error:
            assert "32-bit" in error.rule
            refused += 1
            continue
        assert budget.tau is not None and budget.statistic is not None
        largest = float(budget.tau.max()) / 256 + 16 * float(budget.statistic.sd.max())
        assert largest < 2**31
        near += largest > 2**29
    assert refused and near


@pytest.mark.parametrize("bound", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("count", [3, 4, 6, 7])
def test_the_sharper_rule_of_one_test_needs_parts_of_c(
    make_plan: Make, count: int, bound: int
) -> None:
    """It takes j pairs for j/C of the cost: every spread of fewer pairs must cost no more, where
    the rule is used; where k does not divide C one does, and the rule is not used."""
    plan = make_plan(1, contributions=count, per_key_bound=bound)
    budget = allocate(plan)
    assert budget.selection is not None
    worst = Fraction(0)
    for pairs in range(1, count + 1):
        for keys in range(1, pairs + 1):
            squares = most_squares(keys, pairs, bound) * Fraction(budget.values[0].col2)
            cost = keys * Fraction(budget.selection.col2) / Fraction(budget.selection.sigma) ** 2
            cost += squares / Fraction(budget.values[0].sigma) ** 2
            worst = max(worst, cost * count / pairs)
    within = worst <= Fraction(budget.mu) ** 2
    assert (budget.theta == 0) == (count % min(bound, count) == 0)
    assert within or budget.theta > 0
    if (count, bound) == (3, 2):
        # With another share two pairs of one key cost more than two thirds.
        given = allocate_sharing(make_plan(1, contributions=3, per_key_bound=2), 0.05)
        two = 4 * Fraction(given.values[0].col2) / Fraction(given.values[0].sigma) ** 2
        assert two > Fraction(2, 3) * Fraction(given.mu) ** 2 and given.theta > 0


def test_a_derived_sum_costs_nothing(make_plan: Make) -> None:
    """With the sum beside its mean the other streams are what they are without it."""
    mean = Aggregate("delay", "mean", "d", (-60.0, 180.0), 5.0)
    total = Aggregate("total", "sum", "d", (-60.0, 180.0), 5.0)
    alone, both = (allocate(make_plan(aggregates=a)) for a in ((mean,), (mean, total)))
    assert both.values == alone.values
    # Other numbers, another grid or a share of its own: it is measured.
    for other in (
        msgspec.structs.replace(total, column="e"),
        msgspec.structs.replace(total, bounds=(-60.0, 185.0)),
        msgspec.structs.replace(total, grid=2.5),
        msgspec.structs.replace(total, share=1.0),
    ):
        assert len(allocate(make_plan(aggregates=(mean, other))).values) == 3


WIDE = Aggregate("total", "sum", "v", (-(2.0**32), 2.0**32), 1.0)


@pytest.mark.parametrize("strategy", ["tree", "blt", "geometric"])
def test_noise_beyond_the_integers_is_refused(strategy: str, refused: Refused) -> None:
    plan = build(100, public_keys="list", strategy=strategy, aggregates=(WIDE,), epsilon=1e-4)
    refused(lambda: allocate(plan))


def test_auto_refuses_what_no_family_can_draw(refused: Refused) -> None:
    plan = build(100, public_keys="list", strategy="auto", aggregates=(WIDE,), epsilon=1e-4)
    refused(lambda: allocate(plan))
    usual = build(100, public_keys="list", strategy="auto", aggregates=(WIDE,), contributions=1)
    refused(lambda: allocate(usual))
