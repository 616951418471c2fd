"""Calendars and timelines of them: against ICU, against fixed lengths, and between accounts."""

import itertools
from typing import Any

import duckdb
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpstream.accounting.calendars import NOMINAL, Calendar, CalendarUnit
from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.periods import Spent
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.timeline import Timeline
from dpstream.accounting.plan.unit import UnitIdentity, cost_to, identity_of, periods_of, span_of
from dpstream.accounting.zones import zone_of
from dpstream.state.retention import period_trigger_time
from tests.accounting.test_periods import charge as charge_of
from tests.accounting.test_zones import DAY, YEARS, ZONES
from tests.golden.refusals import Refused
from tests.streams import make_plan

BASE = make_plan()
UNITS: tuple[CalendarUnit, ...] = ("day", "week", "month")


@pytest.mark.parametrize("name", ZONES)
def test_units_are_those_of_another_implementation(name: str) -> None:
    """Of 50 years: the first and the last instant of days, weeks and months, and each change.

    A clock that is set back over midnight shows the day before again; the day has begun by then.
    """
    changes = zone_of(name).changes
    for unit in UNITS:
        calendar = Calendar.of(unit, name)
        numbers = np.arange(calendar.number(0) + 1, calendar.number(YEARS * 365 * DAY))
        begins, local = calendar.beginnings(numbers), calendar.local_beginnings(numbers)
        assert (np.diff(begins) >= 0).all()
        instants = np.unique(np.concatenate([begins, begins - 1, changes]))
        instants = instants[(instants >= begins[0]) & (instants < begins[-1])]
        own = np.searchsorted(begins, instants, "right") - 1
        differ = local[own] != truncated(name, unit, instants)
        since = changes[np.searchsorted(changes, instants[differ], "right") - 1]
        assert (since > begins[own][differ]).all() and (
            since - begins[own][differ] < DAY // 24
        ).all()
        assert (instants[differ] - since < DAY // 24).all()
        assert not differ.any() or name == "America/St_Johns"


def truncated(name: str, unit: str, instants: np.ndarray) -> np.ndarray:
    """Local beginnings of the units that instants lie in, in micros."""
    with duckdb.connect(config={"threads": 1}) as db:
        db.register("given", {"micros": instants})
        local = f"timezone('{name}', make_timestamptz(micros))"
        query = f"SELECT epoch_us(date_trunc('{unit}', {local})) AS t FROM given"
        return np.asarray(db.sql(query).fetchnumpy()["t"], np.int64)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_days_of_utc_are_days_of_one_length(data: st.DataObject) -> None:
    """Two implementations of one timeline: counted in a list, and computed from lengths."""
    draw = data.draw
    step = draw(st.integers(1, 4))
    stride = draw(st.integers(1, 4))
    width = stride + draw(st.integers(0, 5))
    start = draw(st.integers(0, 20_000)) * DAY
    units = {
        "window": width * step,
        "slide": stride * step,
        "trigger_every": step,
        "allowed_lateness": draw(st.integers(0, 3)) * step,
        "period": draw(st.none() | st.integers(1, 9).map(lambda n: n * step)),
    }
    lengths: dict[str, Any] = {name: value and value * DAY for name, value in units.items()}
    skew = draw(st.integers(0, 3 * DAY))
    end = start + draw(st.integers(1, 60 * DAY))
    fixed = Timeline(start=start, end=end, max_skew=skew, **lengths)
    period_unit = None if fixed.period is None else "day"
    listed = Calendar.of("day", "UTC").between(start - 2 * DAY, end + 200 * DAY)
    line = msgspec.structs.replace(fixed, calendar=listed, period_unit=period_unit)
    line.check()
    for name in ("triggers", "windows_per_record", "periods", "periods_met", "windows", "stride"):
        assert getattr(line, name) == getattr(fixed, name), name
    assert line.last_trigger_time == fixed.last_trigger_time
    assert line.skew_trigger_times == fixed.skew_trigger_times
    near = [start + k * DAY + shift for k in range(70) for shift in (-1, 0, 1)]
    near += draw(st.lists(st.integers(start, end), max_size=20))
    times = np.unique(np.array(near))
    stamps = times + draw(st.integers(-DAY, 5 * DAY))
    for one, other in itertools.pairwise((line, fixed)):
        assert (one.trigger_time_of(times) == other.trigger_time_of(times)).all()
        assert (one.last_window_of(times) == other.last_window_of(times)).all()
        inside = times[(times >= start) & (times < end)]
        assert (one.period_of(inside) == other.period_of(inside)).all()
        assert (one.on_time(times, stamps) == other.on_time(times, stamps)).all()
        within = (times >= start) & (times < end)
        closed = [each.period_closed(times[within], stamps[within]) for each in (one, other)]
        assert (closed[0] == closed[1]).all()
        for instant in (*times.tolist(), -(2**63)):
            assert max(-1, one.passed(instant)) == max(-1, other.passed(instant))
            assert max(0, one.ended(instant)) == max(0, other.ended(instant))
    for window in range(fixed.windows):
        assert line.window_bounds(window) == fixed.window_bounds(window)
    if fixed.period is not None:
        numbers = np.arange(1, fixed.last_trigger_time)
        numbers = numbers[numbers <= fixed.windows * fixed.stride]
        assert (period_trigger_time(line, numbers) == period_trigger_time(fixed, numbers)).all()
    spans = [span_of(msgspec.structs.replace(BASE, timeline=each)) for each in (line, fixed)]
    assert (spans[0] is None) == (fixed.period is None)
    if spans[0] is not None and spans[1] is not None:
        assert [value and value * DAY for value in spans[0]] == list(spans[1])


def months(
    start: int, end: int | None, cell: CalendarUnit = "month", zone: str = "Europe/Berlin"
) -> Plan:
    """A job with a budget for each month."""
    length, last = NOMINAL[cell], Calendar.of(cell, zone).end
    calendar = Calendar.of(cell, zone).between(
        start - 2 * DAY, last if end is None else end + 90 * DAY
    )
    line = Timeline(
        start, end, length, length, length,
        period=NOMINAL["month"], calendar=calendar, period_unit="month",
    )  # fmt: skip
    line.check()
    return msgspec.structs.replace(BASE, timeline=line)


def local(text: str, zone: str = "Europe/Berlin") -> int:
    micros = np.array([text], "datetime64[us]").astype(np.int64)
    return int(zone_of(zone).utc(micros)[0])


@pytest.mark.parametrize("cell", ["day", "month"])
def test_a_month_is_charged_once_in_an_account_of_months(cell: CalendarUnit) -> None:
    plan = months(local("2024-01-01"), local("2024-04-01"), cell)
    assert plan.timeline.periods == 3 and plan.timeline.periods_met == 1
    unit = identity_of(plan)
    account = unit.of_all_times
    charge = charge_of(unit, span_of(plan))
    assert cost_to(account, charge).units == 1
    assert periods_of(account, charge) == (54 * 12, 54 * 12 + 3)
    assert UnitIdentity.read(account.text) == account
    later = months(local("2024-04-01"), None, cell)
    further = charge_of(identity_of(later), span_of(later))
    spent = Spent.nothing(account, 8.0).plus(charge).plus(further)
    assert [piece.total.spends for piece in spent.pieces] == [0, 1, 1]


def test_a_window_of_a_week_meets_two_months() -> None:
    start = local("2024-07-01")  # a Monday
    plan = months(start, local("2025-07-01"), "day")
    line = plan.timeline
    weeks = msgspec.structs.replace(line, window=7 * DAY, slide=7 * DAY)
    assert line.periods_met == 1 and weeks.periods_met == 2 and weeks.periods == 12
    begins = [local(f"{year}-{month:02}-01") for year, month in ((2024, 8), (2024, 11), (2025, 4))]
    assert line.period_of(np.array(begins)).tolist() == [1, 4, 9]
    assert line.period_of(np.array(begins) - 1).tolist() == [0, 3, 8]


def test_lists_that_differ_are_another_account(refused: Refused) -> None:
    """A government moves its clocks: the account's list stays, and a later one is refused."""
    plan = months(local("2024-01-01"), local("2024-12-01"))
    account = identity_of(plan).of_all_times
    calendar = plan.timeline.calendar
    assert calendar is not None
    moved = msgspec.structs.replace(
        calendar, changes=(calendar.changes[0] + DAY, calendar.changes[1])
    )
    line = msgspec.structs.replace(plan.timeline, calendar=moved)
    other = msgspec.structs.replace(plan, timeline=line)
    assert other.hash != plan.hash
    for each in (other, months(local("2024-01-01", "UTC"), local("2024-12-01", "UTC"), zone="UTC")):
        charge = charge_of(identity_of(each), span_of(each))
        assert isinstance(refused(cost_to, account, charge), PolicyError)
    # What changes behind a job's last day changes nothing for it.
    beyond = account.calendar
    assert beyond is not None
    longer = msgspec.structs.replace(
        beyond, changes=(*beyond.changes[:-1], beyond.changes[-1] + DAY)
    )
    charge = charge_of(identity_of(plan), span_of(plan))
    assert cost_to(msgspec.structs.replace(account, calendar=longer), charge).units == 1


@pytest.mark.parametrize(
    ("start", "zone", "cell", "changed"),
    [
        ("2024-01-15", "Europe/Berlin", "month", {}),
        ("2024-01-02", "Europe/Berlin", "day", {}),
        ("2024-01-01", "Europe/Berlin", "day", {"trigger_every": 31 * DAY, "window": 31 * DAY}),
        ("2011-12-01", "Pacific/Apia", "day", {"slide": DAY}),
    ],
)
def test_what_no_calendar_has(
    start: str, zone: str, cell: CalendarUnit, changed: dict[str, int], refused: Refused
) -> None:
    """A start inside a month, periods between triggers, and a day that Samoa left out."""
    begin = local(start, zone)
    length = NOMINAL[cell]
    calendar = Calendar.of(cell, zone).between(begin - 2 * DAY, begin + 200 * DAY)
    fields = {"window": length, "slide": length, "trigger_every": length} | changed
    fields["slide"] = fields["window"]
    line = Timeline(
        start=begin, end=begin + 60 * DAY, period=NOMINAL["month"], calendar=calendar,
        period_unit="month", **fields,
    )  # fmt: skip
    assert isinstance(refused(line.check), UsageError)
