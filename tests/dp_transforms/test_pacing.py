"""Where BOUND waits for RELEASE: by looking at every trigger time, and in the store.

Notes of the partitions that a later pass has to read: never one too few.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.budget.calibration import calibrate
from dpstream.accounting.fields import Field
from dpstream.accounting.plan import timeline
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.weights import SelectionWeights
from dpstream.dp_transforms import flow
from dpstream.dp_transforms import run as runs
from dpstream.dp_transforms.batches import admitted_schema, concat, empty, record_schema
from dpstream.dp_transforms.flow import BoundCallback, ReleaseCallback, run_in_memory
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.pacing import (
    Pace,
    last_tests,
    may_decide,
    next_test,
    note_waiting,
    stops,
    waiting_partitions,
)
from dpstream.state import open as stores
from tests.dp_transforms.exhaustive import SlowNoise, skipping
from tests.dp_transforms.reference import accept
from tests.dp_transforms.runs import (
    SKIPPING,
    identity,
    key_ids,
    ranked_plan,
    rows_of,
    stream_of,
)
from tests.lanes import few_first
from tests.streams import begin, by_name, make_plan

_SHORT: dict[str, object] = {"skip": True, "weights": SelectionWeights(1.0, 2.0)}
#: Also windows that have one trigger, and ones that open at every trigger.
CASES = SKIPPING | {
    "one trigger": make_plan(triggers=1, windows=5, **_SHORT),  # type: ignore[arg-type]
    "at every trigger": make_plan(triggers=4, slide=1, windows=6, tests=(3, 4), **_SHORT),  # type: ignore[arg-type]
}
PLANS = pytest.mark.parametrize("plan", CASES.values(), ids=list(CASES))


def stops_by_hand(plan: Plan) -> dict[int, list[tuple[int, int]]]:
    """Trigger time -> (window, step) of the tests that fall on it."""
    timeline, by_time = plan.timeline, dict[int, list[tuple[int, int]]]()
    for window in range(timeline.windows):
        for step in plan.design.test_triggers.tolist():
            by_time.setdefault(timeline.base(window) + step, []).append((window, step))
        if window and plan.design.remembers:  # its start, at which it reads what was published
            by_time.setdefault(timeline.base(window), [])
    return by_time


@PLANS
def test_the_next_test_of_any_window(plan: Plan) -> None:
    at, last = stops_by_hand(plan), plan.timeline.last_trigger_time
    for after in range(last + 1):
        assert next_test(plan, after) == min((t for t in at if t > after), default=None)


def test_a_stream_without_end_has_a_next_test_always() -> None:
    plan = SKIPPING["skip sliding"]
    endless = msgspec.structs.replace(
        plan, timeline=msgspec.structs.replace(plan.timeline, end=None)
    )
    last = plan.timeline.last_trigger_time
    tests = {last + t for t in range(1, 60) for w in range(60) for k in plan.design.test_triggers
             if plan.timeline.base(w) + k == last + t}  # fmt: skip
    at, times = last, list[int]()
    while at < last + 50:
        test = next_test(endless, at)
        assert test is not None
        times.append(at := test)
    assert times == [t for t in sorted(tests) if t <= times[-1]]


@PLANS
def test_what_must_be_committed_before(plan: Plan) -> None:
    at, timeline = stops_by_hand(plan), plan.timeline
    for time in range(1, timeline.last_trigger_time + 1):
        steps = last_tests(plan, time)
        before = [t for t in at if t < time and at[t]]
        for window in timeline.windows_at(time):
            mine = [step for t in before for w, step in at[t] if w == window]
            assert steps.get(window) == (max(mine) if mine else None)
        # The stop before, also of a window that closed with it, if nothing was announced since.
        if before and max(before) == time - 1:
            assert all(steps[window] == step for window, step in at[time - 1])


@PLANS
def test_the_clock_waits_for_every_key_shard(plan: Plan, store_paths: Iterator[str]) -> None:
    run = begin(plan, next(store_paths), shards=2)
    store, pace = run.open(), Pace(run)
    decide, release = BoundCallback(run)(), ReleaseCallback(run)()
    records, pairs = (concat([], schema(plan)) for schema in (record_schema, admitted_schema))
    since = 0
    for _ in range(3):
        upto = pace(since + 1)
        assert upto == next_test(plan, since)
        for shard in range(2):
            decide(shard, [records], upto, since)
        for shard in range(2):
            if stops_by_hand(plan)[upto]:
                assert pace(upto + 1) == upto  # not before the last one
                assert not may_decide(plan, store, upto + 1)
            list(release(shard, [pairs], upto, since).outputs)
        assert may_decide(plan, store, upto + 1) and pace(upto + 1) > upto
        since = upto
    stores.close_all()


@pytest.mark.parametrize("names", few_first([[*CASES][:3], [*CASES][3:]]), ids=["few", "rest"])
def test_a_late_timer_may_span_the_start_of_a_window(
    names: list[str], store_paths: Iterator[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its start a window reads what others have published, and waits for nobody: a clock passes
    it at once, and the next timer of a shard may be the first one behind it."""
    spanned = 0
    for name in names:
        plan = CASES[name]
        at, source = stops_by_hand(plan), stream_of(plan)
        early = [stop for stop in stops(plan) if at.get(stop) or stop == max(stops(plan))]
        spanned += len(stops(plan)) - len(early)
        one_by_one = by_name(run_in_memory(begin(plan, next(store_paths)), source.batches(400))[0])
        with monkeypatch.context() as patch:
            patch.setattr(flow, "stops", lambda _, early=early: early)
            late = by_name(run_in_memory(begin(plan, next(store_paths)), source.batches(400))[0])
        assert rows_of(plan, late) == rows_of(plan, one_by_one), name
    assert spanned > 0
    stores.close_all()


