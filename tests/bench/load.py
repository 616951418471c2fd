"""Uneven load: half of the keys on one shard, one trigger with ten times its share.

    python -m tests.bench.load
    python -m tests.bench.load --records 20000000

The same number of records each time through the whole pipeline; the even load of the same run
is the baseline.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.dp_transforms.noise.ids import typed_ids
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.jobs.secret import secret_source
from dpstream.state.idtable import shard_of
from tests.bench.common import emit, machine
from tests.bench.paper.jobs import Frame, Setting, parse_mode, write_job
from tests.bench.paper.one_run import in_child
from tests.bench.paper.synth import DAY_MICROS

SHARDS, TRIGGERS = 8, 100
START = 1_704_067_200_000_000  # 2024-01-01
KINDS = ("even", "half of the keys on one shard", "ten times the records in one trigger")


def key_names(path: Path, keys: int, uneven: bool) -> npt.NDArray[np.str_]:
    """Names of keys; with ``uneven`` half of them are of shard 0 under the job's own secret."""
    names = np.array([f"key {n:09d}" for n in range(keys * (SHARDS + 1) if uneven else keys)])
    if not uneven:
        return names
    job = load_job(path)
    with secret_source(job).ring() as ring:
        ids = typed_ids(ring.key, [("string", pa.array(names, pa.string()))])
    first = shard_of(ids, SHARDS) == 0
    half = keys // 2
    return np.concatenate([names[first][:half], names[~first][: keys - half]])


def write(kind: str, path: Path, data: Path, records: int) -> None:
    """The records of a kind of load for a job."""
    rng, keys = np.random.default_rng(1), max(1000, records // 40)
    names = key_names(path, keys, kind == KINDS[1])
    # Zipf over a random order, so that large keys are on every shard.
    weight = (np.arange(keys) + 20.0) ** -1.1
    key = rng.permutation(keys)[rng.choice(keys, records, p=weight / weight.sum())]
    time = rng.integers(0, DAY_MICROS, records)
    if kind == KINDS[2]:
        step = DAY_MICROS // TRIGGERS
        burst = rng.random(records) < 10 / (TRIGGERS + 9)
        time[burst] = step * (TRIGGERS // 2) + rng.integers(0, step, int(burst.sum()))
    table = pa.table(
        {
            "user": rng.integers(0, records // 6, records),
            "key": pa.array(names).take(pa.array(key)),
            "time": pa.array(START + time).cast(pa.timestamp("us", "UTC")),
        }
    )
    pq.write_table(table, data, row_group_size=500_000)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=3_000_000)
    parser.add_argument("--out", type=Path, help="append the JSON result to this file")
    args = parser.parse_args()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for kind in ("even", *KINDS):  # the first one compiles kernels and warms the file cache
            data = Path(scratch) / "data.parquet"
            frame = Frame(data, "int", Path(scratch) / "runs", 6.0, 1e-9, SHARDS)
            data.touch()
            path = write_job(frame, Setting(parse_mode("sticky"), TRIGGERS, 32))
            write(kind, path, data, args.records)
            runs.append({"load": kind, **in_child("tests.bench.paper.one_run", str(path))})
    even = runs[1]
    for run in runs[1:]:
        for name in ("seconds", "cpu_seconds", "peak_gib", "state_mib"):
            run[f"{name}_times_even"] = round(run[name] / even[name], 2)
    emit({"benchmark": "load", **machine(), "shards": SHARDS, "runs": runs[1:]}, args.out)


if __name__ == "__main__":
    main()
