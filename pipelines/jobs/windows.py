"""Windows that suit a range of time: days, weeks, and lengths that replace months and years.

All windows of a job have one length, which calendar months do not have.  A calendar month is a
window only if it is the whole range; otherwise four weeks replace it.  Windows of weeks begin on
Mondays.
"""

import re
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.project.text import duration_micros, instant_micros

_DAY = timedelta(days=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: Days of a window, by what is asked for; months, quarters and years in whole weeks.
WORDS = {"hour": 0, "day": 1, "week": 7, "month": 28, "quarter": 91, "year": 364}
#: Months of what is exact where it is the whole stretch.
_MONTHS = {"month": 1, "quarter": 3, "year": 12}
#: The first word whose stretch is not longer than so many days.
_SUITS = ((3, "hour"), (31, "day"), (190, "week"), (1_100, "month"))


class Windows(NamedTuple):
    """The windows of a job.

    Attributes:
        start, end: RFC 3339 times.
        length: length of a window, as a job writes it.
        note: a remark for the user, or empty.
    """

    start: str
    end: str
    length: str
    note: str = ""

    @property
    def several(self) -> bool:
        """Whether there is more than one window."""
        return self.number > 1

    @property
    def number(self) -> int:
        """The number of windows."""
        start, end = (instant_micros("time", text) for text in (self.start, self.end))
        return -(-(end - start) // duration_micros("window", self.length))


def instant(field: str, text: str) -> datetime:
    """Parse a day (``2024-01-01``) or an RFC 3339 time; a time without zone is UTC.

    Raises:
        UsageError: the text is neither.
    """
    text = text.strip()
    if re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
        text += "T00:00:00"
    if re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9:.]+", text):
        text += "Z"
    try:
        return _EPOCH + timedelta(microseconds=instant_micros(field, text))
    except (UsageError, OverflowError):
        raise UsageError(
            field, "is neither a day nor an RFC 3339 time", "write it like 2024-01-31"
        ) from None


def instant_text(moment: datetime) -> str:
    """Return an instant as a job writes it."""
    return moment.isoformat().replace("+00:00", "Z")


def suited(start: datetime, end: datetime) -> str:
    """Return the word for windows that are neither too short for a range nor too few."""
    days = (end - start) / _DAY
    return next((word for most, word in _SUITS if days <= most), "year")


def windows(start: datetime, end: datetime, text: str) -> Windows:
    """Return the windows of a range.

    Args:
        start, end: of the range, UTC.
        text: a word of ``WORDS``, or a length such as ``6h``.

    Raises:
        UsageError: the range is empty, or the text is not a length.
    """
    if end <= start:
        raise UsageError("--end", "must lie after --start", "give the day after the last one")
    word = text.strip().lower().removesuffix("s")
    if word in _MONTHS:
        return _calendar(start, end, word)
    if word == "week":
        monday = start.replace(hour=0, minute=0, second=0, microsecond=0)
        monday -= timedelta(days=start.weekday())
        note = "Weeks begin on Monday, so the first window begins before --start."
        return _windows_of(monday, end, timedelta(days=7), "7d", note if monday != start else "")
    length = {"hour": "1h", "day": "1d"}.get(word, text.strip())
    micros = duration_micros("--window", length)
    if not micros:
        raise UsageError("--window", "must be longer than nothing", "write day, week or 12h")
    try:
        size = timedelta(microseconds=micros)
    except OverflowError:
        raise UsageError("--window", "is too long", "write day, week or 12h") from None
    return _windows_of(start, end, size, length)


def _calendar(start: datetime, end: datetime, word: str) -> Windows:
    """Return one window if the range is one month, quarter or year; else windows of whole weeks."""
    months = start.year * 12 + start.month - 1 + _MONTHS[word]
    if start.day == 1 and months // 12 < datetime.max.year:
        after = start.replace(year=months // 12, month=months % 12 + 1)
        if after == end and start.time() == datetime.min.time():
            return Windows(instant_text(start), instant_text(end), f"{(end - start).days}d")
    days = WORDS[word]
    note = (
        f"Windows have one length, and a {word} of the calendar has not: {days // 7} weeks stand"
        f" for it. For one exact {word} give its own --start and --end."
    )
    return _windows_of(start, end, timedelta(days=days), f"{days}d", note)


def _windows_of(
    start: datetime, end: datetime, size: timedelta, length: str, note: str = ""
) -> Windows:
    """Return windows of one size; the last one may end before it is full."""
    if (end - start) % size:
        note = f"{note} --end cuts the last window short.".strip()
    return Windows(instant_text(start), instant_text(end), length, note)
