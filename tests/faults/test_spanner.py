"""Spanner under a flow: commits of unknown outcome, stops, moves between stores."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.errors import DpstreamError, RunError
from dpstream.dp_transforms import flow
from dpstream.dp_transforms.batches import concat, ids_of, record_schema
from dpstream.dp_transforms.decision import Batch
from dpstream.dp_transforms.flow import run_in_memory
from dpstream.dp_transforms.ingest.records import CanonicaliserFactory
from dpstream.dp_transforms.run import Run
from dpstream.state import open as stores
from dpstream.state import transfer
from dpstream.state.spanner import client
from dpstream.state.spanner import client as spanner_client
from dpstream.state.spanner import shards as spanner_shards
from dpstream.state.spanner import store as spanner
from dpstream.state.spanner.client import ExistsError, MissingError, commit, connect, read_rows
from dpstream.state.spanner.fill import PROGRESS
from dpstream.state.spanner.schema import BOUND, Mutations, create_tables, generation_of
from dpstream.state.spanner.shards import SpannerUnitShard
from dpstream.state.store import OvertakenError, RunIdentity
from tests import emulator
from tests.bounded import bound, ids_in
from tests.faults.child import batches_of, plan_of
from tests.faults.places import Places, places, small_commits
from tests.faults.runs import Releases, calm, job, released
from tests.faults.test_store_faults import Full, redelivered, stop_at_commit
from tests.faults.unsure import Network

NAMES = ("sticky", "threshold", "public", "combined", "skip")


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


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bytes_as_sqlite(url: str, name: str) -> None:
    expected = calm(name)
    assert released(job(name, url), batches_of(plan_of(name))) == expected
    stores.close_all()
    # All of it is read back by another process; nothing is computed again.
    assert released(job(name, url), batches_of(plan_of(name))[:1]) == expected


class Stopped(Exception):
    """Stops a run where a test wants it stopped."""


def stop_at(nth: int, after: bool) -> Any:
    """Commit number ``nth`` of all kinds fails, before or after it took effect."""
    real, commits = client.commit, [nth]

    def commit(*args: Any) -> None:
        commits[0] -= 1
        if commits[0] == 0 and not after:
            raise Stopped
        try:
            real(*args)
        except MissingError:
            if commits[0]:
                raise
        if commits[0] == 0:
            raise Stopped

    return mock.patch.object(spanner, "commit", commit)


def stopped_again_and_again(name: str, url: str, most: int) -> tuple[Releases, int]:
    """Each attempt dies at one of its first ``most`` commits; the next is another process with
    other batches.  Returns (releases of the one that lived, attempts that died)."""
    rng = np.random.default_rng(3)
    for attempt in range(200):
        batches = batches_of(plan_of(name), attempt, rows=int(rng.integers(20, 200)))
        with stop_at(int(rng.integers(1, most)), after=bool(rng.integers(0, 2))):
            try:
                return released(job(name, url), batches), attempt
            except Stopped:
                stores.close_all()
    raise AssertionError("no attempt came to its end")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("small", [False, True], ids=["whole", "split"])
def test_stopped_again_and_again(url: str, name: str, small: bool) -> None:
    with small_commits() if small else contextlib.nullcontext():
        releases, deaths = stopped_again_and_again(name, url, 30 if small else 5)
    assert deaths > 2
    assert releases == calm(name)


def decided_in_turns(url: str, interrupted: bool) -> list[str]:
    """Pairs that BOUND admits up to trigger time 3 and then to the end, by two workers that are
    given what is new; before, one may have been interrupted on its way to the end."""
    run = job("sticky", url, 1)
    plan = run.plan
    canonicalise = CanonicaliserFactory(plan, run.keys, None)()
    records = concat([canonicalise(batch)[0] for batch in batches_of(plan)], record_schema(plan))
    last = plan.timeline.last_trigger_time
    if interrupted:
        with pytest.raises(Stopped), stop_at(9, after=True):
            bound(plan, run.open(), 0, records, last)
        stores.close_all()
    out = []
    trigger_time = Batch(plan, records, ids_in(plan)).trigger_time
    for since, upto in ((0, 3), (3, last)):
        new = records.filter(pa.array((trigger_time > since) & (trigger_time <= upto)))
        admitted, *_ = bound(plan, run.open(), 0, new, upto)
        again, *_ = bound(plan, run.open(), 0, new, upto)
        assert again.num_rows == admitted.num_rows > 0
        out += [repr(row) for row in sorted(map(repr, again.to_pylist()))]
        stores.close_all()
    counts = run.open().unit_shard(0)
    run.open().load_units(0, counts, np.unique(ids_of(records.column("unit")), axis=0))
    return [*out, *map(str, sorted(counts.counts.tolist()))]


@pytest.fixture
def second_url() -> Iterator[str]:
    made = emulator.fresh_url()
    create_tables(connect(made))
    yield made
    stores.close_all()
    emulator.drop(made)


@pytest.mark.parametrize("sabotaged", [False, True])
def test_a_decision_that_went_further_than_the_next(
    url: str, second_url: str, sabotaged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_commits():
        expected = decided_in_turns(second_url, interrupted=False)
        if sabotaged:  # how far it went is not looked at
            zeros = property(zero, lambda *_: None)
            monkeypatch.setattr(SpannerUnitShard, "reach", zeros, raising=False)
        with pytest.raises(AssertionError) if sabotaged else contextlib.nullcontext():
            assert decided_in_turns(url, interrupted=True) == expected


def zero(_: Any) -> int:
    return 0


def done_keys_are_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real = spanner_shards.SpannerKeyShard._enter

    def enter(states: Any, *args: Any) -> None:
        real(states, *args)
        states.done[:] = False

    monkeypatch.setattr(spanner_shards.SpannerKeyShard, "_enter", enter)


def progress_comes_with_the_first_part(monkeypatch: pytest.MonkeyPatch) -> None:
    real = spanner.SpannerStore._commit_once

    def commit_once(store: Any, out: Any, fence: tuple[int, ...]) -> None:
        if fence[1] != BOUND:
            out.upsert("Progress", PROGRESS, [list(fence[:3])])
        real(store, out, fence)

    monkeypatch.setattr(spanner.SpannerStore, "_commit_once", commit_once)


def due_lists_name_changed_keys_only(monkeypatch: pytest.MonkeyPatch) -> None:
    real = spanner_shards.SpannerKeyShard.write_due

    def write_due(states: Any, out: Any, slots: Any, *rest: Any) -> None:
        real(states, out, slots[states._changed[slots]], *rest)

    monkeypatch.setattr(spanner_shards.SpannerKeyShard, "write_due", write_due)


def records_of_a_cut_decision_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    real = spanner.SpannerStore.unit_shard

    def unit_shard(store: Any, shard: int) -> Any:
        units: Any = real(store, shard)
        units.load = lambda *args: None
        return units

    monkeypatch.setattr(spanner.SpannerStore, "unit_shard", unit_shard)


SABOTAGE = [
    ("threshold", done_keys_are_taken_again),
    ("sticky", progress_comes_with_the_first_part),
    ("public", due_lists_name_changed_keys_only),
    ("sticky", records_of_a_cut_decision_are_forgotten),
]


@pytest.mark.parametrize(("name", "sabotage"), SABOTAGE, ids=lambda x: getattr(x, "__name__", x))
def test_sabotage_is_seen(
    url: str,
    name: str,
    sabotage: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store with a guard taken out does not pass the test above."""
    sabotage(monkeypatch)
    with small_commits():
        try:
            releases = stopped_again_and_again(name, url, 30)[0]
        except (AssertionError, RunError):
            return
    assert releases != calm(name)


