"""A recorded day as a stream on Prism or Flink, or read to its end: records a second, latency.

    python -m tests.bench.stream --runner prism
    python -m tests.bench.stream --runner direct
    python -m tests.bench.stream --runner flink --workers 2
    python -m tests.bench.stream --runner flink --workers 1 2 --shards 1 4 16
    python -m tests.bench.stream --runner prism --latency --rate 20000 --seconds 120

Rates come from two sizes of the same stream, so that start-up (a job server, a cluster, compiled
kernels) is left out, in records a second and in records a CPU second of all processes; where
start-up varies by seconds (Flink) the rate of the larger one with it is the one to trust.  The
baseline reads both on the same runner and drops them.  The sink is the same for all (Parquet).
Every release is compared with the bounded run's.  Latency: the wall time from the moment the
source's watermark passes a trigger until the release's file is there, at a paced rate.
"""

import argparse
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import apache_beam as beam
import numpy as np
import tomlkit

from dpstream.pipelines.connectors.replay import source as replay
from dpstream.pipelines.connectors.replay.source import Replay
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.runners.table import make_runner
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from tests.bench.common import emit, machine, tree_seconds
from tests.bench.paper.synth import Synth, generate
from tests.runners.engines import worker_pool
from tests.runners.golden import digest, published

RECORDS_PER_USER = 5.9
NAMES = {"prism": "PrismRunner", "flink": "FlinkRunner", "direct": "DirectRunner"}


def job_of(folder: Path, data: Path, shards: int, triggers: int) -> Job:
    """A job file over the stream, in a folder of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "data").symlink_to(data)
    day = 86_400
    tables: dict[str, Any] = {
        "source": {"kind": "parquet", "path": "data/*.parquet"},
        "schema": {
            "unit": {"column": "user", "type": "int"},
            "key": [{"column": "key"}],
            "event_time": {"column": "time"},
        },
        "aggregate": [{"name": "n", "kind": "count"}],
        "time": {
            "start": "2024-01-01T00:00:00Z",
            "end": "2024-01-02T00:00:00Z",
            "window": "1d",
            "trigger_every": f"{day // triggers}s",
        },
        "privacy": {
            "epsilon": 6.0,
            "delta": 1e-9,
            "contributions": 32,
            "insecure_test_key": "0f" * 32,
            "insecure_test_run_id": "22" * 16,
        },
        "state": {"shards": shards},
        "sink": {"kind": "parquet", "path": "releases"},
    }
    (folder / "job.toml").write_text(tomlkit.dumps(tables))
    return load_job(folder / "job.toml")


@contextlib.contextmanager
def flags_of(runner: str, workers: int) -> Iterator[list[str]]:
    """Flags for so many Python processes; Prism's workers are threads of this process."""
    if runner != "flink":
        yield []
        return
    with worker_pool() as pool:
        yield [
            f"--parallelism={workers}",
            f"--sdk_worker_parallelism={workers}",
            "--environment_type=EXTERNAL",
            f"--environment_config={pool.address}",
            "--shutdown_sources_after_idle_ms=1000",
        ]


