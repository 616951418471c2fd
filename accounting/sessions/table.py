"""A table whose records have budgets of their own: what is public of it, fixed before its first
record.

The table's space is what budgets are accounted in, so it can never change: every charge names its
digest, and a ledger of another space is refused.  Aggregated columns are dimensions too: a
dimension's range is the public bound of sums over it.

**Unit of protection: one record.**  ``identity`` is the unit that charges name.  It is no column's,
so that a ledger refuses streams and SQL, which protect persons, on the same data set, and sessions
on theirs.
"""

import hashlib
from functools import cached_property

import msgspec

from dpstream.accounting import limits
from dpstream.accounting.errors import UsageError
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.accounting.regions.amounts import exact, initial_of
from dpstream.accounting.regions.dimensions import (
    Budget,
    Category,
    Dimension,
    Integer,
    Real,
    Timestamp,
)
from dpstream.accounting.regions.space import Space
from dpstream.accounting.strength import weaknesses_of_budget

#: First line of what the digest covers.
_FORM = "dpstream session table/1"
AnyDimension = Integer | Timestamp | Real | Category | Budget


class SessionTable(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The public model of a table; see the module.

    Attributes:
        name: of the data set that the table is of.
        dimensions: of its space, in order: those that queries select by, the aggregated columns,
            and one or two initial budgets.
        cap: most regions that its account may hold; coarser beyond it.

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
        """Of initial budgets that may promise a record little."""
        budgets = [d for d in self.dimensions if isinstance(d, Budget)]
        return [
            f"a record's initial budget may be {of.kind} {of.most}: {weakness}"
            for of in budgets
            for weakness in weaknesses_of_budget(of.kind, float(exact(of.most, of.name)))
        ]

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits of all that is fixed: what the plan's hash is for other kinds."""
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
        case Real(low=low, high=high, step=step):
            return ["real", *common, *(str(exact(v, dimension.name)) for v in (low, high, step))]
        case Category(codes=codes):
            return ["category", *common, list(codes)]
        case Budget(kind=kind, most=most, step=step):
            return ["budget", *common, kind, initial_of(most, dimension.name), step]
    raise TypeError(type(dimension))
