"""The public time axis against plain loops, and its refusals."""

import json
import math
import re
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest

from dpstream.accounting import limits
from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Field
from dpstream.accounting.plan.timeline import (
    COMBINED_TESTS,
    DEFAULT_TESTS,
    Timeline,
    growing,
    triggers_of_tests,
)
from dpstream.accounting.weights import SelectionWeights
from tests.streams import make_plan

BASE = Timeline(start=1000, end=1600, window=100, slide=50, trigger_every=10, allowed_lateness=20)


def changed(**fields: object) -> Timeline:
    return msgspec.structs.replace(BASE, **fields)


def test_counts() -> None:
    BASE.check()
    assert (BASE.triggers, BASE.windows_per_record, BASE.windows) == (12, 2, 12)
    assert BASE.window_bounds(3) == (1150, 1250)
    assert BASE.base(3) == 15 and BASE.instant_of(15) == 1150
    assert BASE.last_trigger_time == 11 * 5 + 12
    assert changed(end=1601).windows == 13
    with pytest.raises(ValueError, match="without end"):
        _ = changed(end=None).windows


def test_a_record_on_a_trigger_time_belongs_to_the_next_trigger() -> None:
    times = np.array([1000, 1009, 1010, 1599])
    assert BASE.trigger_time_of(times).tolist() == [1, 1, 2, 60]
    for instant in range(1000, 1600):
        trigger_time = int(BASE.trigger_time_of(np.array([instant]))[0])
        assert BASE.instant_of(trigger_time - 1) <= instant < BASE.instant_of(trigger_time)


@pytest.mark.parametrize(
    "timeline", [BASE, changed(slide=100), changed(end=None), changed(slide=30)]
)
def test_windows_at_a_trigger_time(timeline: Timeline) -> None:
    last = 40 if timeline.end is None else timeline.windows
    for trigger_time in range(1, 70):
        expected = [
            w
            for w in range(last)
            if timeline.base(w) < trigger_time <= timeline.base(w) + timeline.triggers
        ]
        assert list(timeline.windows_at(trigger_time)) == [w for w in expected if w < last]


def test_every_event_is_in_windows_per_record_windows_at_most() -> None:
    for event in range(1000, 1600):
        inside = [
            w
            for w in range(BASE.windows)
            if BASE.window_bounds(w)[0] <= event < BASE.window_bounds(w)[1]
        ]
        assert 1 <= len(inside) <= BASE.windows_per_record
        trigger_time = int(BASE.trigger_time_of(np.array([event]))[0])
        assert set(inside) <= set(BASE.windows_at(trigger_time))


def test_on_time_uses_the_records_own_stamp_alone() -> None:
    line = changed(max_skew=5)
    event = np.array([999, 1000, 1599, 1600, 1205, 1206, 1000])
    stamp = np.array([2000, 1000, 2000, 2000, 1200, 1200, 995])
    assert line.on_time(event, stamp).tolist() == [False, True, True, False, True, False, True]
    # Absurd stamps do not wrap.
    extreme = np.array([np.iinfo(np.int64).min, np.iinfo(np.int64).max])
    assert line.on_time(np.array([1300, 1300]), extreme).tolist() == [False, True]