def seconds_of(job: Job, runner: str, flags: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of a run, start-up included."""
    begin, used = time.perf_counter(), tree_seconds()
    run_job(job, NAMES[runner], flags)
    return time.perf_counter() - begin, tree_seconds() - used


def read_only(job: Job, runner: str, flags: list[str]) -> float:
    """The baseline: the same source on the same runner, and nothing behind it."""
    engine = make_runner(NAMES[runner], flags)
    begin = time.perf_counter()
    pipeline = beam.Pipeline(runner=engine.runner, options=engine.options)
    _ = (pipeline | Replay(job)).records | beam.Map(lambda batch: batch.num_rows)
    pipeline.run().wait_until_finish()
    taken = time.perf_counter() - begin
    engine.close()
    return taken


def throughput(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """One result for each number of workers and shards."""
    few, many = folder / "few", folder / "many"
    rows = []
    for place, users in ((few, args.users), (many, 3 * args.users)):
        place.mkdir()
        params = Synth(users=users, keys=100_000, row_group_rows=20_000)
        rows.append(generate(params, place / "z.parquet"))
    with flags_of(args.runner, args.workers[0]) as flags:  # kernels are compiled, files are read
        seconds_of(job_of(folder / "job", few, args.shards[0], args.triggers), args.runner, flags)
    for workers in args.workers:
        for shards in args.shards:
            jobs = [job_of(folder / "job", d, shards, args.triggers) for d in (few,)]
            with flags_of(args.runner, workers) as flags:
                short, short_cpu = seconds_of(jobs[0], args.runner, flags)
                base = [read_only(jobs[0], args.runner, flags)]
                job = job_of(folder / "job", many, shards, args.triggers)
                long, long_cpu = seconds_of(job, args.runner, flags)
                base.append(read_only(job, args.runner, flags))
            found = digest(published(job))
            stores.close_all()
            run_job(job_of(folder / "job", many, shards, args.triggers))
            yield {
                "runner": args.runner,
                "workers": workers,
                "shards": shards,
                "triggers": args.triggers,
                "records": rows,
                "seconds": [round(short, 2), round(long, 2)],
                "records_per_second": round((rows[1] - rows[0]) / (long - short)),
                "with_start_records_per_second": round(rows[1] / long),
                "records_per_cpu_second": round((rows[1] - rows[0]) / (long_cpu - short_cpu)),
                "read_only_records_per_second": round((rows[1] - rows[0]) / (base[1] - base[0])),
                "same_bytes_as_bounded": found == digest(published(job)),
            }


def latency(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds from the watermark to the release, at a paced rate."""
    data = folder / "data"
    data.mkdir()
    users = int(args.rate * args.seconds / RECORDS_PER_USER)
    rows = generate(Synth(users=users, keys=100_000, row_group_rows=20_000), data / "z.parquet")
    job, passed = job_of(folder / "job", data, args.shards[0], args.triggers), {}
    line, real = job.plan.timeline, replay.advance

    def advance(estimator: Any, micros: int) -> None:
        real(estimator, micros)
        now, trigger_time = (
            time.time(),
            min(line.last_trigger_time, (micros - line.start) // line.trigger_every),
        )
        while trigger_time > 0 and trigger_time not in passed:
            passed[trigger_time] = now
            trigger_time -= 1

    with mock.patch.object(replay, "advance", advance):
        run_job(job, NAMES[args.runner], [], speed=86_400 * args.rate / rows)
    waited = []
    for trigger in range(1, line.triggers):  # at the end of the recording nothing is paced
        path = Path(job.sink.path) / "window-000000" / f"trigger-{trigger:06d}.parquet"
        waited.append(os.stat(path).st_ctime - passed[trigger])
    return {
        "runner": args.runner,
        "records_per_second": args.rate,
        "triggers": line.triggers,
        "seconds_between_triggers": round(rows / args.rate / line.triggers, 2),
        "latency_median": round(float(np.median(waited)), 3),
        "latency_p99": round(float(np.quantile(waited, 0.99)), 3),
        "latency_max": round(max(waited), 3),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runner", choices=sorted(NAMES), default="prism")
    parser.add_argument("--workers", type=int, nargs="+", default=[1])
    parser.add_argument("--shards", type=int, nargs="+", default=[4])
    parser.add_argument("--users", type=int, default=170_000, help="5.9 records each; also thrice")
    parser.add_argument("--triggers", type=int, default=100)
    parser.add_argument("--latency", action="store_true")
    parser.add_argument("--rate", type=int, default=20_000, help="records a second")
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--out", type=Path, help="append the JSON results to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dpstream-bench-") as name:
        results = [latency(args, Path(name))] if args.latency else throughput(args, Path(name))
        for result in results:
            emit({"benchmark": "stream", **machine(), **result}, args.out)


if __name__ == "__main__":
    main()
