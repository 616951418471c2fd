"""The comparison of mechanisms that ``dpstream plan`` prints."""

import inspect
import math
import tomllib

import msgspec
import numpy as np
import pytest
from scipy.stats import binom, norm

from dpstream.accounting.budget import allocate
from dpstream.accounting.plan.fields import Aggregate
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.tuning.alternatives import compare, in_words, text
from dpstream.accounting.weights import MILD
from tests.accounting.plans import Make


def test_the_job_stands_first_and_no_row_is_starred(make_plan: Make) -> None:
    rows = compare(make_plan(strategy="tree"))
    assert rows[0].settings["strategy"] == "tree" and rows[0].keys == rows[0].error == 1
    assert "*" not in text(rows)  # the starred line is another's: `starred`


def test_every_kind_is_compared(make_plan: Make) -> None:
    rows = compare(make_plan(1000, strategy="blt", weights=MILD))
    kinds = {(r.settings["strategy"], bool(r.settings["weights"]), r.settings["combine"])
             for r in rows}  # fmt: skip
    assert {("blt", True, True), ("toeplitz", False, False), ("tree", True, False)} <= kinds
    assert {r.settings["mode"] for r in rows} == {"sticky", "rounds"}
    combined = next(r for r in rows if r.settings["combine"])
    assert not combined.same and combined.error < 0.9
    assert "(another figure)" in text(rows)


def test_expected_keys_follow_what_was_simulated(make_plan: Make) -> None:
    """Ratios to the tree at T = 100, C = 32: 1.18 for BLT, 1.5 and more for the combined."""
    rows = compare(make_plan(strategy="tree"))
    blt = next(r for r in rows if r.settings["strategy"] == "blt" and not r.settings["weights"])
    assert 1.05 < blt.keys < 1.25 and 0.85 < blt.error < 1
    steep = max(r.keys for r in rows if r.settings["combine"])
    assert 2.0 < steep < 2.6  # 106k of 46.2k
    rows = compare(make_plan(strategy="tree", skip=False))
    assert 1.3 < max(r.keys for r in rows if r.settings["combine"]) < 1.8


def test_what_the_job_cannot_use_is_not_listed(make_plan: Make) -> None:
    rows = compare(make_plan(5000, strategy="blt"))
    assert {r.settings["strategy"] for r in rows} == {"blt", "tree"}
    words = text(rows)
    assert "refused" not in words and len(words.splitlines()) == 4 + len(rows)
    # Each row can be taken over as it stands.
    assert all(in_words(row.settings) in words for row in rows)
    others = sum(not row.same for row in rows)
    assert others and words.count("(another figure)") == others
    for row in rows:
        told = tomllib.loads(f"privacy = {{ {in_words(row.settings)} }}")["privacy"]
        weights = row.settings["weights"]
        asked = row.settings | {"weights": weights and msgspec.to_builtins(weights)}
        assert told == {name: value for name, value in asked.items() if value}


@pytest.mark.parametrize("least", [100_000, 2_000_000])
def test_the_comparison_never_stops_a_plan(make_plan: Make, least: int) -> None:
    rows = compare(make_plan(pre_threshold=least))
    assert len(rows) > 5 and text(rows)
    assert all(r.keys is None or r.keys >= 0 for r in rows)


def mean_weights(plan: Plan, triggers: int) -> list[float]:
    """What a record weighs on average up to each of T triggers, records in the order of time."""
    if plan.privacy.weights is None:
        return [1.0] * triggers
    total = plan.privacy.contributions
    weighs, fine = plan.privacy.weights.integers(total), 40
    times = (np.arange(triggers * fine) + 0.5) / (triggers * fine)
    at, whole = np.zeros(len(times)), 0.0
    for records in range(1, total + 1):
        # At least i records with chance 1/i; others of the unit are earlier with chance s each.
        units = records * (1 / records - (0 if records == total else 1 / (records + 1)))
        earlier = binom.pmf(np.arange(records)[:, None], records - 1, times)
        at, whole = at + units * (weighs[:records] @ earlier), whole + units
    return list((np.cumsum(at / whole) / np.arange(1, len(at) + 1))[fine - 1 :: fine])


