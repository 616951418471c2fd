"""What settings mean together: running sums, unit sets, counts of units, the calendar."""

from typing import Any

import msgspec
import pytest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Aggregate, Field
from dpstream.accounting.guarantee import describe
from dpstream.accounting.plan.design import design_of, hindrance, resolve, skips, suits, weights_of
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.privacy import Privacy
from dpstream.accounting.weights import MILD, SPARED, STEEP, SelectionWeights
from dpstream.pipelines.render.job_plan import details_text
from tests.accounting.plans import COUNT, SECOND, UNITS, Make, build
from tests.streams import STEP, make_plan

REPLACED = msgspec.structs.replace


@pytest.mark.parametrize(
    ("settings", "remembers", "lasting"),
    [
        ({}, True, None),
        ({"remember": "run"}, True, None),
        ({"remember": "never"}, False, None),
        ({"remember": 5 * STEP}, True, 5),
        ({"windows": 1}, False, None),
        ({"windows": 1, "remember": "run"}, False, None),
        ({"public": "list"}, False, None),
        ({"public": "list", "remember": "never"}, False, None),
    ],
)
def test_which_plans_remember(
    settings: dict[str, object], remembers: bool, lasting: int | None
) -> None:
    design = make_plan(**settings).design  # type: ignore[arg-type]
    assert design.remembers == remembers
    assert design.remembered_for == lasting


def test_a_stream_without_end_remembers() -> None:
    plan = make_plan()
    line = REPLACED(plan.timeline, end=None)
    assert REPLACED(plan, timeline=line).design.remembers


@pytest.mark.parametrize(
    "settings",
    [
        {"public": "list", "remember": "run"},
        {"public": "list", "remember": STEP},
        {"remember": 0},
        {"remember": -STEP},
        {"remember": STEP + 1},
    ],
)
def test_what_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"remember_keys"):
        make_plan(**settings)  # type: ignore[arg-type]


def test_only_what_is_said_is_hashed() -> None:
    plans = [make_plan(remember=r) for r in (None, "run", "never", STEP, 2 * STEP)]
    assert len({plan.hash for plan in plans}) == 5
    one: list[Plan] = [make_plan(windows=1, remember=r) for r in (None, "never")]
    assert allocate(one[0]).has_guarantee and one[0].hash != one[1].hash


def test_the_guarantee_says_it() -> None:
    for remember, words in (
        (None, "untested"),
        (5 * STEP, "untested, for 5 seconds"),
        ("never", ""),
    ):
        plan = make_plan(remember=remember)
        publishing = describe(plan, allocate(plan))["publishing"]
        assert publishing.endswith(words) and ("untested" in publishing) == bool(words)


SKIPPING_COUNT = Aggregate("n", "count")


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
    assert resolve(unnamed, (SKIPPING_COUNT,), True, 24, suited=True).weights == SPARED
    assert resolve(unnamed, (SKIPPING_COUNT,), True, 24).weights == STEEP


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
    words = details_text(plan, allocate(plan))
    assert ("takes no selection weight" in words) == plan.design.skips
    assert (f"like other keys ({field})" in words) == (field is not None)


def test_repeats_of_a_key_take_nothing() -> None:
    combined = privacy(per_key_bound=1, combine=True, skip=True)
    design = resolve(combined, (SKIPPING_COUNT,), True, 24)
    assert design.skips and design.admits_per_key and not design.packs_indices
    assert design.unit_sets == "none"
    apart = resolve(privacy(skip=True), (SKIPPING_COUNT,), True, 24)
    assert apart.skips and not apart.admits_per_key and apart.packs_indices


MEAN = Aggregate("delay", "mean", "d", (-60.0, 180.0), 0.5)
SUM = Aggregate("total", "sum", "x", (-3.0, 9.0))


