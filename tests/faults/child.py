"""One attempt at a small job in a process of its own, which may be killed at any instant.

Faults are data: ``Fault(point, nth)`` kills the process when the point is reached for the nth
time.  Points are named ``before`` and ``after`` the calls that make work durable or visible.
Stores are named by path (SQLite) or URL (Spanner; ``host`` is the emulator of the parent).
"""

import contextlib
import functools
import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import apache_beam as beam
import pyarrow as pa
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from dpstream.accounting.errors import RunError
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.weights import SelectionWeights
from dpstream.dp_transforms import flow
from dpstream.dp_transforms.flow import DPStream, run_in_memory
from dpstream.dp_transforms.run import Run
from dpstream.state import open as stores
from dpstream.state.spanner import store as spanner
from dpstream.state.spanner.store import SpannerStore
from dpstream.state.sqlite.store import SqliteStore
from tests import emulator, written
from tests.faults.places import small_commits
from tests.streams import COUNT, MEAN, STEP, SUM, UNITS, begin, generate, make_plan, public_table

SHARDS = 2
#: Steps that share a commit: a kill can fall inside a group and between two.
TOGETHER = 4
#: Public keys, most of them without any data.
PUBLIC = range(0, 120, 3)
#: The child says "another worker was faster" with this exit code; it is simply run again.
BEATEN = 75

#: Named commit points, by store and by kind of point: calls of the store and of the sink.
#: ``commit`` is every commit that is sent to Spanner, also of a part of a step.
POINTS = {
    "sqlite": {
        "before load": ("before unit_shard", "before key_shard"),
        "before commit": ("before commit_units", "before commit_step", "before _write_steps"),
        "after commit, before emit": (
            "after commit_units", "after _write_steps", "after commit_step", "before write_release",
        ),
        "after emit": ("after write_release",),
    },
    "spanner": {
        "before load": ("before unit_shard", "before load_units", "before key_shard",
                        "before load_keys", "after load_keys"),
        "before commit": ("before commit_units", "before commit_step", "before commit"),
        "after commit, before emit": (
            "after commit_units", "after commit", "after commit_step", "before write_release",
        ),
        "after emit": ("after write_release",),
    },
}  # fmt: skip


class Fault(NamedTuple):
    """Die when ``point`` is reached for the ``nth`` time (from 1)."""

    point: str
    nth: int


@functools.cache
def plan_of(name: str) -> Plan:
    """A job by name: few steps, so that every one of them can be the last before a kill."""
    late = {"stamped": True, "lateness": 2, "skew": STEP // 2}
    return {
        "sticky": make_plan(triggers=6, aggregates=(COUNT, MEAN, UNITS), **late),  # type: ignore
        "threshold": make_plan(triggers=6, pre_threshold=1, **late),  # type: ignore
        "combined": make_plan(
            triggers=6, aggregates=(COUNT, SUM), strategy="blt", contributions=5, epsilon=9.0,
            per_key_bound=1, weights=SelectionWeights(), combine=True, **late,  # type: ignore
        ),
        "skip": make_plan(
            triggers=6, contributions=5, epsilon=9.0, weights=SelectionWeights(1.0, 2.0),
            skip=True, tests=(1, 2, 4, 6), **late,  # type: ignore
        ),
        # Most steps test and publish nothing.
        "quiet": make_plan(triggers=9, refresh_every=3, aggregates=(COUNT, MEAN, UNITS)),
        "public": make_plan(triggers=6, aggregates=(COUNT, UNITS), public="f" * 32),
        # Mixed rows, whose noise of later steps is drawn again after a restart.
        "public geometric": make_plan(
            triggers=20, windows=1, aggregates=(COUNT, SUM), public="f" * 32, delta=0.0,
            strategy="geometric",
        ),
    }[name]  # fmt: skip


def batches_of(plan: Plan, seed: int | None = None, rows: int = 97) -> list[pa.RecordBatch]:
    """The job's input; a seed delivers its batches in another order."""
    return generate(plan, 5, records=500, users=250, keys=40).batches(rows, seed)


def begin_job(name: str, store: str) -> Run:
    """Begin or resume the job on a store."""
    plan = plan_of(name)
    return begin(plan, store, SHARDS, None if plan.design.selects else public_table(plan, PUBLIC))


def work(name: str, store: str, out: Path, in_beam: bool, seed: int | None = None) -> None:
    """The whole job: records in, files out."""
    run = begin_job(name, store)
    batches = batches_of(run.plan, seed)
    try:
        if in_beam:
            _in_beam(run, batches, out)
            return
        for batch in run_in_memory(run, batches)[0]:
            written.write_release(out, "parquet", batch)
    finally:
        stores.close_all()


def _in_beam(run: Run, batches: list[pa.RecordBatch], out: Path) -> None:
    run = run._replace(performance=run.performance._replace(threads=SHARDS))
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        output = pipeline | beam.Create(batches) | DPStream(run.plan, run)
        _ = output.releases | beam.Map(lambda batch: written.write_release(out, "parquet", batch))


@contextlib.contextmanager
def faulty(kind: str, fault: Fault | None, pause: float) -> Iterator[None]:
    """Count the points as they are reached, dawdle at commits, and die where told to."""
    reached: dict[str, int] = {}

    def at(point: str) -> None:
        reached[point] = reached.get(point, 0) + 1
        if fault == (point, reached[point]):
            os.kill(os.getpid(), signal.SIGKILL)

    def around(owner: Any, name: str) -> Any:
        real = getattr(owner, name)

        def call(*args: Any) -> Any:
            at(f"before {name}")
            time.sleep(pause)
            result = real(*args)
            at(f"after {name}")
            return result

        return mock.patch.object(owner, name, call)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(flow, "COMMIT_STEPS", TOGETHER))
        points = itertools.chain(*POINTS[kind].values())
        for name in sorted({point.split()[1] for point in points}):
            owners = {"write_release": written, "commit": spanner}
            owner = owners.get(name, SqliteStore if kind == "sqlite" else SpannerStore)
            stack.enter_context(around(owner, name))
        yield


def attempt(
    name: str,
    store: str,
    out: str,
    fault: Fault | None = None,
    in_beam: bool = False,
    seed: int | None = None,
    pause: float = 0.0,
    host: str | None = None,
    split: bool = False,
) -> None:
    """What a child process does; ``split`` makes commits so small that steps come in parts."""
    if host:
        os.environ[emulator.HOST] = host
    with (
        faulty("spanner" if host else "sqlite", fault, pause),
        small_commits() if split else contextlib.nullcontext(),
    ):
        try:
            work(name, store, Path(out), in_beam, seed)
        except RunError as error:
            os._exit(BEATEN if "another worker" in error.rule else 1)