def expected(plan: Plan) -> tuple[float, float, float]:
    """(keys, error, units of an even chance) on the reference population, size by size."""
    budget = allocate(plan)
    statistic, tau = budget.statistic, budget.tau
    assert statistic is not None and tau is not None
    triggers = len(tau)
    adds = [statistic.weighted * of + statistic.counted for of in mean_weights(plan, triggers)]
    noise = budget.values[0].sd[-1] / plan.design.streams[0].sensitivity
    sizes, keys, wrong, even = np.geomspace(1, 1e6, 400), [], [], math.nan
    for n in sizes:
        best = max(
            (n * adds[t - 1] * t / triggers - tau[t - 1] / 256) / statistic.sd[t - 1]
            for t in range(1, triggers + 1)
        )
        chance = norm.cdf(best)
        even = n if chance < 0.5 else even
        keys.append(n**-1.7 * chance)
        wrong.append(n**-1.7 * (chance * noise * math.sqrt(2 / math.pi) + (1 - chance) * n))
    return np.trapezoid(keys, sizes), np.trapezoid(wrong, sizes), even


@pytest.mark.parametrize(
    "options",
    [
        {"selection_share": 0.7},
        {"select_every": 5, "refresh_every": 5},
        {"aggregates": (Aggregate("total", "sum", "v", (-1.0, 7.0), 0.5),)},
    ],
)
def test_rows_by_their_definition(make_plan: Make, options: dict[str, object]) -> None:
    """Other mechanisms choose shares anew, and rounds have no calendar of tests."""
    plan = make_plan(20, strategy="tree", skip=False, **options)
    rows = compare(plan)
    assert rows[0].keys == rows[0].error == 1
    own = expected(plan)
    for row in rows:
        change = dict(row.settings)
        if row is not rows[0]:
            change["selection_share"] = None
        if change["mode"] == "rounds":
            change["select_every"] = None
        privacy = msgspec.structs.replace(plan.privacy, **change)
        other = msgspec.structs.replace(plan, privacy=privacy)
        keys, error, even = expected(other)
        assert row.keys == pytest.approx(keys / own[0], rel=1e-3), row
        assert row.error == pytest.approx(error / own[1], rel=1e-3), row
        assert even <= row.units <= even * 1.04
        noise = allocate(other).values[0].sd[-1]
        assert row.sd == pytest.approx(noise / plan.design.streams[0].sensitivity)


def test_the_last_sd_of_a_count_of_units(make_plan: Make) -> None:
    plan = make_plan(24, aggregates=(Aggregate("people", "units"),), strategy="tree")
    units = allocate(plan).units
    assert units is not None and len(set(units.sd[-3:].tolist())) > 1
    assert compare(plan)[0].sd == units.sd[-1]


def test_nothing_to_choose(make_plan: Make) -> None:
    assert compare(make_plan(public_keys="list")) == []
    assert text([]) == ""


def test_the_criterion_is_public(make_plan: Make) -> None:
    """It is given the plan and nothing else, and of that only what the noise depends on: a job of
    other columns and days, and so of other records, has the same rows."""
    assert list(inspect.signature(compare).parameters) == ["plan"]
    replace = msgspec.structs.replace
    plan = make_plan(aggregates=(Aggregate("people", "units"),))
    day, line = 86_400_000_000, plan.timeline
    assert line.end is not None
    other = replace(
        plan,
        unit=replace(plan.unit, column="somebody"),
        key=tuple(replace(field, column=f"other_{field.column}") for field in plan.key),
        timeline=replace(line, start=line.start + day, end=line.end + day),
    )
    assert other.hash != plan.hash
    assert compare(other) == compare(plan)
    assert compare(replace(plan, privacy=replace(plan.privacy, epsilon=2.0))) != compare(plan)
