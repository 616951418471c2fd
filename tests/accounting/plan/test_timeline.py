"""The public time axis against plain loops, and its refusals."""

import msgspec
import numpy as np
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.plan.timeline import Timeline

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


@pytest.mark.parametrize("line", [BASE, changed(slide=100), changed(end=None), changed(slide=30)])
def test_windows_at_a_trigger_time(line: Timeline) -> None:
    last = 40 if line.end is None else line.windows
    for trigger_time in range(1, 70):
        expected = [
            w for w in range(last) if line.base(w) < trigger_time <= line.base(w) + line.triggers
        ]
        assert list(line.windows_at(trigger_time)) == [w for w in expected if w < last]


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
        ("time.trigger_every", {"trigger_every": 0}),
        ("time.window", {"window": 105}),
        ("time.window", {"window": 0}),
        ("time.slide", {"slide": 0}),
        ("time.slide", {"slide": 25}),
        ("time.slide", {"slide": 110}),
        ("time.slide", {"window": 1000, "slide": 10}),
        ("time.allowed_lateness", {"allowed_lateness": 5}),
        ("time.allowed_lateness", {"allowed_lateness": -10}),
        ("privacy.period", {"period": 15}),
        ("privacy.period", {"period": 0}),
        ("time.max_skew", {"max_skew": -1}),
        ("time.end", {"end": 1000}),
        ("time.trigger_every", {"window": 10 * ((1 << 20) + 1), "slide": 10 * ((1 << 20) + 1)}),
        ("time", {"end": 10**13}),
    ],
)
def test_refusals(field: str, fields: dict) -> None:
    with pytest.raises(UsageError) as caught:
        changed(**fields).check()
    assert caught.value.field == field