@pytest.mark.parametrize("own", [False, True])
def test_every_stage_goes_by_the_tests_that_were_committed(
    ring: KeyRing, store_paths: Iterator[str], monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """A run that an earlier program began with other defaults: it has 13 tests, not 4.

    ``own``: the test notices a stage that goes by its own program's.
    """
    monkeypatch.setattr(timeline, "DEFAULT_TESTS", 4)
    plan, then = (ranked_plan((1, 2), skip=None, triggers=20, tests=n) for n in (None, 15))
    assert plan.design.tests == 4 and plan.design.skips and then.design.tests == 13
    monkeypatch.setattr(runs, "calibrate", lambda _: calibrate(then))
    if own:
        monkeypatch.setattr(runs.Run, "explicit", lambda run: run.plan)
    run, source = begin(plan, next(store_paths)), stream_of(plan)
    assert (stops(run.explicit()) == stops(then)) is not own
    assert (Pace(run)(1) == then.design.test_triggers[0]) is not own
    rows = rows_of(plan, by_name(run_in_memory(run, source.batches(400))[0]))
    noise = SlowNoise(plan, ring, identity(plan))
    assert (rows == skipping(then, accept(then, source).values(), key_ids(ring), noise)) is not own
    stores.close_all()


def rows(partitions: list[int], plan: object) -> pa.RecordBatch:
    """Canonical records that stand in these partitions."""
    schema = record_schema(plan)  # type: ignore[arg-type]
    size = len(partitions)
    given = {"partition": pa.array(partitions, pa.int32()), "unit": pa.array([b"u" * 16] * size)}
    arrays = []
    for field in schema:
        column = given.get(field.name)
        if column is None:
            column = (
                pa.array(np.zeros(size, np.int64))
                if pa.types.is_integer(field.type)
                else [""] * size
            )
        arrays.append(pa.array(column).cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def test_all_shards_together(tmp_path: Path) -> None:
    plan = make_plan()
    run = begin(plan, tmp_path / "s.db", shards=2)
    store, read = run.open(), [0, 1, 2, 5]
    assert waiting_partitions(store, 2, 7, read) == read, "nobody has said anything"
    note_waiting(plan, store, 0, 7, rows([5, 1, 5], plan))
    assert waiting_partitions(store, 2, 7, read) == read, "one has not"
    note_waiting(plan, store, 1, 7, empty(record_schema(plan)))
    assert waiting_partitions(store, 2, 7, read) == [1, 5]
    assert waiting_partitions(store, 2, 8, read) == read, "that was of another pass"
    note_waiting(plan, store, 1, 8, empty(record_schema(plan)))
    assert waiting_partitions(store, 2, 8, read) == read


@pytest.mark.parametrize("waits", [True, False])
def test_ids_do_not_say_where_records_stand(tmp_path: Path, waits: bool) -> None:
    import msgspec

    plan = msgspec.structs.replace(make_plan(), record_id=Field("id"))
    run = begin(plan, tmp_path / "s.db", shards=1)
    note_waiting(plan, run.open(), 0, 7, rows([9] * waits, plan))
    assert waiting_partitions(run.open(), 1, 7, [0, 1]) == ([0, 1] if waits else [])
