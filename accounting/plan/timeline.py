"""The public time axis: windows, triggers, periods.

Everything here is a function of the plan and of one record's own times, never of another
record or of a clock (mechanism.md rule 0: stamps decide).  Times are int64 microseconds
since the epoch.  The axis is divided every ``trigger_every`` micros from ``start``: trigger
time g is the instant ``start + g * trigger_every``; the half-open cell before it holds the
records of trigger g, so a record exactly on a trigger time belongs to the next trigger.

Window w is ``[start + w*slide, start + w*slide + window)``.  Its triggers are the trigger
times ``base(w) + 1 .. base(w) + T`` with ``base(w) = w * slide / trigger_every`` and
``T = (window + allowed_lateness) / trigger_every``; its step j is trigger ``base(w) + j``.
"""

import math

import msgspec
import numpy as np

from dpstream.accounting import limits
from dpstream.accounting.arrays import Bool, Int64
from dpstream.accounting.errors import PolicyError, UsageError


class Timeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Public geometry of a job's time (all fields in microseconds).

    Attributes:
        start: first instant; windows, triggers and periods align here.
        end: no event at or after it; ``None`` for a stream without end (see
            ``horizon``).
        window: length of a window; ``slide``: distance of window starts.
        trigger_every: distance of public triggers.
        allowed_lateness: how long after its end a window still takes records.
        max_skew: how far an event time may run ahead of its stamp.
        period: length of a privacy period, ``None`` = the whole stream.
    """

    start: int
    end: int | None
    window: int
    slide: int
    trigger_every: int
    allowed_lateness: int = 0
    max_skew: int = 0
    period: int | None = None

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
                    "choose lengths that the trigger interval divides",
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

    def once(self) -> "Timeline":
        """The time of one answer: all of it as one window with one trigger.

        Raises:
            UsageError: it has no end.
            PolicyError: every period has a budget of its own.
        """
        if self.end is None:
            raise UsageError(
                "end",
                "is required for one answer",
                "add it, or use --over-time, which needs a delta above 0",
            )
        if self.period is not None:
            raise PolicyError(
                "budget.covers",
                "gives every period a budget of its own, but one answer covers all periods",
                "omit it, or use --over-time, which needs a delta above 0",
            )
        length = self.end - self.start
        return msgspec.structs.replace(
            self, window=length, slide=length, trigger_every=length, allowed_lateness=0
        )

    @property
    def triggers(self) -> int:
        """T: public triggers of a window, those of the lateness included."""
        return (self.window + self.allowed_lateness) // self.trigger_every

    @property
    def horizon(self) -> int:
        """No event at or after it (micros): the end; without one, where triggers of a window or
        a period could have a number beyond 32 bits."""
        if self.end is not None:
            return self.end
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
        return None if self.end is None else -(-(self.end - self.start) // self.period)

    @property
    def periods_met(self) -> int:
        """m: the most privacy periods that the event times of one window can meet.

        1 where windows lie inside periods (tumbling windows whose length divides the period), at
        most 2 where they are no longer than one.  A window takes late records, but of its own
        event times, so that lateness changes nothing.
        """
        if self.period is None:
            return 1
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
        return -(-(self.end - self.start) // self.slide)

    @property
    def last_trigger_time(self) -> int:
        """Global index of the last trigger of a job with an end."""
        return self.base(self.windows - 1) + self.triggers

    def base(self, window: int) -> int:
        """Global index of the trigger time at which window ``window`` starts (its step 0)."""
        return window * (self.slide // self.trigger_every)

    def instant_of(self, trigger_time: int) -> int:
        """Instant of global trigger time ``trigger_time`` in micros."""
        return self.start + trigger_time * self.trigger_every

    def window_bounds(self, window: int) -> tuple[int, int]:
        """``[start, end)`` of a window in micros."""
        begin = self.start + window * self.slide
        return begin, begin + self.window

    def trigger_time_of(self, times: Int64) -> Int64:
        """Global trigger index (>= 1 inside the job) of each instant."""
        return (times - self.start) // self.trigger_every + 1

    def windows_at(self, trigger_time: int) -> range:
        """Windows that have a step at global trigger time ``trigger_time``, oldest first."""
        stride = self.slide // self.trigger_every
        first = max(0, -(-(trigger_time - self.triggers) // stride))
        last = (trigger_time - 1) // stride
        if self.end is not None:
            last = min(last, self.windows - 1)
        return range(first, last + 1)

    def on_time(self, event: Int64, stamp: Int64) -> Bool:
        """Which records lie inside the job: start <= event < end and event <= stamp + skew."""
        end = self.horizon
        ok = (event >= self.start) & (event < end)
        # On this side of the inequality nothing overflows: the event is clipped into the job.
        inside = np.clip(event, self.start, end)
        ok &= (event <= stamp) | (stamp >= inside - self.max_skew)
        return ok

    def period_of(self, event: Int64) -> Int64:
        """Privacy period of each event time (0 for all without periods)."""
        if self.period is None:
            return np.zeros(len(event), np.int64)
        return (event - self.start) // self.period

    def period_closed(self, event: Int64, stamp: Int64) -> Bool:
        """Whether the record's privacy period is closed at its stamp."""
        if self.period is None:
            return np.zeros(len(event), np.bool_)
        period_end = self.start + (self.period_of(event) + 1) * self.period
        return stamp >= period_end + self.allowed_lateness
