"""The parts of a plan that name columns: identifiers, published columns, the sums behind them."""

import math
from typing import Literal

import msgspec

from dpstream.accounting.regions.amounts import exact

FieldType = Literal["string", "int", "bool", "bytes"]
KindName = Literal["count", "sum", "mean", "units"]


class Field(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A column that identifies something (the unit, a part of the key), with its type."""

    column: str
    type: FieldType = "string"


class Aggregate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One published column.

    Attributes:
        name: column of the release.
        kind: ``count`` of records, ``sum`` or ``mean`` of ``column`` clamped to ``clamp`` on
            multiples of ``grid``, ``units`` = count of distinct units of the window.
        share: weight in the division of the value budget (default: equal).
    """

    name: str
    kind: KindName
    column: str | None = None
    bounds: tuple[float, float] | None = None
    grid: float = 1.0
    share: float | None = None

    def grid_bounds(self) -> tuple[int, int]:
        """Return (lo, hi) in grid units, snapped inward; exact in rationals."""
        if self.bounds is None:
            raise ValueError("only sum and mean have bounds")
        low, high, grid = (exact(v, self.name, self.grid) for v in (*self.bounds, self.grid))
        return math.ceil(low / grid), math.floor(high / grid)


class ValueStream(msgspec.Struct, frozen=True):
    """One noisy running sum behind the aggregates.

    Attributes:
        name: ``count`` or the name of the aggregate it was made for.
        column: input column, ``None`` for the constant 1 of a count.
        lo, hi: bounds in grid units; ``mid`` is subtracted after clamping.
        sensitivity: L = the most one record adds, in grid units.
        grid: size of a grid unit.
        share: weight of this stream in the value budget.
    """

    name: str
    column: str | None
    lo: int
    hi: int
    mid: int
    sensitivity: int
    grid: float
    share: float


#: Fields of `accounting.plan.privacy.Privacy` that stand elsewhere than in ``mechanism``.
_PLACES = {
    "epsilon": "budget.epsilon",
    "delta": "budget.delta",
    "contributions": "contributions",
    "per_key_bound": "per_key_bound",
}


def job_field(name: str) -> str:
    """Return the place of a field of ``Privacy`` in a job's section of the project file."""
    return _PLACES.get(name, f"mechanism.{name}")
