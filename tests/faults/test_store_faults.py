"""F1, F4, F6: every store call fails once, deliveries repeat, workers overlap: one value each."""

import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

from accounting.errors import RunError
from accounting.plan import Plan
from dp_transforms import bounding, flow, step
from dp_transforms.batches import admitted_schema, concat, ids_of, record_schema
from dp_transforms.flow import run_in_memory
from dp_transforms.ids import key_ids
from dp_transforms.records import Canonicaliser, public_key_ids
from dp_transforms.release import steps_through
from dp_transforms.run import Run
from dp_transforms.step import Stepper
from state import log
from state import open as stores
from state.idtable import shard_of
from state.log import to_bytes
from state.sqlite import SqliteStore
from tests.faults.child import PUBLIC, batches_of, plan_of
from tests.streams import KEYS, begin, by_name, generate, public_table

NAMES = ("sticky", "rounds", "public")
#: A failure of the machine: its text is never shown, only that it happened.
FAILURE = sqlite3.OperationalError("disk I/O error")


@pytest.fixture(autouse=True)
def closed_stores() -> Iterator[None]:
    yield
    stores.close_all()


def job(name: str, folder: Path, shards: int = 2, file: str = "s.db") -> Run:
    plan = plan_of(name)
    public = None if plan.selects else public_table(plan, PUBLIC)
    return begin(plan, folder / file, shards, public)


def released(run: Run, batches: list[pa.RecordBatch]) -> dict[tuple[int, int], bytes]:
    return by_name(run_in_memory(run, batches)[0])


def calm(name: str, folder: Path) -> dict[tuple[int, int], bytes]:
    """Releases of a run that nothing happens to."""
    out = released(job(name, folder, file="calm.db"), batches_of(plan_of(name)))
    stores.close_all()
    return out


class FailOnce:
    """Wraps functions; the nth call of all fails, before or after it took effect."""

    def __init__(self, nth: int, after: bool) -> None:
        self.left, self.after = nth, after

    def wrap(self, owner: Any, name: str) -> Any:
        real = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == 0 and not self.after:
                raise FAILURE
            out = real(*args, **options)
            if self.left == 0:
                raise FAILURE
            return out

        return mock.patch.object(owner, name, call)

    @property
    def failed(self) -> bool:
        return self.left <= 0


STORE_CALLS = [
    (SqliteStore, name)
    for name in (
        "unit_shard", "admitted_before", "commit_units",
        "key_shard", "commit_step", "committed_releases",
    )
]  # fmt: skip
#: Between the store's calls: the states in memory are half changed when these fail.
WORK_CALLS = [
    (bounding, "admit"), (bounding, "expand"), (step, "aggregate"),
    (step, "select"), (step, "publish"), (step, "predict"),
]  # fmt: skip


