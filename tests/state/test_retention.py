"""What may go and when: trigger times by hand, and stores that are expired and thinned."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dpstream.accounting.plan.timeline import Timeline
from dpstream.state.retention import (
    drop_delivered,
    drop_releases,
    expire,
    period_trigger_time,
    reached,
    settled_trigger_time,
    skew_trigger_times,
)
from dpstream.state.retention_store import RetainedWindows
from dpstream.state.sqlite.file import create_store
from dpstream.state.sqlite.store import SqliteStore
from dpstream.state.store import NEVER
from tests.state.conformance import KEY_SCHEMA, STREAMS
from tests.state.life_conformance import LINE, OLD, SHARDS, decide_units, fill_step


@pytest.mark.parametrize(("skew", "times"), [(0, 0), (1, 1), (10, 1), (11, 2)])
def test_a_skew_is_rounded_up_to_trigger_times(skew: int, times: int) -> None:
    assert skew_trigger_times(Timeline(0, 100, 50, 50, 10, max_skew=skew)) == times


def test_a_period_is_asked_for_until_its_latest_record() -> None:
    """Events of trigger times 1 to 5 are of the first period, which ends at 50, 30 late at most."""
    timeline = Timeline(0, None, 10, 10, 10, 30, period=50)
    trigger_times = period_trigger_time(timeline, np.array([1, 5, 6, 11]))
    assert trigger_times.tolist() == [8, 8, 13, 18]
    far = period_trigger_time(timeline, np.array([NEVER + 10_000]))
    assert far.tolist() == [NEVER]


def test_records_are_settled_when_their_windows_are_closed() -> None:
    timeline = Timeline(0, 100, 20, 20, 10, max_skew=5)
    assert [settled_trigger_time(timeline, windows) for windows in (0, 1, 2, 4)] == [0, 1, 3, 7]
    assert settled_trigger_time(timeline, 5) == timeline.last_trigger_time
    endless = Timeline(0, None, 20, 20, 10)
    assert settled_trigger_time(endless, 5) == 10


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    create_store(tmp_path / "s.db", OLD)
    made = SqliteStore(tmp_path / "s.db", KEY_SCHEMA, STREAMS)
    yield made
    made.close()


def run(store: SqliteStore, windows: range, decide: bool = False) -> None:
    """Whole windows of both shards, their records decided before."""
    for window in windows:
        for shard in range(SHARDS):
            for trigger in (1, 2):
                if decide:
                    decide_units(store, shard, 2 * window + trigger, [shard])
                fill_step(store, window, shard, trigger, [shard])


def test_how_far_the_shards_are(store: SqliteStore) -> None:
    run(store, range(2))
    fill_step(store, 2, 0, 1, [0])
    reach = reached(store, LINE)
    assert reach == (2, {2: 0})
    fill_step(store, 2, 1, 1, [1])
    reach = reached(store, LINE)
    assert [reach.trigger(LINE, window) for window in (0, 1, 2, 3)] == [2, 2, 1, 0]


def test_complete_windows_are_noted_once_they_are_many(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpstream.state.retention._NOTED", 3)
    run(store, range(2))
    assert reached(store, LINE, remember=True).complete == 2 and store.metadata("complete") is None
    run(store, range(2, 4))
    assert reached(store, LINE).complete == 4 and store.metadata("complete") is None
    assert reached(store, LINE, remember=True).complete == 4 and store.metadata("complete") == "4"
    assert reached(store, LINE) == (4, {})


def test_expiry_waits_until_it_is_worth_the_work(store: SqliteStore) -> None:
    assert expire(store, LINE) == 0
    run(store, range(2), decide=True)
    assert expire(store, LINE, least=5) == 0
    assert expire(store, LINE) == SHARDS and store.unit_progress(0).forgotten == 4
    assert expire(store, LINE) == 0, "nothing more has become settled"


@pytest.mark.parametrize(("lasting", "left"), [(None, 9), (1, 2), (3, 4), (20, 9)])
def test_selections_go_when_no_window_looks_back_so_far(
    store: SqliteStore, lasting: int | None, left: int
) -> None:
    """Four windows are complete: the fifth, which is open, asks for what came behind 8 - D."""
    for window in range(5):
        for shard in range(SHARDS):
            for trigger in (1, 2) if window < 4 else (1,):
                decide_units(store, shard, 2 * window + trigger, [shard])
                fill_step(store, window, shard, trigger, [shard], True)
    assert expire(store, LINE, remembered_for=lasting) == SHARDS
    times = [s.trigger_time for s in store.selections(0, -1)]
    assert times == list(range(1, 10))[-left:]


def test_a_shard_that_is_behind_keeps_its_positions(store: SqliteStore) -> None:
    run(store, range(2))
    decide_units(store, 0, 4, [0])
    decide_units(store, 1, 3, [1])
    assert expire(store, LINE) == 1
    assert [store.unit_progress(shard).forgotten for shard in range(2)] == [4, 0]


def test_releases_are_dropped_behind_their_mark(store: SqliteStore) -> None:
    run(store, range(3))
    drop_releases(store, LINE, 2)
    assert store.retained_windows == RetainedWindows(2)
    release_flags = [store.committed_releases(window, 0, 2) is not None for window in range(3)]
    assert release_flags == [False, False, True]
    with pytest.raises(AssertionError):
        drop_releases(store, LINE, 4)


def test_what_the_sink_has_goes_when_it_is_old_enough(store: SqliteStore) -> None:
    """Windows end at 2, 4, 6, ...; trigger time t is the instant t."""
    run(store, range(6))
    assert drop_delivered(store, LINE, 1, keep=0) == 0
    assert drop_delivered(store, LINE, 6, keep=3) == 1  # window 0 ended at 2, window 1 at 4
    assert store.retained_windows.dropped == 1
    assert drop_delivered(store, LINE, 6, keep=3) == 0
    assert drop_delivered(store, LINE, 100, keep=0) == 5, "no more than are complete"
    assert store.retained_windows.dropped == 6
