"""Kinds of published columns, one class per kind with its inputs, releases and costs.

**SUM beside MEAN of one column**: the sum is made from the mean's two sums, not measured again.  A
mean of a column publishes the running sum of (value - middle) and the running count, each with a
stream of its own.  The clamped sum of the same column is

    sum = (centred sum) + middle * count,

so that it is post-processing of the two (mechanism.md section 4): no sensitivity, no share of mu^2.
Its sd is sqrt(sd_centred^2 + middle^2 sd_count^2), as the two streams have independent noise.  A
stream of its own would have L = max(|lo|, |hi|) = |middle| + half where these two have half and 1,
and would take a third of the values' share.

A sum with a share of its own in the job is measured by itself: the job has said what it is worth.

**MEAN**: a noisy centred sum over a noisy count, both published mechanisms of their own.  With S
and N the noisy sum and count of a key of sum s and count n, and c the sd of N's noise, which is
independent of S's, what is published is

    middle + S N / (N^2 + c^2).

S / N would be off by a factor E[n / N] = 1 + (c/n)^2 + 3 (c/n)^4 + ... of the mean's distance
from the middle, and by anything at all where N is near 0; with N / (N^2 + c^2) in the place of
1 / N that factor is 1 - 2 (c/n)^4 + ..., and the quotient is never more than |S| / (2 c).  So
nothing needs to be clipped.  Clipping moves the expected value away from the nearer bound, by .4 sd
where the true mean stands on it.  A published mean may therefore lie outside of the bounds, by
noise alone, as a count may be below 0.  Where the count is no more than its noise the mean is drawn
to the middle: little is known there, which the sd says, as it is not drawn.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from typing_extensions import override

from dpstream.accounting import limits
from dpstream.accounting.arrays import Float64
from dpstream.accounting.errors import UsageError, required
from dpstream.accounting.fields import Aggregate, ValueStream

#: Name of the running count of records, which columns of several kinds share.
COUNT = "count"
_SUMMED, _COUNTED = "the column has an exact sum", "units are counted"


class Prefix(NamedTuple):
    """A noisy running sum: its stream (``None`` for a count of units), its values in grid units
    and their sd, one for all values or one for each."""

    stream: ValueStream | None
    values: Float64
    sd: Float64


class Prefixes(NamedTuple):
    """The input of a release: running sums by name, and the count of units if there is one."""

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
        uses_count: whether the kind needs the running count of records.
        counts_units: whether it is read from the count of units, not from a sum over records.
        divides: whether it is a quotient, so that its noise is not Gaussian.
        bounded: whether it takes a column of values, whose sensitivity needs public bounds.
    """

    bounded = False
    uses_count = False
    counts_units = False
    divides = False

    def own_stream(self, aggregate: Aggregate) -> ValueStream | None:
        """Return the running sum that is kept for this column alone, by default none; its
        ``sensitivity`` is L.
        """
        return None

    @abstractmethod
    def release(self, aggregate: Aggregate, prefixes: Prefixes) -> tuple[Float64, Float64]:
        """Return the published values and their sds, in the column's own units."""

    @abstractmethod
    def expected_sd(self, aggregate: Aggregate, prefixes: Prefixes) -> tuple[Float64, str]:
        """Return (T,) sd at each trigger in the column's own units, and a note on what it leaves
        out.

        Args:
            prefixes: running sums with their sds by trigger; their values are not read.
        """

    @abstractmethod
    def exact(self, stream: ValueStream | None, truth: Exact) -> Float64:
        """Return the column's exact values, NaN where it is not defined."""


def own_prefix(aggregate: Aggregate, prefixes: Prefixes) -> tuple[ValueStream, Prefix]:
    """Return the running sum that was made for a column."""
    prefix = prefixes.streams[aggregate.name]
    return required(prefix.stream, "a running sum has a stream"), prefix


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
    sizes = all(map(limits.has_usable_size, aggregate.bounds))
    if not sizes or not 0 < aggregate.grid < math.inf:
        raise UsageError(
            where,
            f"bounds must be finite, each 0 or of a size from {limits.LEAST_SIZE:g} to "
            f"{limits.MOST_SIZE:g}, and grid finite and positive",
            "correct them",
        )
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
    """Return the running sum of a bounded column less ``mid``; a record adds at most L.

    L is the distance of ``mid`` from the farther bound.
    """
    lo, hi = aggregate.grid_bounds()
    bound = max(abs(lo - mid), abs(hi - mid), 1)
    return ValueStream(
        aggregate.name, aggregate.column, lo, hi, mid, bound, aggregate.grid, aggregate.share or 1.0
    )


