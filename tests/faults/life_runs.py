"""Small runs on SQLite files that are stopped, resharded and restored."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

from accounting.plan import Plan
from dp_transforms.flow import run_in_memory
from dp_transforms.run import Run
from state import open as stores
from state.sqlite import SqliteStore
from tests.faults.child import PUBLIC, batches_of, plan_of
from tests.streams import begin, by_name, public_table

NAMES = ("sticky", "rounds", "public")


@pytest.fixture(autouse=True)
def closed_stores() -> Iterator[None]:
    yield
    stores.close_all()


def job(name: str, folder: Path, shards: int = 2, file: str = "s.db") -> Run:
    """Begin or resume a job on a file."""
    plan = plan_of(name)
    public = None if plan.selects else public_table(plan, PUBLIC)
    return begin(plan, folder / file, shards, public)


def released(run: Run, batches: list[pa.RecordBatch]) -> dict[tuple[int, int], bytes]:
    """Releases of a whole run."""
    return by_name(run_in_memory(run, batches)[0])


def calm(name: str, folder: Path) -> dict[tuple[int, int], bytes]:
    """Releases of a run that nothing happens to."""
    out = released(job(name, folder, file="calm.db"), batches_of(plan_of(name)))
    stores.close_all()
    return out


class Full(Exception):
    """Stops a run where a test wants it stopped."""


def stop_at_commit(nth: int) -> Any:
    """The steps after the nth are not taken."""
    real, left = SqliteStore.commit_step, [nth]

    def commit_step(*args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise Full
        return real(*args)

    return mock.patch.object(SqliteStore, "commit_step", commit_step)


def redelivered(plan: Plan, seed: int) -> list[pa.RecordBatch]:
    """The same records in batches of other sizes, each 1 to 5 times, in any order."""
    rng = np.random.default_rng(seed)
    batches = batches_of(plan, seed, rows=int(rng.integers(5, 120)))
    out = [b for b in batches for _ in range(int(rng.integers(1, 6)))]
    return [out[i] for i in rng.permutation(len(out))]
