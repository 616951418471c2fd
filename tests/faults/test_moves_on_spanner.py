"""Reshard, backup and restore of a store on Spanner, also to the embedded store and back."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from dpstream.accounting.errors import RunError
from dpstream.dp_transforms import release
from dpstream.dp_transforms.flow import run_in_memory
from dpstream.dp_transforms.run import Run
from dpstream.state import open as stores
from dpstream.state import transfer
from dpstream.state.spanner.client import connect
from dpstream.state.spanner.schema import generation_of
from dpstream.state.store import RunIdentity
from tests.faults.places import Places, places, small_commits
from tests.faults.runs import calm, job, released
from tests.faults.test_spanner_flow import Stopped, stop_at
from tests.faults.test_store_faults import Full, redelivered, stop_at_commit

STOPS = [(0, 0), (3, 8), (15, 20), (20, 18)]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Places]:
    with places("spanner", tmp_path) as fresh:
        yield fresh


def go_on(run: Run, commits: int, seed: int) -> None:
    """Go on for some steps, committed two at a time, then stop as if killed."""
    together = mock.patch.object(release, "COMMIT_STEPS", 2)
    with contextlib.suppress(Full), stop_at_commit(commits, "spanner"), together:
        run_in_memory(run, redelivered(run.plan, seed))
    stores.close_all()


def resharded(run: Run, shards: int) -> Run:
    assert transfer.reshard(run.store, run.plan, shards) is None
    return run._replace(shards=shards)


@pytest.mark.parametrize("stops", STOPS)
@pytest.mark.parametrize("name", ["sticky", "rounds", "public", "skip"])
def test_shards_change_in_the_midst(place: Places, name: str, stops: tuple[int, int]) -> None:
    run = job(name, place())
    go_on(run, stops[0], 1)
    run = resharded(run, 5)
    go_on(run, stops[1], 2)
    run = resharded(run, 1)
    assert released(run, redelivered(run.plan, 4)) == calm(name)
    assert generation_of(connect(run.store)) == 2


@pytest.mark.parametrize("name", ["sticky", "combined", "skip"])
def test_a_step_cut_short_goes_on_after_a_reshard(place: Places, name: str) -> None:
    """Some parts of a step, or of a decision, are committed when the shards change."""
    for seed in range(4):
        run, rng = job(name, place()), np.random.default_rng(seed)
        with small_commits():
            with contextlib.suppress(Stopped), stop_at(int(rng.integers(2, 40)), after=True):
                run_in_memory(run, redelivered(run.plan, seed))
            stores.close_all()
            try:
                run = resharded(run, 3)
            except RunError as error:
                assert "in part" in error.rule
            assert released(run, redelivered(run.plan, 9)) == calm(name)
        stores.close_all()


@pytest.mark.parametrize("name", ["sticky", "skip"])
def test_a_backup_is_restored_to_either_kind(place: Places, tmp_path: Path, name: str) -> None:
    run = job(name, place())
    go_on(run, 15, 1)
    transfer.backup(run.store, run.plan, tmp_path / "b")
    go_on(run, 5, 2)
    transfer.restore(run.store, run.plan, tmp_path / "b", replace=True)
    store = stores.open_store(run.store, run.plan, run.run_id)
    assert store.restoring and store.completed(2)[0] <= 6
    file = f"sqlite:{tmp_path}/s.db"
    transfer.restore(file, run.plan, tmp_path / "b")
    other = place()
    transfer.restore(other, run.plan, tmp_path / "b")
    for url in (run.store, file, other):
        stores.close_all()
        assert released(run._replace(store=url), redelivered(run.plan, 3)) == calm(name)


def test_a_reshard_cut_short_leaves_the_old_store(place: Places) -> None:
    run = job("rounds", place())
    go_on(run, 9, 1)

    def stop(done: int, _: int) -> None:
        if done == 2:
            raise Full

    with pytest.raises(Full):
        transfer.reshard(run.store, run.plan, 3, stop)
    stores.close_all()
    assert generation_of(connect(run.store)) == 0
    run = resharded(run, 3)
    assert released(run, redelivered(run.plan, 4)) == calm("rounds")


def test_of_two_commands_at_once_the_last_wins(place: Places, tmp_path: Path) -> None:
    """Both fill a generation; the one that began first would have mixed its rows in."""
    run = job("sticky", place())
    go_on(run, 9, 1)
    transfer.backup(run.store, run.plan, tmp_path / "b")
    inner: list[RunIdentity] = []

    def meanwhile(done: int, _: int) -> None:
        if not inner:
            inner.append(run.open().identity)
            transfer.restore(run.store, run.plan, tmp_path / "b", replace=True)

    with pytest.raises(RunError, match="another command"):
        transfer.reshard(run.store, run.plan, 3, meanwhile)
    stores.close_all()
    assert stores.identity_of(run.store, run.plan).shards == run.shards
    assert released(run, redelivered(run.plan, 4)) == calm("sticky")


def test_a_run_that_begins_meanwhile_is_not_mixed_with_a_restore(
    place: Places, tmp_path: Path
) -> None:
    run = job("sticky", place())
    go_on(run, 9, 1)
    transfer.backup(run.store, run.plan, tmp_path / "b")
    fresh = place()

    def meanwhile(done: int, _: int) -> None:
        if not stores.exists(fresh):
            job("sticky", fresh)

    with pytest.raises(RunError, match="another command"):
        transfer.restore(fresh, run.plan, tmp_path / "b", progress=meanwhile)
    stores.close_all()
    store = stores.open_store(fresh, run.plan, run.run_id)
    assert not store.progress() and not store.restoring
    assert released(run._replace(store=fresh), redelivered(run.plan, 4)) == calm("sticky")


def test_expiry_clears_what_was_replaced(place: Places) -> None:
    run = resharded(job("sticky", place()), 3)
    assert released(run, redelivered(run.plan, 4)) == calm("sticky")
    store = run.open()
    store.compact()
    with connect(run.store).snapshot() as snapshot:
        parts = {part for (part,) in snapshot.execute_sql("SELECT DISTINCT Part FROM Progress")}
    assert min(parts) >= 1 << 15
    stores.close_all()
    assert released(run, redelivered(run.plan, 5)) == calm("sticky")
