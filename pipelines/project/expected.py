"""``expect`` of a table: the names of files that complete data has, a public rule of time alone.

``expect = "raw/date={day}/*.csv.gz"`` says that every day of the job has a file of that name, of
any name that the glob signs allow.  A field is ``{hour}``, ``{day}`` or ``{month}``, written as in
RFC 3339 or in directives of ``strftime``: ``{day:%Y%m%d}``.  Names are relative to the project
file's folder, as ``path`` is; a marker that a producer writes last, such as
``raw/date={day}/_SUCCESS``, may be expected too, though ``path`` does not match it.

**What is public.**  The rule, the names that follow from it and the calendar, and whether a file of
each is there: whoever writes ``expect`` declares that the producer writes one for every period,
whatever the records are.  If it writes none for a period without records, the absence of the name
says that there were none, without noise.  Which other names there are, how many files have a name
and how large they are depends on the records, and is the operator's alone.
"""

import contextlib
import functools
import glob
import os
import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import cast

import msgspec
import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.accounting.calendars import Calendar, CalendarUnit
from dpstream.accounting.errors import UsageError
from dpstream.accounting.figures import EPOCH
from dpstream.accounting.places import below, matching
from dpstream.state.disk_errors import file_errors
from dpstream.state.passes import Period

FIELD = "table.expect"
_TIME_FIELD = re.compile(r"\{(hour|day|month)(?::([^{}]*))?\}")
#: How each field is written, and the directives that it may have.
_WRITTEN = {"hour": "%Y-%m-%dT%H", "day": "%Y-%m-%d", "month": "%Y-%m"}
_DIRECTIVES = {"hour": "YmdjH", "day": "Ymdj", "month": "Ym"}
_HOUR = 3_600_000_000
_DAY = 24 * _HOUR
#: What a name must show: each is added to the beginning of 2023.
_LATER = {
    "month": (31 * _DAY, 365 * _DAY),
    "day": (_DAY, 31 * _DAY, 365 * _DAY),
    "hour": (_HOUR, _DAY, 31 * _DAY, 365 * _DAY),
}
_SAMPLE = 1_672_531_200_000_000


class Expectation(msgspec.Struct, frozen=True):
    """A rule over names of files.

    Attributes:
        text: as written.
        unit: of the periods.
        zone: whose hours, days and months they are.
    """

    text: str
    unit: str
    zone: str

    @classmethod
    def of(cls, text: str, zone: str) -> "Expectation":
        """Return the rule of a text.

        Raises:
            UsageError: it has no field, fields of different units, or directives that do not tell
                one period from another.
        """
        fix = 'write it like "raw/date={day}/*.csv.gz", with {hour}, {day} or {month}'
        units = {match[1] for match in _TIME_FIELD.finditer(text)}
        if len(units) != 1 or {*"{}"} & {*_TIME_FIELD.sub("", text)}:
            raise UsageError(FIELD, "needs time fields of one unit, and no other braces", fix)
        rule = cls(text, units.pop(), zone)
        directives = {
            directive
            for match in _TIME_FIELD.finditer(text)
            for directive in re.findall("%(.?)", match[2] or "")
        }
        names = {rule._name(_SAMPLE + later) for later in (0, *_LATER[rule.unit])}
        if not directives <= {*_DIRECTIVES[rule.unit]} or len(names) <= len(_LATER[rule.unit]):
            allowed = ", ".join(f"%{each}" for each in _DIRECTIVES[rule.unit])
            raise UsageError(
                FIELD,
                f"does not tell one {rule.unit} from another, or has a directive that is not one of"
                f" {allowed}",
                fix,
            )
        return rule

    def _name(self, local: int) -> str:
        """Return the name of the period that begins at a local time (micros since 1970)."""
        moment = EPOCH + timedelta(microseconds=local)
        return _TIME_FIELD.sub(
            lambda match: moment.strftime(match[2] or _WRITTEN[match[1]]), self.text
        )

    def periods(self, begin: int, end: int) -> list[Period]:
        """Return the periods that meet ``[begin, end)`` (instants in micros), in order."""
        if end <= begin:
            return []
        local = self._beginnings(begin, end)
        at = _calendar("day", self.zone).instants(local)
        return [
            Period(self._name(each), first, after)
            for each, first, after in zip(
                local.tolist(), at[:-1].tolist(), at[1:].tolist(), strict=False
            )
            if first < after and first < end and after > begin
        ]

    def _beginnings(self, begin: int, end: int) -> Int64:
        """Return local beginnings of periods (micros) from before an instant to behind another."""
        if self.unit == "hour":
            local = _calendar("day", self.zone).local
            return np.arange(local(begin) // _HOUR - 1, local(end) // _HOUR + 3) * _HOUR
        calendar = _calendar(cast(CalendarUnit, self.unit), self.zone)
        numbers = np.arange(calendar.number(begin), calendar.number(end) + 2, dtype=np.int64)
        return calendar.local_beginnings(numbers)


@functools.lru_cache(maxsize=8)
def _calendar(unit: CalendarUnit, zone: str) -> Calendar:
    return Calendar.of(unit, zone)


def files_of(period: Period, folder: Path) -> list[str]:
    """Return the paths of the files that have a period's name.

    Args:
        folder: that names are relative to.

    Raises:
        RunError: a folder cannot be listed.
    """
    pattern = below(Path(glob.escape(str(folder))), period.name, FIELD)
    with file_errors(FIELD, "has a folder that cannot be listed"):
        return [path for path in matching(os.fspath(pattern)) if os.path.isfile(path)]


#: How the part of a name that a ``*`` stands for may be written, and the field that says so.
_FORMS = {
    "%Y-%m-%d": "{day}",
    "%Y%m%d": "{day:%Y%m%d}",
    "%Y-%m": "{month}",
    "%Y-%m-%dT%H": "{hour}",
}


def proposed(pattern: str, path: str) -> str | None:
    """Return the rule that a pattern of files suggests; ``None``: it has no time in its names.

    Args:
        pattern: a table's path.
        path: a file that it matches; only its name is read.
    """
    parts, names = Path(pattern).parts, Path(path).parts
    for at, (part, name) in enumerate(zip(parts, names, strict=False)):
        before, star, after = part.partition("*")
        if not star or "*" in after or "**" in parts[:at]:
            continue
        value = name.removeprefix(before).removesuffix(after)
        for form, field in _FORMS.items():
            with contextlib.suppress(ValueError):
                if datetime.strptime(value, form).strftime(form) == value:
                    return str(Path(*parts[:at], f"{before}{field}{after}", *parts[at + 1 :]))
    return None