def test_periods() -> None:
    assert BASE.period_of(np.array([1000, 1599])).tolist() == [0, 0]
    assert not BASE.period_closed(np.array([1000]), np.array([10**9])).any()
    line = changed(period=200)
    event = np.array([1199, 1199, 1200, 1200])
    stamp = np.array([1219, 1220, 1220, 1420])
    assert line.period_of(event).tolist() == [0, 0, 1, 1]
    # "closed once stamp > period end + allowed lateness"; the last instant is 1199.
    assert line.period_closed(event, stamp).tolist() == [False, True, False, True]


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("release_every", {"trigger_every": 0}),
        ("window", {"window": 105}),
        ("window", {"window": 0}),
        ("slide", {"slide": 0}),
        ("slide", {"slide": 25}),
        ("slide", {"slide": 110}),
        ("slide", {"window": 1000, "slide": 10}),
        ("allowed_lateness", {"allowed_lateness": 5}),
        ("allowed_lateness", {"allowed_lateness": -10}),
        ("budget.covers", {"period": 15}),
        ("budget.covers", {"period": 0}),
        ("max_skew", {"max_skew": -1}),
        ("end", {"end": 1000}),
        ("release_every", {"window": 10 * ((1 << 20) + 1), "slide": 10 * ((1 << 20) + 1)}),
        ("time", {"end": 10**13}),
    ],
)
def test_refusals(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        changed(**fields).check()
    assert caught.value.field == field


WEEK, DAY = 7 * 86_400_000_000, 86_400_000_000
MOST = limits.MAX_WINDOWS_PER_RECORD


@pytest.mark.parametrize(
    ("field", "last", "first"),
    [
        ("slide", {"window": 10 * MOST, "slide": 10, "allowed_lateness": 0},
         {"window": 10 * (MOST + 1), "slide": 10, "allowed_lateness": 0}),
        ("slide", {"slide": 100}, {"slide": 110}),
        ("release_every", {"end": None, "allowed_lateness": 10 * (1 << 20) - 100},
         {"end": None, "allowed_lateness": 10 * (1 << 20) - 90}),
        ("end", {"end": 1001}, {"end": 1000}),
        ("time", {"end": 1000 + 10 * limits.MAX_STEPS, "slide": 100, "allowed_lateness": 0},
         {"end": 1001 + 10 * limits.MAX_STEPS, "slide": 100, "allowed_lateness": 0}),
        ("max_skew", {"max_skew": 0}, {"max_skew": -1}),
    ],
)  # fmt: skip
def test_the_last_that_is_allowed_and_the_first_that_is_not(
    field: str, last: dict[str, Any], first: dict[str, Any]
) -> None:
    if "end" in last and last["end"] is None:  # long enough to have a year of trigger numbers
        scale = 100_000
        last, first = ({n: v and v * scale for n, v in one.items()} for one in (last, first))
        base = {"window": 100 * scale, "slide": 50 * scale, "trigger_every": 10 * scale}
        last, first = base | last, base | first
    changed(**last).check()
    with pytest.raises(UsageError) as caught:
        changed(**first).check()
    assert caught.value.field == field


def test_a_stream_without_end_ends_where_trigger_numbers_do() -> None:
    """No window or period that holds an event has a trigger beyond the last number."""
    lines = [
        Timeline(5, None, WEEK, DAY, 60_000_000, 2 * DAY, period=30 * DAY),
        Timeline(-(10**15), None, 100_000, 100_000, 100_000),
        Timeline(0, None, 60_000_000, 60_000_000, 20_000, 20_000),
    ]
    for line in lines:
        line.check()
        reach = line.window + line.allowed_lateness + (line.period or 0)
        numbers = line.trigger_time_of(np.array([line.horizon - 1 + reach, line.horizon + reach]))
        assert numbers[0] == limits.MAX_TRIGGER_TIME < numbers[1]
    # Long intervals: instants end before numbers do, with room for what follows an event.
    far = Timeline(0, None, WEEK, WEEK, WEEK, period=WEEK)
    assert far.horizon == (1 << 62) - 2 * WEEK
    assert changed(end=1600).horizon == 1600


def test_a_stream_without_end_lasts_a_year_or_is_refused() -> None:
    def lasting(life: int) -> Timeline:
        """Trigger intervals of 20 ms; a period as long as what life leaves."""
        every = 20_000
        rest = limits.MAX_TRIGGER_TIME * every - every - life
        return Timeline(0, None, every, every, every, period=rest - rest % every)

    life = limits.LEAST_LIFE
    assert lasting(life).horizon == life
    lasting(life).check()
    with pytest.raises(UsageError, match="out of trigger numbers"):
        lasting(life - 20_000).check()


def test_an_end_that_cuts_windows_short_is_looked_at_wherever_time_starts() -> None:
    """Whole windows of this length meet three periods; before the end they meet two."""
    for start in (-1000, 0, 7000):
        timeline = Timeline(start, start + 115, 100, 50, 5, period=60)
        assert timeline.periods_met == 2
        assert msgspec.structs.replace(timeline, end=None).periods_met == 3


def test_a_microsecond_is_the_least_interval() -> None:
    least = Timeline(0, 100, 10, 10, 1)
    least.check()
    with pytest.raises(UsageError, match="allowed_lateness"):
        msgspec.structs.replace(least, allowed_lateness=-1).check()


WEIGHTS = SelectionWeights(1.0, 2.0)


@pytest.mark.parametrize("triggers", [1, 2, 5, 15, 16, 100, 1000])
@pytest.mark.parametrize("tests", [1, 3, 15, 16])
def test_growing_tests_are_the_squares_rounded_up(triggers: int, tests: int) -> None:
    want = {math.ceil(triggers * Fraction(j, tests) ** 2) for j in range(1, tests + 1)}
    test_triggers = growing(triggers, tests)
    assert (
        list(test_triggers) == sorted(want)
        and test_triggers[-1] == triggers
        and test_triggers[0] >= 1
    )


@pytest.mark.parametrize("triggers", [100, 365, 1000, 1440])
def test_the_first_test_is_in_the_first_hundredth(triggers: int) -> None:
    """And the usual numbers put one just before a tenth and just before a half of the window."""
    for tests in (DEFAULT_TESTS, COMBINED_TESTS):
        usual = growing(triggers, tests)
        assert usual[0] <= math.ceil(triggers / 100) and len(usual) == tests
        assert any(0.089 * triggers < at <= triggers / 10 for at in usual)
        assert any(0.47 * triggers < at <= triggers / 2 for at in usual)


@pytest.mark.parametrize(
    ("triggers", "every", "schedule", "want"),
    [
        (7, 3, None, [3, 6, 7]),
        (6, 3, None, [3, 6]),
        (4, 1, None, [1, 2, 3, 4]),
        (9, 2, (1, 4, 9), [1, 4, 9]),
    ],
)
def test_triggers_of_the_tests(
    triggers: int, every: int, schedule: tuple[int, ...] | None, want: list[int]
) -> None:
    assert triggers_of_tests(triggers, every, schedule).tolist() == want


def test_a_step_holds_the_data_up_to_the_next_test() -> None:
    design = make_plan(triggers=12, tests=(2, 3, 7, 12)).design
    assert [design.selection_step_index(t) for t in range(1, 14)] == [
        1, 1, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 5
    ]  # fmt: skip
    assert [t for t in range(1, 13) if design.selects_at(t)] == [2, 3, 7, 12]
    assert design.tests == 4


def test_skipping_has_sixteen_tests_unless_it_says_otherwise() -> None:
    def tests(**given: object) -> int:
        plan = make_plan(triggers=100, skip=True, weights=WEIGHTS, **given)  # type: ignore[arg-type]
        return plan.design.tests

    assert (tests(), tests(tests=4), tests(tests=(5, 100))) == (16, 4, 2)


@pytest.mark.parametrize(
    "given", [(), (0, 12), (3, 3, 12), (5, 4, 12), (3, 11), (12, 13), 0, -1, (1, 2, 3, 14), (-4,)]
)
def test_other_lists_are_refused(given: object) -> None:
    with pytest.raises(UsageError) as raised:
        make_plan(triggers=12, tests=given)
    assert raised.value.field == "mechanism.tests"
    # Whichever of the fixes is written as it stands, the plan is one.
    fixes = re.findall(r"\[[\d, ]+\]|\d+", raised.value.fix)
    assert len(fixes) == (2 if isinstance(given, tuple) else 1)
    for fix in fixes:
        mended = json.loads(fix)
        make_plan(triggers=12, tests=tuple(mended) if isinstance(mended, list) else mended)


def test_the_shortest_schedules_are_accepted() -> None:
    def tests(given: object) -> list[int]:
        return make_plan(triggers=12, tests=given).design.test_triggers.tolist()

    assert (tests(1), tests((12,)), tests((1, 12))) == ([12], [12], [1, 12])


def test_without_tests_or_skip_keys_are_tested_at_equal_distances() -> None:
    design = make_plan(triggers=12, select_every=5, refresh_every=5, weights=WEIGHTS).design
    assert design.schedule is None and design.test_triggers.tolist() == [5, 10, 12]
    assert not design.test_triggers.flags.writeable  # all designs of equal numbers share it


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("mechanism.tests", {"tests": 3, "select_every": 2}),
        ("mechanism.skip", {"skip": True}),
        ("mechanism.skip", {"skip": True, "weights": WEIGHTS, "select_every": 2}),
        ("mechanism.skip", {"skip": True, "weights": None}),
        ("mechanism.skip", {"skip": True, "weights": WEIGHTS, "contributions": 1024}),
        ("mechanism.weights", {"skip": True, "weights": WEIGHTS, "public": "list"}),
        ("mechanism.tests", {"tests": 3, "public": "list"}),
    ],
)
def test_what_cannot_be_is_refused(field: str, given: dict[str, object]) -> None:
    with pytest.raises(UsageError) as raised:
        make_plan(triggers=12, **given)  # type: ignore[arg-type]
    assert raised.value.field == field


def test_records_that_an_id_names_are_not_skipped() -> None:
    plan = make_plan(triggers=12, skip=True, weights=WEIGHTS)
    named = msgspec.structs.replace(plan, record_id=Field("id"))
    with pytest.raises(UsageError, match="record_id") as raised:
        named.check()
    assert raised.value.field == "mechanism.skip"


def test_a_record_in_too_many_windows_is_refused() -> None:
    make_plan(triggers=11, slide=1, skip=True, weights=WEIGHTS)
    with pytest.raises(UsageError, match="windows"):
        make_plan(triggers=12, slide=1, skip=True, weights=WEIGHTS)


def test_only_what_is_new_moves_the_hash() -> None:
    plan = make_plan(triggers=12, weights=WEIGHTS)
    hashes = [plan.hash]
    for change in ({"skip": True}, {"tests": 4}, {"tests": (4, 12)}, {"skip": True, "tests": 4}):
        privacy = msgspec.structs.replace(plan.privacy, **change)
        hashes.append(msgspec.structs.replace(plan, privacy=privacy).hash)
    assert len(set(hashes)) == 5
