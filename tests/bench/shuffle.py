"""Rows a second that a runner moves between two stages: batches split over key shards, gathered.

    python -m tests.bench.shuffle --prism .tools/bin/prism
    python -m tests.bench.shuffle --rows 500000 4000000

The flow's own split and coder on batches like its own (unit id, stamp, position, key), without
any other work.  Two sizes are run: their difference leaves out the start.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from dpstream.dp_transforms.batches import ID
from dpstream.dp_transforms.beam.split import SplitByShard, unit_ids
from dpstream.pipelines.runners.worker_pool import LoopbackPrismRunner
from dpstream.state.arrow import id_array
from tests.bench.common import emit, machine

SCHEMA = pa.schema(
    [
        ("unit", ID), ("stamp", pa.int64()), ("partition", pa.int32()),
        ("offset", pa.int64()), ("key", pa.string()),
    ]
)  # fmt: skip
BATCH = 20_000


class Batches(beam.DoFn):
    """A number -> a batch of that seed."""

    def process(self, seed: int) -> Iterator[pa.RecordBatch]:
        """Random units and keys."""
        rng = np.random.default_rng(seed)
        names = np.array([f"key {n:06d}" for n in range(10_000)])
        columns = [
            id_array(rng.integers(0, 2**63, (BATCH, 2)).astype(np.uint64)),
            pa.array(np.arange(BATCH)),
            pa.array(np.zeros(BATCH, np.int32)),
            pa.array(np.arange(BATCH)),
            pa.array(names[rng.integers(0, len(names), BATCH)]),
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def seconds(rows: int, shards: int, prism: Path | None) -> float:
    """Wall time of a run that moves so many rows."""
    flags = ["--job_server_timeout=60"]
    runner: Any = FnApiRunner()
    if prism is not None:
        runner = LoopbackPrismRunner()
        flags += [f"--prism_location={prism}", "--environment_type=LOOPBACK"]
    begin = time.perf_counter()
    with beam.Pipeline(runner=runner, options=PipelineOptions(flags)) as pipeline:
        _ = (
            pipeline
            | beam.Create(range(rows // BATCH))
            | beam.Reshuffle()
            | beam.ParDo(Batches()).with_output_types(pa.RecordBatch)
            | beam.ParDo(SplitByShard(unit_ids, shards, SCHEMA)).with_output_types(
                tuple[int, pa.RecordBatch]
            )
            | beam.GroupByKey()
            | beam.Map(lambda pair: sum(batch.num_rows for batch in pair[1]))
        )
    taken = time.perf_counter() - begin
    if prism is not None:
        runner.close()
    return taken


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs=2, default=[500_000, 4_000_000])
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--prism", type=Path, help="the prism binary; without it in process")
    parser.add_argument("--out", type=Path, help="append the JSON result to this file")
    args = parser.parse_args()
    few, many = (seconds(rows, args.shards, args.prism) for rows in args.rows)
    rate = (args.rows[1] - args.rows[0]) / (many - few)
    figures = {
        "runner": "Prism" if args.prism else "FnApiRunner",
        "shards": args.shards,
        "seconds": [round(few, 2), round(many, 2)],
        "rows_per_second": round(rate),
    }
    emit({"benchmark": "shuffle", **machine(), **figures}, args.out)


if __name__ == "__main__":
    main()