def fail_until_clean(
    run: Run, batches: list[pa.RecordBatch], calls: list[tuple[Any, str]], after: bool, stride: int
) -> Callable[[Callable[[Run], None]], dict[tuple[int, int], bytes]]:
    """One run on one store in which calls number 1, 1 + stride, ... fail, one per attempt."""

    def go(recover: Callable[[Run], None]) -> dict[tuple[int, int], bytes]:
        nth = 1
        while True:
            fault = FailOnce(nth, after)
            patches = [fault.wrap(owner, name) for owner, name in calls]
            try:
                for patch in patches:
                    patch.start()
                return released(run, batches)
            except (sqlite3.OperationalError, RunError):
                assert fault.failed
            finally:
                for patch in patches:
                    patch.stop()
            recover(run)
            nth += stride

    return go


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("after", [False, True])
def test_store_calls_fail_and_the_worker_goes_on(tmp_path: Path, name: str, after: bool) -> None:
    """The store object lives on, as on a runner that repeats a bundle in the same process."""
    go = fail_until_clean(job(name, tmp_path), batches_of(plan_of(name)), STORE_CALLS, after, 1)
    assert go(lambda run: None) == calm(name, tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_store_calls_fail_and_the_worker_restarts(tmp_path: Path, name: str) -> None:
    go = fail_until_clean(job(name, tmp_path), batches_of(plan_of(name)), STORE_CALLS, True, 3)
    assert go(lambda run: stores.close_all()) == calm(name, tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_work_fails_half_way_and_is_repeated(tmp_path: Path, name: str) -> None:
    """Rows that were added in memory and not committed are not added again."""
    go = fail_until_clean(job(name, tmp_path), batches_of(plan_of(name)), WORK_CALLS, True, 1)
    assert go(lambda run: None) == calm(name, tmp_path)


class Full(Exception):
    """Stops a run where a test wants it stopped."""


def stop_at_commit(nth: int) -> Any:
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


@pytest.mark.parametrize("name", NAMES)
def test_deliveries_repeat_and_change(tmp_path: Path, name: str) -> None:
    plan, expected = plan_of(name), calm(name, tmp_path)
    total = plan.timeline.windows * plan.timeline.triggers * 2
    for seed in range(3):
        run = job(name, tmp_path, file=f"{seed}.db")
        stop = int(np.random.default_rng(seed).integers(0, total))
        with pytest.raises(Full), stop_at_commit(stop):
            run_in_memory(run, redelivered(plan, seed))
        stores.close_all()
        assert released(run, redelivered(plan, 100 + seed)) == expected


@pytest.mark.parametrize("rows", [1, 7])
def test_commits_in_many_pieces(tmp_path: Path, monkeypatch: Any, rows: int) -> None:
    """A commit of BOUND larger than a piece of the log is read back whole."""
    monkeypatch.setattr(log, "_PIECE_ROWS", rows)
    expected = calm("sticky", tmp_path)
    run = job("sticky", tmp_path)
    with pytest.raises(Full), stop_at_commit(5):
        run_in_memory(run, batches_of(run.plan))
    counts = [run.open().unit_shard(n).counts.tolist() for n in range(2)]
    stores.close_all()
    again = [run.open().unit_shard(n) for n in range(2)]
    for units, before in zip(again, counts, strict=True):
        assert units.counts[: units.table.size].tolist() == before[: units.table.size]
    assert released(run, redelivered(run.plan, 2)) == expected


@pytest.mark.parametrize("name", NAMES)
def test_other_shard_counts(tmp_path: Path, name: str) -> None:
    """The same run id on stores with other shards: names do not know shards."""
    plan, expected = plan_of(name), calm(name, tmp_path)
    for shards in (1, 5):
        run = job(name, tmp_path, shards, file=f"{shards}.db")
        assert released(run, redelivered(plan, shards)) == expected
        stores.close_all()


class Worker:
    """One worker with a store object of its own."""

    def __init__(self, run: Run, path: Path, steps: list[tuple[int, int, int, pa.RecordBatch]]):
        schema = stores.key_schema(run.plan)
        self.store = SqliteStore(path, schema, len(run.plan.value_streams))
        ring = KEYS.ring()
        public = (
            None if run.public is None else (run.public, public_key_ids(run.plan, ring, run.public))
        )
        self.stepper = Stepper(run.plan, ring, self.store, public, look_ahead=3)
        self.steps, self.out = steps, list[pa.RecordBatch]()

    def turn(self) -> bool:
        """Do the next step; False when there is none."""
        if len(self.out) < len(self.steps):
            self.out.append(self.stepper.step(*self.steps[len(self.out)])[0])
        return len(self.out) < len(self.steps)


def admitted_steps(run: Run) -> list[tuple[int, int, int, pa.RecordBatch]]:
    """(window, shard, trigger, rows) of every step, after BOUND was decided."""
    plan, store = run.plan, run.open()
    ring = KEYS.ring()
    ids = None if run.public is None else public_key_ids(plan, ring, run.public)
    door = Canonicaliser(plan, ring, ids)
    records = concat([door(b)[0] for b in batches_of(plan)], record_schema(plan))
    shard, upto = shard_of(ids_of(records.column("unit")), run.shards), plan.timeline.last_cut
    parts = [
        flow.bound(plan, store, n, records.filter(pa.array(shard == n)), upto)[0]
        for n in range(run.shards)
    ]
    rows = concat(parts, admitted_schema(plan))
    target = shard_of(key_ids(plan, ring.key, rows), run.shards)
    return [
        (window, n, trigger, part)
        for n in range(run.shards)
        for window, trigger, part in steps_through(
            plan.timeline, rows.filter(pa.array(target == n)), upto
        )
    ]


def encoded(batches: list[pa.RecordBatch]) -> list[bytes]:
    """Bytes to compare: as values, a mean that is not defined (NaN) would not equal itself."""
    return [to_bytes(batch) for batch in batches]


@pytest.mark.parametrize("name", NAMES)
def test_workers_take_turns(tmp_path: Path, name: str) -> None:
    """Two workers with a store each run every step, now one ahead and now the other."""
    reference = job(name, tmp_path, file="one.db")
    one = Worker(reference, tmp_path / "one.db", admitted_steps(reference))
    while one.turn():
        pass
    for seed in range(4):
        rng = np.random.default_rng(seed)
        run = job(name, tmp_path, file=f"{seed}.db")
        steps = admitted_steps(run)
        pair = [Worker(run, tmp_path / f"{seed}.db", steps) for _ in range(2)]
        ahead = 0
        while True:
            # Long turns: a worker falls behind, reads back, overtakes and goes on alone.
            more = [pair[ahead].turn() for _ in range(int(rng.integers(1, 6)))][-1]
            ahead = 1 - ahead
            if not more and not pair[ahead].turn():
                break
        while pair[0].turn() or pair[1].turn():
            pass
        for worker in pair:
            assert encoded(worker.out) == encoded(one.out)
            worker.store.close()
    one.store.close()


@pytest.mark.parametrize("name", NAMES)
def test_workers_meet_at_a_commit(tmp_path: Path, name: str) -> None:
    """Both compute a step before either commits it: the second gives what the first gave."""
    run = job(name, tmp_path)
    steps = admitted_steps(run)
    slow, fast = (Worker(run, tmp_path / "s.db", steps) for _ in range(2))
    real = SqliteStore.commit_step

    def commit_step(store: Any, *args: Any) -> Any:
        if store is slow.store:
            fast.turn()
        return real(store, *args)

    with mock.patch.object(SqliteStore, "commit_step", commit_step):
        while slow.turn():
            pass
    assert encoded(slow.out) == encoded(fast.out)
    assert any(batch.num_rows for batch in slow.out)
    for worker in (slow, fast):
        worker.store.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_worker_that_was_away_looks_again(tmp_path: Path, name: str) -> None:
    """Its states are those of an early step when the runner gives it a late one."""
    run = job(name, tmp_path)
    steps = [step for step in admitted_steps(run) if step[1] == 0]
    there, away = (Worker(run, tmp_path / "s.db", steps) for _ in range(2))
    away.turn()
    for _ in range(4):
        there.turn()
    assert there.stepper.store.key_shard(*steps[0][:2]).committed == 4
    assert away.stepper.store.key_shard(*steps[0][:2]).committed == 1
    fifth, computed = away.stepper.step(*steps[4])
    assert computed
    there.turn()
    assert encoded([fifth]) == encoded(there.out[-1:])
    sixth = away.stepper.steps(0, [(steps[5][0], *steps[5][2:])])[0][0]
    there.turn()
    assert encoded([sixth]) == encoded(there.out[-1:])
    reference = job(name, tmp_path, file="one.db")
    one = Worker(reference, tmp_path / "one.db", steps[:6])
    while one.turn():
        pass
    assert encoded(there.out) == encoded(one.out)
    for worker in (there, away, one):
        worker.store.close()


def test_threads_of_a_process_wait_for_each_other(tmp_path: Path) -> None:
    """A bundle comes again while the process is in the midst of it: one after the other."""
    run = job("sticky", tmp_path)
    steps = admitted_steps(run)
    worker = Worker(run, tmp_path / "s.db", steps)
    inside, go_on, seen = threading.Event(), threading.Event(), list[bytes]()
    real = step.aggregate

    def aggregate(*args: Any) -> Any:
        out = real(*args)  # the states are half changed
        inside.set()
        assert go_on.wait(30)
        return out

    def work() -> None:
        seen.append(to_bytes(worker.stepper.step(*steps[0])[0]))

    with mock.patch.object(step, "aggregate", aggregate):
        first, second = (threading.Thread(target=work) for _ in range(2))
        first.start()
        assert inside.wait(30)
        second.start()
        second.join(0.2)
        assert second.is_alive() and seen == []
        go_on.set()
        first.join()
        second.join()
    assert len(seen) == 2 and seen[0] == seen[1]
    fresh = Worker(run, tmp_path / "s.db", steps)
    rows, states = steps[0][3], fresh.store.key_shard(*steps[0][:2])
    pairs = set(zip(rows["unit"].to_pylist(), rows["page"].to_pylist(), strict=True))
    assert states.units[: states.size].sum() == len(pairs) > 0
    for each in (worker, fresh):
        each.store.close()


def test_a_decision_of_bound_is_made_once(tmp_path: Path) -> None:
    """Two workers decide the same records: the second is refused, and then reads the first's."""
    run = job("sticky", tmp_path)
    plan = run.plan
    door = Canonicaliser(plan, KEYS.ring())
    batches = generate(plan, 6, records=300, users=60).batches(100)
    records = concat([door(b)[0] for b in batches], record_schema(plan))
    schema, streams = stores.key_schema(plan), len(plan.value_streams)
    a, b = (SqliteStore(tmp_path / "s.db", schema, streams) for _ in range(2))
    upto = plan.timeline.last_cut
    b.unit_shard(0)  # b has looked before a decides
    first, _ = bounding.bound(plan, a, 0, records, upto)
    with pytest.raises(RunError, match="another worker"):
        bounding.bound(plan, b, 0, records, upto)
    second, _ = bounding.bound(plan, b, 0, records, upto)
    assert first == second and first.num_rows
    for store in (a, b):
        store.close()
