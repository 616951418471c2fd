"""SUM beside MEAN of one column: the sum is made from the mean's two sums, not measured again.

A mean of a column publishes the running sum of (value - middle) and the running count, each with a
stream of its own.  The clamped sum of the same column is

    sum = (centred sum) + middle * count,

so that it is post-processing of the two (mechanism.md section 4): no sensitivity, no share of mu^2.
Its sd is sqrt(sd_centred^2 + middle^2 sd_count^2), as the two streams have independent noise.  A
stream of its own would have L = max(|lo|, |hi|) = |middle| + half where these two have half and 1,
and would take a third of the values' share.

A sum with a share of its own in the job is measured by itself: the job has said what it is worth.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from dpstream.accounting.aggregates.base import COUNT, Prefix, bounded_stream
from dpstream.accounting.fields import Aggregate, ValueStream


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
        """The sum and its sd, in grid units, from the mean's running sum and the count."""
        centred, count = streams[self.mean], streams[COUNT]
        values = centred.values + self.middle * count.values
        # Products and roots are rounded correctly on every processor, powers and hypot are not.
        spread = self.middle * np.asarray(count.sd)
        sd = np.sqrt(np.square(centred.sd) + spread * spread) * (1 + _SLACK)
        return Prefix(self.stream, values, sd)


#: Sds are rounded up, far above the float error of a root.
_SLACK = 1e-15


def derived_sums(aggregates: Sequence[Aggregate]) -> tuple[DerivedSum, ...]:
    """Sums that stand beside a mean of the same column, bounds and grid, in the job's order."""
    means = {_measured(a): a for a in reversed(aggregates) if a.kind == "mean"}
    sums = []
    for a in aggregates:
        mean = means.get(_measured(a)) if a.kind == "sum" and a.share is None else None
        if mean is not None:
            middle = sum(mean.grid_bounds()) // 2
            sums.append(DerivedSum(a.name, mean.name, middle, bounded_stream(a, 0)))
    return tuple(sums)


def with_derived(streams: Mapping[str, Prefix], derived: Sequence[DerivedSum]) -> dict[str, Prefix]:
    """The running sums, and beside them those that are made from them."""
    return {**streams, **{made.name: made.prefix(streams) for made in derived}}


def _measured(aggregate: Aggregate) -> tuple[object, ...] | None:
    """What is summed: column, bounds in grid units, grid; ``None`` where nothing is."""
    if aggregate.bounds is None:
        return None
    return aggregate.column, aggregate.grid_bounds(), aggregate.grid
