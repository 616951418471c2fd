"""The page a plan prints: complete, consistent with the budget, honest where none holds.

Both promises of both families: 91 months of (2, 1e-7).
"""

import itertools
import json
import math
from fractions import Fraction

import msgspec
import numpy as np
import pytest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.gaussian import delta_of, epsilon_of
from dpstream.accounting.guarantee import (
    COMPUTATIONAL,
    NEIGHBOURS,
    NOT_SOUND,
    delta_of_losses,
    describe,
    epsilon_of_responses,
    losses_of,
    promises,
)
from dpstream.accounting.limits import MAX_GEOMETRIC_TRIGGERS
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.unit import several_mu, together
from dpstream.accounting.strength import STATED_DELTA
from dpstream.accounting.weights import SelectionWeights
from dpstream.pipelines.render.job_plan import details_text, promise_lines
from tests.accounting.plans import SECOND, Make, build
from tests.golden.refusals import Refused

ALL = (
    Aggregate("n", "count"),
    Aggregate("delay", "mean", "d", (0.0, 10.0), 0.5),
    Aggregate("total", "sum", "x", (-1.0, 10.0), 0.5),
    Aggregate("people", "units"),
)


@pytest.mark.parametrize("public", [None, "list"])
def test_everything_is_there_and_json_able(make_plan: Make, public: str | None) -> None:
    plan = make_plan(aggregates=ALL, public_keys=public)
    budget = allocate(plan)
    figures = json.loads(json.dumps(describe(plan, budget), allow_nan=False))
    assert figures["plan_hash"] == plan.hash
    assert figures["guarantee"]["sound"] is True
    assert "'user'" in figures["unit"]["text"]
    names = [s["name"] for s in figures["streams"]]
    assert names == ["units" if public else "selection", "count", "delay", "total"]
    assert all(len(s["sd"]) == 100 for s in figures["streams"])
    assert [s["sigma"] for s in figures["streams"][1:]] == [v.sigma for v in budget.values]
    assert figures["warnings"] == []
    if public:
        assert figures["tau"] is None and figures["selection"] is None
        assert figures["split"]["delta_gaussian"] == 1e-9
        return
    assert budget.tau is not None
    assert np.array_equal(np.array(figures["tau"]) * 256, budget.tau)
    split = figures["split"]
    assert split["delta_gaussian"] + split["delta_thresholds"] == pytest.approx(1e-9)


def test_figures_have_their_names(make_plan: Make) -> None:
    """What programs read of a plan: the names of its figures, and the figures."""
    second = 1_000_000
    plan = make_plan(windows=4, period=50 * second, periods_share_windows=True, pre_threshold=3)
    budget = allocate(plan)
    figures = describe(plan, budget)
    stated = {k: v for k, v in figures["guarantee"].items() if k != "text"}
    assert stated == {
        "sound": True, "epsilon": 6.0, "delta": 1e-9, "neighbours": NEIGHBOURS,
        "computational": COMPUTATIONAL,
    }  # fmt: skip
    assert {k: v for k, v in figures["unit"].items() if k != "text"} == {
        "column": "user", "period_micros": 50 * second, "covers": "50 seconds", "periods_met": 2,
        "contributions": 32, "for_ever": False,
    }  # fmt: skip
    assert budget.selection is not None
    assert figures["split"] == {
        "law": "gaussian",
        "mu": budget.mu,
        "theta": budget.theta,
        "delta_gaussian": pytest.approx(1e-9 * (1 - budget.theta)),
        "delta_thresholds": pytest.approx(1e-9 * budget.theta, rel=1e-2),
        "b": budget.b,
        "shares_of_mu_squared": {
            "selection": budget.selection.share,
            "count": budget.values[0].share,
        },
    }
    for stream, noise in zip(figures["streams"], (budget.selection, budget.values[0]), strict=True):
        assert stream == {
            "name": noise.name, "strategy": "tree", "triggers": 100, "col2": noise.col2,
            "scale": 0.0, "sensitivity": noise.sensitivity, "share": noise.share,
            "sigma": noise.sigma, "sd": noise.sd.tolist(),
        }  # fmt: skip
    assert figures["selection"]["pre_threshold"] == 3
    assert figures["selection"]["last_pair_counts"] == 1.0


