"""Uneven load, small: half of the keys on one shard, ten times the records in one trigger.

``python -m tests.bench.load`` measures the same at size.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.flow import run_in_memory
from dpstream.dp_transforms.noise.ids import typed_ids
from dpstream.state import open as stores
from dpstream.state.idtable import shard_of
from tests import emulator
from tests.faults.child import plan_of
from tests.faults.places import places, small_commits
from tests.streams import KEYS, STEP, Stream, begin, by_name, generate, key_name

SHARDS = 8


def uneven_keys(stream: Stream) -> Stream:
    """The same records with keys of which half are on shard 0 of ``SHARDS``."""
    numbers = np.arange(900)
    with KEYS.ring() as ring:
        ids = typed_ids(ring.key, [("string", pa.array([key_name(n) for n in numbers.tolist()]))])
    first = shard_of(ids, SHARDS) == 0
    half = (int(stream.key.max()) + 2) // 2
    chosen = np.stack([numbers[first][:half], numbers[~first][:half]], axis=1).reshape(-1)
    assert (shard_of(ids[chosen], SHARDS) == 0).mean() == 0.5
    return dataclasses.replace(stream, key=chosen[stream.key])


def burst(stream: Stream, plan: Plan) -> Stream:
    """The same records, but one trigger has ten times the share of another."""
    rng = np.random.default_rng(4)
    moved = rng.random(len(stream)) < 10 / (plan.timeline.windows * 6 + 9)
    event = np.where(moved, plan.timeline.start + 3 * STEP + stream.event % STEP, stream.event)
    return dataclasses.replace(stream, event=event, stamp=np.maximum(stream.stamp, event))


def streams(plan: Plan) -> dict[str, Stream]:
    even = generate(plan, 5, records=900, users=300, keys=40)
    return {"shard": uneven_keys(even), "burst": burst(even, plan)}


@pytest.mark.parametrize("kind", ["shard", "burst"])
@pytest.mark.parametrize("name", ["sticky", "rounds", "combined"])
def test_uneven_load_changes_no_release(tmp_path: Path, name: str, kind: str) -> None:
    plan = plan_of(name)
    batches = streams(plan)[kind].batches(97)
    releases = []
    for shards in (1, SHARDS):
        run = begin(plan, tmp_path / f"{shards}.db", shards)
        releases.append(by_name(run_in_memory(run, batches)[0]))
        stores.close_all()
    with emulator.running(), places("spanner", tmp_path) as place, small_commits():
        releases.append(by_name(run_in_memory(begin(plan, place(), SHARDS), batches)[0]))
    assert releases[0] == releases[1] == releases[2]
    assert len({len(data) for data in releases[0].values()}) > 3
