"""The whole flow on Spanner's emulator: the same bytes as on SQLite, whatever is interrupted."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.errors import RunError
from dpstream.dp_transforms.batches import concat, ids_of, record_schema
from dpstream.dp_transforms.decision import Batch
from dpstream.dp_transforms.ingest.records import CanonicaliserFactory
from dpstream.state import open as stores
from dpstream.state.spanner import client
from dpstream.state.spanner import shards as spanner_shards
from dpstream.state.spanner import store as spanner
from dpstream.state.spanner.client import MissingError, connect
from dpstream.state.spanner.fill import PROGRESS
from dpstream.state.spanner.schema import BOUND, create_tables
from dpstream.state.spanner.shards import SpannerUnitShard
from tests import emulator
from tests.bounded import bound
from tests.faults.child import batches_of, plan_of
from tests.faults.places import small_commits
from tests.faults.runs import Releases, calm, job, released

NAMES = ("sticky", "rounds", "public", "combined", "skip")


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
    real, left = client.commit, [nth]

    def commit(*args: Any) -> None:
        left[0] -= 1
        if left[0] == 0 and not after:
            raise Stopped
        try:
            real(*args)
        except MissingError:
            if left[0]:
                raise
        if left[0] == 0:
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
    trigger_time = Batch(plan, records).trigger_time
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
    ("rounds", done_keys_are_taken_again),
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
