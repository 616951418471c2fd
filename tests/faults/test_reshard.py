"""F4: other shard counts in the midst of a run, at any progress of the shards: the same bytes."""

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest

from dpstream.dp_transforms import release
from dpstream.dp_transforms.flow import run_in_memory
from dpstream.dp_transforms.run import Run
from dpstream.dp_transforms.step import TakenSteps
from dpstream.state import open as stores
from dpstream.state import transfer
from dpstream.state.sqlite.file import create_store
from dpstream.state.sqlite.store import SqliteStore
from dpstream.state.transfer import copy_store
from tests.faults.child import batches_of, plan_of
from tests.faults.runs import calm, job, released
from tests.faults.test_store_faults import NAMES, Full, redelivered, stop_at_commit


def resharded(run: Run, target: Path, shards: int) -> Run:
    """The run on a copy of its store with other shards."""
    source = run.open()
    identity = msgspec.structs.replace(source.identity, shards=shards)
    create_store(target, identity)
    new = SqliteStore(target, stores.key_schema(run.plan), run.plan.design.sums)
    copy_store(source, new, run.plan.timeline)
    new.close()
    stores.close_all()
    return run._replace(store=f"sqlite:{target}", shards=shards)


def go_on(run: Run, commits: int, seed: int) -> None:
    """Go on for some steps, committed two at a time, then stop as if killed."""
    together = mock.patch.object(release, "COMMIT_STEPS", 2)
    with contextlib.suppress(Full), stop_at_commit(commits), together:
        run_in_memory(run, redelivered(run.plan, seed))
    stores.close_all()


def check(name: str, folder: Path, stops: tuple[int, int, int]) -> None:
    """2 -> 5 -> 1 shards, each after some commits, then to the end."""
    expected = calm(name)
    run = job(name, folder / "s.db", 2)
    go_on(run, stops[0], 1)
    run = resharded(run, folder / "five.db", 5)
    go_on(run, stops[1], 2)
    run = resharded(run, folder / "three.db", 3)
    go_on(run, stops[2], 3)
    run = resharded(run, folder / "one.db", 1)
    assert released(run, redelivered(run.plan, 4)) == expected


#: Steps are committed shard by shard: 12 a shard (2 windows of 6), so these leave every pattern.
STOPS = [(0, 0, 0), (3, 8, 4), (12, 30, 2), (15, 3, 20), (20, 18, 6), (23, 1, 1)]


@pytest.mark.parametrize("stops", STOPS)
@pytest.mark.parametrize("name", NAMES)
def test_shards_change_in_the_midst(name: str, stops: tuple[int, int, int], tmp_path: Path) -> None:
    check(name, tmp_path, stops)


def test_what_was_taken_before_is_not_taken_again(tmp_path: Path, monkeypatch: Any) -> None:
    """Sabotaged: keys of a shard that was ahead take their steps twice."""
    none = lambda self, window, trigger, ids: np.zeros(len(ids), np.bool_)  # noqa: E731
    monkeypatch.setattr(TakenSteps, "before_reshard", none)
    with pytest.raises(AssertionError):
        check("sticky", tmp_path, (15, 3, 20))


def test_what_was_released_ahead_is_released(tmp_path: Path, monkeypatch: Any) -> None:
    """Sabotaged: releases of a shard that was ahead are lost."""
    monkeypatch.setattr(SqliteStore, "released_ahead", lambda *_: None)
    with pytest.raises(AssertionError):
        check("sticky", tmp_path, (15, 3, 20))


def test_what_was_selected_goes_along(tmp_path: Path, monkeypatch: Any) -> None:
    """Sabotaged: the new shards do not know what the first window has published."""
    monkeypatch.setattr(transfer, "_copy_selections", lambda *_: None)
    with pytest.raises(AssertionError):
        check("sticky", tmp_path, (15, 3, 20))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, "combined"])
def test_any_stops(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    for number in range(25):
        folder = tmp_path / str(number)
        folder.mkdir()
        check(name, folder, tuple(rng.integers(0, 24, 3).tolist()))


def test_decisions_cut_short_between_shards(tmp_path: Path) -> None:
    """Only one unit shard has decided when the shards change."""
    for name in ("sticky", "combined"):
        folder = tmp_path / name
        folder.mkdir()
        expected, run = calm(name), job(name, folder / "s.db", 2)
        real, left = SqliteStore.commit_units, [1]

        def commit_units(*args: Any, real: Any = real, left: list[int] = left) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Full
            return real(*args)

        with pytest.raises(Full), mock.patch.object(SqliteStore, "commit_units", commit_units):
            run_in_memory(run, batches_of(plan_of(name)))
        stores.close_all()
        assert sorted(run.open().unit_progress(n).decided > 0 for n in (0, 1)) == [False, True]
        stores.close_all()
        run = resharded(run, folder / "three.db", 3)
        assert released(run, redelivered(run.plan, 4)) == expected