class Count(AggregateKind):
    """A count: one record adds 1 to the running count, whichever share of it is used."""

    uses_count = True

    @override
    def release(self, aggregate: Aggregate, prefixes: Prefixes) -> tuple[Float64, Float64]:
        count = prefixes.streams[COUNT]
        return count.values, np.full(len(count.values), count.sd)

    @override
    def expected_sd(self, aggregate: Aggregate, prefixes: Prefixes) -> tuple[Float64, str]:
        return prefixes.streams[COUNT].sd, ""

    @override
    def exact(self, stream: ValueStream | None, truth: Exact) -> Float64:
        return truth.records


class Sum(AggregateKind):
    """A sum: a record adds its bounded value, at most L = the larger bound."""

    bounded = True

    @override
    def own_stream(self, aggregate: Aggregate) -> ValueStream | None:
        return bounded_stream(aggregate, 0)

    @override
    def release(self, aggregate: Aggregate, prefixes: Prefixes) -> tuple[Float64, Float64]:
        _, total = own_prefix(aggregate, prefixes)
        sd = np.full(len(total.values), total.sd)
        return total.values * aggregate.grid, sd * aggregate.grid

    @override
    def expected_sd(self, aggregate: Aggregate, prefixes: Prefixes) -> tuple[Float64, str]:
        stream, total = own_prefix(aggregate, prefixes)
        return total.sd * stream.grid, ""

    @override
    def exact(self, stream: ValueStream | None, truth: Exact) -> Float64:
        return required(truth.total, _SUMMED) * required(stream, _SUMMED).grid


class Units(AggregateKind):
    """A count of units, read from the selection stream or from one of its own."""

    counts_units = True

    @override
    def release(self, aggregate: Aggregate, prefixes: Prefixes) -> tuple[Float64, Float64]:
        units = required(prefixes.units, _COUNTED)
        return units.values, np.full(len(units.values), units.sd)

    @override
    def expected_sd(self, aggregate: Aggregate, prefixes: Prefixes) -> tuple[Float64, str]:
        return required(prefixes.units, _COUNTED).sd, ""

    @override
    def exact(self, stream: ValueStream | None, truth: Exact) -> Float64:
        return required(truth.units, _COUNTED)


class DerivedSum(msgspec.Struct, frozen=True):
    """A sum that is made from a mean's streams.

    Attributes:
        name: of the sum's column; mean: of the column whose centred sum it is made from.
        middle: what the mean's stream subtracts from each record, in grid units.
        stream: the sum as it would be measured; no noise is drawn for it.
    """

    name: str
    mean: str
    middle: int
    stream: ValueStream

    def prefix(self, streams: Mapping[str, Prefix]) -> Prefix:
        """Return the sum and its sd, in grid units, from the mean's running sum and the count."""
        centred, count = streams[self.mean], streams[COUNT]
        values = centred.values + self.middle * count.values
        # Products and roots are rounded correctly on every processor, powers and hypot are not.
        spread = self.middle * np.asarray(count.sd)
        sd = np.sqrt(np.square(centred.sd) + spread * spread) * (1 + _SLACK)
        return Prefix(self.stream, values, sd)


#: Sds are rounded up, far above the float error of a root.
_SLACK = 1e-15


def derived_sums(aggregates: Sequence[Aggregate]) -> tuple[DerivedSum, ...]:
    """Return sums that stand beside a mean of the same column, bounds and grid, in the job's
    order.
    """
    means = {_measured(a): a for a in reversed(aggregates) if a.kind == "mean"}
    sums = []
    for a in aggregates:
        mean = means.get(_measured(a)) if a.kind == "sum" and a.share is None else None
        if mean is not None:
            middle = sum(mean.grid_bounds()) // 2
            sums.append(DerivedSum(a.name, mean.name, middle, bounded_stream(a, 0)))
    return tuple(sums)


def with_derived(streams: Mapping[str, Prefix], derived: Sequence[DerivedSum]) -> dict[str, Prefix]:
    """Return the running sums, and beside them those that are made from them."""
    return {**streams, **{made.name: made.prefix(streams) for made in derived}}


