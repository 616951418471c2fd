"""Both stages in one: a shard's records are complete when its timer fires, and all come at once."""

from collections.abc import Iterator
from typing import Any

import pytest

from dpstream.accounting.errors import RunError
from dpstream.dp_transforms.batches import concat, record_schema
from dpstream.dp_transforms.beam.clock import ToShards
from dpstream.dp_transforms.beam.conductor import Conductor
from dpstream.dp_transforms.beam.workers import Threads
from dpstream.dp_transforms.flow import stages_of
from dpstream.state import open as stores
from tests.delivery.runner import Cells, _Bag, _Timer, _Value
from tests.dp_transforms.runs import PLANS
from tests.streams import begin

PLAN = PLANS["skip"]


def conducted(run: Any, shards: int) -> list[Any]:
    """What a bundle gives in which the timers of so many shards fire."""
    stage, cells = Conductor(run, stages_of(run), Threads()), [Cells() for _ in range(shards)]
    ticks = list(ToShards(shards, record_schema(PLAN)).process((1, 1, 24)))
    stage.start_bundle()
    for shard, batch in [*ticks, *ticks]:  # a clock tick may come again
        own = cells[shard]
        stage.process((shard, batch), rows=_Bag(own), armed=_Value(own), timer=_Timer(own))
    assert list(stage.finish_bundle()) == []  # nothing before the timers
    assert all(own.armed == cells[0].armed for own in cells)
    stage.start_bundle()
    for shard, own in enumerate(cells):
        own.rows.append(concat([], record_schema(PLAN)))
        stage.fire(shard=shard, rows=_Bag(own), armed=_Value(own))
        assert not own.rows
    return list(stage.finish_bundle())


def test_all_shards_of_a_bundle_take_all_steps(store_paths: Iterator[str]) -> None:
    run = begin(PLAN, next(store_paths))
    assert len(conducted(run, 3)) == 3 * 24
    stores.close_all()


def test_some_shards_alone_are_refused(store_paths: Iterator[str]) -> None:
    run = begin(PLAN, next(store_paths))
    with pytest.raises(RunError, match=r"privacy\.skip"):
        conducted(run, 2)
    stores.close_all()
