"""The non-private pipeline of one job, timed: ``python -m tests.bench.one_run JOB``.

Beside ``tests.bench.paper.one_run``, which times the job itself, with the same measures.

A non-private pipeline of the same shape: the baseline beside every figure of speed.

It reads the same files, shuffles by key shard, holds rows until each trigger and publishes the
running count of every key the trigger touched.  It carries no user ids, bounds nothing, draws
nothing and stores nothing durable.
"""

import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from dpstream.dp_transforms.batches import (
    HAND_OVER,
    concat,
    ids_of,
    numpy_view,
    split_by_shard,
)
from dpstream.dp_transforms.beam.buffer import BufferUntilTriggerTime, Held, ShardCallback
from dpstream.dp_transforms.beam.clock import Announced, ToShards
from dpstream.dp_transforms.noise.ids import typed_ids
from dpstream.dp_transforms.noise.prf import Prf
from dpstream.pipelines.connectors.files.source import ReadFiles
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.state.arrow import id_array
from dpstream.state.idtable import shard_of
from dpstream.state.store import KeyShard
from tests.bench.paper.one_run import measure

_SCHEMA = pa.schema([("key_id", pa.binary(16)), ("key", pa.string()), ("trigger_time", pa.int32())])


class _Route(beam.DoFn):
    """Source batches -> (shard, key id, key, trigger)."""

    def __init__(self, job: Job) -> None:
        self._line, self._shards = job.plan.timeline, job.state.shards

    def setup(self) -> None:
        self._prf = Prf(bytes(32))

    def start_bundle(self) -> None:
        self._held: list[pa.RecordBatch] = []

    def process(self, element: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
        ids = typed_ids(self._prf, [("string", element.column("key"))])
        trigger_time = self._line.trigger_time_of(
            element.column("time").cast(pa.int64()).to_numpy()
        )
        self._held.append(
            pa.RecordBatch.from_arrays(
                [id_array(ids), element.column("key"), pa.array(trigger_time.astype(np.int32))],
                schema=_SCHEMA,
            )
        )
        if len(self._held) >= 20:
            yield from self._split()

    def finish_bundle(self) -> Iterator[Any]:
        for pair in list(self._split()):
            yield beam.transforms.window.GlobalWindows.windowed_value(pair)

    def _split(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        if self._held:
            batch = concat(self._held, _SCHEMA)
            self._held = []
            shard = shard_of(ids_of(batch.column("key_id")), self._shards)
            yield from split_by_shard(batch, shard, self._shards)


def _count(trigger_times: int) -> Callable[[], ShardCallback]:
    def make() -> ShardCallback:
        def callback(shard: int, batches: Iterable[pa.RecordBatch], upto: int, since: int) -> Held:
            return Held(counted(batches))

        def counted(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.Table]]:
            rows = concat(batches, _SCHEMA)
            trigger_time = numpy_view(rows.column("trigger_time"))
            rows = rows.take(pa.array(np.argsort(trigger_time, kind="stable")))
            bounds = np.searchsorted(
                numpy_view(rows.column("trigger_time")), np.arange(1, trigger_times + 2)
            )
            states = KeyShard(pa.schema([("key", pa.string())]), 0)
            counts = np.zeros(0, np.int64)
            for trigger in range(1, trigger_times + 1):
                begin, end = int(bounds[trigger - 1]), int(bounds[trigger])
                part = rows.slice(begin, end - begin)
                slots = states.intern(ids_of(part.column("key_id")), part)
                counts = np.append(counts, np.zeros(states.size - len(counts), np.int64))
                touched, more = np.unique(slots, return_counts=True)
                counts[touched] += more
                table = states.key_columns(touched).append_column(
                    "count", pa.array(counts[touched])
                )
                yield trigger, table.combine_chunks().to_batches()[0] if len(touched) else table

        return callback

    return make


def run_plain(job: Job) -> None:
    """Run the baseline on the job's input."""
    timeline = job.plan.timeline
    hold = BufferUntilTriggerTime(timeline, _count(timeline.last_trigger_time))
    runner, options = FnApiRunner(), PipelineOptions([])
    with HAND_OVER.open(), beam.Pipeline(runner=runner, options=options) as pipeline:
        read = pipeline | ReadFiles(job)
        route = beam.ParDo(_Route(job)).with_output_types(tuple[int, pa.RecordBatch])
        clock_ticks = beam.ParDo(ToShards(job.state.shards, _SCHEMA))
        clock_ticks = clock_ticks.with_output_types(tuple[int, pa.RecordBatch])
        _ = (
            (read.records | route, pipeline | Announced(timeline.last_trigger_time) | clock_ticks)
            | beam.Flatten()
            | beam.ParDo(hold).with_output_types(tuple[int, pa.RecordBatch])
            | "Gather" >> beam.GroupByKey()
            | "Publish" >> beam.Map(lambda pair: (pair[0], sum(b.num_rows for b in pair[1])))
        )


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    print(json.dumps(measure(load_job(sys.argv[1]), run_plain)))
