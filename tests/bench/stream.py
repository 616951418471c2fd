"""A recorded day on Prism or Flink beside the run in process: records a second, CPU, latency.

    python -m tests.bench.stream
    python -m tests.bench.stream --records 6000000 20000000 --sinks parquet jsonl
    python -m tests.bench.stream --engines flink flink_threads --workers 1 2 --shards 1 4 16
    python -m tests.bench.stream --latency --rate 20000 --seconds 120

Each engine reads the same data into the same sink as the run in process of the same call, and its
releases are compared with that run's.  Runs of all engines alternate, so that other work on the
machine disturbs all alike; of each figure the median, the least and the most of ``--repeats`` are
told, and of rates what part of the rate in process of the same repetition they are.  Marginal rates
come from two sizes, a third of the records and all of them: start-up (a job server, a cluster,
compiled kernels) is left out.  Rates with start-up are all records over the seconds of their run.
CPU time is told by process: the launcher (in process, on Prism and for ``flink_threads`` workers
are its threads), the engine that it started, and the Python workers of ``flink``.  ``--markdown``
prints the table of docs/benchmarks.md.

Latency: the wall time from the moment the source's watermark passes a trigger until the release's
file is there, at a paced rate.
"""

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import tomlkit

from dpstream.pipelines.connectors import inputs
from dpstream.pipelines.connectors.files import stream as file_stream
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from tests.bench.common import emit, machine, tree_seconds
from tests.bench.paper.one_run import ONE_HEAP
from tests.bench.paper.synth import Synth, generate
from tests.fixed_runs import fix_run_id
from tests.paced import paced
from tests.runners.engines import Pool, worker_pool
from tests.runners.golden import digest, published

RECORDS_PER_USER = 5.9
IN_PROCESS = "in_process"
#: Flink with workers that are processes of their own, and with threads of the launcher.
FLINK, FLINK_THREADS = "flink", "flink_threads"
NAMES = {
    "prism": "PrismRunner",
    FLINK: "FlinkRunner",
    FLINK_THREADS: "FlinkRunner",
    IN_PROCESS: "DirectRunner",
}


