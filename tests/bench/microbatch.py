"""Seconds of one micro-batch against its size: the design paper's Figure 9, by stage.

    python -m tests.bench.microbatch --picture microbatch.png           # SQLite and Spanner
    python -m tests.bench.microbatch --stores sqlite --rows 1000 1000000

One shard takes the records of one trigger after the other: records (canonical), bound (with its
commit), load, aggregate, select (with prediction), perturb, commit.  As in the paper's test of
scale, keys are drawn uniformly from many and units have few records, so that nearly every row
changes a key of its own: the dearest case, in which nothing is published.  CPU seconds are those
of this process: on Spanner, of its client.  ``--cold`` opens the store anew before every step
and draws few keys: the states of all of them are loaded, as by a worker that takes over.
"""

import argparse
import contextlib
import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import matplotlib.pyplot as plt
import numpy as np
import pyarrow as pa

from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms import step
from dpstream.dp_transforms.batches import OFFSET, PARTITION, admitted_schema, ids_of
from dpstream.dp_transforms.ingest.records import Canonicaliser
from dpstream.dp_transforms.run import Run, begin_run
from dpstream.dp_transforms.step import Stepper
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.jobs.secret import secret_source
from dpstream.state import open as stores
from dpstream.state.spanner.client import connect
from dpstream.state.spanner.schema import create_tables
from tests import emulator
from tests.bench.common import emit, machine
from tests.bench.growth import exponent
from tests.bench.paper.jobs import Frame, Setting, write_job
from tests.bench.paper.modes import parse_mode
from tests.bounded import bound

#: Stage -> functions of the step whose seconds are its own.
STAGES = {
    "aggregate": ("aggregate",),
    "select": ("candidates", "select", "predict", "wait_for_test"),
    "perturb": ("publish",),
}
ORDER = ("records", "bound", "load", "aggregate", "select", "perturb", "commit")
TRIGGERS = 100
Seconds = defaultdict[str, float]


@contextlib.contextmanager
def adding(seconds: Seconds, stage: str) -> Iterator[None]:
    """Add the block's wall time to a stage."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        seconds[stage] += time.perf_counter() - begin


def _timed(seconds: Seconds, stage: str, real: Any) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        with adding(seconds, stage):
            return real(*args, **options)

    return call


@contextlib.contextmanager
def watched(seconds: Seconds, store: Any) -> Iterator[None]:
    """Time the stages inside a step."""
    with contextlib.ExitStack() as stack:
        for stage, names in STAGES.items():
            for name in names:
                timed = _timed(seconds, stage, getattr(step, name))
                stack.enter_context(mock.patch.object(step, name, timed))
        for stage, name in (("load", "load_keys"), ("commit", "commit_step")):
            timed = _timed(seconds, stage, getattr(store, name))
            stack.enter_context(mock.patch.object(store, name, timed))
        yield


def batch_of(
    plan: Plan, rng: np.random.Generator, rows: int, keys: int, trigger: int, names: pa.Array
) -> pa.RecordBatch:
    """Records of one trigger: units with six records each in all, keys uniform."""
    timeline = plan.timeline
    first = timeline.start + (trigger - 1) * timeline.trigger_every
    columns = [
        pa.array(rng.integers(0, max(1, rows * TRIGGERS // 6), rows)),
        names.take(pa.array(rng.integers(0, keys, rows))),
        pa.array(np.sort(rng.integers(first, first + timeline.trigger_every, rows))).cast(
            pa.timestamp("us", "UTC")
        ),
    ]
    where = {PARTITION: "0", OFFSET: str((trigger - 1) * rows)}
    return pa.RecordBatch.from_arrays(columns, ["user", "key", "time"]).replace_schema_metadata(
        where
    )


class Shard:
    """One shard of a run, fed trigger by trigger."""

    def __init__(self, run: Run) -> None:
        self.plan, self.store, self.ring = run.plan, run.open(), run.keys.ring()
        self.canonical = Canonicaliser(self.plan, self.ring)
        self.stepper = Stepper(self.plan, self.ring, self.store)

    def take(self, batch: pa.RecordBatch, trigger: int) -> dict[str, float]:
        """Seconds of every stage of one trigger, ``total`` and ``cpu``."""
        seconds: Seconds = defaultdict(float)
        begin, cpu = time.perf_counter(), time.process_time()
        with adding(seconds, "records"):
            records, dead = self.canonical(batch)
        assert dead.num_rows == 0
        with adding(seconds, "bound"):
            admitted, *_ = bound(self.plan, self.store, 0, records, trigger, trigger - 1)
        rows = admitted.cast(admitted_schema(self.plan))
        with watched(seconds, self.store):
            self.stepper.step(0, 0, trigger, rows)
        total, used = time.perf_counter() - begin, time.process_time() - cpu
        keys = len(np.unique(ids_of(records.column("unit")), axis=0))
        return {**seconds, "total": total, "cpu": used, "rows": rows.num_rows, "units": keys}


class Size(NamedTuple):
    """One point: rows of a step, keys there are, steps, and whether each one starts cold."""

    rows: int
    keys: int
    steps: int
    cold: bool


def measure(url: str, size: Size, folder: Path) -> dict[str, Any]:
    """Medians over the steps after a warm-up, of one size of micro-batch."""
    rows, keys, steps, cold = size
    data = folder / "data.parquet"
    data.touch()
    frame = Frame(data, "int", folder / "runs", 6.0, 1e-9, 1)
    job = load_job(write_job(frame, Setting(parse_mode("sticky"), TRIGGERS, 32)))
    run, _ = begin_run(job.plan, secret_source(job), url, 1, source=[b"microbatch"])
    shard, rng = Shard(run), np.random.default_rng(1)
    names = pa.array([f"key {n:09d}" for n in range(keys)])
    timings = []
    for trigger in range(1, steps + 3):
        if cold:
            stores.close_all()
            shard = Shard(run)
        batch = batch_of(job.plan, rng, rows, keys, trigger, names)
        timings.append(shard.take(batch, trigger))
    timings = timings[2:]
    stores.close_all()
    middle = {
        name: round(statistics.median(one.get(name, 0.0) for one in timings), 6)
        for name in (*ORDER, "total", "cpu")
    }
    spread = statistics.pstdev(one["total"] for one in timings) / math.sqrt(len(timings))
    return {
        "rows": rows,
        "keys": keys,
        "steps": steps,
        "cold": cold,
        "seconds": middle,
        "standard_error": round(spread, 6),
        "cpu_microseconds_a_row": round(1e6 * middle["cpu"] / rows, 3),
        "rows_per_second": round(rows / middle["total"]),
    }


def fresh_database() -> str:
    """The URL of an empty database with the store's tables."""
    url = emulator.fresh_url()
    create_tables(connect(url))
    return url


