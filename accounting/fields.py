"""The parts of a plan that name columns: identifiers, published columns, the sums behind them."""

import functools
import math
from collections.abc import Callable
from typing import Annotated, Literal, get_args, get_type_hints

import msgspec

from dpstream.accounting.errors import UsageError
from dpstream.accounting.regions.amounts import exact

FieldType = Literal["string", "int", "bool", "bytes"]
KindName = Literal["count", "sum", "mean", "units"]
#: A whole number that counts something there is.
Positive = Annotated[int, msgspec.Meta(ge=1)]


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


@functools.cache
def _bounds_of(kind: type[msgspec.Struct]) -> dict[str, msgspec.Meta]:
    """Bounds of whole numbers, by the name of the field that declares them."""
    return {
        name: meta
        for name, hint in get_type_hints(kind, include_extras=True).items()
        for part in (hint, *get_args(hint))
        for meta in getattr(part, "__metadata__", ())
        if isinstance(meta, msgspec.Meta) and meta.ge is not None
    }


def check_bounds(values: msgspec.Struct, place: Callable[[str], str] = str) -> None:
    """Refuse whole numbers outside of the bounds that their fields declare.

    The decoder of the project file does the same (`pipelines.project.text`); a struct that is made
    in code is not decoded.

    Args:
        place: the place of a field in the project file, by its name.

    Raises:
        UsageError: a number is too small or too large.
    """
    for name, bounds in _bounds_of(type(values)).items():
        value = getattr(values, name)
        if isinstance(value, int) and bounds.ge is not None and value < bounds.ge:
            raise outside(place(name), ">=", bounds.ge)
        if isinstance(value, int) and bounds.le is not None and value > bounds.le:
            raise outside(place(name), "<=", bounds.le)


def outside(field: str, sign: str, bound: float) -> UsageError:
    """Return the error for a whole number outside of its bounds: the one rule for all of them.

    Args:
        sign: ``>=`` or ``<=`` what the number must be.
    """
    rule = f"{bound:.0f} or more" if sign == ">=" else f"at most {bound:.0f}"
    return UsageError(field, f"must be a whole number, {rule}", f"write e.g. {bound:.0f}")
