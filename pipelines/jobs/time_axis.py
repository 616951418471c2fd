"""The time fields of a job as the plan's timeline: of fixed lengths, or of a calendar.

With ``calendar = "Europe/Berlin"`` all lengths are days, weeks, months, quarters or years of that
zone, in the unit of ``release_every``; what the budget covers may be of a longer unit.  A time
without an offset is local.
"""

import re
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from dpstream.accounting.calendars import NOMINAL, RANGE, Calendar, CalendarUnit
from dpstream.accounting.errors import UsageError
from dpstream.accounting.plan.timeline import Timeline
from dpstream.pipelines.project.dialect import check_zone
from dpstream.pipelines.project.job_section import JobSection
from dpstream.pipelines.project.source import Source
from dpstream.pipelines.project.text import duration_micros, instant_micros

_LENGTH = re.compile(r"\s*(?:([0-9]{1,9}) ?)?(d|day|w|week|month|quarter|year)s?\s*")
_UNITS: dict[str, tuple[CalendarUnit, int]] = {
    "d": ("day", 1),
    "day": ("day", 1),
    "w": ("week", 1),
    "week": ("week", 1),
    "month": ("month", 1),
    "quarter": ("month", 3),
    "year": ("month", 12),
}
#: A list of a calendar begins so much before its start, in micros: no offset is larger.
_MARGIN = 2 * NOMINAL["day"]
#: Where a stretch of several units that has a name of its own begins: the number of one such unit.
_BEGINS = {
    ("day", 7): (-3, "on a Monday"),
    ("month", 3): (0, "in January, April, July or October"),
    ("month", 12): (0, "in January"),
}


class _Length(NamedTuple):
    """A length of the calendar: a number of its units, and how many its word stands for."""

    unit: CalendarUnit
    number: int
    each: int


def timeline_of(job: JobSection, source: Source) -> Timeline:
    """Return the time axis of a job; a bounded source needs its end.

    Raises:
        UsageError: a length or time cannot be read, or is none of the calendar.
    """
    if job.end is None and not source.unbounded:
        raise UsageError(
            "end",
            f"is required, because table.format '{source.kind}' is bounded",
            "add the end of the last window, for example end = '2014-01-07T00:00:00Z'",
        )
    if job.calendar is not None:
        return _of_calendar(job, job.calendar)
    window = duration_micros("window", job.window)
    covers = {"lifetime": None, "window": job.window}
    period = covers.get(job.budget.covers, job.budget.covers)
    return Timeline(
        start=instant_micros("start", job.start),
        end=None if job.end is None else instant_micros("end", job.end),
        window=window,
        slide=window if job.slide is None else duration_micros("slide", job.slide),
        trigger_every=duration_micros("release_every", job.release_every),
        allowed_lateness=duration_micros("allowed_lateness", job.allowed_lateness),
        max_skew=duration_micros("max_skew", job.max_skew),
        period=None if period is None else duration_micros("budget.covers", period),
    )


def remembered(job: JobSection) -> Literal["run", "never"] | int | None:
    """Return what ``remember_keys`` says: for how long (micros), for the run, or never."""
    text = job.remember_keys
    if text is None:
        return None
    named: dict[str, Literal["run", "never"]] = {"run": "run", "never": "never"}
    if text in named:
        return named[text]
    try:
        if job.calendar is None:
            return duration_micros("remember_keys", text)
        unit = _length("release_every", job.release_every).unit
        return _in_units("remember_keys", text, unit) * NOMINAL[unit]
    except UsageError as error:
        fix = "write 'run', 'never', or a duration such as '30d'"
        raise UsageError("remember_keys", error.rule, fix) from None