ABORTED, UNKNOWN = 0.3, 0.05
#: Attempts of one commit: with 35% faults, one of 10,000 needs about 9.
MOST_ATTEMPTS = 25
FLOWS = ("sticky", "threshold", "combined", "public")
TABLES = {
    "Progress": ("Part", "WindowIndex", "Reached"),
    "Steps": ("Part", "WindowIndex", "Step", "Piece", "Releases"),
    "Keys": ("Part", "WindowIndex", "KeyId", "Columns", "State", "UnitIds"),
    "KeyUnits": ("Part", "WindowIndex", "KeyId", "Chunk", "UnitIds"),
    "KeysByDue": ("Part", "WindowIndex", "Due", "Step", "Piece", "KeyIds"),
    "Units": ("Part", "UnitId", "Records"),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same attempts with shorter pauses."""
    retry = spanner_client._RETRY.with_delay(initial=0.0002, maximum=0.01)
    monkeypatch.setattr(spanner_client, "_RETRY", retry)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Places]:
    with places("spanner", tmp_path) as fresh:
        yield fresh


def contents(url: str) -> dict[str, list[list[Any]]]:
    """Everything a run wrote, without the random marks of its writers."""
    return {
        table: list(read_rows(connect(url), table, columns)) for table, columns in TABLES.items()
    }


def writers(url: str) -> Counter[str]:
    """Rows of ``Steps`` by their writer."""
    return Counter(row[0] for row in read_rows(connect(url), "Steps", ("Writer",)))


def run_on(url: str, name: str) -> Releases:
    try:
        return released(job(name, url), batches_of(plan_of(name)))
    finally:
        stores.close_all()


class Tally:
    """Figures of many runs over a bad network; every run is checked."""

    def __init__(self, place: Places) -> None:
        self.place, self.transactions = place, 0
        self.attempts: Counter[int] = Counter()
        self.faults: Counter[str] = Counter()
        self.late: Counter[str] = Counter()
        self._calm: dict[str, dict[str, list[list[Any]]]] = {}

    def calm_contents(self, name: str) -> dict[str, list[list[Any]]]:
        """Tables of a run over a good network."""
        if name not in self._calm:
            url = self.place()
            assert run_on(url, name) == calm(name)
            self._calm[name] = contents(url)
            assert all(self._calm[name][table] for table in ("Progress", "Steps", "Units"))
        return self._calm[name]

    def run(self, name: str, seed: int) -> None:
        """One run over a bad network: its releases and its tables are those of a good one."""
        with small_commits():
            expected, url = self.calm_contents(name), self.place()
            network = Network(seed, ABORTED, UNKNOWN)
            with network.between(connect(url)):
                releases = run_on(url, name)
        assert releases == calm(name)
        assert contents(url) == expected
        # Whatever was sent took effect once: each mark stands, and no commit was applied twice.
        assert set(writers(url)) == set(network.attempts) == set(network.applied)
        assert set(network.applied.values()) == {1}
        self.transactions += len(network.attempts)
        self.attempts.update(network.attempts.values())
        self.faults.update(network.faults)
        self.late.update(network.late)

    def show(self) -> None:
        """Print what happened."""
        spread = ", ".join(f"{n}: {self.attempts[n]}" for n in sorted(self.attempts))
        print(
            f"\nF7: {self.transactions} transactions, {dict(self.faults)}, late {dict(self.late)}:"
            f" 0 double effects, 0 lost; attempts of a commit {{{spread}}}"
        )


def many(place: Places, transactions: int) -> None:
    tally, seed = Tally(place), 0
    while tally.transactions < transactions:
        tally.run(FLOWS[seed % len(FLOWS)], seed)
        seed += 1
    tally.show()
    assert max(tally.attempts) <= MOST_ATTEMPTS
    sent = sum(tally.attempts.values())
    assert sum(tally.faults.values()) > 0.3 * sent and tally.late["refused"]


def test_commits_of_unknown_outcome(place: Places) -> None:
    many(place, 300)


@pytest.mark.slow
def test_commits_of_unknown_outcome_long(place: Places) -> None:
    many(place, 10_000)


def test_an_emulator_that_aborts_at_random(tmp_path: Path) -> None:
    """Its own fault injection, a few in a hundred commits; runs go on until it was seen."""
    with emulator.running("--enable_fault_injection"), places("spanner", tmp_path) as place:
        for _ in range(10):
            url, network = place(), Network(0, 0.0, 0.0)
            job("sticky", url)
            with network.between(connect(url)), small_commits():
                assert run_on(url, "sticky") == calm("sticky")
            assert set(network.applied.values()) == {1}
            assert max(network.attempts.values()) <= MOST_ATTEMPTS
            if sum(network.attempts.values()) > len(network.attempts):
                return
    raise AssertionError("the emulator aborted nothing")


def no_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of ``Steps`` may be written again: a late commit overwrites newer states."""
    monkeypatch.setattr(Mutations, "insert", Mutations.upsert)


def no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit whose row is there believes that another worker wrote it."""

    def commit_once(store: Any, out: Mutations, fence: tuple[int, ...]) -> None:
        try:
            commit(store._db, out.fill)
        except ExistsError:
            raise OvertakenError from None

    monkeypatch.setattr(spanner.SpannerStore, "_commit_once", commit_once)


def no_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit is tried once."""
    monkeypatch.setattr(spanner_client, "_RETRY", spanner_client._RETRY.with_timeout(0.0))


@pytest.mark.parametrize("sabotage", [no_fence, no_mark, no_retry], ids=lambda f: f.__name__)
def test_sabotaged_commits_are_seen(
    place: Places, sabotage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tally = Tally(place)
    with small_commits():
        tally.calm_contents("sticky")
    sabotage(monkeypatch)
    with pytest.raises((AssertionError, DpstreamError)):
        tally.run("sticky", 5)


STOPS = [(0, 0), (3, 8), (15, 20), (20, 18)]


def go_on(run: Run, commits: int, seed: int) -> None:
    """Go on for some steps, committed two at a time, then stop as if killed."""
    together = mock.patch.object(flow, "COMMIT_STEPS", 2)
    with contextlib.suppress(Full), stop_at_commit(commits, "spanner"), together:
        run_in_memory(run, redelivered(run.plan, seed))
    stores.close_all()


def resharded(run: Run, shards: int) -> Run:
    assert transfer.reshard(run.store, run.plan, shards) is None
    return run._replace(shards=shards)


@pytest.mark.parametrize("stops", STOPS)
@pytest.mark.parametrize("name", ["sticky", "threshold", "public", "skip"])
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
            with (
                contextlib.suppress(Stopped),
                stop_at(int(rng.integers(2, 40)), after=True),
            ):
                run_in_memory(run, redelivered(run.plan, seed))
            stores.close_all()
            try:
                run = resharded(run, 3)
            except RunError as error:
                assert "in part" in error.rule
            assert released(run, redelivered(run.plan, 9)) == calm(name)
        stores.close_all()


@pytest.mark.parametrize("commit", [23, 27, 35, 43])
def test_a_group_cut_short_loses_no_rows_of_quiet_steps(place: Places, commit: int) -> None:
    """Their rows would wait for a step that is committed later than they are."""
    run = job("quiet", place())
    with small_commits():
        with pytest.raises(Stopped), stop_at(commit, after=True):
            run_in_memory(run, redelivered(run.plan, commit))
        stores.close_all()
        assert released(run, redelivered(run.plan, 9)) == calm("quiet")


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
    run = job("threshold", place())
    go_on(run, 9, 1)

    def stop(done: int, _: int) -> None:
        if done == 2:
            raise Full

    with pytest.raises(Full):
        transfer.reshard(run.store, run.plan, 3, stop)
    stores.close_all()
    assert generation_of(connect(run.store)) == 0
    run = resharded(run, 3)
    assert released(run, redelivered(run.plan, 4)) == calm("threshold")


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
