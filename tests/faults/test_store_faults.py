"""F1, F4, F6: every store call fails once, deliveries repeat, workers overlap: one value each.

Every test runs on both stores; the undisturbed run is always SQLite's.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dpstream.accounting.errors import RunError
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms import aggregation, bounding, step
from dpstream.dp_transforms.batches import admitted_schema, concat, ids_of, record_schema
from dpstream.dp_transforms.flow import run_in_memory
from dpstream.dp_transforms.ingest.records import Canonicaliser, public_key_ids
from dpstream.dp_transforms.noise.ids import key_ids
from dpstream.dp_transforms.release import steps_through
from dpstream.dp_transforms.run import Run
from dpstream.dp_transforms.step import Stepper
from dpstream.state import arrow
from dpstream.state import open as stores
from dpstream.state.arrow import to_bytes
from dpstream.state.idtable import shard_of
from dpstream.state.spanner import client
from dpstream.state.spanner import shards as spanner_shards
from dpstream.state.spanner import store as spanner
from dpstream.state.spanner.store import SpannerStore
from dpstream.state.sqlite.store import SqliteStore
from dpstream.state.store import Store
from tests.bounded import bound
from tests.faults.child import batches_of, plan_of
from tests.faults.failing import FailOnce, FailureError
from tests.faults.places import KINDS, Places, places, small_commits
from tests.faults.runs import calm, job, released
from tests.streams import KEYS, generate

NAMES = ("sticky", "threshold", "public", "skip")
STORES: dict[str, type[Store]] = {"sqlite": SqliteStore, "spanner": SpannerStore}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def place(kind: str, tmp_path: Path) -> Iterator[Places]:
    with places(kind, tmp_path) as fresh:
        yield fresh


_CONTRACT = (
    "unit_shard", "load_units", "admitted_before", "commit_units",
    "key_shard", "load_keys", "commit_step", "committed_releases",
)  # fmt: skip
#: What the flow calls, and on Spanner what is sent.
STORE_CALLS: dict[str, list[tuple[Any, str]]] = {
    "sqlite": [(SqliteStore, name) for name in _CONTRACT if not name.startswith("load")],
    "spanner": [(SpannerStore, name) for name in _CONTRACT],
    "spanner calls": [
        (spanner, "commit"), (spanner, "read_rows"),
        (spanner_shards, "read_rows"),
    ],
}  # fmt: skip
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
            except (FailureError, RunError):
                assert fault.failed
            finally:
                for patch in patches:
                    patch.stop()
            recover(run)
            nth += stride

    return go


#: On Spanner only some of the calls fail in CI: a call takes milliseconds.
STRIDE = {"sqlite": 1, "spanner": 11}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("after", [False, True])
def test_store_calls_fail_and_the_worker_goes_on(
    kind: str, place: Places, name: str, after: bool
) -> None:
    """The store object lives on, as on a runner that repeats a bundle in the same process."""
    run, batches = job(name, place()), batches_of(plan_of(name))
    go = fail_until_clean(run, batches, STORE_CALLS[kind], after, STRIDE[kind])
    assert go(lambda run: None) == calm(name)


@pytest.mark.parametrize("name", NAMES)
def test_store_calls_fail_and_the_worker_restarts(kind: str, place: Places, name: str) -> None:
    run, batches = job(name, place()), batches_of(plan_of(name))
    go = fail_until_clean(run, batches, STORE_CALLS[kind], True, 3 * STRIDE[kind])
    assert go(lambda run: stores.close_all()) == calm(name)


@pytest.mark.parametrize("kind", ["spanner"], indirect=True)
@pytest.mark.parametrize("after", [False, True])
def test_calls_to_spanner_fail(place: Places, after: bool) -> None:
    run, batches = job("sticky", place()), batches_of(plan_of("sticky"))
    go, failed = fail_until_clean(run, batches, STORE_CALLS["spanner calls"], after, 5), list[Run]()

    def recover(run: Run) -> None:
        failed.append(run)
        if after:
            stores.close_all()

    assert go(recover) == calm("sticky") and failed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["spanner"], indirect=True)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("calls", ["spanner", "spanner calls", "spanner calls, in parts"])
def test_every_call_on_spanner_fails(place: Places, name: str, after: bool, calls: str) -> None:
    in_parts = small_commits() if calls.endswith("parts") else contextlib.nullcontext()
    run, batches = job(name, place()), batches_of(plan_of(name))
    wrapped, failures = STORE_CALLS[calls.partition(",")[0]], 0

    def recover(run: Run) -> None:
        nonlocal failures
        failures += 1
        if failures % 2:
            stores.close_all()

    with in_parts:
        go = fail_until_clean(run, batches, wrapped, after, 1)
        assert go(recover) == calm(name)
        commits = undisturbed_commits(job(name, place()), batches, wrapped)
    print(f"\nF1 {calls}, {name}: {failures} calls failed, one each run; releases as undisturbed")
    # Attempt i makes at most i commits, and the last one, which nothing fails in, no more than
    # failures were before it: fewer failures would not have done the work.
    assert failures * (failures + 3) / 2 >= commits >= 4


def undisturbed_commits(run: Run, batches: list[pa.RecordBatch], calls: list[Any]) -> int:
    """Commits among the calls of a run in which none fails."""
    none = FailOnce(1 << 60, False)
    with contextlib.ExitStack() as stack:
        for owner, name in calls:
            stack.enter_context(none.wrap(owner, name))
        released(run, batches)
    return none.commits


@pytest.mark.parametrize("name", NAMES)
def test_work_fails_half_way_and_is_repeated(kind: str, place: Places, name: str) -> None:
    """Rows that were added in memory and not committed are not added again."""
    run, batches = job(name, place()), batches_of(plan_of(name))
    go = fail_until_clean(run, batches, WORK_CALLS, True, STRIDE[kind])
    assert go(lambda run: None) == calm(name)


class Full(Exception):
    """Stops a run where a test wants it stopped."""


def stop_at_commit(nth: int, kind: str = "sqlite") -> Any:
    store = STORES[kind]
    real, left = store.commit_step, [nth]

    def commit_step(*args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise Full
        return real(*args)

    return mock.patch.object(store, "commit_step", commit_step)


def redelivered(plan: Plan, seed: int) -> list[pa.RecordBatch]:
    """The same records in batches of other sizes, each 1 to 5 times, in any order."""
    rng = np.random.default_rng(seed)
    batches = batches_of(plan, seed, rows=int(rng.integers(5, 120)))
    out = [b for b in batches for _ in range(int(rng.integers(1, 6)))]
    return [out[i] for i in rng.permutation(len(out))]


@pytest.mark.parametrize("name", NAMES)
def test_deliveries_repeat_and_change(kind: str, place: Places, name: str) -> None:
    plan, expected = plan_of(name), calm(name)
    total = plan.timeline.windows * plan.timeline.triggers * 2
    for seed in range(3):
        run = job(name, place())
        stop = int(np.random.default_rng(seed).integers(0, total))
        with pytest.raises(Full), stop_at_commit(stop, kind):
            run_in_memory(run, redelivered(plan, seed))
        stores.close_all()
        assert released(run, redelivered(plan, 100 + seed)) == expected


@pytest.mark.parametrize("rows", [1, 7])
def test_commits_in_many_pieces(tmp_path: Path, monkeypatch: Any, rows: int) -> None:
    """A commit of BOUND larger than a piece of the log is read back whole."""
    monkeypatch.setattr(arrow, "_PIECE_ROWS", rows)
    expected = calm("sticky")
    run = job("sticky", str(tmp_path / "s.db"))
    with pytest.raises(Full), stop_at_commit(5):
        run_in_memory(run, batches_of(run.plan))
    counts = [run.open().unit_shard(n).counts.tolist() for n in range(2)]
    stores.close_all()
    again = [run.open().unit_shard(n) for n in range(2)]
    for units, before in zip(again, counts, strict=True):
        assert units.counts[: units.table.size].tolist() == before[: units.table.size]
    assert released(run, redelivered(run.plan, 2)) == expected


@pytest.mark.parametrize("name", NAMES)
def test_other_shard_counts(place: Places, name: str) -> None:
    """The same run id on stores with other shards: names do not know shards."""
    plan, expected = plan_of(name), calm(name)
    for shards in (1, 5):
        run = job(name, place(), shards)
        assert released(run, redelivered(plan, shards)) == expected
        stores.close_all()


def another(run: Run) -> Store:
    """A handle on the run's store as another process has it."""
    return stores.backend(run.store).open(run.plan)


