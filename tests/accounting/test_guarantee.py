"""The page a plan prints: complete, consistent with the budget, honest where none holds."""

import json
import math
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from dpstream.accounting.budget import allocate
from dpstream.accounting.errors import UsageError
from dpstream.accounting.gaussian import delta_of
from dpstream.accounting.guarantee import NOT_SOUND, describe, text
from dpstream.accounting.plan.fields import Aggregate
from dpstream.accounting.plan.plan import Plan

Make = Callable[..., Plan]
SECOND = 1_000_000
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
    assert "'user'" in figures["unit"]["words"]
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
    assert "k = 10" in text(plan, budget)
    assert "period of 100 seconds" in text(plan, budget)
    assert "over the whole stream" in text(make_plan(), allocate(make_plan()))


@pytest.mark.parametrize("case", [{}, {"mode": "rounds", "final_flush": True}, {"triggers": 1}])
def test_text_is_short_and_complete(make_plan: Make, case: dict) -> None:
    plan = make_plan(**case)
    page = text(plan, allocate(plan))
    assert len(page.splitlines()) <= 45
    for part in ("Guarantee", "Neighbours", "2^129", "sigma", "tau", "even chance", "Assumed"):
        assert part in page
    assert NOT_SOUND not in page
    assert ("once-selected" in page) == bool(case.get("final_flush"))


def test_numbers_without_a_guarantee_say_so(make_plan: Make) -> None:
    plan = make_plan(mode="rounds")
    budget = msgspec.structs.replace(allocate(plan), sound=False)
    figures = describe(plan, budget)
    assert NOT_SOUND == "as published: the stated guarantee does NOT hold"
    assert text(plan, budget).startswith(f"Guarantee   {NOT_SOUND}")
    assert figures["guarantee"]["sound"] is False
    assert figures["warnings"] == [NOT_SOUND] and figures["periods"] == []


def test_tiny_and_huge_epsilons_are_warned_of(make_plan: Make) -> None:
    plan = make_plan(epsilon=3e-4, contributions=1)
    assert any("nothing is released" in w for w in describe(plan, allocate(plan))["warnings"])
    assert "Warning" in text(plan, allocate(plan))
    plan = make_plan(epsilon=30.0)
    assert any("above 20" in w for w in describe(plan, allocate(plan))["warnings"])


@pytest.mark.parametrize("slide", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("public", [None, "list"])
def test_what_a_stream_without_end_is_told_to_do_costs_what_it_says(
    make_plan: Make, slide: int, public: str | None
) -> None:
    """Windows of 12 triggers; periods of one, two and five windows."""
    plan = make_plan(12, public_keys=public)
    line = msgspec.structs.replace(plan.timeline, end=None, slide=slide * SECOND)
    plan = msgspec.structs.replace(plan, timeline=line)
    (told,) = (w for w in describe(plan, allocate(plan))["warnings"] if "for ever" in w)
    assert "a multiple of the window" in told
    opt_in = "periods_share_windows = true" in told
    assert opt_in == (slide < 12 and public is None)
    rule = next(k for k in ("and sqrt(k) mu", "sqrt(2 k) mu", "and k mu over") if k in told)
    for windows in (1, 2, 5):
        period = msgspec.structs.replace(line, period=windows * line.window)
        privacy = msgspec.structs.replace(plan.privacy, periods_share_windows=opt_in)
        done = msgspec.structs.replace(plan, timeline=period, privacy=privacy)
        found = describe(done, allocate(done))
        for row in found["periods"][1:]:
            k = row["periods"]
            factor = {"and sqrt": k**0.5, "sqrt(2 k": (2 * k) ** 0.5, "and k mu": k}[rule[:8]]
            assert row["mu"] == pytest.approx(factor * found["split"]["mu"])
        if opt_in:
            alone = msgspec.structs.replace(done, timeline=msgspec.structs.replace(
                period, slide=period.window), privacy=plan.privacy)  # fmt: skip
            assert np.allclose(
                np.subtract(found["tau"], describe(alone, allocate(alone))["tau"]), 1
            )
