"""What windows have published: the releases of their tests, all shards of them, as of a test.

What windows remember: by definition from a log of selections, and read from a store once.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.arrays import Ids
from dpstream.accounting.errors import RunError
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.noise.ids import key_ids
from dpstream.dp_transforms.published_keys import PublishedKeys, Remembered, RememberedKeys
from dpstream.state import open as stores
from dpstream.state.arrow import id_array
from dpstream.state.retention_store import Selection
from dpstream.state.store import OvertakenError, Store
from tests.dp_transforms.runs import PLANS, stream_of
from tests.lanes import few_first
from tests.streams import KEYS, STEP, as_rows, begin, key_name, make_plan, released


def ids_of(numbers: list[int]) -> Ids:
    return np.array([[n, n * 7 + 1] for n in numbers], np.uint64).reshape(-1, 2)


def selection(time: int, keys: list[int]) -> Selection:
    names = pa.array([f"p{k}" for k in keys], pa.string())
    batch = pa.RecordBatch.from_arrays([names, id_array(ids_of(keys))], names=["page", "_id"])
    return Selection(time, 0, batch)


def by_definition(log: list[tuple[int, list[int]]], start: int, lasting: int | None) -> set[int]:
    """Keys with a selection by the start, and not ``lasting`` trigger times before it."""
    return {
        key
        for time, keys in log
        if time <= start and (lasting is None or start - time < lasting)
        for key in keys
    }


@pytest.mark.parametrize("lasting", [None, 1, 4, 9])
@pytest.mark.parametrize("seed", few_first(range(8)))
def test_any_log(seed: int, lasting: int | None) -> None:
    rng = np.random.default_rng(seed)
    log = [
        (time, rng.choice(30, int(rng.integers(0, 5)), replace=False).tolist())
        for time in sorted(rng.integers(1, 60, 40).tolist())
    ]
    stride = int(rng.integers(1, 7))
    remembered, total = Remembered(lasting), 0
    for window in range(1, 60 // stride):
        start, before = window * stride, remembered.through
        selections = [selection(t, keys) for t, keys in log if before < t <= start]
        remembered.begin(window, start, selections)
        for open_ in range(max(1, window - 3), window + 1):
            want = by_definition(log, open_ * stride, lasting)
            assert set(np.flatnonzero(remembered.knows(open_, ids_of(list(range(35)))))) == want
            slots = remembered.of(open_)
            names: Any = (
                [] if remembered.columns is None else remembered.columns.take(pa.array(slots))
            )
            assert len(slots) == len(want)
            if want:
                assert {int(n[1:]) for n in names["page"].to_pylist()} == want
            total += len(want)
        remembered.end(window - 2)
    assert total > 5


def test_what_nobody_remembers_is_let_go() -> None:
    remembered = Remembered(2)
    for window in range(1, 200):
        remembered.begin(window, window, [selection(window, [5 * window + k for k in range(5)])])
        remembered.end(window)
        assert len(remembered.of(window)) == min(10, 5 * window)
    assert remembered.columns is not None and remembered.columns.num_rows < 40


def test_a_start_before_what_was_read_is_refused() -> None:
    remembered = Remembered()
    remembered.begin(2, 8, [selection(3, [1])])
    for start, late in ((4, []), (9, [selection(8, [2])]), (9, [selection(10, [2])])):
        with pytest.raises(AssertionError):
            remembered.begin(3, start, late)


class Counting:
    """A store whose reads of the log are counted."""

    def __init__(self, real: Store) -> None:
        self._real, self.reads, self.rows = real, 0, 0

    def selections(self, shard: int, after: int, upto: int | None = None) -> list[Selection]:
        selections = self._real.selections(shard, after, upto)
        self.reads, self.rows = self.reads + 1, self.rows + len(selections)
        return selections


def published(out: dict[tuple[int, int], bytes], name: tuple[int, int]) -> set[str]:
    return {str(row["page"]) for row in as_rows(out[name])}


REMEMBERING = [name for name, plan in PLANS.items() if plan.design.remembers]


@pytest.mark.parametrize("name", REMEMBERING)
def test_a_log_is_read_once_and_says_what_was_selected(
    name: str, store_paths: Iterator[str]
) -> None:
    plan = PLANS[name]
    timeline, path = plan.timeline, next(store_paths)
    out = released(plan, stream_of(plan).batches(400), path)
    run = begin(plan, path)
    store = Counting(run.open())
    every = [RememberedKeys(plan, store, shard) for shard in range(3)]  # type: ignore[arg-type]
    for window in range(1, timeline.windows):
        names = set()
        for remembered in (of_shard.at(window) for of_shard in every):
            if remembered.columns is not None:
                rows = remembered.columns.take(pa.array(remembered.of(window)))
                names |= set(rows["page"].to_pylist())
        if plan.design.refresh_every == 1:  # all of them are there at the first trigger
            assert names <= published(out, (window, 1))
        assert names <= published(out, (window, timeline.triggers))
        if plan.remember in (None, "run"):  # whatever is out by the start is known
            before = [n for n in out if timeline.base(n[0]) + n[1] <= timeline.base(window)]
            assert names == set().union(*(published(out, n) for n in before))
    held = len([s for shard in range(3) for s in run.open().selections(shard, -1)])
    assert store.rows <= held and store.reads <= 3 * (timeline.windows - 1)
    # Another reader that begins late, or asks for what is long closed, finds the same.
    key_ids = ids_of_all(plan, run.open())
    for shard, of_shard in enumerate(every):
        last = RememberedKeys(plan, run.open(), shard, ids_only=True)
        for window in (timeline.windows - 1, 1, timeline.windows - 1):
            want = of_shard.at(window).knows(window, key_ids)
            assert (last.at(window).knows(window, key_ids) == want).all()
    stores.close_all()


def ids_of_all(plan: Plan, store: Store) -> Ids:
    columns = [s.keys.column("_id") for n in range(3) for s in store.selections(n, -1)]
    raw = b"".join(value.as_py() for column in columns for value in column)
    return np.frombuffer(raw, np.uint64).reshape(-1, 2)


def test_series_have_no_gaps(store_paths: Iterator[str]) -> None:
    """A key that was published once is published at every trigger of all later windows."""
    plan = make_plan(triggers=4, windows=8)
    out = released(plan, stream_of(plan).batches(400), next(store_paths))
    seen: set[str] = set()
    for name in sorted(out):
        here = published(out, name)
        assert seen <= here
        seen |= here
    again = released(
        make_plan(triggers=4, windows=8, remember=STEP), stream_of(plan).batches(400),
        next(store_paths),
    )  # fmt: skip
    assert any(not published(again, (w, 4)) <= published(again, (w + 1, 4)) for w in range(7))
    assert len(seen) > 10


def test_one_window_remembers_nothing(store_paths: Iterator[str]) -> None:
    plan, never = (make_plan(windows=1, remember=r) for r in ("run", "never"))
    assert not plan.design.remembers
    path = next(store_paths)
    one = released(plan, stream_of(plan).batches(400), path)
    assert begin(plan, path).open().selections(0, -1) == []
    stores.close_all()
    two = released(never, stream_of(plan).batches(400), next(store_paths))
    assert [[r["page"] for r in as_rows(b)] for b in one.values()] and len(one) == len(two)


NAMES = [key_name(k) for k in range(60)]


def keys_of(path: str, plan: Plan, shards: int = 3) -> PublishedKeys:
    run = begin(plan, path, shards)
    return PublishedKeys(run.plan, run.open())


def ids(names: list[str]) -> Ids:
    rows = pa.RecordBatch.from_pydict({"page": names})
    return key_ids(PLANS["skip"], KEYS.ring().key, rows)


@pytest.mark.parametrize(
    "name", ["skip", "skip combined", "skip sliding", "skip, never remembered"]
)
def test_keys_of_the_tests_before(name: str, store_paths: Iterator[str]) -> None:
    plan, path = PLANS[name], next(store_paths)
    timeline, tests = plan.timeline, plan.design.test_triggers.tolist()
    out = released(plan, stream_of(plan).batches(400), path)
    keys = keys_of(path, plan)
    first, count = np.zeros(len(NAMES), np.int64), np.full(len(NAMES), timeline.windows)
    total = 0
    for decided in (timeline.last_trigger_time, 0, *range(1, timeline.last_trigger_time)):
        mask = keys.of_keys(ids(NAMES), first, count, decided, decided + 1)
        for window in range(timeline.windows):
            own = [(window, t) for t in tests if timeline.base(window) + t <= decided]
            start = timeline.base(window)
            if plan.design.remembers and start <= decided:
                own += [n for n in out if timeline.base(n[0]) + n[1] <= start]
            pages = {str(row["page"]) for n in own for row in as_rows(out[n])}
            have = {page for page, bits in zip(NAMES, mask, strict=True) if bits >> window & 1}
            assert have == pages
            total += len(have)
    assert total > 100
    stores.close_all()


def test_steps_that_are_not_committed_are_refused(store_paths: Iterator[str]) -> None:
    plan, path = PLANS["skip"], next(store_paths)
    keys = keys_of(path, plan)
    one = np.ones(1, np.int64)
    assert not keys.of_keys(ids(NAMES[:1]), 0 * one, one, 1, 2).any()  # before the first test
    test = int(plan.design.test_triggers[0])
    with pytest.raises(RunError):
        keys.of_keys(ids(NAMES[:1]), 0 * one, one, test, test + 1)
    stores.close_all()


def test_a_test_within_what_is_decided_is_refused(store_paths: Iterator[str]) -> None:
    """Whoever would decide so does not know how far the shard is."""
    plan, one = PLANS["skip"], np.ones(1, np.int64)
    keys = keys_of(next(store_paths), plan)
    for decided, upto in ((0, 3), (1, 5), (3, 24)):
        with pytest.raises(OvertakenError):
            keys.of_keys(ids(NAMES[:1]), 0 * one, one, decided, upto)
    stores.close_all()


def test_windows_beyond_a_record_s_are_not_marked(store_paths: Iterator[str]) -> None:
    plan, path = PLANS["skip sliding"], next(store_paths)
    released(plan, stream_of(plan).batches(400), path)
    keys, last = keys_of(path, plan), plan.timeline.last_trigger_time
    count = np.arange(len(NAMES)) % 3  # the fourth window is never asked for, others not by all
    mask = keys.of_keys(ids(NAMES), 0 * count, count, last, last + 1)
    assert (mask >> count == 0).all() and mask.any()
    stores.close_all()


@pytest.mark.parametrize("slide", [None, 1])
def test_few_windows_are_kept_and_each_test_is_read_once(
    store_paths: Iterator[str], monkeypatch: pytest.MonkeyPatch, slide: int | None
) -> None:
    plan = make_plan(
        triggers=3, windows=20, slide=slide, skip=True, weights=PLANS["skip"].privacy.weights
    )
    path, read = next(store_paths), list[tuple[int, int]]()
    released(plan, stream_of(plan).batches(400), path)
    keys, timeline, real = keys_of(path, plan), plan.timeline, PublishedKeys._released

    def reads(own: PublishedKeys, window: int, shard: int, trigger: int) -> Ids:
        read.append((window, trigger))
        return real(own, window, shard, trigger)

    monkeypatch.setattr(PublishedKeys, "_released", reads)
    for time in range(1, timeline.last_trigger_time):
        for window in timeline.windows_at(time):
            at = np.full(1, window, np.int64)
            keys.of_keys(ids(NAMES[:1]), at, 0 * at + 1, time, time + 1)
    assert len(keys._windows) <= (5 if slide is None else 9)
    last = timeline.last_trigger_time  # what was published at the end concerns no record
    want = {(w, t) for w in range(20) for t in (1, 2, 3) if timeline.base(w) + t < last}
    open_then = {(w, t) for w, t in want if timeline.base(w) + t in range(1, last)}
    assert len(read) == len(set(read)) and set(read) == open_then
    stores.close_all()
