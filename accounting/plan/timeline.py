"""The public time axis: windows, triggers, periods, and when keys are tested.

Everything here is a function of the plan and of one record's own times, never of another
record or of a clock (mechanism.md rule 0: stamps decide).  Times are int64 microseconds
since the epoch.  The axis is divided every ``trigger_every`` micros from ``start``: trigger
time g is the instant ``start + g * trigger_every``; the half-open cell before it holds the
records of trigger g, so a record exactly on a trigger time belongs to the next trigger.

In a timeline with a calendar (`accounting.calendars`) trigger times are beginnings of local days,
weeks or months instead, and all that is counted in trigger times stays as it is: lengths are whole
numbers of the calendar's unit, each with its nominal length in micros, and only the instants of
trigger times and of privacy periods are looked up in the calendar's list.

Window w is ``[start + w*slide, start + w*slide + window)``.  Its triggers are the trigger
times ``base(w) + 1 .. base(w) + T`` with ``base(w) = w * slide / trigger_every`` and
``T = (window + allowed_lateness) / trigger_every``; its step j is trigger ``base(w) + j``.

**Tests of keys** are at public triggers of a window, few of them and growing apart.  Fewer tests
need less selection noise and a smaller union; with ``skip`` what one test published costs later
pairs nothing (mechanism.md section 9).  Values keep their own triggers.
"""

import functools
import itertools
import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from dpstream.accounting import limits
from dpstream.accounting.arrays import Bool, Float64, Int64
from dpstream.accounting.calendars import Bounds, Calendar, CalendarUnit, bounds
from dpstream.accounting.errors import UsageError, required
from dpstream.accounting.fields import job_field
from dpstream.accounting.figures import duration

if TYPE_CHECKING:
    from dpstream.accounting.plan.privacy import Privacy


class Timeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Public geometry of a job's time (instants and lengths in microseconds).

    Attributes:
        start: first instant; windows, triggers and periods align here.
        end: no event at or after it; ``None`` for a stream without end (see
            ``horizon``).
        window: length of a window; ``slide``: distance of window starts.
        trigger_every: distance of public triggers.
        allowed_lateness: how long after its end a window still takes records.
        max_skew: how far an event time may run ahead of its stamp.
        period: length of a privacy period, ``None`` = the whole stream.
        calendar: whose units trigger times begin with; ``None``: they are equally far apart.
        period_unit: the calendar's unit that privacy periods are of.
    """

    start: int
    end: int | None
    window: int
    slide: int
    trigger_every: int
    allowed_lateness: int = 0
    max_skew: int = 0
    period: int | None = None
    calendar: Calendar | None = None
    period_unit: CalendarUnit | None = None

    def check(self) -> None:
        """Refuse geometry that is empty, misaligned or unbounded in cost."""
        step = self.trigger_every
        if step <= 0:
            raise UsageError("release_every", "must be positive", "write e.g. '15m'")
        aligned = {
            "window": self.window,
            "slide": self.slide,
            "allowed_lateness": self.allowed_lateness,
            "budget.covers": self.period if self.period is not None else step,
        }
        for field, value in aligned.items():
            if value % step or value < 0 or (value == 0 and field != "allowed_lateness"):
                raise UsageError(
                    field,
                    "must be a positive multiple of release_every (lateness may be 0)",
                    "choose lengths that release_every divides",
                )
        if self.max_skew < 0:
            raise UsageError("max_skew", "must not be negative", "write e.g. '0s'")
        if self.end is not None and self.end <= self.start:
            raise UsageError("end", "must lie after start", "correct the two times")
        if self.slide > self.window:
            raise UsageError(
                "slide",
                "must not exceed window (records between windows would be lost)",
                "use slide <= window",
            )
        if -(-self.window // self.slide) > limits.MAX_WINDOWS_PER_RECORD:
            raise UsageError(
                "slide",
                f"a record may be in at most {limits.MAX_WINDOWS_PER_RECORD} windows",
                "use a larger slide",
            )
        if self.triggers > limits.MAX_TRIGGERS:
            raise UsageError(
                "release_every",
                f"a window has at most {limits.MAX_TRIGGERS} triggers",
                "use a longer trigger interval",
            )
        if self.calendar is not None:
            self._check_calendar(self.calendar)
        if self.end is None and self.horizon - self.start < limits.LEAST_LIFE:
            raise UsageError(
                "release_every",
                "a stream without end would run out of trigger numbers (31 bits) within a year",
                "use a longer trigger interval, or give end",
            )
        if self.end is not None and self.windows * self.triggers > limits.MAX_STEPS:
            raise UsageError(
                "time", f"windows x triggers exceed {limits.MAX_STEPS}", "use fewer triggers"
            )

    def _check_calendar(self, calendar: Calendar) -> None:
        """Refuse a start inside a unit or a period, and a calendar that leaves out a unit."""
        for of_unit in (calendar, self.period_calendar or calendar):
            begins = of_unit.beginnings(np.array([of_unit.number(self.start)]))
            if begins[0] != self.start:
                raise UsageError(
                    "start",
                    f"is not the beginning of a {of_unit.unit} in {calendar.zone}",
                    f"write its first day, such as {calendar.day(int(begins[0]))}",
                )
        if not self._bounds.aligned:
            raise UsageError(
                "budget.covers",
                "begins between two trigger times",
                "write a multiple of release_every, or release_every = '1 day'",
            )
        instants = self._bounds.instants
        last = len(instants) - 1 if self.end is None else self.last_trigger_time
        if not calendar.begin <= self.start < self.horizon <= calendar.end or last >= len(instants):
            raise UsageError("calendar", "ends before the job does", "let it end sooner")
        if (np.diff(instants[: last + 1]) <= 0).any():
            raise UsageError(
                "calendar",
                f"has a day that {calendar.zone} left out when its clocks were set forward",
                "let the job end before that day or start after it, or use another zone",
            )

    def once(self) -> "Timeline":
        """Return the timeline of one answer: all of its time as one window with one trigger.

        Raises:
            UsageError: it has no end, or every period has a budget of its own.
        """
        if self.end is None:
            raise UsageError(
                "end",
                "is required for one answer",
                "add it, or use --over-time, which needs a delta above 0",
            )
        if self.period is not None:
            raise UsageError(
                "budget.covers",
                "gives every period a budget of its own, but one answer covers all periods",
                "omit it, or use --over-time, which needs a delta above 0",
            )
        length = self.end - self.start
        return msgspec.structs.replace(
            self,
            window=length,
            slide=length,
            trigger_every=length,
            allowed_lateness=0,
            calendar=None,
        )

    @property
    def _bounds(self) -> Bounds:
        calendar = required(self.calendar, "a calendar has its list")
        step = self.trigger_every // calendar.nominal
        period = 1 if self.period is None else self.first_period[1]
        return bounds(calendar, self.start, step, self.period_unit, period)

    @property
    def zone(self) -> str | None:
        """The time zone of the calendar."""
        return None if self.calendar is None else self.calendar.zone

    @property
    def period_calendar(self) -> Calendar | None:
        """The calendar of the privacy periods."""
        if self.calendar is None or self.period_unit is None:
            return None
        return msgspec.structs.replace(self.calendar, unit=self.period_unit)

    @property
    def first_period(self) -> tuple[int, int]:
        """The start and the length of the first period: micros, or units of the calendar."""
        calendar, length = self.period_calendar, required(self.period, "timeline.period is there")
        if calendar is None:
            return self.start, length
        return calendar.number(self.start), length // calendar.nominal

    @property
    def stride(self) -> int:
        """Trigger times between the starts of two windows."""
        return self.slide // self.trigger_every

    @property
    def width(self) -> int:
        """Trigger times of a window without its lateness."""
        return self.window // self.trigger_every

    @property
    def one_window_a_period(self) -> bool:
        """Return whether each window is a privacy period."""
        unit = None if self.calendar is None else self.calendar.unit
        return self.period == self.window and self.period_unit == unit

    def words(self, length: int) -> str:
        """Return one of the timeline's lengths as text."""
        if self.calendar is None:
            return duration(length)
        of_period = self.period_calendar if length == self.period else None
        return (of_period or self.calendar).words(length)

    @property
    def triggers(self) -> int:
        """T: the number of public triggers of a window, those of the lateness included."""
        return (self.window + self.allowed_lateness) // self.trigger_every

    @property
    def horizon(self) -> int:
        """The time (micros) at which events end; without an end, the last that 32-bit numbers
        allow.

        Triggers of a window or a period behind it could have a number beyond 32 bits.
        """
        if self.end is not None:
            return self.end
        if self.calendar is not None:
            instants = self._bounds.instants
            behind = (
                self.window + self.allowed_lateness + (self.period or 0)
            ) // self.trigger_every
            return int(instants[max(0, len(instants) - 2 - behind)])
        last = self.start + limits.MAX_TRIGGER_TIME * self.trigger_every
        return min(last, 1 << 62) - self.window - self.allowed_lateness - (self.period or 0)

    @property
    def windows_per_record(self) -> int:
        """The most windows one event time can belong to."""
        return -(-self.window // self.slide)

    @property
    def periods(self) -> int | None:
        """Privacy periods of the job, 1 without periods; ``None``: a stream without end."""
        if self.period is None:
            return 1
        if self.end is None:
            return None
        if self.calendar is not None:
            return int(np.searchsorted(self._bounds.periods, self._trigger_times(self.end)))
        return -(-(self.end - self.start) // self.period)

    @property
    def periods_met(self) -> int:
        """m: the most privacy periods that the event times of one window can meet.

        1 where windows lie inside periods (tumbling windows whose length divides the period), at
        most 2 where they are no longer than one.  A window takes late records, but of its own
        event times, so that lateness changes nothing.
        """
        if self.period is None:
            return 1
        if self.calendar is not None:
            behind, periods = self._trigger_times(self.horizon), self._bounds.periods
            begins = np.arange(0, behind, self.stride, dtype=np.int64)
            ends = np.minimum(begins + self.width, behind) - 1
            met = np.searchsorted(periods, (begins, ends), "right")
            return int((met[1] - met[0]).max(initial=0)) + 1
        # Phases of window starts against the periods: multiples of the gcd, in turn.
        shared = math.gcd(self.slide, self.period)
        turn = self.period // shared
        if self.end is None or (turn - 1) * self.slide + self.window <= self.end - self.start:
            return (self.period - shared + self.window - 1) // self.period + 1
        # The end comes first, or cuts windows short: those of the first turn are the longest.
        first = np.arange(min(turn, self.windows), dtype=np.int64) * self.slide
        last = np.minimum(first + self.window, self.end - self.start) - 1
        return int((last // self.period - first // self.period).max()) + 1

    @property
    def windows(self) -> int:
        """Number of windows of a job with an end."""
        if self.end is None:
            raise ValueError("a stream without end has no last window")
        if self.calendar is not None:
            return -(-self._trigger_times(self.end) // self.stride)
        return -(-(self.end - self.start) // self.slide)

    def _trigger_times(self, end: int) -> int:
        """Trigger times of a calendar from the start on that lie before an instant."""
        return int(np.searchsorted(self._bounds.instants, end))

    @property
    def last_trigger_time(self) -> int:
        """Global index of the last trigger of a job with an end."""
        return self.base(self.windows - 1) + self.triggers

    def base(self, window: int) -> int:
        """Return the global index of the trigger time at which window ``window`` starts (its step
        0).
        """
        return window * self.stride

    def instant_of(self, trigger_time: int) -> int:
        """Return the instant of global trigger time ``trigger_time`` in micros."""
        if self.calendar is not None:
            return int(self._bounds.instants[trigger_time])
        return self.start + trigger_time * self.trigger_every

    def window_bounds(self, window: int) -> tuple[int, int]:
        """Return ``[start, end)`` of a window in micros."""
        base = self.base(window)
        return self.instant_of(base), self.instant_of(base + self.width)

    def trigger_time_of(self, times: Int64) -> Int64:
        """Return the global trigger index (>= 1 inside the job) of each instant."""
        if self.calendar is not None:
            return np.searchsorted(self._bounds.instants, times, side="right")
        return (times - self.start) // self.trigger_every + 1

    def passed(self, instant: int) -> int:
        """Return the last global trigger time at or before an instant."""
        if self.calendar is not None:
            return int(np.searchsorted(self._bounds.instants, instant, side="right")) - 1
        return (instant - self.start) // self.trigger_every  # exact: a watermark may be -2^63

    def last_window_of(self, times: Int64) -> Int64:
        """Return the last window that begins at or before each instant."""
        if self.calendar is not None:
            return (self.trigger_time_of(times) - 1) // self.stride
        return (times - self.start) // self.slide

    def ended(self, instant: int) -> int:
        """Return the number of windows that have passed their last trigger at an instant."""
        return (self.passed(instant) - self.triggers) // self.stride + 1

    def windows_at(self, trigger_time: int) -> range:
        """Return windows that have a step at global trigger time ``trigger_time``, oldest first."""
        stride = self.stride
        first = max(0, -(-(trigger_time - self.triggers) // stride))
        after = (trigger_time - 1) // stride + 1
        return range(first, after if self.end is None else min(after, self.windows))

    def on_time(self, event: Int64, stamp: Int64) -> Bool:
        """Return whether each record is inside the job: start <= event < end and event <= stamp +
        skew.
        """
        end = self.horizon
        ok = (event >= self.start) & (event < end)
        # On this side of the inequality nothing overflows: the event is clipped into the job.
        inside = np.clip(event, self.start, end)
        ok &= (event <= stamp) | (stamp >= inside - self.max_skew)
        return ok

    def period_of(self, event: Int64) -> Int64:
        """Return the privacy period of each event time (0 for all without periods)."""
        if self.period is None:
            return np.zeros(len(event), np.int64)
        if self.calendar is not None:
            return self._period_at(self.trigger_time_of(event))
        return (event - self.start) // self.period

    def _period_at(self, trigger_time: Int64) -> Int64:
        """Return the calendar's period of events before each trigger time."""
        return np.searchsorted(self._bounds.periods, trigger_time - 1, side="right") - 1

    def period_trigger_time(self, event_trigger_time: Int64) -> Int64:
        """Return the last trigger time at which records of these events' periods can be stamped."""
        length = required(self.period, "timeline.period is there")
        late = self.allowed_lateness // self.trigger_every
        if self.calendar is not None:
            periods = self._bounds.periods
            after = self._period_at(event_trigger_time) + 1
            return periods[np.minimum(after, len(periods) - 1)] + late
        per = length // self.trigger_every
        return ((event_trigger_time - 1) // per + 1) * per + late

    def period_closed(self, event: Int64, stamp: Int64) -> Bool:
        """Return whether each record's privacy period is closed at its stamp."""
        if self.period is None:
            return np.zeros(len(event), np.bool_)
        last = self.period_trigger_time(self.trigger_time_of(event))
        return self.trigger_time_of(stamp) > last

    @property
    def skew_trigger_times(self) -> int:
        """By how many trigger times an event time may be ahead of its stamp."""
        if self.calendar is not None:
            instants = self._bounds.instants
            ahead = np.searchsorted(instants, instants + self.max_skew)
            return int((ahead - np.arange(len(instants))).max(initial=0))
        return -(-self.max_skew // self.trigger_every)


#: Tests of a window where published keys are skipped, and the job does not say how many.  The 5th
#: of 16 falls just before T/10 (25/256 of T), the 4th of 15 at 7% of T: a tenth more keys by then
#: for 1% fewer at the end.
DEFAULT_TESTS = 16
#: The same where the statistic is combined: the 3rd of 10 falls just before T/10.
COMBINED_TESTS = 10
#: What shares are cut by, far above the float error of their sum.
_CUT = 1e-12


def growing(triggers: int, tests: int) -> tuple[int, ...]:
    """Return the distinct values of ceil(T (j/n)^2), j = 1 .. n, the last of them T."""
    square = tests * tests
    return tuple(sorted({-(-triggers * j * j // square) for j in range(1, tests + 1)}))


def schedule_of(privacy: "Privacy", triggers: int, skips: bool) -> tuple[int, ...] | None:
    """Return triggers at which keys are tested, ``None`` where they are ``select_every`` apart.

    Args:
        skips: pairs on published keys take no selection weight.
    """
    given = privacy.tests
    if given is None and not skips:
        return None
    if given is None or isinstance(given, int):
        usual = COMBINED_TESTS if privacy.combine else DEFAULT_TESTS
        return growing(triggers, min(given or usual, triggers))
    return given


@functools.lru_cache(maxsize=64)
def triggers_of_tests(triggers: int, select_every: int, schedule: tuple[int, ...] | None) -> Int64:
    """Return (tests,) window triggers of the tests, rising; read-only."""
    if schedule is None:
        steps = np.arange(1, -(-triggers // select_every) + 1, dtype=np.int64)
        at = np.minimum(steps * select_every, triggers)
    else:
        at = np.array(schedule, np.int64)
    at.setflags(write=False)
    return at


def shares_of_tests(tests: int) -> Float64:
    """Return (tests,) parts of the thresholds' delta, of sum at most 1.

    Half of it is for the last test, where most keys are selected.
    """
    if tests == 1:
        return np.ones(1)
    return np.append(np.full(tests - 1, (0.5 - _CUT) / (tests - 1)), 0.5)


def check_tests(privacy: "Privacy", triggers: int) -> None:
    """Refuse a list of tests that does not rise, or does not end at the last trigger."""
    given = privacy.tests
    if privacy.select_every is not None and (given is not None or privacy.skip):
        name = "skip" if given is None else "tests"
        raise UsageError(
            job_field(name), "says when keys are tested, and so does select_every", "keep one"
        )
    if given is None or isinstance(given, int):
        return
    rises = all(a < b for a, b in itertools.pairwise(given))
    if not given or given[0] < 1 or not rises or given[-1] != triggers:
        mended = [*sorted({t for t in given if 0 < t < triggers}), triggers]
        raise UsageError(
            "mechanism.tests",
            "must be a list of triggers that rises from 1 or more to the last trigger of a "
            f"window, which is {triggers}",
            f"write {DEFAULT_TESTS}, for that many tests, or the list {mended}",
        )
