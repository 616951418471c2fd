"""Local days, weeks and months as a public list of instants.

Days of a time zone have 23 to 25 hours and months 28 to 31 days, so that windows of the calendar
have no length.  A `Calendar` says when each of its units begins, and a timeline counts in units.
The list follows from the Gregorian calendar, which never changes, and from the offsets of the zone,
which governments change: these stand in the calendar, for all instants that it is used for.  A
plan, its hash and a worker therefore have one list, whatever a machine knows of time zones later.

Units have numbers: days since 1970-01-01, weeks since that of Monday 1969-12-29, months since
1970-01.  Each begins at its local midnight; where clocks skip that, at the instant that would be
midnight without the change (`accounting.zones`): its first instant if they are set forward at
midnight, half an hour later if at 23:30 (Toronto, 1919-03-30).
"""

import functools
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.accounting.zones import Zone, zone_of

CalendarUnit = Literal["day", "week", "month"]

_DAY = 86_400_000_000
#: What stands for the length of a unit where lengths are divided, in micros.  No unit lasts longer
#: but where a clock is set back.
NOMINAL: dict[CalendarUnit, int] = {"day": _DAY, "week": 7 * _DAY, "month": 31 * _DAY}
#: Days from 1970-01-01 back to a Monday.
_MONDAY = 3
#: The instants between which a zone is known, in micros: 1900 to 2099.
RANGE = (-2_208_988_800_000_000, 4_102_444_800_000_000)


class Calendar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One unit of the local calendar of a time zone, between two instants.

    Attributes:
        unit: what is counted.
        zone: name of the time zone.
        begin, end: micros since 1970; the offsets are those of every instant between them.
        changes: micros since 1970 at which the offset changes, all of them between the two.
        offsets: micros to add to UTC before, between and after the changes.
    """

    unit: CalendarUnit
    zone: str
    begin: int
    end: int
    changes: tuple[int, ...]
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, unit: CalendarUnit, zone: str) -> "Calendar":
        """Return the calendar of a zone as this machine knows it."""
        offsets = zone_of(zone)
        changes = tuple(offsets.changes.tolist())
        return cls(unit, zone, *RANGE, changes, tuple(offsets.offsets.tolist()))

    def between(self, begin: int, end: int) -> "Calendar":
        """Return the calendar between two of its instants."""
        first, last = np.searchsorted(np.array(self.changes, np.int64), (begin, end - 1), "right")
        return msgspec.structs.replace(
            self,
            begin=begin,
            end=end,
            changes=self.changes[first:last],
            offsets=self.offsets[first : last + 1],
        )

    @property
    def nominal(self) -> int:
        """What stands for the length of a unit, in micros."""
        return NOMINAL[self.unit]

    def number(self, instant: int) -> int:
        """Return the number of the unit that an instant lies in."""
        day = self.local(instant) // _DAY
        if self.unit == "month":
            return int(np.datetime64(day, "D").astype("M8[M]").astype(np.int64))
        return day if self.unit == "day" else (day + _MONDAY) // 7

    def local(self, instant: int) -> int:
        """Return the local time of an instant; both in micros since 1970."""
        zone = self._zone
        return instant + int(zone.offsets[np.searchsorted(zone.changes, instant, side="right")])

    def beginnings(self, numbers: Int64) -> Int64:
        """Return the instants at which units begin, in micros."""
        return self.instants(self.local_beginnings(numbers))

    def local_beginnings(self, numbers: Int64) -> Int64:
        """Return the local midnights at which units begin, in micros since 1970."""
        if self.unit == "month":
            days = numbers.astype("M8[M]").astype("M8[D]").astype(np.int64)
        else:
            days = numbers if self.unit == "day" else 7 * numbers - _MONDAY
        return days * _DAY

    def instants(self, local: Int64) -> Int64:
        """Return the instants of local times; both in micros since 1970."""
        return self._zone.utc(local)

    def day(self, instant: int) -> str:
        """Return the local day of an instant, ``2024-01-31``."""
        days = msgspec.structs.replace(self, unit="day")
        return str(np.datetime64(days.number(instant), "D"))

    def days(self, begin: int, end: int) -> str:
        """Return the local days or the months from one instant to before another."""
        first, last = self.day(begin), self.day(end - 1)
        if self.unit == "month":
            first, last = first[:-3], last[:-3]
        return first if first == last else f"{first} to {last}"

    @property
    def _zone(self) -> Zone:
        return Zone(np.array(self.changes, np.int64), np.array(self.offsets, np.int64))

    def words(self, length: int) -> str:
        """Return a nominal length as text: ``1 month``."""
        number = length // self.nominal
        return f"{number} {self.unit}{'s' if number != 1 else ''}"


class Bounds(NamedTuple):
    """When trigger times and privacy periods of a timeline of the calendar are.

    Attributes:
        instants: (n + 1,) int64 micros: trigger time i is at ``instants[i]``, 0 is the start.
        periods: (p + 1,) int64 trigger times at which privacy periods begin; without any, ``(0,)``.
        aligned: whether all privacy periods begin at trigger times.
    """

    instants: Int64
    periods: Int64
    aligned: bool


@functools.lru_cache(maxsize=64)
def bounds(
    calendar: Calendar, start: int, step: int, period_unit: CalendarUnit | None, period: int
) -> Bounds:
    """Return the trigger times of a calendar from one of its beginnings to its end.

    Args:
        step: units between two trigger times.
        period_unit: unit of the privacy periods, ``None``: there are none; period: units of each.
    """
    first = calendar.number(start)
    numbers = np.arange(first, calendar.number(calendar.end), step, dtype=np.int64)
    instants = calendar.beginnings(numbers)
    instants.setflags(write=False)
    if period_unit is None:
        return Bounds(instants, np.zeros(1, np.int64), True)
    of_periods = msgspec.structs.replace(calendar, unit=period_unit)
    first, last = of_periods.number(start), of_periods.number(calendar.end)
    at = of_periods.beginnings(np.arange(first, last, period, dtype=np.int64))
    at = at[at <= instants[-1]]
    periods = np.searchsorted(instants, at)
    periods.setflags(write=False)
    return Bounds(instants, periods, bool((instants[periods] == at).all()))