def test_value_streams(make_plan: Make) -> None:
    only_mean = make_plan(aggregates=(MEAN,)).design.streams
    assert [s.name for s in only_mean] == ["count", "delay"]
    mean = only_mean[1]
    assert (mean.lo, mean.hi, mean.mid, mean.sensitivity, mean.grid) == (-120, 360, 120, 240, 0.5)
    both = make_plan(aggregates=(Aggregate("n", "count", share=2.0), MEAN, SUM)).design.streams
    assert [(s.name, s.share) for s in both] == [("count", 2.0), ("delay", 1.0), ("total", 1.0)]
    assert both[2].sensitivity == 9 and both[2].mid == 0
    assert make_plan(aggregates=(Aggregate("u", "units"),)).design.streams == ()
    odd = make_plan(aggregates=(Aggregate("m", "mean", "x", (0.0, 5.0)),)).design.streams[1]
    assert odd.sensitivity == max(odd.hi - odd.mid, odd.mid - odd.lo) == 3


def test_derived_switches(make_plan: Make) -> None:
    plan = make_plan()
    assert plan.design.selects and plan.design.unit_sets == "until selected"
    public = make_plan(public_keys="list")
    assert not public.design.selects and public.design.unit_sets == "none"
    units = make_plan(public_keys="list", aggregates=(Aggregate("u", "units"),))
    assert units.design.unit_sets == "window" and units.design.units_apart
    every = [make_plan(t).design.refresh_every for t in (1, 100, 250, 1000)]
    assert every == [1, 1, 2, 10] and make_plan(refresh_every=7).design.refresh_every == 7


@pytest.mark.parametrize("triggers", [1, 7, 12, 100])
@pytest.mark.parametrize("every", [1, 3, 7, 200])
def test_the_calendar_of_tests(make_plan: Make, triggers: int, every: int) -> None:
    """Data of a trigger count at the first test that is not before it; the last trigger is one."""
    design = make_plan(triggers, select_every=every).design
    tests = [t for t in range(1, triggers + 1) if design.selects_at(t)]
    assert len(tests) == design.tests and tests[-1] == triggers
    for trigger in range(1, triggers + 1):
        step = design.selection_step_index(trigger)
        assert tests[step - 1] == min(t for t in tests if t >= trigger)


def test_where_a_count_of_units_gets_its_noise(make_plan: Make) -> None:
    """From the selection stream only where that is a plain count."""
    weights, columns = SelectionWeights(), (COUNT, UNITS)
    assert make_plan().design.units_from == "none" and make_plan().design.units_column is None
    plain = make_plan(aggregates=columns).design
    assert plain.units_from == "selection" and plain.units_column == UNITS and plain.sums == 1
    assert plain.window_sets and not plain.units_apart and not plain.ranked
    weighted = make_plan(aggregates=columns, weights=weights).design
    assert weighted.units_apart and weighted.sums == 2 and weighted.ranked and weighted.weighted


def test_a_bound_per_key_is_kept_where_pairs_are_admitted(make_plan: Make) -> None:
    """Then no set of units is needed."""
    for bound in (1, 3):
        design = make_plan(per_key_bound=bound, aggregates=(COUNT, UNITS)).design
        assert design.admits_per_key and design.unit_sets == "none" and design.per_key == bound
        assert design.once_per_key == (bound == 1) and design.ranked
    plain = make_plan().design
    assert not plain.admits_per_key and plain.per_key is None


def test_a_sum_beside_a_mean_is_derived(make_plan: Make) -> None:
    twin = msgspec.structs.replace(MEAN, name="twin", kind="sum")
    now = make_plan(aggregates=(twin, MEAN))
    assert [s.name for s in now.design.streams] == ["count", MEAN.name]
    assert [d.name for d in now.design.derived] == ["twin"]


def test_several_units_of_one_person(make_plan: Make) -> None:
    """A window may meet several periods; thresholds allow for them where the plan says so."""
    privacy = make_plan(periods_share_windows=True).privacy
    assert resolve(privacy, (COUNT,), True, 10, periods_met=3).units_alone == 3
    assert resolve(make_plan().privacy, (COUNT,), True, 10, periods_met=3).units_alone == 1


def test_a_plan_is_resolved_from_its_parts(make_plan: Make) -> None:
    plan = make_plan(24, public_keys="list", aggregates=(COUNT, UNITS))
    assert plan.design == design_of(plan) == resolve(plan.privacy, plan.aggregates, False, 24)
