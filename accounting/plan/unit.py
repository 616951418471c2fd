"""The privacy unit: its identity in a ledger, and the cost of runs to one or several units.

Runs on different units add up in the account of a data set under conditions, which are stated here.

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

**Different units in one ledger.**  The cost of a run is stated for neighbours that differ in ALL
records of one of its units.  If the records of a unit B are a disjoint union of n complete units
of the run's A, the run costs B what n units of a person cost together (above).  If they are only
a part of a unit of A, nothing follows from the run's own guarantee but replacement (remove the
unit, add it again without the part): 2 mu and a factor e^epsilon on the thresholds' delta, for
each unit that is met in part; such a bound is not used.  So costs are added up for the *common
unit*: the finest unit of which every run's units are complete parts.  Borders of a period are
phase + i * period for all whole i; a time is a border of the common unit if it is one of all:

* all without a period: the unit itself;
* all with periods of one event-time column: the borders common to all, whose period is lcm(P, Q)
  where the phases agree modulo gcd(P, Q), and none at all where they do not;
* no common border, or a run without a period: all records of the unit's name.  Then n is the number
  of periods in the run's own time, and a run without an end is refused;
* event-time columns that differ: refused, because one period of the one can meet any number of
  the other's; so are names or types that differ.

A limit of the ledger then holds for the common unit.

**The account of a data set**: what its runs cost together, kept up to date run by run.  `composed`
looks at every run each time.  An account keeps its sums: a run whose unit is among those of the
runs before it leaves their common unit as it is, so it costs the same whether it is looked at alone
or with all others (`tests/accounting/plan/test_unit.py` holds the two against each other).  A run
with a unit that is new here is composed with all of them.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from dpstream.accounting.composition import Spend, Total, epsilon_spent, total_of
from dpstream.accounting.errors import InvariantError, PolicyError
from dpstream.accounting.fields import FieldType
from dpstream.accounting.figures import duration, up
from dpstream.accounting.limits import MAX_EPSILON
from dpstream.accounting.strength import MOST_DELTA

if TYPE_CHECKING:
    from dpstream.accounting.plan.plan import Plan


_VERSION = "unit/1 "
#: Relative error allowed for a product and a root.
_UP = 1 + 1e-12
#: Beyond this epsilon e^epsilon is near the end of a float's range; no delta is promised there.
_LARGEST = 600.0
_SEVERAL = (
    "the runs protect different units; their costs are added up, and the limit holds, for the "
    "unit that they have in common"
)


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


class _Several(msgspec.Struct, frozen=True):
    """What one run costs several units of a person together."""

    epsilon: float
    delta: float
    mu: float | None
    threshold_delta: float
    rho: float | None = None


class Composed(NamedTuple):
    """Entries of one data set on their common unit.

    Attributes:
        unit_text: the common unit in words, ``None`` without entries.
        spends: what each entry costs it; units: as how many units of its own run it is counted.
        warnings: what a reader must know.
        common: the common unit, ``None`` without entries.
    """

    unit_text: str | None
    spends: list[Spend]
    units: list[int]
    warnings: list[str]
    common: UnitIdentity | None = None


def composed(charges: Sequence[Charged]) -> Composed:
    """Return the cost of each entry to the common unit of all.

    Raises:
        PolicyError: the costs do not add up.
    """
    if not charges:
        return Composed(None, [], [], [])
    own = [UnitIdentity.read(charge.identity) for charge in charges]
    common = common_unit(own)
    pairs = list(zip(charges, own, strict=True))
    units = [_parts(common, unit, charge) for charge, unit in pairs]
    spends = [_cost(charge, n) for charge, n in zip(charges, units, strict=True)]
    several = [_SEVERAL] if len(set(own)) > 1 else []
    return Composed(common.description, spends, units, several, common)


def cost_to(common: UnitIdentity | None, charge: Charged) -> Spend:
    """Return the cost of one run to a common unit of several runs, as in ``composed``."""
    if common is None:
        return charge
    return _cost(charge, _parts(common, UnitIdentity.read(charge.identity), charge))


def common_unit(units: Iterable[UnitIdentity]) -> UnitIdentity:
    """Return the finest unit that consists of complete units of all entries.

    Raises:
        PolicyError: there is none, or nothing bounds how many.
    """
    common, *others = sorted(set(units), key=lambda u: u.period is None)
    times = {u.event_time for u in (common, *others)} - {None}
    if any((u.name, u.type) != (common.name, common.type) for u in others):
        raise _another("by name or type")
    if len(times) > 1:
        raise _another("by the event time of its period")
    for other in others:
        common = _joined(common, other)
    return common


def _joined(one: UnitIdentity, other: UnitIdentity) -> UnitIdentity:
    if one.period is None or other.period is None:
        return UnitIdentity(one.name, one.type)
    if one.phase is None or other.phase is None:
        raise InvariantError("one.phase is not None and other.phase is not None")
    shared = math.gcd(one.period, other.period)
    apart = other.phase - one.phase
    if apart % shared:
        return UnitIdentity(one.name, one.type)
    # The least i with one.phase + i * one.period = other.phase modulo other.period.
    most = other.period // shared
    steps = (apart // shared) * pow(one.period // shared, -1, most) % most if most > 1 else 0
    period = math.lcm(one.period, other.period)
    phase = (one.phase + steps * one.period) % period
    return UnitIdentity(one.name, one.type, one.event_time, period, phase)


def _parts(common: UnitIdentity, part: UnitIdentity, charge: Charged) -> int:
    """How many units of a run one common unit can have."""
    if part.period is None or part == common:
        return 1
    counts = [n for n in (charge.periods, common.period and common.period // part.period) if n]
    if not counts:
        raise PolicyError(
            "data_set",
            "its runs protect units that only all records of a person have in common, and a "
            "stream without end has no last period",
            "give its jobs the same period, and starts that differ by whole periods, or end",
        )
    return min(counts)


def _cost(charge: Charged, units: int) -> Spend:
    """What a run costs so many of its units at once."""
    if units == 1:
        return charge
    if charge.mu is not None:
        mu = several_mu(charge.mu, units, charge.together)
        thresholds = charge.threshold_delta * units * _UP
        # As a guarantee of its own it is not used: `composition.within` takes its parts.
        return _Several(math.inf, charge.delta + thresholds, mu, thresholds)
    if charge.rho is not None and not charge.threshold_delta:
        # Group privacy of zCDP, k^2 rho (Bun and Steinke 2016, proposition 1.9).  That effects do
        # not add up (``together``) is known of Gaussian noise alone.
        return _Several(math.inf, charge.delta, None, 0.0, units**2 * charge.rho * _UP)
    epsilon, delta = charge.epsilon * units * _UP, 0.0
    if charge.together == 1:
        # No output depends on two of the units but by other outputs: k mechanisms compose.
        return _Several(epsilon, min(1.0, charge.delta * units * _UP), None, 0.0)
    # Group privacy of a plain (epsilon, delta): delta (1 + e^epsilon + ... + e^((k-1) epsilon)).
    if charge.delta and epsilon > _LARGEST:
        delta = 1.0
    elif charge.delta:
        steps = (math.exp(i * charge.epsilon) for i in range(units))
        delta = min(1.0, charge.delta * math.fsum(steps) * _UP)
    return _Several(epsilon, delta, None, 0.0)


def _another(how: str) -> PolicyError:
    return PolicyError(
        "data_set",
        f"its runs protect another privacy unit {how}, and such costs do not add up",
        "use one unit in all jobs on this data set: the name and type of its section, and the same "
        "event time",
    )


class Account:
    """Runs on one data set, in order; see the module."""

    def __init__(self) -> None:
        self.charges = list[Charged]()
        self._total: Total | None = None  # of all charges; None: not known yet
        self._common: UnitIdentity | None = None
        self._units = set[str]()

    def add(self, charge: Charged) -> None:
        """Charge one more run, whatever it costs."""
        total = self._total if self._joins(charge) else None
        self._total = None if total is None else total.plus(cost_to(self._common, charge))
        self.charges.append(charge)

    def cut(self, runs: int) -> None:
        """Take back all runs but the first so many."""
        if runs < len(self.charges):
            del self.charges[runs:]
            self._total = None

    def within(self, more: Sequence[Charged], epsilon: float, delta: float) -> bool:
        """Return whether all runs and some more together satisfy (epsilon, delta) per common unit.

        Raises:
            PolicyError: their costs do not add up.
        """
        return self.total(more).within(epsilon, delta)

    def shortage(self, more: Sequence[Charged], delta: float) -> tuple[str, str]:
        """Return which figure of a limit is too small for all runs and some more, and what they
        would spend of it together, with their unit, as texts.

        Args:
            delta: of the limit; it is too small itself where no epsilon is enough at it.

        Raises:
            PolicyError: their costs do not add up.
        """
        total, unit = self.total(more), composed([*self.charges, *more]).unit_text
        try:
            at_delta = total.epsilon(delta)
            if math.isfinite(at_delta):
                return "epsilon", f"epsilon {up(at_delta)} at that delta, per {unit}"
            least = min(1.0, float(total.extra))
            return "delta", f"delta {up(least)} or more at every epsilon, per {unit}"
        except (ValueError, OverflowError):  # figures that floats do not hold
            return "epsilon", f"more than any figure here, per {unit}"

    def limit_for(
        self, more: Sequence[Charged], epsilon: float, delta: float
    ) -> tuple[float, float] | None:
        """Return the least limit found that has room for all runs and some more.

        Args:
            epsilon, delta: of the present limit.  Delta stays where some epsilon is enough; else it
                is what no epsilon pays for, and as much again for noise.

        Returns:
            ``None``: no limit that a person should set has room.

        Raises:
            PolicyError: their costs do not add up.
        """
        total = self.total(more)
        try:
            if not math.isfinite(epsilon_spent(total, delta)):
                noise = bool(total.gauss or total.rho)
                delta = float(up(float(total.extra) * (1 + noise), 3))
            epsilon = max(epsilon, float(up(epsilon_spent(total, delta), 4)))
            fits = total.within(epsilon, delta)
        except (ValueError, OverflowError):  # figures that floats do not hold
            return None
        usable = epsilon <= MAX_EPSILON and delta <= MOST_DELTA
        return (epsilon, delta) if fits and usable else None

    def total(self, more: Sequence[Charged] = ()) -> Total:
        """Return the cost of all runs to their common unit.

        Args:
            more: charges that are counted as if they were in the account.

        Raises:
            PolicyError: the costs do not add up.
        """
        if self._total is None:
            composition = composed(self.charges)
            self._total, self._common = total_of(composition.spends), composition.common
            self._units = {c.identity for c in self.charges}
        if not all(map(self._joins, more)):
            return total_of(composed([*self.charges, *more]).spends)
        total = self._total
        for charge in more:
            total = total.plus(cost_to(self._common, charge))
        return total

    def _joins(self, charge: Charged) -> bool:
        return charge.identity in self._units
