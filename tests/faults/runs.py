"""The small job of `tests.faults.child` in this process, and its undisturbed releases."""

import functools
import tempfile
from pathlib import Path

import pyarrow as pa

from dpstream.dp_transforms.flow import run_in_memory
from dpstream.dp_transforms.run import Run
from dpstream.state import open as stores
from tests.faults.child import PUBLIC, batches_of, plan_of
from tests.streams import begin, by_name, public_table

#: (window, trigger) -> bytes of the sealed release.
Releases = dict[tuple[int, int], bytes]


def job(name: str, store: str | Path, shards: int = 2) -> Run:
    """Begin or resume the job on a store."""
    plan = plan_of(name)
    return begin(plan, store, shards, None if plan.design.selects else public_table(plan, PUBLIC))


def released(run: Run, batches: list[pa.RecordBatch]) -> Releases:
    """The whole job in this process."""
    return by_name(run_in_memory(run, batches)[0])


@functools.cache
def calm(name: str) -> Releases:
    """Releases of a run on SQLite that nothing happens to."""
    with tempfile.TemporaryDirectory() as folder:
        out = released(job(name, f"{folder}/calm.db"), batches_of(plan_of(name)))
        stores.close_all()
    return out