def _measured(aggregate: Aggregate) -> tuple[object, ...] | None:
    """What is summed: column, bounds in grid units, grid; ``None`` where nothing is."""
    if aggregate.bounds is None:
        return None
    return aggregate.column, aggregate.grid_bounds(), aggregate.grid


class Mean(AggregateKind):
    """A mean: the sum of (value - middle) over the count, so that L is half of the bounds' width.

    The quotient is post-processing (mechanism.md section 4).
    """

    bounded = True
    uses_count = True
    divides = True

    @override
    def own_stream(self, aggregate: Aggregate) -> ValueStream | None:
        lo, hi = aggregate.grid_bounds()
        return bounded_stream(aggregate, (lo + hi) // 2)

    @override
    def release(self, aggregate: Aggregate, prefixes: Prefixes) -> tuple[Float64, Float64]:
        stream, total = own_prefix(aggregate, prefixes)
        count = prefixes.streams[COUNT]
        sd = np.asarray(total.sd), np.asarray(count.sd)
        return quotient(aggregate, stream.mid, total.values, count.values, sd)

    @override
    def expected_sd(self, aggregate: Aggregate, prefixes: Prefixes) -> tuple[Float64, str]:
        stream, total = own_prefix(aggregate, prefixes)
        sd = np.hypot(total.sd, stream.sensitivity * prefixes.streams[COUNT].sd) * stream.grid
        return sd, (
            "divided by the key's number of records, for values at the bounds (the worst case)"
        )

    @override
    def exact(self, stream: ValueStream | None, truth: Exact) -> Float64:
        total, grid = required(truth.total, _SUMMED), required(stream, _SUMMED).grid
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(total / truth.records * grid)


def quotient(
    aggregate: Aggregate,
    middle: int,
    total: Float64,
    count: Float64,
    sd: tuple[Float64 | float, Float64 | float],
) -> tuple[Float64, Float64]:
    """Return the mean and its sd, without the bias of a quotient or of bounds; see the module.

    Args:
        middle: grid value that was subtracted from each record.
        total, count: noisy prefixes; ``sd``: their sds, in grid units, one for all or one for each.

    Returns:
        Means, also outside of the bounds, NaN where the noisy count is below 1, and their sds
        (first-order error of the quotient).
    """
    defined = count >= 1
    safe = np.where(defined, count, 1.0)
    # Products and roots are rounded correctly on every processor; a power of a scalar is libm's.
    offset = total * safe / (safe * safe + sd[1] * sd[1])
    spread = offset * sd[1]
    error = np.sqrt(sd[0] * sd[0] + spread * spread) / safe * aggregate.grid
    mean = (middle + offset) * aggregate.grid
    return np.where(defined, mean, np.nan), np.where(defined, error, np.nan)


AGGREGATE_KINDS: dict[str, AggregateKind] = {
    "count": Count(),
    "sum": Sum(),
    "mean": Mean(),
    "units": Units(),
}


def kind_of(aggregate: Aggregate) -> AggregateKind:
    """Return the class of a column's kind."""
    return AGGREGATE_KINDS[aggregate.kind]


def check(aggregate: Aggregate, index: int) -> None:
    """Refuse a column whose sensitivity is not bounded by public figures.

    Raises:
        UsageError: names the field of the job's aggregate number ``index``.
    """
    where = f"aggregate[{index}]"
    if not aggregate.name or aggregate.name.startswith("_"):
        raise UsageError(f"{where}.name", "must be non-empty and not start with '_'", "rename")
    if aggregate.share is not None and not 0 < aggregate.share < math.inf:
        raise UsageError(f"{where}.share", "must be a positive number", "write e.g. 1.0")
    (needs_bounds if kind_of(aggregate).bounded else takes_no_column)(aggregate, where)


def streams_of(
    aggregates: Sequence[Aggregate], derived: Collection[str] = ()
) -> tuple[ValueStream, ...]:
    """Return the noisy running sums behind the columns: the count first, shared by all that need
    it.

    Args:
        derived: names of columns that are made from the streams of others.
    """
    made = [(a, kind_of(a).own_stream(a)) for a in aggregates if a.name not in derived]
    counting = [(a, stream) for a, stream in made if kind_of(a).uses_count]
    streams = [stream for _, stream in made if stream is not None]
    if not counting:
        return tuple(streams)
    # A count that is published has a share of its own; one that only means need has not.
    share = next((a.share for a, stream in counting if stream is None and a.share), 1.0)
    return (ValueStream(COUNT, None, 1, 1, 0, 1, 1.0, share), *streams)
