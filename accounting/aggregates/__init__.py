"""Kinds of published columns, a class each: what a kind needs, releases and costs is said once."""

import math
from collections.abc import Collection, Sequence

from dpstream.accounting.aggregates.base import COUNT, AggregateKind
from dpstream.accounting.aggregates.count import Count
from dpstream.accounting.aggregates.derived import DerivedSum, derived_sums
from dpstream.accounting.aggregates.mean import Mean
from dpstream.accounting.aggregates.sum import Sum
from dpstream.accounting.aggregates.units import Units
from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Aggregate, ValueStream

KINDS: dict[str, AggregateKind] = {"count": Count(), "sum": Sum(), "mean": Mean(), "units": Units()}


def kind_of(aggregate: Aggregate) -> AggregateKind:
    """The class of a column's kind."""
    return KINDS[aggregate.kind]


def check(aggregate: Aggregate, index: int) -> None:
    """Refuse a column whose sensitivity is not bounded by public figures.

    Raises:
        UsageError: names the field of the job's ``[[aggregate]]`` table number ``index``.
    """
    where = f"aggregate[{index}]"
    if not aggregate.name or aggregate.name.startswith("_"):
        raise UsageError(f"{where}.name", "must be non-empty and not start with '_'", "rename")
    if aggregate.share is not None and not 0 < aggregate.share < math.inf:
        raise UsageError(f"{where}.share", "must be a positive number", "write e.g. 1.0")
    kind_of(aggregate).check(aggregate, where)


def streams_of(
    aggregates: Sequence[Aggregate], derived: Collection[str] = ()
) -> tuple[ValueStream, ...]:
    """The noisy running sums behind the columns: the count first, shared by all that need it.

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


__all__ = [
    "COUNT",
    "KINDS",
    "AggregateKind",
    "DerivedSum",
    "check",
    "derived_sums",
    "kind_of",
    "streams_of",
]
