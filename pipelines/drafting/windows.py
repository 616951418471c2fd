"""The windows of a first job: of one length, or days, weeks and months of a calendar."""

from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec
import numpy as np

from dpstream.accounting.calendars import Calendar, CalendarUnit
from dpstream.accounting.errors import UsageError
from dpstream.accounting.figures import EPOCH, time_text
from dpstream.pipelines.project.text import duration_micros

_MICRO = timedelta(microseconds=1)
#: What a word stands for in a calendar: a unit, how many, and the number of the first such stretch.
_STRETCHES: dict[str, tuple[CalendarUnit, int]] = {
    "day": ("day", 1),
    "week": ("week", 1),
    "month": ("month", 1),
    "quarter": ("month", 3),
    "year": ("month", 12),
}
WORDS = tuple(_STRETCHES)
#: The first word whose stretch is not longer than so many days.
_SUITS = ((3, "hour"), (31, "day"), (190, "week"), (1_100, "month"))


class Windows(NamedTuple):
    """The windows of a job.

    Attributes:
        start, end: times or local days, as a job writes them; length: of a window, likewise.
        number: how many windows there are.
        calendar: the zone whose days, weeks or months they are; ``None``: windows of one length.
        note: a remark for the user, or empty.
    """

    start: str
    end: str
    length: str
    number: int
    calendar: str | None = None
    note: str = ""


def suited(start: datetime, end: datetime) -> str:
    """Return the word for windows that are neither too short for a range nor too few."""
    days = (end - start) / timedelta(days=1)
    return next((word for most, word in _SUITS if days <= most), "year")


def windows(start: datetime, end: datetime, text: str, zone: str | None = None) -> Windows:
    """Return the windows of a range.

    Args:
        start, end: of the range, UTC.
        text: hour, day, week, month, quarter, year, or a length such as ``6h``.
        zone: of local times.  With it days and weeks are local, too; without it months are UTC's.

    Raises:
        UsageError: the range is empty, or the text is not a length.
    """
    if end <= start:
        raise UsageError("--end", "must lie after --start", "give the day after the last one")
    word = text.strip().lower().removesuffix("s")
    if word in _STRETCHES and (zone is not None or word not in ("day", "week")):
        return _of_calendar(start, end, word, zone or "UTC")
    if word == "week":
        monday = start.replace(hour=0, minute=0, second=0, microsecond=0)
        monday -= timedelta(days=start.weekday())
        return _windows_of(monday, end, timedelta(days=7), "7d", _earlier(word, monday != start))
    length = {"hour": "1h", "day": "1d"}.get(word, text.strip())
    micros = duration_micros("--window", length)
    if not micros:
        raise UsageError("--window", "must be longer than nothing", "write day, week or 12h")
    try:
        size = timedelta(microseconds=micros)
    except OverflowError:
        raise UsageError("--window", "is too long", "write day, week or 12h") from None
    return _windows_of(start, end, size, length)


def _of_calendar(start: datetime, end: datetime, word: str, zone: str) -> Windows:
    """Return windows of a calendar, from the beginning of the one that the range begins in."""
    unit, each = _STRETCHES[word]
    calendar = Calendar.of(unit, zone)
    begin, behind = ((moment - EPOCH) // _MICRO for moment in (start, end))
    first, last = calendar.number(begin), calendar.number(behind - 1)
    first -= first % each
    number = (last - first) // each + 1
    ends = calendar.beginnings(np.array([first, first + number * each]))
    days = msgspec.structs.replace(calendar, unit="day")
    is_day = int(days.beginnings(np.array([days.number(behind)]))[0]) == behind
    note = _earlier(word, int(ends[0]) != begin)
    if int(ends[1]) != behind:
        note = f"{note} {_CUTS}".strip()
    return Windows(
        calendar.day(int(ends[0])),
        calendar.day(behind) if is_day else time_text(end),
        f"1 {word}",
        number,
        zone,
        note,
    )


_CUTS = "--end cuts the last window short."


def _earlier(word: str, before: bool) -> str:
    """Return a remark where the first window begins before the range."""
    return f"The first {word} began before --start, and so does the first window." if before else ""


def _windows_of(
    start: datetime, end: datetime, size: timedelta, length: str, note: str = ""
) -> Windows:
    """Return windows of one size; the last one may end before it is full."""
    if (end - start) % size:
        note = f"{note} {_CUTS}".strip()
    return Windows(time_text(start), time_text(end), length, -((start - end) // size), None, note)
