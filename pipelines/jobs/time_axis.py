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
_ZERO = re.compile(r"0 ?[a-z]*")
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
        UsageError: a length or time cannot be read, or does not suit the calendar.
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
        unit = cell_unit(job)
        return _in_units("remember_keys", text, unit) * NOMINAL[unit]
    except UsageError as error:
        length = "30 days" if job.calendar is None else f"3 {cell_unit(job)}s"
        fix = f"write 'run', 'never', or a length such as '{length}'"
        raise UsageError("remember_keys", error.rule, fix) from None


def cell_unit(job: JobSection) -> CalendarUnit:
    """Return the calendar's unit in which a job's lengths are: that of ``release_every``."""
    return _length("release_every", job.release_every).unit


def _of_calendar(job: JobSection, zone: str) -> Timeline:
    """Return a time axis in units of the calendar; see the module."""
    check_zone("calendar", zone)
    unit = cell_unit(job)
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
        allowed_lateness=0 if _ZERO.fullmatch(late) else micros("allowed_lateness", late),
        max_skew=duration_micros("max_skew", job.max_skew),
        period=None if covered is None else covered.number * NOMINAL[covered.unit],
        period_unit=None if covered is None else covered.unit,
    )
    if job.slide is None:
        _check_named("start", "window =", job.window, calendar, start)
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
    if start is None:
        return period.number, 0, calendar
    day = _instant("--start", start, calendar)
    first = calendar.number(day)
    if calendar.beginnings(np.array([first]))[0] != day:
        raise UsageError(
            "--start",
            f"is not the beginning of a {period.unit} in {zone}",
            "write the first day of one",
        )
    _check_named("--start", field, length, calendar, day)
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
            "is not a number of days, weeks, months, quarters or years, the lengths of a calendar",
            "write '1 day', '2 weeks' or '1 month'" + (", or omit calendar" * (field[0] != "-")),
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
    fix = f"write a number of {unit}s, such as '4 {unit}s'"
    if unit == "day" and field != "budget.covers":
        fix = "write release_every = '1 month', because a month is no number of days"
    raise UsageError(
        field,
        f"is in {length.unit}s and release_every is in {unit}s, but a {length.unit} is no fixed"
        f" number of {unit}s",
        fix,
    )


def _check_named(field: str, written: str, text: str, calendar: Calendar, start: int) -> None:
    """Refuse windows or periods called weeks, quarters or years that begin inside of one.

    Args:
        field: of the start; written: what stands before ``text``, their length.
    """
    length = _length(written, text)
    each = 7 if (length.unit, calendar.unit) == ("week", "day") else length.each
    first, where = _BEGINS.get((calendar.unit, each), (0, ""))  # of windows that do not slide
    if where and (calendar.number(start) - first) % each:
        units, zone = length.number * each // length.each, f" in {calendar.zone}"
        raise UsageError(
            field,
            f"is inside of a stretch of '{text}', which begins {where}",
            f"choose another start, or write {written} '{units} {calendar.unit}s"
            f"{zone * (written[0] == '-')}'",
        )


def _instant(field: str, text: str, calendar: Calendar) -> int:
    """Return the instant of a local day or time, or of a time with its offset."""
    local = re.fullmatch(r"([0-9-]{10})(?:[Tt ]([0-9:.]+))?", text.strip())
    if local is None:
        return instant_micros(field, text)
    try:
        micros = instant_micros(field, f"{local[1]}T{local[2] or '00:00:00'}Z")
    except UsageError as error:
        raise UsageError(field, error.rule, "write it like 2024-01-31") from None
    return int(calendar.instants(np.array([micros]))[0])
