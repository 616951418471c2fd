"""The privacy unit: its identity in a ledger, and the cost of a run to one or several units.

**Identity.**  Two runs protect the same unit if it has one name and type and, where there is a
privacy period, the periods are the same sets of event times: one event-time column, one length,
one phase (start modulo length), and for periods of the calendar one unit and the same list of its
beginnings wherever a run has records.  The name identifies the column's ids: by
default it is the column's name; jobs of one account that read the same ids from columns of other
names declare one name (``unit`` of the data set).  An entry of the account stores
``UnitIdentity.text``.

**Several units of one person** (k pairs (person, period), added or removed together).  Let S be
the stacked, noise-normalised encodings of all streams, x_i what unit i adds to S on a given path
of outputs.  Each x_i is a function of that unit's own records and of the outputs so far, and
|x_i| <= mu (mechanism.md section 4).  Units meet only within the trees of one window, and a window
meets at most m periods (``Timeline.periods_met``), so at most m of the x_i are not zero in any
coordinate, and by Cauchy-Schwarz, coordinate by coordinate,

    |x_1 + ... + x_k|^2 <= min(k, m) (|x_1|^2 + ... + |x_k|^2) <= k min(k, m) mu^2.

With m = 1 that is sqrt(k) mu.  The bound is reached: m units with all their pairs in one key and
step (late records share a step) add up to m times what one adds, which is mu for the tree.  For
selected keys and m > 1 the plan states the larger k mu, by the triangle inequality without a look
at the trees, and k C b of delta; ``budget.thresholds`` describes the thresholds that this needs.

A plain (epsilon, delta) of one unit costs k units k epsilon.  With m = 1 the windows of each period
are a separate mechanism, whose inputs depend on those of the others only through outputs: k of them
compose to (k epsilon, k delta), whether they run one after the other or concurrently (Lyu 2022).
With m > 1 one mechanism meets several units, and delta is that of group privacy.

**A run whose unit is not the account's.**  The unit of an account is fixed when the account is
made: a name and a type and, if its limit is per period, the event-time column, length and phase of
the period.  So no answer can change whom the limit protects.  The cost of a run is stated for
neighbours that differ in ALL records of one of the run's units.  ``cost_to`` returns its cost to
the account's unit:

* the two units are equal: the cost of the run;
* the account's unit is a disjoint union of n whole units of the run (the account protects a person
  and the run a person's week; or a week and a day): the cost of n units of a person together, as
  above.  A run without an end has no largest n for a person, and is refused;
* the account's unit is a part of a unit of the run (the account protects a person's week, and a
  question a person's records of all time): the cost of a *replacement*, in which the whole unit is
  removed and added again without the part.  These are two units at once that meet everywhere: 2 mu,
  4 rho, and for a plain charge 2 epsilon and delta (1 + e^epsilon).  Thresholds of Gaussian noise
  cost 2 C b: with the gates of one of the two data sets, each test that only one of them makes
  succeeds with probability at most b, there are C such tests on each side, and neither side has a
  factor e^epsilon (mechanism.md section 4);
* otherwise the run is refused, and so are runs of another unit name, type or event-time column.
"""

import functools
import math
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import numpy as np

from dpstream.accounting.calendars import Calendar
from dpstream.accounting.composition import Cost, Spend, decimal_value
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.fields import FieldType
from dpstream.accounting.figures import duration, second_text

if TYPE_CHECKING:
    from dpstream.accounting.plan.plan import Plan


_VERSION = "unit/1 "
#: Relative error allowed for a product and a root.
_UP = 1 + 1e-12
#: Above this epsilon e^epsilon is near the end of a float's range; delta is then 1.
_LARGEST_EPSILON = 600.0


class UnitIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The public properties that distinguish privacy units.

    Attributes:
        name: name of the unit: the declared one, or that of its column.
        type: type of its values.
        event_time: column of the times that decide the period; period: its length in
            microseconds, or in units of the calendar; phase: start modulo period.  All three are
            set, or none: then the unit has all records of the stream.
        calendar: whose units a period has; ``None``: periods have one length.  An account has the
            list of all times, and a run that of its own: periods are counted in the same numbers.

    Accounts store ``text`` and digests cover it, so the names in it must never change.
    """

    name: str = msgspec.field(name="name")
    type: FieldType = msgspec.field(name="type")
    event_time: str | None = msgspec.field(default=None, name="event_time")
    period: int | None = msgspec.field(default=None, name="period")
    phase: int | None = msgspec.field(default=None, name="phase")
    calendar: Calendar | None = msgspec.field(default=None, name="calendar")

    def __post_init__(self) -> None:
        given = [part is not None for part in (self.event_time, self.period, self.phase)]
        if any(given) != all(given):
            raise ValueError("a period needs a length, a phase and an event time")
        if self.period is not None and not 0 <= (self.phase or 0) < self.period:
            raise ValueError("a phase must be at least 0 and below the period")
        if self.calendar is not None and self.period is None:
            raise ValueError("a calendar is that of periods")

    @property
    def text(self) -> str:
        """Canonical text of this version of the format: equal units have equal texts."""
        return _VERSION + msgspec.json.encode(self, order="sorted").decode()

    @classmethod
    def read(cls, text: str) -> "UnitIdentity":
        """Return the unit of a canonical text.

        Raises:
            PolicyError: the text is not of a version that this program can read.
        """
        return _read(text)

    @property
    def description(self) -> str:
        """The unit as a text for people, with exact figures."""
        who = f"{self.name} ({self.type})"
        if self.period is None:
            return f"{who}, all records"
        since = "" if not self.phase else f", one begins at {self.first_period}"
        return f"{who}, per {self.covers} of {self.event_time}{since}"

    @property
    def covers(self) -> str | None:
        """The length of a period as a text, with the zone of its calendar."""
        if self.period is None:
            return None
        if self.calendar is None:
            return duration(self.period)
        words = self.calendar.words(self.period * self.calendar.nominal)
        return f"{words} in {self.calendar.zone}"

    @property
    def first_period(self) -> str:
        """The first beginning of a period since 1970."""
        phase = self.phase or 0
        if self.calendar is None:
            return second_text(phase)
        return self.calendar.day(int(self.calendar.beginnings(np.array([phase]))[0]))

    @property
    def of_all_times(self) -> "UnitIdentity":
        """The unit with the whole list of its calendar, as an account has it."""
        if self.calendar is None:
            return self
        return msgspec.structs.replace(
            self, calendar=Calendar.of(self.calendar.unit, self.calendar.zone)
        )

    def as_far_as(self, run: "UnitIdentity") -> "UnitIdentity":
        """Return the unit with the part of its list that a run's unit has.

        The list of a run's calendar says nothing of other times, so the two are compared where both
        say something.
        """
        mine, theirs = self.calendar, run.calendar
        if (
            mine is None
            or theirs is None
            or not mine.begin <= theirs.begin < theirs.end <= mine.end
        ):
            return self
        return msgspec.structs.replace(self, calendar=mine.between(theirs.begin, theirs.end))


@functools.lru_cache(maxsize=1024)
def _read(text: str) -> UnitIdentity:
    try:
        identity = msgspec.json.decode(text.removeprefix(_VERSION), type=UnitIdentity)
        if identity.text == text:
            return identity
    except (msgspec.MsgspecError, ValueError):
        pass
    raise PolicyError(
        "account.path",
        "stores a privacy unit in a format that this program cannot read",
        "use the build of dpstream that wrote the account",
    )


def identity_of(plan: "Plan", name: str | None = None) -> UnitIdentity:
    """Return the unit of a plan, under the account's ``name`` for it if there is one."""
    timeline, called = plan.timeline, name or plan.unit.column
    if timeline.period is None:
        return UnitIdentity(called, plan.unit.type)
    calendar, (start, period) = timeline.period_calendar, timeline.first_period
    unit = called, plan.unit.type, plan.event_time
    return UnitIdentity(*unit, period, start % period, calendar)


