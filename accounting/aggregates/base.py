"""What a kind of published column is: its running sums, its error, how it is read and checked."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

from dpstream.accounting import limits
from dpstream.accounting.arrays import Float64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Aggregate, ValueStream

#: Name of the running count of records, which columns of several kinds share.
COUNT = "count"


class Prefix(NamedTuple):
    """A noisy running sum: its stream (``None`` for a count of units), its values in grid units
    and their sd, one for all values or one for each."""

    stream: ValueStream | None
    values: Float64
    sd: Float64


class Prefixes(NamedTuple):
    """What a release is made from: running sums by name, and the count of units if there is one."""

    streams: Mapping[str, Prefix]
    units: Prefix | None


class Exact(NamedTuple):
    """Exact totals by key, for comparisons on public data only.

    Attributes:
        records: number of records; units: distinct units.
        total: sum of the column's own stream in grid units, its middle added again.
    """

    records: Float64
    units: Float64 | None
    total: Float64 | None


class AggregateKind(ABC):
    """One kind of published column; stateless.

    Attributes:
        uses_count: it needs the running count of records.
        counts_units: it is read from the count of units, not from a running sum of records.
        divides: it is a quotient, so that its noise is not Gaussian.
    """

    uses_count = False
    counts_units = False
    divides = False

    @abstractmethod
    def check(self, aggregate: Aggregate, where: str) -> None:
        """Refuse a column whose sensitivity is not bounded by public figures.

        Raises:
            UsageError: names the field below ``where``.
        """

    @abstractmethod
    def own_stream(self, aggregate: Aggregate) -> ValueStream | None:
        """The running sum that is kept for this column alone; its ``sensitivity`` is L."""

    @abstractmethod
    def release(self, aggregate: Aggregate, prefixes: Prefixes) -> tuple[Float64, Float64]:
        """Published values and their sds, in the column's own units."""

    @abstractmethod
    def expected_sd(self, aggregate: Aggregate, prefixes: Prefixes) -> tuple[Float64, str]:
        """(T,) sd at each trigger in the column's own units, and what it does not say.

        Args:
            prefixes: with sds by trigger; values are not read.
        """

    @abstractmethod
    def exact(self, stream: ValueStream | None, truth: Exact) -> Float64:
        """The column's exact values, NaN where it is not defined."""


def own(aggregate: Aggregate, prefixes: Prefixes) -> tuple[ValueStream, Prefix]:
    """The running sum that was made for a column."""
    prefix = prefixes.streams[aggregate.name]
    if prefix.stream is None:
        raise ValueError("a running sum has a stream")
    return prefix.stream, prefix


def takes_no_column(aggregate: Aggregate, where: str) -> None:
    """Refuse a column or bounds of a kind that counts.

    Raises:
        UsageError: there is one.
    """
    if aggregate.column is not None or aggregate.bounds is not None:
        raise UsageError(
            where, f"kind '{aggregate.kind}' takes no column and no bounds", "remove them"
        )


def needs_bounds(aggregate: Aggregate, where: str) -> None:
    """Refuse a column of values without finite public bounds on its grid.

    Raises:
        UsageError: names the field below ``where``.
    """
    if aggregate.column is None or aggregate.bounds is None:
        raise UsageError(
            where,
            f"kind '{aggregate.kind}' needs a column and public bounds",
            "add column = '...' and bounds = [low, high]",
        )
    if (
        not all(math.isfinite(x) for x in (*aggregate.bounds, aggregate.grid))
        or aggregate.grid <= 0
    ):
        raise UsageError(where, "bounds and grid must be finite and grid positive", "correct them")
    if aggregate.bounds[0] > aggregate.bounds[1]:
        low, high = aggregate.bounds[1], aggregate.bounds[0]
        raise UsageError(
            f"{where}.bounds",
            "is reversed, the lower bound comes first",
            f"write bounds = [{low:g}, {high:g}]",
        )
    lo, hi = aggregate.grid_bounds()
    if lo > hi or lo == hi == 0:
        raise UsageError(
            f"{where}.bounds",
            "must be [low, high] with a multiple of the grid other than 0 inside",
            "widen the bounds or choose a finer grid",
        )
    if max(abs(lo), abs(hi)) > limits.MAX_GRID_VALUE:
        raise UsageError(
            f"{where}.grid",
            f"bounds exceed {limits.MAX_GRID_VALUE} grid units",
            "choose a coarser grid",
        )


def bounded_stream(aggregate: Aggregate, mid: int) -> ValueStream:
    """The running sum of a clamped column less ``mid``: a record adds at most L = the farther
    bound."""
    lo, hi = aggregate.grid_bounds()
    bound = max(abs(lo - mid), abs(hi - mid), 1)
    return ValueStream(
        aggregate.name, aggregate.column, lo, hi, mid, bound, aggregate.grid, aggregate.share or 1.0
    )
