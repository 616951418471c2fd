"""Which plans skip what is published unasked, and with which weights."""

from typing import Any

import msgspec
import pytest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.fields import Aggregate, Field
from dpstream.accounting.guarantee import text
from dpstream.accounting.plan.design import resolve
from dpstream.accounting.plan.privacy import Privacy
from dpstream.accounting.plan.skipping import hindrance, skips, suits, weights_of
from dpstream.accounting.weights import MILD, SPARED, STEEP
from tests.accounting.plans import SECOND, build

COUNT = Aggregate("n", "count")


def privacy(**changes: Any) -> Privacy:
    usual: dict[str, Any] = {
        "epsilon": 6.0, "delta": 1e-9, "contributions": 32, "weights": MILD,
    }  # fmt: skip
    return Privacy(**(usual | changes))


@pytest.mark.parametrize("skip_set", [True, False])
def test_a_job_is_taken_at_its_word(skip_set: bool) -> None:
    assert skips(privacy(skip=skip_set), True, 24, False) is skip_set


def test_a_job_that_says_nothing_skips() -> None:
    assert skips(privacy(), True, 24, True) and skips(privacy(), True, 2, True)


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "rounds", "weights": None},
        {"weights": None},
        {"per_key_bound": 2},
        {"contributions": 1024},
        {"select_every": 4},
        {"tests": 1},
        {"tests": (24,)},
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_go_with_it(changes: dict[str, Any]) -> None:
    assert not skips(privacy(**changes), True, 24, True)


def test_records_and_time_that_do_not_go_with_it() -> None:
    assert not skips(privacy(), True, 24, False)
    assert not skips(privacy(), False, 24, True)
    assert not skips(privacy(), True, 1, True)  # there is nothing to save


def test_its_weights_are_the_usual_ones_unless_named() -> None:
    combined = privacy(per_key_bound=1, combine=True, weights=STEEP)
    unnamed = privacy(per_key_bound=1, combine=True, weights=STEEP, usual_weights=True)
    assert weights_of(combined, True) == weights_of(unnamed, False) == STEEP
    assert weights_of(unnamed, True) == SPARED
    assert weights_of(privacy(usual_weights=True), True) == MILD
    assert weights_of(privacy(skip=True, usual_weights=True, weights=STEEP), True) == STEEP
    assert resolve(unnamed, (COUNT,), True, 24, suited=True).weights == SPARED
    assert resolve(unnamed, (COUNT,), True, 24).weights == STEEP


@pytest.mark.parametrize(
    ("field", "changes", "of_plan", "of_line"),
    [
        ("mechanism.skip", {"skip": False}, {}, {}),
        ("mechanism.select_every", {"select_every": 4}, {}, {}),
        ("per_key_bound", {"per_key_bound": 2}, {}, {}),
        ("contributions", {"contributions": 1024}, {}, {}),
        ("table.record_id", {}, {"record_id": Field("message")}, {}),
        ("max_skew", {}, {}, {"max_skew": 1}),
        ("slide", {}, {}, {"slide": 2 * SECOND}),
        ("slide", {}, {}, {"end": None}),
        (None, {}, {}, {"end": None, "window": 30 * SECOND, "slide": 30 * SECOND}),
        ("one test a window", {"tests": 1}, {}, {}),
        (None, {}, {}, {}),
        (None, {}, {}, {"slide": 3 * SECOND}),
        (None, {"weights": None}, {}, {}),
    ],
)
def test_what_hinders_is_said(
    field: str | None,
    changes: dict[str, Any],
    of_plan: dict[str, Any],
    of_line: dict[str, int | None],
) -> None:
    """And each of these alone hinders: the plan without it skips."""
    base = build(24, weights=MILD)
    assert base.design.skips and suits(base)
    plan = msgspec.structs.replace(
        base,
        privacy=msgspec.structs.replace(base.privacy, **changes),
        timeline=msgspec.structs.replace(base.timeline, **of_line),
        **of_plan,
    ).check()
    assert hindrance(plan) == field
    assert plan.design.skips == (field is None and plan.design.weighted and not of_plan)
    words = text(plan, allocate(plan))
    assert ("takes no selection weight" in words) == plan.design.skips
    assert (f"like other keys ({field})" in words) == (field is not None)


def test_repeats_of_a_key_take_nothing() -> None:
    combined = privacy(per_key_bound=1, combine=True, skip=True)
    design = resolve(combined, (COUNT,), True, 24)
    assert design.skips and design.admits_per_key and not design.packs_indices
    assert design.unit_sets == "none"
    apart = resolve(privacy(skip=True), (COUNT,), True, 24)
    assert apart.skips and not apart.admits_per_key and apart.packs_indices
