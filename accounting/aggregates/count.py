"""COUNT: the number of admitted records of a key."""

import numpy as np
from typing_extensions import override

from dpstream.accounting.aggregates.base import (
    COUNT,
    AggregateKind,
    Exact,
    Prefixes,
    takes_no_column,
)
from dpstream.accounting.arrays import Float64
from dpstream.accounting.fields import Aggregate, ValueStream


class Count(AggregateKind):
    """One record adds 1 to the running count, which means share."""

    uses_count = True

    @override
    def check(self, aggregate: Aggregate, where: str) -> None:
        takes_no_column(aggregate, where)

    @override
    def own_stream(self, aggregate: Aggregate) -> ValueStream | None:
        return None

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
