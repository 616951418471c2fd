"""BOUND with all admitted pairs in one batch, as tests look at them."""

import functools
from typing import NamedTuple

import pyarrow as pa

from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms import bounding
from dpstream.dp_transforms.decision import KeyIdsOf
from dpstream.dp_transforms.noise.ids import key_ids
from dpstream.dp_transforms.published_keys import PublishedKeys
from dpstream.state.store import Store
from tests.streams import KEYS


def ids_in(plan: Plan) -> KeyIdsOf:
    """Ids of keys under the fixed test secret."""
    return functools.partial(key_ids, plan, KEYS.ring().key)


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
    since: int = 0,
    published: PublishedKeys | None = None,
) -> Bounded:
    """Do ``bounding.decide`` under the fixed test secret."""
    pieces, counts, waiting = bounding.decide(
        plan, store, shard, records, upto, since, ids_in(plan), published
    )
    admitted, *_ = pieces(max(1, counts["operator_pairs_admitted"]))
    return Bounded(admitted, counts, waiting)