def test_a_test_of_a_key_stands_at_all_its_triggers(make_plan: Make) -> None:
    plan = make_plan(11, select_every=3, refresh_every=6)
    budget = allocate(plan)
    selection, count = describe(plan, budget)["streams"]
    assert budget.selection is not None and len(budget.selection.sd) == 4
    assert selection["sd"] == [budget.selection.sd[t // 3] for t in range(11)]
    assert count["sd"] == budget.values[0].sd.tolist() and len(count["sd"]) == 11


@pytest.mark.parametrize("combine", [False, True])
def test_thresholds_are_in_units_that_count_in_full(make_plan: Make, combine: bool) -> None:
    weights = SelectionWeights(3.0, 1.5)
    kind = {"per_key_bound": 1, "combine": combine, "skip": False}
    plan = make_plan(8, contributions=8, weights=weights, **kind)
    budget = allocate(plan)
    statistic = budget.statistic
    assert statistic is not None and budget.tau is not None and statistic.alone > 1
    figures = describe(plan, budget)
    assert np.allclose(np.array(figures["tau"]) * 256 * statistic.alone, budget.tau)
    integers = weights.integers(8).tolist()
    last = statistic.weighted * integers[7] + statistic.counted
    assert figures["selection"]["last_pair_counts"] == last / statistic.alone < 1
    assert last < statistic.weighted * integers[6] + statistic.counted
    page = details_text(plan, budget)
    assert f"last pair counts {last / statistic.alone:.2g} of that" in page
    for part in ("one record per unit, window and key counts", "weighs (i + 3)^-1.5 in selection"):
        assert part in page
    assert ("tested together with the published count" in page) == combine
    plain = details_text(make_plan(8), allocate(make_plan(8)))
    assert "last pair counts" not in plain and "strategy tree\n" in plain


def test_columns_are_in_their_own_units(make_plan: Make) -> None:
    plan = make_plan(aggregates=ALL)
    budget = allocate(plan)
    count, delay, total = budget.values
    columns = {c["name"]: c for c in describe(plan, budget)["columns"]}
    assert columns["n"]["sd_final"] == count.sd[-1]
    assert columns["n"]["sd_mean"] == pytest.approx(count.sd.mean())
    assert columns["total"]["sd_final"] == pytest.approx(0.5 * total.sd[-1])
    assert columns["people"]["sd_final"] == budget.units.sd[-1]  # type: ignore[union-attr]
    # A mean's error at the bounds: both the sum's and the count's noise, times the count.
    both = math.hypot(delay.sd[-1], 10 * count.sd[-1]) * 0.5
    assert columns["delay"]["sd_final"] == pytest.approx(both)
    assert "number of records" in columns["delay"]["note"]


def test_a_sum_cannot_be_named_count(make_plan: Make, refused: Refused) -> None:
    aggregates = (Aggregate("count", "sum", "x", (0.0, 9.0)), Aggregate("n", "count", share=2.0))
    refused(lambda: allocate(make_plan(aggregates=aggregates)))


def test_half_chance_counts(make_plan: Make) -> None:
    plan = make_plan()
    budget = allocate(plan)
    assert budget.tau is not None
    chosen = describe(plan, budget)["selection"]
    for count, tau in (
        (chosen["units_for_half_chance_first"], int(budget.tau[0])),
        (chosen["units_for_half_chance_last"], int(budget.tau[-1])),
        (chosen["units_for_half_chance_easiest"], int(budget.tau.min())),
    ):
        assert count * 256 > tau >= (count - 1) * 256


def test_periods(make_plan: Make) -> None:
    second = 1_000_000
    plan = make_plan(aggregates=ALL, windows=10, period=100 * second)
    budget = allocate(plan)
    rows = describe(plan, budget)["periods"]
    assert [r["periods"] for r in rows] == [1, 2, 4, 8, 10]
    assert rows[0]["epsilon"] == 6.0 and rows[0]["delta"] == 1e-9
    for row in rows[1:]:
        k = row["periods"]
        assert row["mu"] == pytest.approx(math.sqrt(k) * budget.mu)
        failures = k * 32 * budget.b
        assert delta_of(row["epsilon"], row["mu"]) + failures <= row["delta"] * (1 + 1e-12)
        gaussian = 1e-9 * (1 - budget.theta)
        assert row["delta"] == pytest.approx(gaussian + failures)
        assert Fraction(row["delta"]) >= Fraction(gaussian) + 32 * k * Fraction(budget.b)
    assert "k = 10" in details_text(plan, budget)
    assert "period of 100 seconds" in details_text(plan, budget)
    assert "over the whole stream" in details_text(make_plan(), allocate(make_plan()))


def test_a_delta_is_at_most_1(make_plan: Make) -> None:
    plan = make_plan(4, windows=200, period=4_000_000, delta=0.3, contributions=1)
    rows = describe(plan, allocate(plan))["periods"]
    assert rows[-1]["periods"] == 200 and rows[-1]["delta"] == 1.0


def test_one_budget_for_ever_counts_pairs_once(make_plan: Make) -> None:
    plan = make_plan()
    plan = msgspec.structs.replace(plan, timeline=msgspec.structs.replace(plan.timeline, end=None))
    assert "pairs, once for all time" in details_text(plan, allocate(plan))
    assert describe(plan, allocate(plan))["unit"]["for_ever"] is True


def test_numbers_without_a_guarantee_say_so(make_plan: Make) -> None:
    plan = make_plan()
    budget = msgspec.structs.replace(allocate(plan), has_guarantee=False)
    figures = describe(plan, budget)
    assert NOT_SOUND == "as published: the stated guarantee does NOT hold"
    assert details_text(plan, budget).startswith(f"Guarantee   {NOT_SOUND}")
    assert figures["guarantee"]["sound"] is False
    assert figures["warnings"] == [NOT_SOUND] and figures["periods"] == []


def test_tiny_and_huge_epsilons_are_warned_of(make_plan: Make) -> None:
    plan = make_plan(epsilon=3e-4, contributions=1)
    assert any("nothing is released" in w for w in describe(plan, allocate(plan))["warnings"])
    assert "Warning" in details_text(plan, allocate(plan))
    plan = make_plan(epsilon=30.0)
    assert any("promises little" in w for w in describe(plan, allocate(plan))["warnings"])


@pytest.mark.parametrize("slide", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("public", [None, "list"])
def test_what_a_stream_without_end_is_told_to_do_costs_what_it_says(
    make_plan: Make, slide: int, public: str | None
) -> None:
    """Windows of 12 triggers; periods of one, two and five windows."""
    plan = make_plan(12, public_keys=public)
    line = msgspec.structs.replace(plan.timeline, end=None, slide=slide * SECOND)
    plan = msgspec.structs.replace(plan, timeline=line)
    (warning,) = (w for w in describe(plan, allocate(plan))["warnings"] if "for ever" in w)
    assert "a multiple of the window" in warning
    opt_in = "periods_share_windows = true" in warning
    assert opt_in == (slide < 12 and public is None)
    rule = next(k for k in ("and sqrt(k) mu", "sqrt(2 k) mu", "and k mu over") if k in warning)
    for windows in (1, 2, 5):
        period = msgspec.structs.replace(line, period=windows * line.window)
        privacy = msgspec.structs.replace(plan.privacy, periods_share_windows=opt_in)
        done = msgspec.structs.replace(plan, timeline=period, privacy=privacy)
        description = describe(done, allocate(done))
        for row in description["periods"][1:]:
            k = row["periods"]
            factor = {"and sqrt": k**0.5, "sqrt(2 k": (2 * k) ** 0.5, "and k mu": k}[rule[:8]]
            assert row["mu"] == pytest.approx(factor * description["split"]["mu"])
        if opt_in:
            alone = msgspec.structs.replace(done, timeline=msgspec.structs.replace(
                period, slide=period.window), privacy=plan.privacy)  # fmt: skip
            assert np.allclose(
                np.subtract(description["tau"], describe(alone, allocate(alone))["tau"]), 1
            )


def test_it_says_what_a_bound_per_key_and_a_derived_sum_are(make_plan: Make) -> None:
    mean = Aggregate("delay", "mean", "d", (-60.0, 180.0), 5.0)
    total = msgspec.structs.replace(mean, name="total", kind="sum")
    plan = make_plan(8, aggregates=(mean, total), per_key_bound=3)
    budget = allocate(plan)
    page = details_text(plan, budget)
    assert "at most 3 records per unit, window and key count, repeats take nothing" in page
    assert "made from the sums behind 'delay' and the count, at no cost of its own" in page
    column = describe(plan, budget)["columns"][1]
    count, own = (float(noise.sd[-1]) for noise in budget.values)
    assert column["sd_final"] == pytest.approx(5.0 * math.hypot(own, 12 * count))
    once = make_plan(8, per_key_bound=1)
    assert "one record per unit, window and key counts" in details_text(once, allocate(once))


def delta_of_responses(epsilon: float, each: float, count: int) -> float:
    """Delta of ``count`` mechanisms of plain epsilon ``each``, rounded up."""
    return delta_of_losses(epsilon, *losses_of(each, count))


def enumerated(epsilon: float, each: float, count: int) -> float:
    """Delta of so many responses, over all 2^count outcomes."""
    keep = math.exp(each) / (1 + math.exp(each))
    total = 0.0
    for flips in itertools.product((0, 1), repeat=count):
        own = math.prod(1 - keep if flip else keep for flip in flips)
        other = math.prod(keep if flip else 1 - keep for flip in flips)
        total += max(0.0, own - math.exp(epsilon) * other)
    return total


@pytest.mark.parametrize("each", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_delta_is_that_of_all_outcomes(each: float, count: int) -> None:
    for part in (0.0, 0.3, 0.7, 0.99):
        exact = enumerated(part * count * each, each, count)
        bound = delta_of_responses(part * count * each, each, count)
        assert exact * (1 - 1e-12) <= bound <= exact * (1 + 1e-8) + 1e-15


def test_epsilon_at_a_delta() -> None:
    assert epsilon_of_responses(0.0, 2.0, 91) == 182
    for delta in (1e-9, 1e-6):
        for each, count in ((2.0, 91), (1.0, 182), (0.1, 1000)):
            epsilon = epsilon_of_responses(delta, each, count)
            assert delta_of_responses(epsilon, each, count) <= delta < 1
            assert delta_of_responses(epsilon * (1 - 1e-9), each, count) > delta
    # 91 months of epsilon 2: one record a month, and two on two keys, each of which pays 1.
    assert epsilon_of_responses(4e-6, 2.0, 91) == pytest.approx(181, abs=0.6)
    assert epsilon_of_responses(4e-6, 1.0, 182) == pytest.approx(133, abs=0.6)
    assert epsilon_of_responses(1.0, 1.0, 3) == 0


def months(contributions: int = 1, **settings: object) -> Plan:
    fixed = {"public_keys": "list", "strategy": "auto", "epsilon": 2.0, "delta": 1e-7}
    fixed |= {"windows": 91, "period": SECOND, "contributions": contributions}
    return build(1, **(fixed | settings))  # type: ignore[arg-type]


def without_end(plan: Plan) -> Plan:
    timeline = msgspec.structs.replace(plan.timeline, end=None)
    return msgspec.structs.replace(plan, timeline=timeline)


def test_ninety_one_months() -> None:
    plan = months(2, per_key_bound=1)
    geometric, gaussian = promises(plan, allocate(plan))
    assert (geometric.family, geometric.chosen) == ("geometric", True)
    assert (geometric.epsilon, geometric.delta) == (2, 0)
    assert (gaussian.epsilon, gaussian.delta, gaussian.chosen) == (2, 1e-7, False)
    assert geometric.periods == gaussian.periods == 91
    assert geometric.lifetime == (182, 0)
    assert gaussian.lifetime[0] == pytest.approx(24, abs=0.5)
    mu = allocate(msgspec.structs.replace(plan, privacy=gaussian_of(plan))).mu
    assert gaussian.lifetime[0] == pytest.approx(epsilon_of(91**0.5 * mu, 91e-7), rel=1e-6)
    assert geometric.fixed is not None and gaussian.fixed is None
    assert geometric.fixed == (
        epsilon_of_responses(geometric.fixed[1], 1.0, 182),
        geometric.fixed[1],
    )
    alone = promises(months(), allocate(months()))[0].fixed
    assert alone is not None and geometric.fixed[0] < alone[0] < 182
    assert geometric.sd < gaussian.sd


def gaussian_of(plan: Plan) -> object:
    return msgspec.structs.replace(plan.privacy, strategy="blt")


def test_auto_can_go_by_the_lifetime(refused: Refused) -> None:
    by_period, by_lifetime = months(), months(optimise="lifetime")
    assert allocate(by_period).strategy == "geometric"
    assert allocate(by_lifetime).strategy == "blt"
    assert by_period.hash != by_lifetime.hash
    once = build(1, public_keys="list", strategy="auto", contributions=1, optimise="lifetime")
    assert allocate(once).strategy == "geometric"
    refused(lambda: build(1, public_keys="list", strategy="blt", optimise="lifetime").check())


@pytest.mark.parametrize("public", ["list", None])
@pytest.mark.parametrize("periods", [2, 7, 91])
def test_a_gaussian_lifetime_is_spent_by_noise_and_thresholds(
    public: str | None, periods: int
) -> None:
    """At its epsilon the Gaussian noise of k periods and k times the thresholds cost its delta."""
    plan = months(2, public_keys=public, strategy="blt", windows=periods)
    budget = allocate(plan)
    assert (budget.theta > 0) == (public is None)
    [row, *_] = promises(plan, budget)
    epsilon, delta = row.lifetime
    assert Fraction(delta) >= periods * Fraction(1e-7) * (1 - Fraction(1, 10**15))
    assert delta == pytest.approx(periods * 1e-7, rel=1e-13)
    assert Fraction(delta) >= periods * Fraction(budget.delta)
    mu, thresholds = periods**0.5 * budget.mu, periods * budget.theta * budget.delta
    assert delta_of(epsilon, mu * (1 - 1e-12)) + thresholds <= delta
    assert delta_of(epsilon * (1 - 1e-6), mu) + thresholds > delta


def test_thresholds_of_one_test_are_part_of_a_lifetime() -> None:
    """One window of four periods that is tested once: its rule fits noise and thresholds into the
    delta of one period together, which does not hold for four at four times their mu."""
    plan = build(
        4, strategy="blt", epsilon=2.0, delta=1e-7, period=SECOND, tests=1,
        contributions=2, periods_share_windows=True,
    ).check()  # fmt: skip
    budget = allocate(plan)
    [row, *_] = promises(plan, budget)
    epsilon, delta = row.lifetime
    assert row.periods == 4 and budget.theta == 0
    mu = several_mu(budget.mu, 4, together(plan)) * (1 - 1e-12)
    noise, thresholds = delta_of(epsilon, mu), 4 * 2 * budget.b
    assert noise == pytest.approx(4e-7, rel=1e-6)
    assert noise + thresholds <= delta <= (noise + thresholds) * (1 + 1e-6)
    assert noise + thresholds > 1.5 * 4e-7


@pytest.mark.parametrize("tests", [None, 1])
def test_a_delta_of_many_periods_is_at_most_one(tests: int | None) -> None:
    """(epsilon, 1) holds for anything: a sum of deltas beyond it says no more.  Epsilon is that of
    the Gaussian noise at a delta below 1 all the same."""
    if tests is None:
        plan = months(public_keys=None, strategy="blt", delta=0.3)
    else:  # the rule of one test, whose thresholds come on top
        plan = build(
            40, strategy="blt", epsilon=2.0, delta=0.3, period=SECOND, tests=tests,
            contributions=2, periods_share_windows=True,
        )  # fmt: skip
    budget = allocate(plan)
    [row, *_] = promises(plan, budget)
    epsilon, delta = row.lifetime
    assert row.periods > 3 and row.periods * budget.delta > 1 and delta == 1
    mu = several_mu(budget.mu, row.periods, together(plan))
    assert budget.epsilon < epsilon < math.inf
    assert 0.1 < delta_of(epsilon, mu) < 1


@pytest.mark.parametrize("each", [0.1, 0.3, 2.0])
def test_a_plain_lifetime_is_no_less_than_the_sum(each: float) -> None:
    """In decimals, as the plan states it, and at most one float above the sum."""
    for periods in (3, 7, 91):
        plan = months(strategy="geometric", epsilon=each, windows=periods)
        [row, *_] = promises(plan, allocate(plan))
        exact = periods * Fraction(repr(each))
        assert exact <= Fraction(row.lifetime[0]) <= exact * (1 + Fraction(1, 2**51))
        assert row.lifetime[1] == 0


@pytest.mark.parametrize("contributions", [1, 2])
def test_a_fixed_schedule_pays_thresholds_and_composition(contributions: int) -> None:
    """Its delta is that of 91 periods of thresholds and that at which epsilons compose; sabotage:
    what remains of 91 times delta beside thresholds that use all of it is nothing."""
    kind: dict[str, object] = {"strategy": "geometric", "per_key_bound": 1}
    public, selected = months(contributions, **kind), months(
        contributions, public_keys=None, **kind
    )  # fmt: skip
    for plan in (public, selected):
        budget = allocate(plan)
        fixed = promises(plan, budget)[0].fixed
        assert fixed is not None
        each, count = 2.0 / contributions, 91 * contributions
        composed = delta_of_responses(fixed[0], each, count)
        thresholds = Fraction(91 * contributions) * Fraction(budget.b)
        assert Fraction(composed) + thresholds <= Fraction(fixed[1])
        assert composed == pytest.approx(91e-7, rel=1e-6)
        assert fixed[1] == pytest.approx(91e-7 * (2 if plan.design.selects else 1), rel=1e-9)
        assert (composed + float(thresholds) > 1.5 * 91e-7) == plan.design.selects


def test_pure_noise_states_a_delta_for_a_fixed_schedule_alone() -> None:
    plan = months(strategy="geometric", delta=0.0)
    [row] = promises(plan, allocate(plan))
    assert row.delta == 0 and row.lifetime == (182, 0)
    assert row.fixed == (epsilon_of_responses(STATED_DELTA, 2.0, 91), STATED_DELTA)


def test_a_stream_without_end_shows_a_few_periods_and_says_so() -> None:
    plan = without_end(months())
    rows = promises(plan, allocate(plan))
    assert [row.periods for row in rows] == [4, 4] and rows[0].lifetime == (8, 0)
    lifetime = promise_lines(plan, allocate(plan))[-1]
    assert "a person of 4 periods:" in lifetime and "no end" in lifetime
    ended = promise_lines(months(), allocate(months()))[-1]
    assert "all 91 periods" in ended and "no end" not in ended


def test_budgets_that_guarantee_nothing_are_of_one_family_and_period() -> None:
    budget = msgspec.structs.replace(allocate(months()), has_guarantee=False)
    [row] = promises(months(), budget)
    assert row.chosen and row.periods == 1 and row.lifetime == (budget.epsilon, budget.delta)
    assert promise_lines(months(), budget) == []


def test_a_window_too_long_for_geometric_noise_has_one_promise() -> None:
    plan = build(MAX_GEOMETRIC_TRIGGERS + 1, public_keys="list")
    [row] = promises(plan, allocate(plan))
    assert (row.family, row.chosen) == ("gaussian", True)
