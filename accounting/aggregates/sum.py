"""SUM: clamped values of a column, on multiples of a grid."""

import numpy as np
from typing_extensions import override

from dpstream.accounting.aggregates.base import (
    AggregateKind,
    Exact,
    Prefixes,
    bounded_stream,
    needs_bounds,
    own,
)
from dpstream.accounting.arrays import Float64
from dpstream.accounting.fields import Aggregate, ValueStream


class Sum(AggregateKind):
    """A record adds its clamped value, L = the larger bound."""

    @override
    def check(self, aggregate: Aggregate, where: str) -> None:
        needs_bounds(aggregate, where)

    @override
    def own_stream(self, aggregate: Aggregate) -> ValueStream | None:
        return bounded_stream(aggregate, 0)

    @override
    def release(self, aggregate: Aggregate, prefixes: Prefixes) -> tuple[Float64, Float64]:
        _, total = own(aggregate, prefixes)
        sd = np.full(len(total.values), total.sd)
        return total.values * aggregate.grid, sd * aggregate.grid

    @override
    def expected_sd(self, aggregate: Aggregate, prefixes: Prefixes) -> tuple[Float64, str]:
        stream, total = own(aggregate, prefixes)
        return total.sd * stream.grid, ""

    @override
    def exact(self, stream: ValueStream | None, truth: Exact) -> Float64:
        if stream is None or truth.total is None:
            raise ValueError("no exact sum")
        return truth.total * stream.grid
