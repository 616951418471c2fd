"""The whole flow on Spanner's emulator: the same bytes as on SQLite, whatever is interrupted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

from dp_transforms.flow import run_in_memory
from dp_transforms.run import Run
from state import open as stores
from state import spanner, spanner_batch, spanner_keys
from state.spanner_client import connect
from state.spanner_schema import create_tables
from tests import emulator
from tests.faults.child import PUBLIC, batches_of, plan_of
from tests.streams import begin, by_name, public_table

NAMES = ("sticky", "rounds", "public", "combined")
SHARDS = 2
#: Mutations of a commit in the split runs: two or three keys.
LIMIT = 40


@pytest.fixture(scope="module", autouse=True)
def running() -> Iterator[None]:
    with emulator.running():
        yield


@pytest.fixture(autouse=True)
def closed_stores() -> Iterator[None]:
    yield
    stores.close_all()


@pytest.fixture
def url() -> Iterator[str]:
    made = emulator.fresh_url()
    create_tables(connect(made))
    yield made
    stores.close_all()
    emulator.drop(made)


def job(name: str, store: str | Path, shards: int = SHARDS) -> Run:
    plan = plan_of(name)
    return begin(plan, store, shards, None if plan.selects else public_table(plan, PUBLIC))


def released(run: Run, batches: list[pa.RecordBatch]) -> dict[tuple[int, int], bytes]:
    return by_name(run_in_memory(run, batches)[0])


def on_sqlite(name: str, folder: Path) -> dict[tuple[int, int], bytes]:
    out = released(job(name, folder / "s.db"), batches_of(plan_of(name)))
    stores.close_all()
    return out


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bytes_as_sqlite(tmp_path: Path, url: str, name: str) -> None:
    expected = on_sqlite(name, tmp_path)
    assert released(job(name, url), batches_of(plan_of(name))) == expected
    stores.close_all()
    # All of it is read back by another process; nothing is computed again.
    assert released(job(name, url), batches_of(plan_of(name))[:1]) == expected


class Stopped(Exception):
    """Stops a run where a test wants it stopped."""


def stop_at(nth: int, after: bool) -> Any:
    """Commit number ``nth`` of all kinds fails, before or after it took effect."""
    real, left = spanner.commit, [nth]

    def commit(*args: Any) -> None:
        left[0] -= 1
        if left[0] == 0 and not after:
            raise Stopped
        real(*args)
        if left[0] == 0:
            raise Stopped

    return mock.patch.object(spanner, "commit", commit)


@pytest.fixture(params=[False, True], ids=["whole", "split"])
def small(request: pytest.FixtureRequest) -> Iterator[bool]:
    """With tiny limits every step and decision is committed in many parts."""
    if not request.param:
        yield False
        return
    with (
        mock.patch.object(spanner_batch, "COMMIT_MUTATIONS", LIMIT),
        mock.patch.object(spanner, "COMMIT_MUTATIONS", LIMIT),
        mock.patch.object(spanner_keys, "INLINE_PAIRS", 2),
        mock.patch.object(spanner, "CACHED_STATES", 30),
    ):
        yield True


@pytest.mark.parametrize("name", NAMES)
def test_stopped_again_and_again(tmp_path: Path, url: str, name: str, small: bool) -> None:
    """Each attempt dies at a random commit; the next is another process with other batches."""
    expected, rng = on_sqlite(name, tmp_path), np.random.default_rng(3)
    for attempt in range(200):
        batches = batches_of(plan_of(name), attempt, rows=int(rng.integers(20, 200)))
        with stop_at(int(rng.integers(1, 12 if small else 5)), after=bool(rng.integers(0, 2))):
            try:
                found = released(job(name, url), batches)
                break
            except Stopped:
                stores.close_all()
    assert attempt > 2
    assert found == expected
