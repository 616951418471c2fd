"""One-shot DP sum and count: 1M records of 100k users, one trigger, through the real pipeline.

    python -m tests.bench.oneshot

The first run on 10,000 records pays for start-up (imports, compiled kernels, sampler tables);
the second, timed run starts from an empty store and includes reading, commits and the sink.
"""

import argparse
import json
import logging
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.stream.run import run_job
from tests.bench.common import emit, machine
from tests.bench.paper.jobs import Frame, Setting, parse_mode, write_job
from tests.bench.paper.one_run import measure

COUNT_AND_SUM: dict[str, dict[str, Any]] = {
    "count": {"kind": "count"},
    "total": {"kind": "sum", "column": "value", "bounds": [0, 100], "grid": 1},
}


def write_records(path: Path, records: int, users: int, keys: int) -> None:
    """Records of one day in time order: a uniform user, a Zipf key, a whole value below 100."""
    rng = np.random.default_rng(0)
    start = 1_704_067_200_000_000
    table = pa.table(
        {
            "user": rng.integers(0, users, records),
            "key": pa.array(np.char.add("key", (rng.zipf(1.3, records) % keys).astype(str))),
            "time": pa.array(
                start + np.sort(rng.integers(0, 86_400_000_000, records)), pa.timestamp("us")
            ),
            "value": rng.integers(0, 100, records).astype(np.float64),
        }
    )
    pq.write_table(table, path, row_group_size=250_000)


def bench(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Warm up on a small file, then time ``--repeats`` runs on the large one."""
    write_records(folder / "small.parquet", 10_000, 1_000, args.keys)
    write_records(folder / "large.parquet", args.records, args.users, args.keys)
    seconds, cpu = [], []
    for name in ["small"] + ["large"] * args.repeats:
        frame = Frame(folder / f"{name}.parquet", "int", folder / "runs", 1.0, 1e-6, args.shards)
        job = load_job(write_job(frame, Setting(parse_mode("sticky"), 1, 10), COUNT_AND_SUM))
        figures = measure(job, run_job)
        seconds.append(figures["seconds"])
        cpu.append(figures["cpu_seconds"])
    timed = statistics.median(seconds[1:])
    return {
        "benchmark": "oneshot",
        "records": args.records,
        "users": args.users,
        **machine(),
        "first_run_seconds": seconds[0],
        "seconds": seconds[1:],
        "cpu_seconds": cpu[1:],
        "records_per_second": round(args.records / timed),
        "records_per_cpu_second": round(args.records / statistics.median(cpu[1:])),
        "peak_gib": figures["peak_gib"],
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--users", type=int, default=100_000)
    parser.add_argument("--keys", type=int, default=1_000)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="append the JSON result to this file")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as scratch:
        emit(json.loads(json.dumps(bench(args, Path(scratch)))), args.out)


if __name__ == "__main__":
    main()
