"""A table whose records have budgets of their own: what is public of it.

All of it but the rules is fixed before the table's first record.  The table's space is what budgets
are accounted in, so it can never change: every charge names its digest, and a ledger of another
space is refused.  Aggregated columns are dimensions too: a dimension's range is the public bound of
sums over it.

**Unit of protection: one record.**  ``identity`` is the unit that charges name.  It is no column's,
so that a ledger refuses streams and SQL, which protect persons, on the same data set, and sessions
on theirs.

**Rules** may be changed by the table's steward at any time: quotas of analysts, and how much of an
initial budget may be used by when.  Both are public, and decided on the ledger, the request and the
instant of the charge alone.  They only ever refuse what the points' budgets allow, so that no rule,
and no change of one, weakens the guarantee of a record.

**Quota.**  The most that one analyst may charge to ANY ONE point.  A name is what the program is
told: a quota shares budget among analysts who name themselves truly.

**Unlock.**  Of an initial budget b only floor(b min(1, share (1 + whole days since start))) is
usable, nothing before the start: the first analyst cannot take all.
"""

import hashlib
from fractions import Fraction
from functools import cached_property

import msgspec

from dpstream.accounting import limits
from dpstream.accounting.errors import UsageError
from dpstream.accounting.limits import MICROS_PER_SECOND
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.accounting.regions.amounts import MICRO, Number, exact, initial_of
from dpstream.accounting.regions.space import (
    Budget,
    Category,
    Dimension,
    Integer,
    Real,
    Space,
    Timestamp,
)
from dpstream.accounting.strength import weaknesses_of_budget

#: First line of what the digest covers.
_FORM = "dpstream session table/1"
AnyDimension = Integer | Timestamp | Real | Category | Budget


class SessionTable(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The public model of a table; see the module.

    Attributes:
        name: name of the data set.
        dimensions: dimensions of the table's space, in order: those that queries select by, the
            aggregated columns, and one or two initial budgets.
        cap: largest number of regions in the account; beyond it charges get coarser boxes.

    Raises:
        UsageError: the name is empty, the dimensions are no space, or the cap is out of range.
    """

    name: str
    dimensions: tuple[AnyDimension, ...]
    cap: int = limits.MAX_REGIONS

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable():
            raise UsageError("table.name", "must be printable and not empty", "name the table")
        if not 1 <= self.cap <= limits.MAX_REGIONS:
            raise UsageError(
                "table.cap", f"must be 1 to {limits.MAX_REGIONS:,}", "choose a number in that range"
            )
        _ = self.space  # refuses what is none

    @cached_property
    def space(self) -> Space:
        """The space of its dimensions."""
        return Space(self.dimensions)

    @cached_property
    def identity(self) -> UnitIdentity:
        """The unit of protection: one record of this table."""
        return UnitIdentity(f"record of {self.name}", "string")

    @property
    def warnings(self) -> list[str]:
        """The warnings of initial budgets that may promise a record little."""
        budgets = [d for d in self.dimensions if isinstance(d, Budget)]
        return [
            f"a record's initial budget may be {budget.kind} {budget.most}: {weakness}"
            for budget in budgets
            for weakness in weaknesses_of_budget(
                budget.kind, float(exact(budget.most, budget.name))
            )
        ]

    @cached_property
    def digest(self) -> str:
        """The digest, in 32 hexadecimal digits, of all that is fixed; other kinds have the plan's
        hash.
        """
        lines = [_FORM, self.name, self.cap, [_canonical(d) for d in self.dimensions]]
        text = msgspec.json.encode(lines)
        return hashlib.blake2b(text, digest_size=16, person=b"dpstream-session").hexdigest()


def _canonical(dimension: Dimension) -> list[object]:
    """Equal for dimensions of equal meaning: 1 and 1.0 are one number, 0.10 and 0.1 too."""
    common: list[object] = [dimension.name, dimension.grid, dimension.missing]
    match dimension:
        case Integer(low=low, high=high):
            return ["integer", *common, low, high]
        case Timestamp(low=low, high=high, step=step):
            return ["timestamp", *common, low, high, step]
        case Real():
            return ["real", *common, *map(str, dimension.range)]
        case Category(codes=codes):
            return ["category", *common, list(codes)]
        case Budget(kind=kind, most=most, step=step):
            return ["budget", *common, kind, initial_of(most, dimension.name), step]
    raise TypeError(type(dimension))


_DAY = 86_400 * MICROS_PER_SECOND


class Quotas(msgspec.Struct, frozen=True, kw_only=True):
    """The most that an analyst may charge to one point, in millionths.

    Attributes:
        epsilon, rho: by analyst; default_epsilon, default_rho: of all others, ``None``: no quota.
    """

    epsilon: dict[str, int] = {}
    rho: dict[str, int] = {}
    default_epsilon: int | None = None
    default_rho: int | None = None

    def of(self, kind: str, analyst: str) -> int | None:
        """Return an analyst's quota of a kind of budget; ``None``: none."""
        if kind == "epsilon":
            return self.epsilon.get(analyst, self.default_epsilon)
        return self.rho.get(analyst, self.default_rho)


def quota_of(value: Number, field: str = "quota") -> int:
    """Return a quota in millionths, rounded down.

    Raises:
        UsageError: it is no number from 0 to ``limits.MAX_EPSILON``.
    """
    return initial_of(value, field)


class Unlock(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an initial budget that may be used at each time.

    Attributes:
        start: microseconds since 1970; share: of the initial budget, for each day, as a decimal.
    """

    start: int
    share: float | str

    def __post_init__(self) -> None:
        if not 0 < exact(self.share, "unlock.share") <= 1:
            raise UsageError(
                "unlock.share", "must be above 0 and at most 1", "use 0.1 for ten days"
            )

    def usable(self, at: int) -> Fraction:
        """Return the share of every initial budget that may be used at an instant in
        microseconds.
        """
        if at < self.start:
            return Fraction()
        days = 1 + (at - self.start) // _DAY
        return min(Fraction(1), exact(self.share, "unlock.share") * days)


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """A steward's rules; by default there are none."""

    quotas: Quotas = Quotas()
    unlock: Unlock | None = None

    def usable(self, at: int) -> int:
        """Return the millionths of every initial budget usable at an instant, rounded down."""
        return MICRO if self.unlock is None else int(self.unlock.usable(at) * MICRO)
