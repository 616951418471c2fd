"""The privacy unit: its identity in a ledger, and the cost of a run to one or several units.

**Identity.**  Two runs protect the same unit if it has one name and type and, where there is a
privacy period, the periods are the same sets of event times: one event-time column, one length
in microseconds, one phase (start modulo length).  The name stands for the column's ids: by
default it is the column's name; a ledger's jobs that find the same ids in columns of other names
declare one (``unit`` of the data set).  ``UnitIdentity.text`` is what an entry of the ledger holds.

**Several units of one person** (k pairs (person, period), added or removed together).  Let S be
the stacked, noise-normalised encodings of all streams, x_i what unit i adds to S on a given path
of outputs.  Each x_i is a function of that unit's own records and of the outputs so far, and
|x_i| <= mu (mechanism.md section 4).  Units meet only within the trees of one window, and a window
meets at most m periods (``Timeline.periods_met``), so at most m of the x_i are not zero in any
coordinate, and by Cauchy-Schwarz, coordinate by coordinate,

    |x_1 + ... + x_k|^2 <= min(k, m) (|x_1|^2 + ... + |x_k|^2) <= k min(k, m) mu^2.

With m = 1 that is sqrt(k) mu.  The bound is reached: m units with all their pairs in one key and
step (late records share a step) add up to m times what one adds, which is mu for the tree.  For
selected keys and m > 1 the plan states the larger k mu (no tree is looked at: the triangle
inequality), and k C b of delta; ``budget.thresholds`` says what thresholds must be for that.

A plain (epsilon, delta) of one unit costs k of them k epsilon.  With m = 1 the windows of each
period are a mechanism of their own, whose inputs depend on those of the others by outputs alone:
k of them compose to (k epsilon, k delta), whether they follow each other or run side by side (Lyu
2022).  With m > 1 one mechanism meets several units, and delta is that of group privacy.

**Other units than the account's.**  The unit of an account is fixed when the account is made: a
name and a type and, if its limit is per period, the event-time column, length and phase of the
period.  So no answer can change whom the limit protects.  The cost of a run is stated for
neighbours that differ in ALL records of one of the run's units.  ``cost_to`` gives its cost to the
account's unit:

* the same unit: its own cost;
* the account's unit is a disjoint union of n whole units of the run (a person, of a run per week;
  a week, of a run per day): what n units of a person cost together (above).  A run without an end
  has no largest n for a person, and is refused;
* the account's unit is a part of a unit of the run (a person's week, of a question about all
  records): *replacement*, the whole unit removed and added again without the part.  That is two
  units at once that meet everywhere: 2 mu, 4 rho, and of a plain charge 2 epsilon and delta (1 +
  e^epsilon).  Thresholds of Gaussian noise cost 2 C b: with the gates of one of the two data sets a
  test that only one of them makes succeeds with at most b, C on either side, and neither has a
  factor e^epsilon (mechanism.md section 4);
* neither: refused, and so are other names and types, and periods of another event-time column.
"""

import functools
import math
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from dpstream.accounting.composition import Spend
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.fields import FieldType
from dpstream.accounting.figures import duration, second_text

if TYPE_CHECKING:
    from dpstream.accounting.plan.plan import Plan


_VERSION = "unit/1 "
#: Relative error allowed for a product and a root.
_UP = 1 + 1e-12
#: Beyond this epsilon e^epsilon is near the end of a float's range; no delta is promised there.
_LARGEST = 600.0


class UnitIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The public properties that distinguish privacy units.

    Attributes:
        name: of the unit: as the ledger declares it, or its column's.
        type: of its values.
        event_time: column of the times that decide the period; period: its length in micros;
            phase: start modulo period.  All three or none: the whole stream.

    Digests cover ``text``, which ledgers keep: its names are frozen, whatever the fields are
    called.
    """

    name: str = msgspec.field(name="name")
    type: FieldType = msgspec.field(name="type")
    event_time: str | None = msgspec.field(default=None, name="event_time")
    period: int | None = msgspec.field(default=None, name="period")
    phase: int | None = msgspec.field(default=None, name="phase")

    def __post_init__(self) -> None:
        given = [part is not None for part in (self.event_time, self.period, self.phase)]
        if any(given) != all(given):
            raise ValueError("a period needs its length, its phase and an event time")
        if self.period is not None and not 0 <= (self.phase or 0) < self.period:
            raise ValueError("a phase lies within the period")

    @property
    def text(self) -> str:
        """Canonical text of this form's version: equal units have equal texts."""
        return _VERSION + msgspec.json.encode(self, order="sorted").decode()

    @classmethod
    def read(cls, text: str) -> "UnitIdentity":
        """Return the unit of a canonical text.

        Raises:
            PolicyError: it is none of a version that this program knows.
        """
        return _read(text)

    @property
    def description(self) -> str:
        """The unit as exact text for people."""
        who = f"{self.name} ({self.type})"
        if self.period is None:
            return f"{who}, all records"
        since = f", counted from {duration(self.phase)} into 1970 (UTC)" if self.phase else ""
        return f"{who}, per {duration(self.period)} of {self.event_time}{since}"


@functools.lru_cache(maxsize=1024)
def _read(text: str) -> UnitIdentity:
    try:
        identity = msgspec.json.decode(text.removeprefix(_VERSION), type=UnitIdentity)
        if identity.text == text:
            return identity
    except (msgspec.MsgspecError, ValueError):
        pass
    raise PolicyError(
        "account.path", "names a unit in another form", "use the program that wrote it"
    )


def identity_of(plan: "Plan", name: str | None = None) -> UnitIdentity:
    """Return the unit of a plan, with the ledger's ``name`` for it if there is one."""
    timeline, called = plan.timeline, name or plan.unit.column
    if timeline.period is None:
        return UnitIdentity(called, plan.unit.type)
    phase = timeline.start % timeline.period
    return UnitIdentity(called, plan.unit.type, plan.event_time, timeline.period, phase)


def together(plan: "Plan") -> int | None:
    """Return the most units of one person whose effects are taken to add up; ``None``: all of
    them.
    """
    met = plan.timeline.periods_met
    return None if plan.design.selects and met > 1 else met


def span_of(plan: "Plan") -> tuple[int, int | None] | None:
    """Return the event times of all records that can change an output of a plan's run.

    A record outside of them is a dead letter by its own times, before a counter, a bound or the
    memory of ``record_id`` sees it (mechanism.md rule 0); late records and sliding windows have
    event times inside.  A run without a period counts in all periods of an account.
    """
    timeline = plan.timeline
    if timeline.period is None:
        return None
    many = timeline.periods
    return timeline.start, None if many is None else timeline.start + many * timeline.period


def several_mu(mu: float, units: int, together: int | None) -> float:
    """Return mu of ``units`` of one person together: sqrt(k min(k, together)) mu, rounded up."""
    alike = units if together is None else min(units, together)
    return mu if units == 1 else math.sqrt(units * alike) * mu * _UP


class Charged(Spend, Protocol):
    """An entry of a ledger as far as the unit matters.

    Attributes:
        identity: canonical text of the unit.
        periods: units a person can have in the run, ``None`` without an end.
        together: see the function of that name.
        span: event times of all records that can change an output, in microseconds from the first
            to before the second (``None``: without an end); ``None``: any records.
    """

    @property
    def identity(self) -> str:
        """Canonical text."""

    @property
    def periods(self) -> int | None:
        """Units of a person."""

    @property
    def together(self) -> int | None:
        """Units that add up."""

    @property
    def span(self) -> tuple[int, int | None] | None:
        """Event times of the records that count."""


class _Several(msgspec.Struct, frozen=True):
    """What one run costs several units of a person together."""

    epsilon: float
    delta: float
    mu: float | None
    threshold_delta: float
    rho: float | None = None


class Cost(NamedTuple):
    """The cost of a run to one unit of an account.

    Attributes:
        spend: what the run costs it.
        units: as how many units of the run it is counted.
    """

    spend: Spend
    units: int


