"""Figures of a plan: complete, margins those of the laws, and words that never promise too much."""

import json
import math
from typing import Any

import pytest

from dpstream.accounting.tabulation import margins
from dpstream.accounting.tabulation.describe import (
    NO_GUARANTEE,
    SUPPRESSED,
    accountings,
    describe,
)
from dpstream.accounting.tabulation.parameters import PR_LEVELS, US_LEVELS, Noise
from dpstream.pipelines.render.census_plan import census_text
from tests.accounting.tabulation.examples import COUNTY, USA, households, persons, planned


def of_level(figures: dict[str, Any], table: str, label: str) -> dict[Any, int]:
    [row] = [r for r in figures["levels"] if (r["table"], r["label"]) == (table, label)]
    return {(f["table"], f["figure"], f["detail"]): f["margin"] for f in row["figures"]}


def test_every_kind_of_figure_of_persons() -> None:
    figures = of_level(describe(planned(persons())), "t1t2", USA.label)
    detail = Noise("discrete gauss", math.sqrt(10))
    expected: dict[Any, int] = {
        ("t1", "total of a group of which only the total is measured", None): margins.margin(
            Noise("discrete gauss", 3.0)
        ),
        ("t1", "total", 0): margins.margin(detail),
        **{("t1", "total", d): margins.margin(detail, n) for d, n in ((1, 8), (2, 18), (3, 46))},
        **{("t2", "sex", d): margins.margin(detail, n) for d, n in ((1, 4), (2, 9), (3, 23))},
        **{("t2", "sex by age", d): margins.margin(detail) for d in (1, 2, 3)},
    }
    assert figures == expected
    assert len(of_level(describe(planned(persons())), "t1t2", COUNTY.label)) == len(figures) - 1


def test_every_kind_of_figure_of_households() -> None:
    description = describe(planned(households()))
    detail = Noise("discrete gauss", math.sqrt(18))
    t3 = of_level(description, "t3", COUNTY.label)
    assert t3["t3", "data cells 0", 3] == margins.margin(detail, 5)
    assert t3["t3", "data cells 3, 6", 3] == margins.margin(detail, 2)
    assert of_level(description, "t4", COUNTY.label) == {
        ("t4", "data cells 0", 0): margins.margin(detail),
        ("t4", "data cells 1, 2, 3", 1): margins.margin(detail),
        ("t4", "data cells 0", 1): margins.margin(detail, 3),
    }
    assert "no further cost" in description["notes"][-1]


def test_margins_follow_the_estimates_and_the_options() -> None:
    detail, first = Noise("discrete gauss", math.sqrt(10)), Noise("discrete gauss", math.sqrt(90))
    both = of_level(describe(planned(persons(estimates="combined"))), "t1t2", USA.label)
    assert both["t1", "total", 3] == margins.combined_margin(first, detail, 46, 46)
    clipped = of_level(describe(planned(persons(allow_negative=False))), "t1t2", USA.label)
    assert clipped["t1", "total", 3] == margins.margin(detail, 46, clipped=True)
    plain = of_level(describe(planned(persons())), "t1t2", USA.label)
    assert both["t1", "total", 3] < plain["t1", "total", 3] < clipped["t1", "total", 3]


def test_suppression_is_below_the_state_only() -> None:
    description = describe(planned(persons(zero_suppression=0.9)))
    thresholds = {row["label"]: row["suppressed_at"] for row in description["levels"]}
    assert thresholds[USA.label] is None and thresholds["(STATE, 2)"] is None
    assert thresholds[COUNTY.label] == margins.quantile(Noise("discrete gauss", math.sqrt(10)), 0.9)
    assert describe(planned(persons()))["levels"][-1]["suppressed_at"] is None
    budgets = {"t1t2": dict.fromkeys(US_LEVELS, math.inf)}
    exact = describe(planned(persons(budgets=budgets, zero_suppression=0.9)))
    assert {row["label"]: row["suppressed_at"] for row in exact["levels"]}[COUNTY.label] == 0
    assert (
        SUPPRESSED in description["notes"]
        and SUPPRESSED not in describe(planned(persons()))["notes"]
    )


@pytest.mark.parametrize(
    ("changes", "names", "held"),
    [
        ({}, ["losses", "zcdp", "zcdp-analytic", "gaussian"], [True, True, True, False]),
        ({"noise": "rounded"}, ["gaussian", "zcdp", "zcdp-analytic"], [True, True, True]),
        (
            {"definition": "puredp"},
            ["sum", "renyi", "losses", "renyi-integral"],
            [True, True, True, False],
        ),
    ],
)
def test_accountings(changes: dict[str, Any], names: list[str], held: list[bool]) -> None:
    rows = accountings(planned(persons(**changes)))
    assert [row["name"] for row in rows] == names
    assert [row["holds"] for row in rows] == held
    guarantee = describe(planned(persons(**changes)))["guarantee"]
    assert any(row["epsilon"] == guarantee["epsilon"] and row["holds"] for row in rows)
    lines = census_text(describe(planned(persons(**changes)))).splitlines()
    marks = [line.split()[:1] for line in lines if " at delta " in line]
    assert marks == [["Epsilon"] if holds else ["No"] for holds in held]


def test_for_machines_and_for_people() -> None:
    both = {"run_pr": True, "thresholds": {"t1t2": dict.fromkeys(US_LEVELS + PR_LEVELS, (0, 1, 2))},
            "budgets": {"t1t2": dict.fromkeys(US_LEVELS + PR_LEVELS, 0.5)}}  # fmt: skip
    for parameters in (persons(**both), households(), persons(definition="puredp", **both)):
        description = describe(planned(parameters), groups={USA: 12})
        assert json.loads(json.dumps(description)) == description
        words = census_text(description)
        assert description["guarantee"]["text"] in words and "s = 9" in words
        assert all(row["label"] in words for row in description["levels"])
    assert describe(planned(persons()), groups={USA: 12})["levels"][0]["groups"] == 12


def test_words_round_the_guarantee_up() -> None:
    description = describe(planned(persons()))
    epsilon = float(description["guarantee"]["text"].split("(")[1].split(",")[0])
    assert (
        description["guarantee"]["epsilon"] <= epsilon <= description["guarantee"]["epsilon"] + 1e-4
    )


def test_exact_counts_have_no_guarantee() -> None:
    description = describe(planned(persons(budgets={"t1t2": {USA: math.inf}})))
    assert description["guarantee"]["text"] == NO_GUARANTEE and description["accountings"] == []
    assert NO_GUARANTEE in census_text(description) and "exact" in census_text(description)
    assert json.loads(json.dumps(description)) == description


@pytest.mark.parametrize("changes", [{}, {"noise": "rounded"}, {"definition": "puredp"}])
def test_budgets_of_the_same_margins(changes: dict[str, Any]) -> None:
    """Written into the parameters they give those margins at that cost."""
    plan = planned(persons(**changes))
    same = describe(plan)["same_margins"]
    least = {level: same["budgets"]["t1t2"][level.name] for level in plan.parameters.levels}
    cheaper = planned(persons(**changes, budgets={"t1t2": least}))
    assert float(cheaper.budget) == same["budget"] < plan.budget
    assert cheaper.cost().epsilon == pytest.approx(same["epsilon"])
    single = ("sex by age", "total of a group of which only the total is measured")
    for label in (USA.label, COUNTY.label):
        before, after = (of_level(describe(p), "t1t2", label) for p in (plan, cheaper))
        for kind, margin in before.items():
            if kind[1] in single or kind[2] == 0:
                assert after[kind] == margin
    assert f"{same['budget']:g}"[:4] in census_text(describe(plan))