def job_of(folder: Path, data: Path, shards: int, triggers: int, sink: str = "parquet") -> Job:
    """A project file over the recorded day, in a folder of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "data").symlink_to(data)
    job = {
        "start": "2024-01-01T00:00:00Z",
        "end": "2024-01-02T00:00:00Z",
        "window": "1d",
        "release_every": f"{86_400 // triggers}s",
        "shards": shards,
        "sink": {"kind": sink, "path": "releases"},
    }
    return counting_job(folder, {"path": "data/*.parquet"}, "int", job)


def counting_job(folder: Path, source: dict[str, Any], unit_type: str, job: dict[str, Any]) -> Job:
    """The job that counts records by key.

    Args:
        folder: of the project file.
        source: fields of the table that say where its records come from.
        unit_type: of the units' ids.
        job: times, shards and sink.
    """
    unit = {"name": "user", "type": unit_type}
    counts = {
        "table": "records",
        "key": ["key"],
        "aggregate": {"n": {"kind": "count"}},
        "budget": {"epsilon": 6.0, "delta": 1e-9, "covers": "lifetime"},
        "contributions": 32,
    }
    sections = {
        "version": 1,
        "data_set": {"users": {"unit": unit, "insecure_test_secret": "0f" * 32}},
        "table": {"records": source | {"unit_column": "user", "time_column": "time"}},
        "job": {"counts": counts | job},
    }
    (folder / "dpstream.toml").write_text(tomlkit.dumps(sections))
    fix_run_id(folder)
    return load_job(folder)


class Measured(NamedTuple):
    """One run, start-up included.

    Attributes:
        seconds: of wall time.
        cpu: seconds by process: ``launcher``, ``engine``, ``workers``.
        digest: of all that it published.
    """

    seconds: float
    cpu: dict[str, float]
    digest: str


def measured(job: Job, engine: str, workers: int) -> Measured:
    """Run a job on an engine, on Flink with so many workers."""
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(worker_pool()) if engine == FLINK else None
        flags = _flink_flags(pool, workers) if engine in (FLINK, FLINK_THREADS) else []
        begin, before = time.perf_counter(), _cpu(pool)
        run_job(job, NAMES[engine], flags)
        after, end = _cpu(pool), time.perf_counter()
    stores.close_all()
    cpu = {name: after[name] - before[name] for name in after}
    return Measured(end - begin, cpu, digest(published(job)))


def _flink_flags(pool: Pool | None, workers: int) -> list[str]:
    here = [f"--parallelism={workers}"]
    if pool is None:
        return here
    return [
        *here,
        f"--sdk_worker_parallelism={workers}",
        "--environment_type=EXTERNAL",
        f"--environment_config={pool.address}",
    ]


def _cpu(pool: Pool | None) -> dict[str, float]:
    """Seconds by process; an engine ends with its run, and the launcher has waited for it."""
    used = os.times()
    return {
        "launcher": used.user + used.system,
        "engine": used.children_user + used.children_system,
        **({} if pool is None else {"workers": tree_seconds(pool.pid)}),
    }


def throughput(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """One result for each size, sink, number of shards, and engine with its number of workers."""
    setups = [(IN_PROCESS, 1)] + [
        (engine, workers)
        for engine in args.engines
        for workers in (args.workers if engine in (FLINK, FLINK_THREADS) else [1])
    ]
    for size in args.records:
        sizes = []
        for part in (3, 1):
            place = folder / f"{size}-{part}"
            place.mkdir()
            users = round(size / part / RECORDS_PER_USER)
            params = Synth(users=users, keys=100_000, row_group_rows=20_000)
            sizes.append((place, generate(params, place / "z.parquet")))
        for sink in args.sinks:
            for shards in args.shards:
                runs: dict[tuple[str, int], list[list[Measured]]] = {who: [] for who in setups}
                for engine, workers in setups:  # kernels are compiled, files are read
                    job = job_of(folder / "job", sizes[0][0], shards, args.triggers, sink)
                    measured(job, engine, workers)
                for _ in range(args.repeats):
                    for engine, workers in setups:
                        pair = []
                        for place, _ in sizes:
                            job = job_of(folder / "job", place, shards, args.triggers, sink)
                            pair.append(measured(job, engine, workers))
                        runs[engine, workers].append(pair)
                rows = [rows for _, rows in sizes]
                for (engine, workers), pairs in runs.items():
                    yield {
                        "engine": engine,
                        "workers": workers,
                        "sink": sink,
                        "shards": shards,
                        "triggers": args.triggers,
                        "records": rows,
                        **rates(rows, pairs, runs[IN_PROCESS, 1]),
                        "same_bytes": {pair[1].digest for pair in pairs}
                        == {pair[1].digest for pair in runs[IN_PROCESS, 1]},
                    }


class Spread(NamedTuple):
    """A figure of repeated runs."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float], digits: int = 4) -> "Spread":
        """Of one figure for each run, to some digits."""
        ends = (median(values), min(values), max(values))
        return cls(*(float(f"{value:.{digits}g}") for value in ends))

    def text(self) -> str:
        """The median, and in brackets least and most."""
        middle, low, high = (f"{x:,.0f}" if x >= 100 else f"{x:g}" for x in self)
        return f"{middle} ({low} to {high})"


def rates(
    records: Sequence[int], pairs: Sequence[Sequence[Measured]], base: Sequence[Sequence[Measured]]
) -> dict[str, Any]:
    """The figures of repeated runs of two sizes, each with its spread.

    Args:
        records: of the two sizes.
        pairs: of each repetition the runs of the two sizes.
        base: those in process, of the same repetitions: ratios are of runs beside each other.
    """
    more = records[1] - records[0]

    def further(pair: Sequence[Measured]) -> float:
        return more / (pair[1].seconds - pair[0].seconds)

    def with_start(pair: Sequence[Measured]) -> float:
        return records[1] / pair[1].seconds

    both = list(zip(pairs, base, strict=True))
    names = pairs[0][0].cpu
    cpu = {
        name: Spread.of([1e6 * (b.cpu[name] - a.cpu[name]) / more for a, b in pairs], 3)
        for name in names
    }
    started = {
        name: Spread.of([1e6 * b.cpu[name] / records[1] for _, b in pairs], 3) for name in names
    }
    return {
        "repeats": len(pairs),
        "records_per_second": Spread.of([further(pair) for pair in pairs], 3),
        "with_start_records_per_second": Spread.of([with_start(pair) for pair in pairs], 3),
        "of_in_process": Spread.of([further(own) / further(its) for own, its in both], 3),
        "with_start_of_in_process": Spread.of(
            [with_start(own) / with_start(its) for own, its in both], 3
        ),
        "cpu_micros_per_record": cpu,
        "with_start_cpu_micros_per_record": started,
    }


