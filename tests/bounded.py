"""BOUND with all admitted pairs in one batch, as tests look at them."""

from typing import Any, NamedTuple

import pyarrow as pa

from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms import bounding
from dpstream.state.store import Store


class Bounded(NamedTuple):
    """Admitted pairs, and the other parts of ``bounding.Decided``."""

    admitted: pa.RecordBatch
    counts: dict[str, int]
    waiting: pa.RecordBatch


def bound(
    plan: Plan,
    store: Store,
    shard: int,
    records: pa.RecordBatch,
    upto: int,
    *rest: Any,
    **more: Any,
) -> Bounded:
    """Do ``bounding.decide``."""
    pieces, counts, waiting = bounding.decide(plan, store, shard, records, upto, *rest, **more)
    admitted, *_ = pieces(max(1, counts["operator_pairs_admitted"]))
    return Bounded(admitted, counts, waiting)