def _of_calendar(job: JobSection, zone: str) -> Timeline:
    """Return a time axis in units of the calendar; see the module."""
    check_zone("calendar", zone)
    unit = _length("release_every", job.release_every).unit
    nominal, calendar = NOMINAL[unit], Calendar.of(unit, zone)

    def micros(field: str, text: str) -> int:
        return nominal * _in_units(field, text, unit)

    window, late = micros("window", job.window), job.allowed_lateness
    covered = _covered(job, unit)
    start = _instant("start", job.start, calendar)
    end = None if job.end is None else _instant("end", job.end, calendar)
    timeline = Timeline(
        start=start,
        end=end,
        window=window,
        slide=window if job.slide is None else micros("slide", job.slide),
        trigger_every=micros("release_every", job.release_every),
        allowed_lateness=0 if late == "0s" else micros("allowed_lateness", late),
        max_skew=duration_micros("max_skew", job.max_skew),
        period=None if covered is None else covered.number * NOMINAL[covered.unit],
        period_unit=None if covered is None else covered.unit,
    )
    _check_named(job.window, calendar, start)
    last = RANGE[1] if end is None else end + timeline.allowed_lateness + _MARGIN
    if end is not None:
        last += 2 * (timeline.window + (timeline.period or 0))
    if not RANGE[0] + _MARGIN <= start or last > RANGE[1]:
        raise UsageError("calendar", "is known from 1900 to 2099", "choose other times, or omit it")
    return msgspec.structs.replace(timeline, calendar=calendar.between(start - _MARGIN, last))


def period_of(field: str, length: str, zone: str, start: str | None) -> tuple[int, int, Calendar]:
    """Return a period of a calendar as units, the first beginning's number modulo it, and its list.

    Args:
        start: a local day on which a period begins; ``None``: one begins with the calendar.

    Raises:
        UsageError: the zone, the length or the day is none.
    """
    check_zone(field, zone)
    period = _length(field, length)
    calendar = Calendar.of(period.unit, zone)
    first = 0 if start is None else calendar.number(_instant("--start", start, calendar))
    return period.number, first % period.number, calendar


def _covered(job: JobSection, unit: CalendarUnit) -> _Length | None:
    """Return the length of a privacy period, in a unit whose beginnings are trigger times."""
    covers = job.budget.covers
    if covers == "lifetime":
        return None
    if covers == "window":
        return _Length(unit, _in_units("window", job.window, unit), 1)
    length = _length("budget.covers", covers)
    if unit not in (length.unit, "day"):
        return _Length(unit, _in_units("budget.covers", covers, unit), 1)
    return length


def _length(field: str, text: str) -> _Length:
    match = _LENGTH.fullmatch(text)
    number = int(match[1] or 1) if match else 0
    if match is None or not number:
        raise UsageError(
            field,
            "is no length of a calendar, whose days and months differ in hours",
            "write '1 day', '2 weeks', '1 month', '1 quarter' or '1 year', or omit calendar",
        )
    unit, each = _UNITS[match[2]]
    return _Length(unit, number * each, each)


def _in_units(field: str, text: str, unit: CalendarUnit) -> int:
    """Return a length in units of the calendar."""
    length = _length(field, text)
    if length.unit == unit:
        return length.number
    if (length.unit, unit) == ("week", "day"):
        return 7 * length.number
    raise UsageError(
        field,
        f"is not a number of {unit}s, which release_every is given in",
        f"write it in {unit}s, or release_every as '1 {length.unit}'",
    )


def _check_named(window: str, calendar: Calendar, start: int) -> None:
    """Refuse windows called weeks, quarters or years that begin inside of one."""
    length = _length("window", window)
    each = 7 if (length.unit, calendar.unit) == ("week", "day") else length.each
    first, where = _BEGINS.get((calendar.unit, each), (0, ""))
    if where and (calendar.number(start) - first) % each:
        raise UsageError(
            "start",
            f"is inside of a window of '{window}', which begins {where}",
            f"choose another start, or write window = '{each} {calendar.unit}s'",
        )


def _instant(field: str, text: str, calendar: Calendar) -> int:
    """Return the instant of a local day or time, or of a time with its offset."""
    local = re.fullmatch(r"([0-9-]{10})(?:[Tt ]([0-9:.]+))?", text.strip())
    if local is None:
        return instant_micros(field, text)
    micros = instant_micros(field, f"{local[1]}T{local[2] or '00:00:00'}Z")
    return int(calendar.instants(np.array([micros]))[0])