#: Head of the table of docs/benchmarks.md, and how its rows call the engines.
_HEAD = (
    "| | records/s, further | with start-up | of in process, further | with start-up "
    "| CPU µs a record, further | with start-up |"
)
_LABELS = {IN_PROCESS: "in process", "prism": "Prism", FLINK_THREADS: "Flink, {} threads",
           FLINK: "Flink, {} processes"}  # fmt: skip


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """The table of docs/benchmarks.md."""
    lines = [_HEAD, "|---|---|---|---|---|---|---|"]
    for result in results:
        cells = [_LABELS[result["engine"]].format(result["workers"])]
        for name in ("records_per_second", "with_start_records_per_second", "of_in_process",
                     "with_start_of_in_process"):  # fmt: skip
            cells.append(result[name].text())
        for name in ("cpu_micros_per_record", "with_start_cpu_micros_per_record"):
            parts = result[name].values()
            sums = (sum(part[place] for part in parts) for place in range(3))
            cells.append(Spread.of(list(sums), 3).text())
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def latency(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds from the watermark to the release, at a paced rate."""
    data = folder / "data"
    data.mkdir()
    users = int(args.rate * args.seconds / RECORDS_PER_USER)
    rows = generate(Synth(users=users, keys=100_000, row_group_rows=20_000), data / "z.parquet")
    job, passed = job_of(folder / "job", data, args.shards[0], args.triggers), dict[int, float]()
    timeline, real = job.plan.timeline, inputs.advance

    def advance(estimator: Any, micros: int) -> None:
        real(estimator, micros)
        now, trigger_time = (
            time.time(),
            min(timeline.last_trigger_time, (micros - timeline.start) // timeline.trigger_every),
        )
        while trigger_time > 0 and trigger_time not in passed:
            passed[trigger_time] = now
            trigger_time -= 1

    with mock.patch.object(file_stream, "advance", advance), paced(86_400 * args.rate / rows):
        run_job(job, NAMES["prism"], [])
    waited = []
    for trigger in range(1, timeline.triggers):  # at the end of the recording nothing is paced
        path = Path(job.sink.path) / "window-000000" / f"trigger-{trigger:06d}.parquet"
        waited.append(os.stat(path).st_ctime - passed[trigger])
    return {
        "engine": "prism",
        "records_per_second": args.rate,
        "triggers": timeline.triggers,
        "seconds_between_triggers": round(rows / args.rate / timeline.triggers, 2),
        "latency_median": round(float(np.median(waited)), 3),
        "latency_p99": round(float(np.quantile(waited, 0.99)), 3),
        "latency_max": round(max(waited), 3),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--engines", choices=sorted({*NAMES} - {IN_PROCESS}), nargs="*", default=["prism"]
    )
    parser.add_argument("--records", type=int, nargs="+", default=[6_000_000])
    parser.add_argument("--sinks", choices=["parquet", "jsonl"], nargs="+", default=["parquet"])
    parser.add_argument("--repeats", type=int, default=3, help="of which median and ends are told")
    parser.add_argument("--workers", type=int, nargs="+", default=[2], help="on Flink")
    parser.add_argument("--shards", type=int, nargs="+", default=[4])
    parser.add_argument("--triggers", type=int, default=100)
    parser.add_argument("--latency", action="store_true")
    parser.add_argument("--rate", type=int, default=20_000, help="records a second, on Prism")
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--markdown", action="store_true", help="print the table of the docs too")
    parser.add_argument("--out", type=Path, help="append the JSON results to this file")
    args = parser.parse_args()
    if args.latency and args.markdown:
        parser.error("--markdown is for rates")
    if not ONE_HEAP.items() <= os.environ.items():  # as the command has it, before Arrow is there
        command = [sys.executable, "-m", "tests.bench.stream", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | ONE_HEAP)
    with tempfile.TemporaryDirectory(prefix="dpstream-bench-") as name:
        results = [latency(args, Path(name))] if args.latency else throughput(args, Path(name))
        table = list[dict[str, Any]]()
        for result in results:
            emit({"benchmark": "stream", **machine(), **result}, args.out)
            table.append(result)
    if args.markdown:
        print(markdown(table))


if __name__ == "__main__":
    main()
