"""Admitted pairs written by hand, and the plan's noise, for tests of single stages."""

from collections.abc import Sequence

import pyarrow as pa

from dpstream.accounting.arrays import Ids
from dpstream.accounting.budget.allocation import StreamNoise
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.batches import admitted_schema
from dpstream.dp_transforms.noise.paths import NoiseStream
from dpstream.dp_transforms.step import sampler_of
from dpstream.state.arrow import id_array
from dpstream.state.open import key_schema
from dpstream.state.store import KeyShard
from tests.state.conformance import ids
from tests.streams import KEYS

#: (unit, key, rank, values by name of their column).
Pair = tuple[int, int, int, dict[str, int]]


def batch_of(
    plan: Plan, rows: Sequence[Pair], window: int = 0, trigger: int = 1
) -> tuple[pa.RecordBatch, Ids]:
    """(admitted pairs of one step, key ids of the rows)."""
    columns: dict[str, object] = {
        "window": [window] * len(rows),
        "trigger": [trigger] * len(rows),
        "rank": [row[2] for row in rows],
        "unit": id_array(ids([row[0] for row in rows])),
        "page": [f"k{row[1]}" for row in rows],
    }
    for name in admitted_schema(plan).names:
        if name not in columns:
            columns[name] = [row[3][name] for row in rows]
    schema = admitted_schema(plan)
    batch = pa.RecordBatch.from_pydict({n: columns[n] for n in schema.names}, schema)
    return batch, ids([row[1] for row in rows])


def states_of(plan: Plan, keys: Sequence[int] = ()) -> KeyShard:
    """Key states, with these keys in the first slots."""
    states = KeyShard(key_schema(plan), plan.design.sums)
    pages = pa.RecordBatch.from_pydict({"page": [f"k{key}" for key in keys]}, key_schema(plan))
    states.intern(ids(list(keys)), pages)
    return states


def noise_stream(plan: Plan, noise: StreamNoise, role: str = "value") -> NoiseStream:
    """A stream of the first window, under the fixed test secret."""
    bounds = plan.timeline.window_bounds(0)
    return NoiseStream(KEYS.ring(), (b"run",), bounds, role, noise, sampler_of(noise))
