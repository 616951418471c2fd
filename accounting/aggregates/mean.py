"""MEAN: a noisy centred sum over a noisy count, both published mechanisms of their own.

With S and N the noisy sum and count of a key of sum s and count n, and c the sd of N's noise, which
is independent of S's, what is published is

    middle + S N / (N^2 + c^2).

S / N would be off by a factor E[n / N] = 1 + (c/n)^2 + 3 (c/n)^4 + ... of the mean's distance
from the middle, and by anything at all where N is near 0; with N / (N^2 + c^2) in the place of
1 / N that factor is 1 - 2 (c/n)^4 + ..., and the quotient is never more than |S| / (2 c).  So
nothing needs to be clipped.  Clipping moves the expected value away from the nearer bound, by .4 sd
where the true mean stands on it.  A published mean may therefore lie outside of the bounds, by
noise alone, as a count may be below 0.  Where the count is no more than its noise the mean is drawn
to the middle: little is known there, which the sd says, as it is not drawn.
"""

import numpy as np
from typing_extensions import override

from dpstream.accounting.aggregates.base import (
    COUNT,
    AggregateKind,
    Exact,
    Prefixes,
    bounded_stream,
    needs_bounds,
    own,
)
from dpstream.accounting.arrays import Float64
from dpstream.accounting.fields import Aggregate, ValueStream


class Mean(AggregateKind):
    """The sum is of (value - middle), so that L is half of the bounds' width; the quotient is
    post-processing (mechanism.md section 4)."""

    uses_count = True
    divides = True

    @override
    def check(self, aggregate: Aggregate, where: str) -> None:
        needs_bounds(aggregate, where)

    @override
    def own_stream(self, aggregate: Aggregate) -> ValueStream | None:
        lo, hi = aggregate.grid_bounds()
        return bounded_stream(aggregate, (lo + hi) // 2)

    @override
    def release(self, aggregate: Aggregate, prefixes: Prefixes) -> tuple[Float64, Float64]:
        stream, total = own(aggregate, prefixes)
        count = prefixes.streams[COUNT]
        sd = np.asarray(total.sd), np.asarray(count.sd)
        return quotient(aggregate, stream.mid, total.values, count.values, sd)

    @override
    def expected_sd(self, aggregate: Aggregate, prefixes: Prefixes) -> tuple[Float64, str]:
        stream, total = own(aggregate, prefixes)
        sd = np.hypot(total.sd, stream.sensitivity * prefixes.streams[COUNT].sd) * stream.grid
        return sd, (
            "divided by the key's number of records, for values at the bounds (the worst case)"
        )

    @override
    def exact(self, stream: ValueStream | None, truth: Exact) -> Float64:
        if stream is None or truth.total is None:
            raise ValueError("no exact sum")
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(truth.total / truth.records * stream.grid)


def quotient(
    aggregate: Aggregate,
    middle: int,
    total: Float64,
    count: Float64,
    sd: tuple[Float64 | float, Float64 | float],
) -> tuple[Float64, Float64]:
    """Mean and its sd, without the bias of a quotient or of bounds; see the module.

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


def ratio(
    aggregate: Aggregate,
    middle: int,
    total: Float64,
    count: Float64,
    sd: tuple[Float64 | float, Float64 | float],
) -> tuple[Float64, Float64]:
    """The quotient held to its bounds, and its sd (first-order error): of answers that are given
    once.

    Args:
        middle: grid value that was subtracted from each record.
        total, count: noisy prefixes; ``sd``: their sds, in grid units, one for all or one for each.

    Returns:
        Means within the bounds, NaN where the noisy count is below 1, and their sds.
    """
    lo, hi = aggregate.grid_bounds()
    defined = count >= 1
    safe = np.where(defined, count, 1.0)
    offset = total / safe
    mean = np.clip(middle + offset, lo, hi) * aggregate.grid
    # Products and roots are rounded correctly on every processor; a power of a scalar is libm's.
    spread = offset * sd[1]
    error = np.sqrt(sd[0] * sd[0] + spread * spread) / safe * aggregate.grid
    return np.where(defined, mean, np.nan), np.where(defined, error, np.nan)
