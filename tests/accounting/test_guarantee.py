"""The page a plan prints: complete, consistent with the budget, honest where none holds."""

import json
import math
from fractions import Fraction

import msgspec
import numpy as np
import pytest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.gaussian import delta_of
from dpstream.accounting.guarantee import COMPUTATIONAL, NEIGHBOURS, NOT_SOUND, describe
from dpstream.accounting.weights import SelectionWeights
from dpstream.pipelines.render.job_plan import details_text
from tests.accounting.plans import SECOND, Make

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
        "column": "user", "period_micros": 50 * second, "periods_met": 2, "contributions": 32,
        "for_ever": False,
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


def test_a_sum_cannot_be_named_count(make_plan: Make) -> None:
    aggregates = (Aggregate("count", "sum", "x", (0.0, 9.0)), Aggregate("n", "count", share=2.0))
    with pytest.raises(UsageError, match="reserved"):
        allocate(make_plan(aggregates=aggregates))


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
    budget = msgspec.structs.replace(allocate(plan), sound=False)
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