def series(name: str, points: list[dict[str, Any]]) -> dict[str, Any]:
    """The points of one store and how steeply seconds grow with rows."""
    grows = {}
    if len(points) > 2:
        at = [point["rows"] for point in points]
        grows = exponent(at, [point["seconds"]["total"] for point in points])
    return {"store": name, "points": points, "exponent": grows}


def draw(all_series: list[dict[str, Any]], picture: Path) -> None:
    """Seconds against rows, log by log, one panel a store."""
    figure, panels = plt.subplots(
        1, len(all_series), figsize=(6 * len(all_series), 4.5), squeeze=False, layout="constrained"
    )
    for panel, one in zip(panels[0], all_series, strict=True):
        at = [point["rows"] for point in one["points"]]
        for stage in (*ORDER, "total"):
            seconds = [max(point["seconds"][stage], 1e-6) for point in one["points"]]
            panel.loglog(at, seconds, "k-o" if stage == "total" else "-", label=stage)
        panel.set(title=one["store"], xlabel="rows of a micro-batch", ylabel="seconds")
        panel.set_ylim(bottom=1e-4)  # what takes less does not matter
        panel.grid(True, alpha=0.3)
    panels[0][0].legend(fontsize=8)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stores", nargs="+", default=["sqlite", "spanner"])
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1_000, 10_000, 100_000, 300_000, 1_000_000]
    )
    parser.add_argument("--spanner-rows", type=int, nargs="+", default=[1_000, 4_000, 12_000])
    parser.add_argument("--keys", type=int, default=10_000_000)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--out", type=Path, help="append the JSON result to this file")
    args = parser.parse_args()
    all_series = []

    def sizes(rows: list[int]) -> list[Size]:
        return [Size(n, 2 * n if args.cold else args.keys, args.steps, args.cold) for n in rows]

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if "sqlite" in args.stores:
            points = [
                measure(f"sqlite:{folder}/{size.rows}.db", size, folder)
                for size in sizes(args.rows)
            ]
            all_series.append(series("sqlite", points))
        if "spanner" in args.stores:
            with emulator.running():
                points = [
                    measure(fresh_database(), size, folder) for size in sizes(args.spanner_rows)
                ]
            all_series.append(series("spanner emulator", points))
    if args.picture is not None:
        draw(all_series, args.picture)
    emit({"benchmark": "microbatch", **machine(), "stores": all_series}, args.out)


if __name__ == "__main__":
    main()
