"""What settings mean together: running sums, unit sets, counts of units, the calendar."""

import msgspec
import pytest

from dpstream.accounting.fields import Aggregate
from dpstream.accounting.plan.design import design_of, resolve
from dpstream.accounting.weights import SelectionWeights
from tests.accounting.plans import COUNT, UNITS, Make

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
    assert make_plan(mode="rounds").design.unit_sets == "round"
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


def test_rounds_test_at_every_trigger(make_plan: Make) -> None:
    design = make_plan(250, mode="rounds", refresh_every=5).design
    assert (design.select_every, design.tests, design.restarts) == (1, 250, True)


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
