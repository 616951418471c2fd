"""What windows have published: the releases of their tests, all shards of them, as of a test."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.arrays import Ids
from dpstream.accounting.errors import RunError
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.noise.ids import key_ids
from dpstream.dp_transforms.published_keys import PublishedKeys
from dpstream.state import open as stores
from dpstream.state.store import OvertakenError
from tests.dp_transforms.runs import PLANS, stream_of
from tests.streams import KEYS, as_rows, begin, key_name, make_plan, released

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
    line, tests = plan.timeline, plan.design.test_triggers.tolist()
    out = released(plan, stream_of(plan).batches(400), path)
    keys = keys_of(path, plan)
    first, count = np.zeros(len(NAMES), np.int64), np.full(len(NAMES), line.windows)
    total = 0
    for decided in (line.last_trigger_time, 0, *range(1, line.last_trigger_time)):
        mask = keys.of_keys(ids(NAMES), first, count, decided, decided + 1)
        for window in range(line.windows):
            own = [(window, t) for t in tests if line.base(window) + t <= decided]
            start = line.base(window)
            if plan.design.remembers and start <= decided:
                own += [n for n in out if line.base(n[0]) + n[1] <= start]
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
    with pytest.raises(RunError, match=r"mechanism\.skip"):
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
    keys, line, real = keys_of(path, plan), plan.timeline, PublishedKeys._released

    def reads(own: PublishedKeys, window: int, trigger: int) -> Ids:
        read.append((window, trigger))
        return real(own, window, trigger)

    monkeypatch.setattr(PublishedKeys, "_released", reads)
    for time in range(1, line.last_trigger_time):
        for window in line.windows_at(time):
            at = np.full(1, window, np.int64)
            keys.of_keys(ids(NAMES[:1]), at, 0 * at + 1, time, time + 1)
    assert len(keys._windows) <= (5 if slide is None else 9)
    last = line.last_trigger_time  # what was published at the end concerns no record
    want = {(w, t) for w in range(20) for t in (1, 2, 3) if line.base(w) + t < last}
    open_then = {(w, t) for w, t in want if line.base(w) + t in range(1, last)}
    assert len(read) == len(set(read)) and set(read) == open_then
    stores.close_all()
