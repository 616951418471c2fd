"""What only a database shared by many workers can show: reads that another worker's commit
splits, decisions cut short, workers of an old generation."""

from collections.abc import Callable
from typing import Any

import pytest

from dpstream.state.spanner.client import commit, connect
from dpstream.state.spanner.schema import BOUND
from dpstream.state.spanner.store import SpannerStore
from dpstream.state.store import OvertakenError
from tests.state.conformance import counts, decide, ids, look, take_step
from tests.state.spanner.bench import SpannerBench


def in_between(store: SpannerStore, act: Callable[[], object]) -> None:
    """``act`` happens after the store has read progress, before it reads what is beyond."""
    todo = [act]

    def delayed(real: Callable[..., Any]) -> Callable[..., Any]:
        def beyond(*where: int) -> Any:
            if todo:
                todo.pop()()
            return real(*where)

        return beyond

    for name in ("_rows_of_steps", "_decision"):
        setattr(store, name, delayed(getattr(store, name)))


def torn(store: SpannerStore) -> None:
    """Sabotaged: a reader that believes two reads to be one."""

    def keys(part: int, window: int) -> tuple[int | None, dict[int, int]]:
        reached = store._reached(part, window)
        return reached, store._rows_of_steps(part, window, (reached or 0) + 1)

    def units(part: int) -> tuple[dict[int, int], list[int]]:
        progress = store._unit_reached(part)
        return progress, store._decision(part, progress.get(BOUND, 0))

    store._key_progress, store._unit_rows = keys, units  # type: ignore[method-assign]


def late_worker(bench: SpannerBench, sabotaged: bool) -> list[str]:
    """Pages released at trigger 2, which one worker commits while another begins to read."""
    winner, loser = bench.open(), bench.open()
    take_step(winner, 1, [1, 2], 1)
    if sabotaged:
        torn(loser)
    in_between(loser, lambda: take_step(winner, 2, [2, 3], 2))
    assert loser.key_shard(0, 0).committed == (1 if sabotaged else 2)
    if sabotaged:
        take_step(loser, 2, [2, 3], 2)  # passes the fence: its row is another one
    releases = bench.open().committed_releases(0, 0, 2)
    assert releases is not None
    return sorted(releases.column("page").to_pylist())


def test_progress_and_parts_are_read_as_one(bench: SpannerBench) -> None:
    assert late_worker(bench, sabotaged=False) == ["p2", "p3"]


def test_two_reads_are_not_one(bench: SpannerBench) -> None:
    assert late_worker(bench, sabotaged=True) == ["p2", "p2", "p3", "p3"]


def test_a_decision_and_its_parts_are_read_as_one(bench: SpannerBench) -> None:
    winner, loser = bench.open(), bench.open()
    in_between(loser, lambda: decide(winner, 4, [1, 2], [1, 1], first=0))
    units = loser.unit_shard(0)
    assert (units.decided, units.ahead) == (4, False)
    reader = bench.open()
    torn(reader)
    in_between(reader, lambda: decide(winner, 6, [3], [1], first=5))
    assert (reader.unit_shard(0).decided, reader.unit_shard(0).ahead) == (4, True)


def cut_short(bench: SpannerBench, trigger_time: int, units: list[int], many: int) -> None:
    """A worker dies after ``many`` commits of a decision."""
    store, left = bench.open(), [many]
    real = store._commit_once

    def commit_once(*args: Any) -> None:
        if not left[0]:
            raise InterruptedError
        left[0] -= 1
        real(*args)

    vars(store)["_commit_once"] = commit_once
    with pytest.raises(InterruptedError):
        decide(store, trigger_time, units, [1] * len(units), first=100)


def test_a_decision_cut_short_is_known_as_far_as_it_went(
    bench: SpannerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next decision may end at an earlier trigger time; what was decided beyond stays known."""
    monkeypatch.setattr("dpstream.state.spanner.commits.COMMIT_MUTATIONS", 8)
    cut_short(bench, 9, list(range(6)), 2)
    store = bench.open()
    unit_counts = counts(store)
    assert 0 < len(unit_counts) < 6
    assert store.unit_shard(0).ahead
    decide(store, 4, [10], [1], first=0)
    for handle in (store, bench.open()):
        units = handle.unit_shard(0)
        assert units.decided == 4
        handle.load_units(0, units, ids(list(range(6))))
        assert units.ahead, "records of trigger time 9 would be taken for new ones"
        _, admitted = handle.admitted_before(0, units)
        assert sorted(admitted.trigger_time.tolist()).count(9) == len(unit_counts)
    decide(store, 9, [11], [1], first=1)
    assert not store.unit_shard(0).ahead
    assert {unit: counts(bench.open())[unit] for unit in unit_counts} == unit_counts


def bump(bench: SpannerBench) -> None:
    """What a restore or a reshard does last."""
    row = [("generation", "1")]
    commit(connect(bench.url), lambda batch: batch.update("Meta", ("Name", "Value"), row))


def test_a_worker_of_an_old_generation_writes_where_nobody_reads(bench: SpannerBench) -> None:
    zombie = bench.open()
    take_step(zombie, 1, [1, 2], 1)
    decide(zombie, 2, [1], [1], first=0)
    bump(bench)
    store = bench.open()
    first = take_step(store, 1, [5], 7)
    decide(store, 3, [2], [2], first=0)
    before = look(bench.open()), counts(bench.open())
    take_step(zombie, 2, [1, 3], 2)  # it believes that it goes on
    take_step(zombie, 3, [], 3, closes=True)  # and even that it closes the window
    decide(zombie, 5, [2], [1], first=9)
    other = bench.open()
    assert (look(other), counts(other)) == before
    assert other.key_shard(0, 0).committed == 1
    assert other.committed_releases(0, 0, 2) is None
    assert other.committed_releases(0, 0, 1) == first
    assert other.completed(1) == {0: 1}
    take_step(store, 2, [5], 8)


def test_generations_that_share_rows_meet(bench: SpannerBench) -> None:
    """Sabotaged: the worker of the old generation goes on where the new one stands."""
    zombie = bench.open()
    store = bench.open()
    bump(bench)
    assert store._first_part == zombie._first_part != bench.open()._first_part
    take_step(store, 1, [5], 7)
    with pytest.raises(OvertakenError):
        take_step(zombie, 1, [1], 1)