def cost_to(unit: UnitIdentity, charge: Charged) -> Cost:
    """Return what a run costs one unit of the account; see the module.

    Raises:
        PolicyError: the run protects another unit, or nothing bounds its cost.
    """
    own = UnitIdentity.read(charge.identity)
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
        return Cost(charge, 1)
    if own.period is None:
        return _replaced(charge)
    if unit.period is None:
        if charge.periods is None:
            raise PolicyError(
                "account.path",
                f"limits what is spent per {unit.name} over all records, and a stream without end "
                f"that protects {own.description} has no last period",
                "give the job an end, or charge an account whose limit is per period: "
                f"{_account_per(own)}",
            )
        return _cost(charge, charge.periods, charge.together)
    if own.event_time == unit.event_time and own.phase is not None and unit.phase is not None:
        apart = own.phase - unit.phase
        if not unit.period % own.period and not apart % own.period:
            many = unit.period // own.period
            return _cost(charge, min(many, charge.periods or many), charge.together)
        if not own.period % unit.period and not apart % unit.period:
            return _replaced(charge)
    raise PolicyError(
        "budget.covers",
        f"has periods that are neither whole parts of the account's nor made of them: "
        f"{own.description}, and the account is of {unit.description}",
        "give the job the account's period, a start that differs by whole periods, and the same "
        f"event time; or charge an account of its own: {_account_per(own)}",
    )


def _account_per(unit: UnitIdentity) -> str:
    """What is typed to make an account whose unit has a period."""
    start = "" if not unit.phase else f" --start {second_text(unit.phase)}"
    kind = "" if unit.type == "string" else f" --type {unit.type}"
    return (
        f"`dpstream account create NEW.db --data-set NAME --unit {unit.name}{kind} "
        f'--covers "{duration(unit.period or 0)}" --time {unit.event_time}{start} '
        "--epsilon E --delta D`"
    )


def periods_of(unit: UnitIdentity, charge: Charged) -> tuple[int | None, int | None]:
    """Return the account's periods that a charge counts in, rounded outward.

    Returns:
        Number of the first one, and of the one behind the last, of ``phase + i * period``;
        ``None``: without a bound on that side.
    """
    if unit.period is None or unit.phase is None or charge.span is None:
        return None, None
    begin, end = charge.span
    first = (begin - unit.phase) // unit.period
    return first, None if end is None else -((unit.phase - end) // unit.period)


def _replaced(charge: Charged) -> Cost:
    """The cost to a part of one of its units."""
    return Cost(_cost(charge, 2, None).spend, 2)


def _cost(charge: Charged, units: int, together: int | None) -> Cost:
    """What a run costs so many of its units at once, of which ``together`` at most add up."""
    if units == 1:
        return Cost(charge, 1)
    if charge.mu is not None:
        mu = several_mu(charge.mu, units, together)
        thresholds = charge.threshold_delta * units * _UP
        # As a guarantee of its own it is not used: the account takes its parts.
        return Cost(_Several(math.inf, charge.delta + thresholds, mu, thresholds), units)
    if charge.rho is not None and not charge.threshold_delta:
        # Group privacy of zCDP, k^2 rho (Bun and Steinke 2016, proposition 1.9).  That effects do
        # not add up (``together``) is known of Gaussian noise alone.
        rho = units**2 * charge.rho * _UP
        return Cost(_Several(math.inf, charge.delta, None, 0.0, rho), units)
    epsilon, delta = charge.epsilon * units * _UP, 0.0
    if together == 1:
        # No output depends on two of the units but by other outputs: k mechanisms compose.
        delta = min(1.0, charge.delta * units * _UP)
    # Group privacy of a plain (epsilon, delta): delta (1 + e^epsilon + ... + e^((k-1) epsilon)).
    elif charge.delta and epsilon > _LARGEST:
        delta = 1.0
    elif charge.delta:
        steps = (math.exp(i * charge.epsilon) for i in range(units))
        delta = min(1.0, charge.delta * math.fsum(steps) * _UP)
    return Cost(_Several(epsilon, delta, None, 0.0), units)
