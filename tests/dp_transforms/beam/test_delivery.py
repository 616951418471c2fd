"""A stream without end, one trigger time at a time: what it keeps is bounded."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms import flow
from dpstream.dp_transforms.beam.delivery import delivered_through, released_through, resume_point
from dpstream.dp_transforms.flow import run_in_memory
from dpstream.pipelines.connectors.files.sink import FileSink
from dpstream.state import open as stores
from dpstream.state import retention
from dpstream.state.sqlite.store import SqliteStore
from dpstream.state.store import Store
from tests.flowing import Flowing, cells, endless
from tests.streams import MEAN, START, STEP, begin, by_name, generate, make_plan, positioned

SHARDS = 2
PERIOD = 2


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No machine dies in these tests: nothing waits for its disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    yield
    stores.close_all()


def plan_of(**more: Any) -> Plan:
    settings = {"triggers": 2, "windows": 40, "lateness": 1, "stamped": True, **more}
    return make_plan(epsilon=9.0, **settings)


def rows(
    trigger_time: int, users: list[str], event_trigger_time: int | None = None
) -> pa.RecordBatch:
    """Records of one trigger time."""
    stamp = START + (trigger_time - 1) * STEP + STEP // 2
    event = START + ((event_trigger_time or trigger_time) - 1) * STEP + STEP // 2
    instant, size = pa.timestamp("us", "UTC"), len(users)
    columns = {
        "user": users,
        "page": [f"k{i % 2}" for i in range(size)],
        "time": pa.array(np.full(size, event)).cast(instant),
        "arrived": pa.array(np.full(size, stamp)).cast(instant),
        "value": np.ones(size),
    }
    return positioned(columns, 0, trigger_time * 1000)


def units(store: Store) -> int:
    return sum(len(piece.ids) for n in range(SHARDS) for piece in store.unit_pieces(n))


def positions(store: Store) -> int:
    return sum(len(piece.ids) for n in range(SHARDS) for piece in store.position_pieces(n))


def size(store: Store, name: str) -> int:
    return sum(part.rows for part in store.parts() if part.name == name)


def run_on(stream: Iterator[Flowing]) -> Flowing:
    """The stream after its last trigger time."""
    return list(stream)[-1]


@pytest.mark.parametrize(
    "more", [{}, {"triggers": 3, "slide": 1, "period": 6}, {"skew": STEP, "period": 4}]
)
def test_one_trigger_time_at_a_time_gives_what_the_whole_gives(
    more: dict[str, Any], tmp_path: Path
) -> None:
    plan = plan_of(aggregates=(MEAN,), windows=12, **more)
    source = generate(plan, 5, records=400, users=90, keys=9).batches(50)
    expected = by_name(run_in_memory(begin(plan, tmp_path / "a.db", SHARDS), source)[0])
    sink = FileSink(tmp_path / "out", "parquet")
    flowing = Flowing(begin(plan, tmp_path / "b.db", SHARDS), sink)
    by_trigger_time = cells(plan, source)
    for trigger_time in range(1, plan.timeline.last_trigger_time + 1):
        flowing.feed(by_trigger_time.get(trigger_time, []))
        flowing.step(trigger_time)
        assert released_through(flowing.run) == trigger_time == delivered_through(flowing.store)
    assert by_name(flowing.out.values()) == expected
    assert {(one.window, one.trigger) for one in sink.published()} == set(expected)


def live(
    plan: Plan, folder: Path, trigger_times: int, keep: int | None = None
) -> Iterator[Flowing]:
    """A stream of new units in every period, some of whom come late, by trigger times."""
    flowing = Flowing(begin(plan, folder / "s.db", SHARDS), FileSink(folder / "out", "csv"), keep)
    assert isinstance(flowing.store, SqliteStore)
    flowing.store._db.execute("PRAGMA synchronous = OFF")
    for trigger_time in range(1, trigger_times + 1):
        period = (trigger_time - 1) // PERIOD
        flowing.feed([rows(trigger_time, [f"u{period}-{i}" for i in range(6)])])
        if trigger_time % PERIOD == 1 and trigger_time > 1:
            # of the period before, within the lateness
            late = [f"u{period - 1}-{i}" for i in range(3)]
            flowing.feed([rows(trigger_time, late, trigger_time - 1).slice(0, 3)])
        flowing.step(trigger_time)
        yield flowing


def test_unit_state_stays_bounded_over_200_periods(tmp_path: Path) -> None:
    """Counters of closed periods go, and positions of settled windows; a unit of the open period
    keeps its count."""
    plan, most, last = endless(plan_of(period=PERIOD)), 0, 0
    for trigger_time, flowing in enumerate(live(plan, tmp_path, 200 * PERIOD), 1):
        most = max(most, units(flowing.store))
        last = max(last, positions(flowing.store))
        if trigger_time == 30 * PERIOD:
            early = most, last
    assert (most, last) == early, "it grows with the stream"
    assert most <= 6 * 4 and last <= 6 * 3 * PERIOD
    assert size(flowing.store, "positions") < 20, "the log is merged as it grows"
    for shard in range(SHARDS):
        states = flowing.store.unit_shard(shard)
        counts = states.counts[: states.table.size]
        assert counts.max(initial=0) <= plan.privacy.contributions


def test_a_sabotaged_run_that_never_expires_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow, "expire", lambda *_, **__: 0)
    for flowing in live(endless(plan_of(period=PERIOD)), tmp_path, 40 * PERIOD):
        most = units(flowing.store)
    assert most == 6 * 40


def test_a_unit_of_a_closed_period_does_not_count_again(tmp_path: Path) -> None:
    """Its counter is gone, and so is every way to be counted."""
    plan = endless(plan_of(period=PERIOD))
    flowing = run_on(live(plan, tmp_path, 10 * PERIOD))
    records, dead = flowing.ingest(rows(10 * PERIOD + 1, ["u3-1"] * 9, 3 * PERIOD + 1))
    assert records.num_rows == 0 and set(dead.column("reason").to_pylist()) == {"late"}


def test_what_is_read_of_progress_stays_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = SqliteStore.progress, []

    def progress(store: SqliteStore, first: int = 0) -> list[tuple[int, int, int]]:
        entries = real(store, first)
        seen.append(len(entries))
        return entries

    monkeypatch.setattr(SqliteStore, "progress", progress)
    plan = endless(plan_of(triggers=1, lateness=0))
    flowing = run_on(live(plan, tmp_path, 400))
    assert max(seen) <= SHARDS * (retention._NOTED + 8) and max(seen[:300]) == max(seen)
    assert resume_point(flowing.run).first == 401
    assert retention.reached(flowing.store, plan.timeline).complete == 400
    # Sabotaged: nothing is remembered.
    seen.clear()
    monkeypatch.setattr(retention, "_NOTED", 1 << 30)
    flowing.store.set_metadata("complete", None)
    released_through(flowing.run)
    assert max(seen) == SHARDS * 400


@pytest.mark.parametrize("keep", [0, 5, 64])
def test_releases_go_once_the_sink_has_had_them_for_long_enough(keep: int, tmp_path: Path) -> None:
    plan = endless(plan_of(triggers=2, lateness=0))
    timeline, most = plan.timeline, 0
    for trigger_time, flowing in enumerate(live(plan, tmp_path, 300, keep * timeline.window), 1):
        windows = {part.window for part in flowing.store.parts() if part.name == "outbox"}
        most = max(most, len(windows))
        ended = (trigger_time - timeline.triggers) // 2 + 1
        assert set(range(max(0, ended - keep), ended)) <= windows, "dropped too early"
    assert most <= keep + 2 + max(1, keep // 16)
    written = {(one.window, one.trigger) for one in FileSink(tmp_path / "out", "csv").published()}
    assert written == {(w, t) for w in range(150) for t in (1, 2)}
    assert len(flowing.store.progress()) <= SHARDS * (keep + 3 + keep // 16)
    # Another pipeline goes on where this one was.
    again = Flowing(flowing.run, FileSink(tmp_path / "out", "csv"), keep * timeline.window)
    again.feed([rows(301, ["a", "b"])])
    again.step(301)
    assert set(again.out) == {(150, 1)}


def test_nothing_is_dropped_that_the_sink_may_not_have(tmp_path: Path) -> None:
    plan = endless(plan_of(triggers=2, lateness=0))
    flowing = run_on(live(plan, tmp_path, 60))
    store, timeline = flowing.store, plan.timeline
    assert retention.reached(store, timeline).complete == 30
    assert retention.drop_delivered(store, timeline, 20, 0) == 10 == store.retained_windows.dropped
    assert retention.drop_delivered(store, timeline, 21, 0) == 0
    assert store.committed_releases(9, 0, 1) is None
    assert store.committed_releases(10, 0, 1) is not None
    # Nor what has not ended in every shard, whatever trigger time is said to be delivered.
    assert retention.drop_delivered(store, timeline, 90, 0) == 20
    assert store.retained_windows.dropped == 30


def test_a_stream_that_may_not_drop_yet_keeps_all(tmp_path: Path) -> None:
    flowing = run_on(live(endless(plan_of()), tmp_path, 60))
    assert flowing.store.retained_windows.dropped == 0
    assert {p.window for p in flowing.store.parts() if p.name == "outbox"} == set(range(60))


def test_retained_windows_of_a_shard_that_is_behind_hold_everybody_back(tmp_path: Path) -> None:
    plan = endless(plan_of(triggers=2, lateness=0))
    flowing = next(live(plan, tmp_path, 1))
    timeline = plan.timeline
    for trigger_time in range(2, 9):  # shard 0 runs ahead
        flowing.decide(0, [], trigger_time, trigger_time - 1)
        list(flowing.release(0, [], trigger_time, trigger_time - 1).outputs)
    assert retention.reached(flowing.store, timeline).complete == 0
    assert released_through(flowing.run) == 1
    assert retention.drop_delivered(flowing.store, timeline, 8, 0) == 0
    retained = msgspec.structs.replace(flowing.store.retained_windows, abandoned=2)
    flowing.store.retained_windows = retained
    assert retention.reached(flowing.store, timeline).complete == 2
