"""The comparison of mechanisms that ``dpstream plan`` prints."""

import math
from collections.abc import Callable

import pytest

from dpstream.accounting.plan.fields import Aggregate
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.tuning import alternatives
from dpstream.accounting.tuning.alternatives import compare, text
from dpstream.accounting.weights import MILD

Make = Callable[..., Plan]


def test_the_job_stands_first_and_one_row_is_recommended(make_plan: Make) -> None:
    plan = make_plan(strategy="tree")
    rows = compare(plan)
    assert rows[0].settings["strategy"] == "tree" and rows[0].keys == rows[0].error == 1
    assert sum(row.recommended for row in rows) == 1
    best = next(row for row in rows if row.recommended)
    assert best.same and best.error < 0.95 and best.keys > 1.1
    assert all(row.error * 1.02 >= best.error for row in rows if row.same)
    ours = make_plan(**best.settings)
    again = compare(ours)
    assert again[0].recommended and again[0].error == 1


def test_every_kind_is_compared(make_plan: Make) -> None:
    rows = compare(make_plan(1000, strategy="blt", weights=MILD))
    kinds = {(r.settings["strategy"], bool(r.settings["weights"]), r.settings["combine"])
             for r in rows}  # fmt: skip
    assert {("blt", True, True), ("toeplitz", False, False), ("tree", True, False)} <= kinds
    assert {r.settings["mode"] for r in rows} == {"sticky", "rounds"}
    combined = next(r for r in rows if r.settings["combine"] and not r.refused)
    assert not combined.same and combined.error < 0.9
    words = text(rows)
    assert words.count("*") == 2 and "(another figure)" in words


def test_expected_keys_follow_what_was_simulated(make_plan: Make) -> None:
    """Ratios to the tree at T = 100, C = 32: 1.18 for BLT, 1.5 and more for the combined."""
    rows = compare(make_plan(strategy="tree"))
    blt = next(r for r in rows if r.settings["strategy"] == "blt" and not r.settings["weights"])
    assert 1.05 < blt.keys < 1.25 and 0.85 < blt.error < 1
    steep = max(r.keys for r in rows if r.settings["combine"])
    assert 1.3 < steep < 1.8


def test_what_the_job_cannot_use_is_said(make_plan: Make) -> None:
    rows = compare(make_plan(5000, strategy="blt"))
    refused = [r for r in rows if r.refused]
    assert {r.settings["strategy"] for r in refused} == {"toeplitz"}
    assert "at most 4096" in text(rows)


@pytest.mark.parametrize("least", [100_000, 2_000_000])
def test_the_comparison_never_stops_a_plan(make_plan: Make, least: int) -> None:
    rows = compare(make_plan(pre_threshold=least))
    assert len(rows) > 5 and text(rows)
    assert all(math.isnan(r.keys) or r.keys >= 0 for r in rows)


def test_nothing_to_choose(make_plan: Make) -> None:
    assert compare(make_plan(public_keys="list")) == []
    assert text([]) == ""


def test_the_criterion_is_public(make_plan: Make) -> None:
    """A function of the plan's parameters only: the same plan gives the same rows."""
    plan = make_plan(aggregates=(Aggregate("people", "units"),))
    assert compare(plan) == compare(plan)
    assert alternatives._NEAR == 1.02
