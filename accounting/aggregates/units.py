"""UNITS: the number of distinct privacy units of a key in the window."""

import numpy as np
from typing_extensions import override

from dpstream.accounting.aggregates.base import AggregateKind, Exact, Prefixes, takes_no_column
from dpstream.accounting.arrays import Float64
from dpstream.accounting.fields import Aggregate, ValueStream


class Units(AggregateKind):
    """Read from the count of units: the selection stream continued, or one of its own."""

    counts_units = True

    @override
    def check(self, aggregate: Aggregate, where: str) -> None:
        takes_no_column(aggregate, where)

    @override
    def own_stream(self, aggregate: Aggregate) -> ValueStream | None:
        return None

    @override
    def release(self, aggregate: Aggregate, prefixes: Prefixes) -> tuple[Float64, Float64]:
        if prefixes.units is None:
            raise ValueError("no count of units is kept")
        return prefixes.units.values, np.full(len(prefixes.units.values), prefixes.units.sd)

    @override
    def expected_sd(self, aggregate: Aggregate, prefixes: Prefixes) -> tuple[Float64, str]:
        if prefixes.units is None:
            raise ValueError("the budget has no count of units")
        return prefixes.units.sd, ""

    @override
    def exact(self, stream: ValueStream | None, truth: Exact) -> Float64:
        if truth.units is None:
            raise ValueError("no exact count of units")
        return truth.units