def together(plan: "Plan") -> int | None:
    """Return the largest number of units of one person whose effects are assumed to add up.

    ``None``: all of them.
    """
    met = plan.timeline.periods_met
    return None if plan.design.selects and met > 1 else met


def span_of(plan: "Plan") -> tuple[int, int | None] | None:
    """Return the range of event times of all records that can change an output of a plan's run.

    Returns:
        The first microsecond, and the one behind the last (``None``: without an end); of periods
        of the calendar numbers of its units.  ``None`` for a run without a period, which counts in
        all periods of an account.

    A record outside of the range becomes a dead letter because of its own times, before a counter,
    a bound or the memory of ``record_id`` reads it (mechanism.md rule 0).  Late records and the
    records of sliding windows have event times inside.
    """
    timeline = plan.timeline
    if timeline.period is None:
        return None
    periods, (start, period) = timeline.periods, timeline.first_period
    return start, None if periods is None else start + periods * period


def several_mu(mu: float, units: int, together: int | None) -> float:
    """Return mu of ``units`` of one person together: sqrt(k min(k, together)) mu, rounded up."""
    adding_up = units if together is None else min(units, together)
    return mu if units == 1 else math.sqrt(units * adding_up) * mu * _UP


class Charged(Spend, Protocol):
    """The fields of a charge that its cost to the account's unit depends on.

    Attributes:
        identity: canonical text of the unit.
        periods: number of units that a person can have in the run; ``None`` without an end.
        together: as the function ``together`` returns it.
        span: range of event times of all records that can change an output, as ``span_of`` returns
            it; ``None``: records of any times.
    """

    @property
    def identity(self) -> str:
        """Canonical text of the unit."""

    @property
    def periods(self) -> int | None:
        """Number of units of a person."""

    @property
    def together(self) -> int | None:
        """Number of units whose effects add up."""

    @property
    def span(self) -> tuple[int, int | None] | None:
        """Range of event times of the records that count."""


class UnitCost(NamedTuple):
    """The cost of a run to one unit of an account.

    Attributes:
        spend: cost of the run to the account's unit.
        units: number of units of the run whose joint cost this is.
    """

    spend: Spend
    units: int


def cost_to(unit: UnitIdentity, charge: Charged) -> UnitCost:
    """Return the cost of a run to one unit of the account; see the module.

    Raises:
        PolicyError: the run protects another unit, or nothing bounds its cost.
    """
    own = UnitIdentity.read(charge.identity)
    unit = unit.as_far_as(own)
    if (own.name, own.type) != (unit.name, unit.type):
        raise PolicyError(
            "unit.name",
            f"protects another privacy unit than the account, whose unit is {unit.name} "
            f"({unit.type})",
            "name that unit's column; if it has another name here, rename it, or write "
            'unit_column = "COLUMN" in a table of a data set whose unit.name is the '
            "account's unit",
        )
    if own == unit:
        return UnitCost(charge, 1)
    if own.period is None:
        return _cost_of_replacement(charge)
    if unit.period is None:
        if charge.periods is None:
            raise PolicyError(
                "account.path",
                f"limits what is spent per {unit.name} over all records, and a stream without end "
                f"that protects {own.description} has no last period",
                "give the job an end, or charge an account whose limit is per period: "
                f"{_account_per(own)}",
            )
        return _cost_of_units(charge, charge.periods, charge.together)
    alike = (own.event_time, own.calendar) == (unit.event_time, unit.calendar)
    if alike and own.phase is not None and unit.phase is not None:
        shift = own.phase - unit.phase
        if not unit.period % own.period and not shift % own.period:
            units = unit.period // own.period
            units = min(units, charge.periods or units)
            return _cost_of_units(charge, units, charge.together)
        if not own.period % unit.period and not shift % unit.period:
            return _cost_of_replacement(charge)
    raise PolicyError(
        "budget.covers",
        f"has periods that neither divide the account's periods nor consist of them: "
        f"{own.description}; the account's unit is {unit.description}{_lists_differ(own, unit)}",
        "give the job the account's period, a start that differs by whole periods, and the same "
        f"event time; or charge an account of its own: {_account_per(own)}",
    )


