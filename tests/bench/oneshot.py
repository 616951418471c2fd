"""One-shot DP sum and count: 1M records of 100k users, one trigger, through the real pipeline.

    python -m tests.bench.oneshot

The first run on 10,000 records pays for start-up (imports, compiled kernels, sampler tables);
the second, timed run starts from an empty store and includes reading, commits and the sink.
"""

import argparse
import json
import logging
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.bench.common import COUNT, emit, machine, peak_gib, write_job

COUNT_AND_SUM = COUNT + (
    '[[aggregate]]\nname = "total"\nkind = "sum"\ncolumn = "value"\nclamp = [0, 100]\ngrid = 1\n'
)


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
    from pipelines.job import load_job
    from pipelines.stream import run_job

    write_records(folder / "small.parquet", 10_000, 1_000, args.keys)
    write_records(folder / "large.parquet", args.records, args.users, args.keys)
    seconds, cpu = [], []
    for name in ["small"] + ["large"] * args.repeats:
        shutil.rmtree(folder / "run", ignore_errors=True)
        job = write_job(
            folder,
            "run",
            1,
            data=f"{name}.parquet",
            aggregates=COUNT_AND_SUM,
            epsilon=1.0,
            delta=1e-6,
            contributions=10,
            shards=args.shards,
        )
        checked = load_job(job)
        start, before = time.perf_counter(), time.process_time()
        run_job(checked)
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - before)
    timed = statistics.median(seconds[1:])
    return {
        "benchmark": "oneshot",
        "records": args.records,
        "users": args.users,
        **machine(),
        "first_run_seconds": round(seconds[0], 2),
        "seconds": [round(s, 2) for s in seconds[1:]],
        "cpu_seconds": [round(s, 2) for s in cpu[1:]],
        "records_per_second": round(args.records / timed),
        "records_per_cpu_second": round(args.records / statistics.median(cpu[1:])),
        "peak_gib": round(peak_gib(), 2),
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