class Worker:
    """One worker with a store object of its own."""

    def __init__(self, run: Run, steps: list[tuple[int, int, int, pa.RecordBatch]]):
        self.store = another(run)
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
    ingest = Canonicaliser(plan, ring, ids)
    records = concat([ingest(b)[0] for b in batches_of(plan)], record_schema(plan))
    shard, upto = (
        shard_of(ids_of(records.column("unit")), run.shards),
        plan.timeline.last_trigger_time,
    )
    parts = [
        bound(plan, store, n, records.filter(pa.array(shard == n)), upto)[0]
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


def encoded(batches: list[pa.RecordBatch], ordered: bool = True) -> list[bytes]:
    """Bytes to compare: as values, a mean that is not defined (NaN) would not equal itself.

    Args:
        ordered: rows as they stand; else by key, as the seal sorts them (a store may hand out
            keys in any order).
    """
    if not ordered:
        batches = [b.take(pc.sort_indices(b.column("_id"))) for b in batches]
    return [to_bytes(batch) for batch in batches]


@pytest.mark.parametrize("name", NAMES)
def test_workers_take_turns(kind: str, place: Places, name: str) -> None:
    """Two workers with a store each run every step, now one ahead and now the other."""
    reference = job(name, place())
    one = Worker(reference, admitted_steps(reference))
    while one.turn():
        pass
    for seed in range(4 if kind == "sqlite" else 2):
        rng = np.random.default_rng(seed)
        run = job(name, place())
        steps = admitted_steps(run)
        pair = [Worker(run, steps) for _ in range(2)]
        ahead = 0
        while True:
            # Long turns: a worker falls behind, reads back, overtakes and goes on alone.
            more = [pair[ahead].turn() for _ in range(int(rng.integers(1, 6)))][-1]
            ahead = 1 - ahead
            if not more and not pair[ahead].turn():
                break
        while pair[0].turn() or pair[1].turn():
            pass
        assert encoded(pair[0].out) == encoded(pair[1].out)
        assert encoded(pair[0].out, ordered=False) == encoded(one.out, ordered=False)
        for worker in pair:
            worker.store.close()
    one.store.close()


@pytest.mark.parametrize("name", NAMES)
def test_workers_meet_at_a_commit(kind: str, place: Places, name: str) -> None:
    """Both compute a step before either commits it: the second gives what the first gave."""
    run = job(name, place())
    steps = admitted_steps(run)
    slow, fast = (Worker(run, steps) for _ in range(2))
    real = STORES[kind].commit_step

    def commit_step(store: Any, *args: Any) -> Any:
        if store is slow.store:
            fast.turn()
        return real(store, *args)

    with mock.patch.object(STORES[kind], "commit_step", commit_step):
        while slow.turn():
            pass
    assert encoded(slow.out) == encoded(fast.out)
    assert any(batch.num_rows for batch in slow.out)
    for worker in (slow, fast):
        worker.store.close()


@pytest.mark.parametrize("kind", ["spanner"], indirect=True)
@pytest.mark.parametrize("name", NAMES)
def test_workers_meet_between_parts(place: Places, name: str) -> None:
    """Before any commit of one worker, also of a part of a step, the other may take a turn."""
    run, rng = job(name, place()), np.random.default_rng(8)
    real, busy, meetings = client.commit, False, 0

    def commit(*args: Any) -> None:
        nonlocal busy, meetings
        if not busy and rng.random() < 0.3:
            busy, meetings = True, meetings + 1
            fast.turn()
            busy = False
        real(*args)

    with small_commits():
        steps = admitted_steps(run)
        slow, fast = (Worker(run, steps) for _ in range(2))
        with mock.patch.object(spanner, "commit", commit):
            while slow.turn():
                pass
        while fast.turn():
            pass
        reference = job(name, place())
        one = Worker(reference, admitted_steps(reference))
        while one.turn():
            pass
    assert meetings > 5
    assert encoded(slow.out) == encoded(fast.out)
    assert encoded(slow.out, ordered=False) == encoded(one.out, ordered=False)


@pytest.mark.parametrize("name", NAMES)
def test_a_worker_that_was_away_looks_again(place: Places, name: str) -> None:
    """Its states are those of an early step when the runner gives it a late one."""
    run = job(name, place())
    steps = [step for step in admitted_steps(run) if step[1] == 0]
    there, away = (Worker(run, steps) for _ in range(2))
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
    reference = job(name, place())
    one = Worker(reference, admitted_steps(reference)[:6])
    while one.turn():
        pass
    assert encoded(there.out, ordered=False) == encoded(one.out, ordered=False)
    for worker in (there, away, one):
        worker.store.close()


def test_threads_of_a_process_wait_for_each_other(place: Places) -> None:
    """A bundle comes again while the process is in the midst of it: one after the other."""
    run = job("sticky", place())
    steps = admitted_steps(run)
    worker = Worker(run, steps)
    inside, go_on, seen = threading.Event(), threading.Event(), list[bytes]()
    real = aggregation.aggregate

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
    fresh = Worker(run, steps)
    rows, states = steps[0][3], fresh.store.key_shard(*steps[0][:2])
    ids = key_ids(run.plan, KEYS.ring().key, rows)
    fresh.store.load_keys(*steps[0][:2], 2, states, ids)
    pairs = set(zip(rows["unit"].to_pylist(), rows["page"].to_pylist(), strict=True))
    assert states.units[: states.size].sum() == len(pairs) > 0
    for each in (worker, fresh):
        each.store.close()


def test_a_decision_of_bound_is_made_once(place: Places) -> None:
    """Two workers decide the same records: the second's commit is refused, and it takes the
    first's decision."""
    run = job("sticky", place())
    plan = run.plan
    ingest = Canonicaliser(plan, KEYS.ring())
    batches = generate(plan, 6, records=300, users=60).batches(100)
    records = concat([ingest(b)[0] for b in batches], record_schema(plan))
    a, b = another(run), another(run)
    upto = plan.timeline.last_trigger_time
    b.unit_shard(0)  # b has looked before a decides
    first, *_ = bound(plan, a, 0, records, upto)
    second, *_ = bound(plan, b, 0, records, upto)
    assert first == second and first.num_rows
    for store in (a, b):
        store.close()