def _lists_differ(own: UnitIdentity, unit: UnitIdentity) -> str:
    """Say so where one calendar has two lists."""
    if own.calendar is None or unit.calendar is None or own.calendar == unit.calendar:
        return ""
    if (own.calendar.unit, own.calendar.zone) != (unit.calendar.unit, unit.calendar.zone):
        return ""
    return (
        "; the account lists the offsets of the zone as they were known when it was made, and the "
        "time zones of this machine are others (PYTHONTZPATH names older ones)"
    )


def _account_per(unit: UnitIdentity) -> str:
    """Return the command that makes an account whose unit has a period."""
    start = "" if not unit.phase else f" --start {unit.first_period}"
    kind = "" if unit.type == "string" else f" --type {unit.type}"
    return (
        f"`dpstream account create NEW.db --data-set NAME --unit {unit.name}{kind} "
        f'--covers "{unit.covers}" --time {unit.event_time}{start} '
        "--epsilon E --delta D`"
    )


def periods_of(unit: UnitIdentity, charge: Charged) -> tuple[int | None, int | None]:
    """Return the account's periods that a charge counts in, rounded outward.

    Returns:
        Number of the first period, and of the one behind the last; period i begins at ``phase +
        i * period``.  ``None``: without a bound on that side.
    """
    if unit.period is None or unit.phase is None or charge.span is None:
        return None, None
    begin, end = charge.span
    first = (begin - unit.phase) // unit.period
    return first, None if end is None else -((unit.phase - end) // unit.period)


def _cost_of_replacement(charge: Charged) -> UnitCost:
    """Return the cost of a run to a part of one of its units."""
    return UnitCost(_cost_of_units(charge, 2, None).spend, 2)


def _cost_of_units(charge: Charged, units: int, together: int | None) -> UnitCost:
    """Return the cost of a run to several of its units, of which at most ``together`` add up."""
    if units == 1:
        return UnitCost(charge, 1)
    if charge.mu is not None:
        mu = several_mu(charge.mu, units, together)
        thresholds = charge.threshold_delta * units * _UP
        # Its own (epsilon, delta) is not used: the account composes mu and the thresholds' delta.
        return UnitCost(Cost(math.inf, charge.delta + thresholds, mu, thresholds), units)
    if charge.rho is not None and not charge.threshold_delta:
        # Group privacy of zCDP, k^2 rho (Bun and Steinke 2016, proposition 1.9).  Only for Gaussian
        # noise is it proven that not all effects add up (``together``).
        rho = units**2 * charge.rho * _UP
        return UnitCost(Cost(math.inf, charge.delta, rho=rho), units)
    epsilon, delta = _times(charge.epsilon, units), 0.0
    if together == 1:
        # An output depends on two of the units only through other outputs, so k mechanisms compose.
        delta = min(1.0, _times(charge.delta, units))
    # Group privacy of a plain (epsilon, delta): delta (1 + e^epsilon + ... + e^((k-1) epsilon)).
    elif charge.delta and epsilon > _LARGEST_EPSILON:
        delta = 1.0
    elif charge.delta:
        steps = (math.exp(i * charge.epsilon) for i in range(units))
        delta = min(1.0, charge.delta * math.fsum(steps) * _UP)
    return UnitCost(Cost(epsilon, delta), units)


def _times(figure: float, units: int) -> float:
    """A multiple of a figure's decimal text: never below it, and exact where a float can be,
    so that two units of epsilon 4 fit a limit of 8.
    """
    exact = units * decimal_value(figure)
    multiple = float(exact)
    return multiple if decimal_value(multiple) >= exact else math.nextafter(multiple, math.inf)
