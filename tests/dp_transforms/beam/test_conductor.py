"""Both stages in one: a shard's records are complete when its timer fires, and all come at once."""

from collections.abc import Iterator
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.runners import DirectRunner
from apache_beam.runners.portability.flink_runner import FlinkRunner
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.portability.prism_runner import PrismRunner

from dpstream.accounting.errors import RunError
from dpstream.dp_transforms.batches import concat, record_schema
from dpstream.dp_transforms.beam.clock import ToShards, instant
from dpstream.dp_transforms.beam.conductor import Conductor, one_process
from dpstream.dp_transforms.beam.workers import Threads
from dpstream.dp_transforms.flow import stages_of
from dpstream.dp_transforms.loop import alternate
from dpstream.dp_transforms.pacing import stops
from dpstream.state import open as stores
from dpstream.state.arrow import to_bytes
from tests.delivery.runner import Cells, _Bag, _Timer, _Value, floored
from tests.dp_transforms.runs import PLANS, stream_of
from tests.dp_transforms.test_loop import by_shard
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


def test_records_wait_in_the_bag_and_the_first_tick_decides(store_paths: Iterator[str]) -> None:
    """Every record is in some step, of the trigger times that the first clock tick announced."""
    run = begin(PLAN, next(store_paths))
    source = stream_of(PLAN).batches(400)
    want = sorted(
        (name, to_bytes(part))
        for name, part in alternate(run, stages_of(run), by_shard(run, source), stops(PLAN))
    )
    stores.close_all()
    run = begin(PLAN, next(store_paths))
    stage, cells = Conductor(run, stages_of(run), Threads()), [Cells() for _ in range(3)]
    stage.start_bundle()
    last = PLAN.timeline.last_trigger_time

    def give(shard: int, batch: pa.RecordBatch) -> None:
        own = cells[shard]
        stage.process((shard, batch), rows=_Bag(own), armed=_Value(own), timer=_Timer(own))

    ticks = [ToShards(3, record_schema(PLAN)).process((1, 1, upto)) for upto in (last, 3)]
    for shard, parts in enumerate(by_shard(run, source)):
        give(shard, parts[0])
        assert cells[shard].progress is None  # records alone arm no timer
        for tick in ticks:
            give(*next(tick))
        for part in parts[1:]:
            give(shard, part)
        assert len(cells[shard].rows) == len(parts)  # ticks are no records
        assert cells[shard].armed == floored(instant(PLAN.timeline, last).micros)
        stage.fire(shard=shard, rows=_Bag(cells[shard]), armed=_Value(cells[shard]))
    outputs = list(stage.finish_bundle())
    assert sorted((out.value[0], to_bytes(out.value[1])) for out in outputs) == want
    stores.close_all()


def test_which_engines_are_one_process() -> None:
    def asks(runner: Any) -> bool:
        return one_process(beam.Pipeline(runner=runner))

    assert asks(FnApiRunner()) and asks(DirectRunner())
    assert not asks(PrismRunner()) and not asks(FlinkRunner())


def test_all_shards_of_a_bundle_take_all_steps(store_paths: Iterator[str]) -> None:
    run = begin(PLAN, next(store_paths))
    assert len(conducted(run, 3)) == 3 * 24
    stores.close_all()


def test_some_shards_alone_are_refused(store_paths: Iterator[str]) -> None:
    run = begin(PLAN, next(store_paths))
    with pytest.raises(RunError, match=r"mechanism\.skip"):
        conducted(run, 2)
    stores.close_all()
