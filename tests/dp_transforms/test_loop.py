"""The loop of both stages in one process: stops, threads, stores that are begun again.

Both stages in one: a shard's records are complete when its timer fires, and all come at once.

Where BOUND waits for RELEASE: by looking at every trigger time, and in the store.

Notes of the partitions that a later pass has to read: never one too few.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import apache_beam as beam
import msgspec
import numpy as np
import pyarrow as pa
import pytest
from apache_beam.runners import DirectRunner
from apache_beam.runners.portability.flink_runner import FlinkRunner
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.portability.prism_runner import PrismRunner

from dpstream.accounting.budget.calibration import calibrate
from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Field
from dpstream.accounting.plan import timeline
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.weights import SelectionWeights
from dpstream.dp_transforms import aggregation, flow, step
from dpstream.dp_transforms import run as runs
from dpstream.dp_transforms.batches import (
    SHARD,
    admitted_schema,
    concat,
    empty,
    ids_of,
    record_schema,
    split_by_shard,
)
from dpstream.dp_transforms.beam.clock import ToShards, instant
from dpstream.dp_transforms.beam.workers import Threads
from dpstream.dp_transforms.flow import BoundCallback, ReleaseCallback, run_in_memory, stages_of
from dpstream.dp_transforms.ingest.records import CanonicaliserFactory
from dpstream.dp_transforms.loop import Conductor, Stages, alternate, one_process
from dpstream.dp_transforms.noise import prf
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
from dpstream.dp_transforms.run import Run
from dpstream.state import open as stores
from dpstream.state.arrow import to_bytes
from dpstream.state.idtable import shard_of
from tests.delivery.runner import Bag, Cells, TimerCell, ValueCell, floored
from tests.dp_transforms.beam.test_workers import Once
from tests.dp_transforms.exhaustive import SlowNoise, skipping
from tests.dp_transforms.reference import accept
from tests.dp_transforms.runs import (
    PLANS,
    SKIPPING,
    identity,
    key_ids,
    ranked_plan,
    rows_of,
    slow,
    stream_of,
)
from tests.dp_transforms.runs import run as released
from tests.golden.refusals import Refused
from tests.lanes import few_first
from tests.streams import begin, by_name, make_plan


def by_shard(run: Run, source: list[pa.RecordBatch]) -> list[list[pa.RecordBatch]]:
    ingest = CanonicaliserFactory(run.plan, run.keys, None)()
    records = concat([ingest(batch)[0] for batch in source], record_schema(run.plan))
    shard = shard_of(ids_of(records.column("unit")), run.shards)
    parts: list[list[pa.RecordBatch]] = [[] for _ in range(run.shards)]
    for number, part in split_by_shard(records, shard, run.shards):
        # In pieces, so that a shard is put together again.
        half = part.num_rows // 2
        parts[number] += [part.slice(0, half), part.slice(half)]
    return parts


def steps(run: Run, source: list[pa.RecordBatch], threads: int = 1) -> list[object]:
    """(name, bytes) of every step, in order of name and shard."""
    given = by_shard(run, source)
    own = Threads(threads, run.run_id)
    parts = alternate(run, flow.stages_of(run), given, stops(run.plan), threads=own)
    out = sorted((name, part.schema.metadata[SHARD], to_bytes(part))
                 for name, part in parts)  # fmt: skip
    assert not any(given)  # what a shard held has gone
    return list(out)


@pytest.mark.parametrize("plan", SKIPPING.values(), ids=list(SKIPPING))
def test_stops_are_the_tests_of_all_windows_and_the_end(plan: Plan) -> None:
    timeline = plan.timeline
    want = {
        timeline.base(w) + t for w in range(timeline.windows) for t in plan.design.test_triggers
    }
    if plan.design.remembers:  # and where windows begin, which know what was published
        want |= {timeline.base(w) for w in range(1, timeline.windows)}
    assert stops(plan) == sorted(want | {timeline.last_trigger_time})


@pytest.mark.parametrize("name", ["skip late", "skip sliding"])
def test_steps_are_those_of_the_reference(
    name: str, ring: KeyRing, store_paths: Iterator[str]
) -> None:
    """Also where records wait for a later trigger time, and pairs for a later step."""
    assert released(PLANS[name], store_paths) == slow(PLANS[name], ring)
    stores.close_all()


def test_what_was_asked_for_before_is_not_given_again(store_paths: Iterator[str]) -> None:
    """A run that goes on behind a test gives the steps that are left, and the same ones."""
    plan, path = PLANS["skip late"], next(store_paths)
    source = stream_of(plan).batches(400)
    want = steps(begin(plan, path), source)
    stores.close_all()
    run, ends = begin(plan, path), stops(plan)
    first = ends[2] + 1
    parts = alternate(run, flow.stages_of(run), by_shard(run, source), stops(plan, first),
                      first=first)  # fmt: skip
    out = sorted((name, part.schema.metadata[SHARD], to_bytes(part))
                 for name, part in parts)  # fmt: skip
    base = plan.timeline.base
    left = [step for step in want if base(step[0][0]) + step[0][1] >= first]  # type: ignore[index]
    assert out == left and len(left) < len(want)
    stores.close_all()


@pytest.mark.parametrize("once", [False, True])
def test_a_position_that_is_there_twice(store_paths: Iterator[str], once: bool) -> None:
    """Refused where somebody else has numbered the rows, else one record that came again."""
    plan = PLANS["skip"]
    run, batches = begin(plan, next(store_paths)), stream_of(plan).batches(400)
    parts = alternate(run, flow.stages_of(run), by_shard(run, [*batches, batches[0]]), stops(plan),
                      once=once)  # fmt: skip
    with pytest.raises(UsageError) if once else nullcontext():
        rows = sum(part.num_rows for _, part in parts)
        stores.close_all()
        again = begin(plan, next(store_paths))
        want = alternate(again, flow.stages_of(again), by_shard(again, batches), stops(plan))
        assert rows == sum(part.num_rows for _, part in want)
    stores.close_all()


def test_shards_without_records_take_their_steps(store_paths: Iterator[str]) -> None:
    plan = PLANS["skip"]
    source = stream_of(plan).take(np.arange(3)).batches(400)
    assert len(steps(begin(plan, next(store_paths), shards=5), source)) == 5 * 24
    stores.close_all()


def test_records_of_decided_triggers_join_the_next_one(
    store_paths: Iterator[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were not there when their trigger time was decided: they wait, and none is lost."""
    plan, path, real = PLANS["skip"], next(store_paths), aggregation.aggregate
    stream = stream_of(plan)
    early = np.flatnonzero(plan.timeline.trigger_time_of(stream.stamp) == 1)
    ends = stops(plan)

    def go(rows: np.ndarray, through: int) -> None:
        run = begin(plan, path)
        given = by_shard(run, stream.take(rows).batches(400))
        for _ in alternate(run, flow.stages_of(run), given, stops(plan, 1, through)):
            pass
        stores.close_all()

    go(np.setdiff1d(np.arange(len(stream)), early), ends[2])
    seen: list[int] = []

    def keep(plan: Plan, states: object, rows: pa.RecordBatch, *rest: object) -> object:
        if rows.num_rows and rows.column("window")[0].as_py() == 0:
            seen.extend([rows.column("trigger")[0].as_py()] * rows.num_rows)
        return real(plan, states, rows, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(step, "aggregate", keep)
    go(early, ends[4])
    # One more pair may be too many for its unit; those that count are of the next trigger.
    assert set(seen) == {ends[2] + 1} and len(early) / 2 < len(seen) <= len(early)


def test_a_run_that_ends_before_its_plan_stops_there() -> None:
    plan = PLANS["skip"]
    ends = stops(plan)
    assert stops(plan, 1, ends[3] + 1) == [*ends[:4], ends[3] + 1]
    assert stops(plan, ends[1] + 1, ends[3]) == ends[2:4]


@pytest.mark.parametrize(
    "name", ["skip", "skip late", "skip combined", "skip sliding", "skip remembered for a while"]
)
def test_threads_shards_and_begun_stores_change_nothing(
    name: str, store_paths: Iterator[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, source = PLANS[name], stream_of(PLANS[name]).batches(400)
    path = next(store_paths)
    want = steps(begin(plan, path), source)
    assert len(want) == 3 * plan.timeline.windows * plan.timeline.triggers
    stores.close_all()
    assert steps(begin(plan, path), source) == want  # read back
    stores.close_all()
    if plan.timeline.max_skew == 0:  # pairs ahead of their stamps wait, whatever the threads
        assert steps(begin(plan, next(store_paths)), source, 3) == want
    stores.close_all()
    # A worker that dies in some step, and one that goes on.
    path, real, left = next(store_paths), aggregation.aggregate, [9]

    def dies(*args: object) -> object:
        left[0] -= 1
        if left[0] == 0:
            raise MemoryError
        return real(*args)  # type: ignore[arg-type]

    for calls in (9, 21, 33):
        left[0] = calls
        with monkeypatch.context() as patch:
            patch.setattr(step, "aggregate", dies)
            with pytest.raises(MemoryError):
                steps(begin(plan, path), source)
        stores.close_all()
    assert steps(begin(plan, path), source) == want
    stores.close_all()


@pytest.mark.parametrize("shared", [False, True])
def test_no_cipher_is_used_by_two_threads(
    store_paths: Iterator[str], monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """A key shard's noise paths go from one test to the next, whichever thread works on it.

    ``shared``: the test notices if key shards were to share what they release with.
    """
    monkeypatch.setattr(prf, "Prf", Once)
    if shared:
        real = flow.stages_of

        def stages_of(run: Run) -> Stages:
            one = real(run).release()
            return real(run)._replace(release=lambda: one)

        monkeypatch.setattr(flow, "stages_of", stages_of)
    plan = PLANS["skip combined"]
    run = begin(plan, next(store_paths), shards=7)
    source = stream_of(plan).batches(400)
    if shared:
        with pytest.raises(AssertionError, match="two threads"):
            steps(run, source, 4)
    else:
        assert len(steps(run, source, 4)) == 7 * 28
    stores.close_all()


PLAN = PLANS["skip"]


def conducted(run: Any, shards: int) -> list[Any]:
    """What a bundle gives in which the timers of so many shards fire."""
    stage, cells = Conductor(run, stages_of(run), Threads()), [Cells() for _ in range(shards)]
    ticks = list(ToShards(shards, record_schema(PLAN)).process((1, 1, 24)))
    stage.start_bundle()
    for shard, batch in [*ticks, *ticks]:  # a clock tick may come again
        own = cells[shard]
        stage.process((shard, batch), rows=Bag(own), armed=ValueCell(own), timer=TimerCell(own))
    assert list(stage.finish_bundle()) == []  # nothing before the timers
    assert all(own.armed == cells[0].armed for own in cells)
    stage.start_bundle()
    for shard, own in enumerate(cells):
        own.rows.append(concat([], record_schema(PLAN)))
        stage.fire(shard=shard, rows=Bag(own), armed=ValueCell(own))
        assert not own.rows
    return list(stage.finish_bundle())


def test_records_wait_in_the_bag_and_the_first_tick_decides(store_paths: Iterator[str]) -> None:
    """Every record is in some step, of the trigger times that the first clock tick announced."""
    run = begin(PLAN, next(store_paths))
    source = stream_of(PLAN).batches(400)
    want = sorted(
        (name, to_bytes(part))
        for name, part in alternate(run, stages_of(run), by_shard(run, source), stops(PLAN))
    )
    stores.close_all()
    run = begin(PLAN, next(store_paths))
    stage, cells = Conductor(run, stages_of(run), Threads()), [Cells() for _ in range(3)]
    stage.start_bundle()
    last = PLAN.timeline.last_trigger_time

    def give(shard: int, batch: pa.RecordBatch) -> None:
        own = cells[shard]
        stage.process((shard, batch), rows=Bag(own), armed=ValueCell(own), timer=TimerCell(own))

    ticks = [ToShards(3, record_schema(PLAN)).process((1, 1, upto)) for upto in (last, 3)]
    for shard, parts in enumerate(by_shard(run, source)):
        give(shard, parts[0])
        assert cells[shard].progress is None  # records alone arm no timer
        for tick in ticks:
            give(*next(tick))
        for part in parts[1:]:
            give(shard, part)
        assert len(cells[shard].rows) == len(parts)  # ticks are no records
        assert cells[shard].armed == floored(instant(PLAN.timeline, last).micros)
        stage.fire(shard=shard, rows=Bag(cells[shard]), armed=ValueCell(cells[shard]))
    outputs = list(stage.finish_bundle())
    assert sorted((out.value[0], to_bytes(out.value[1])) for out in outputs) == want
    stores.close_all()


def test_which_engines_are_one_process() -> None:
    def asks(runner: Any) -> bool:
        return one_process(beam.Pipeline(runner=runner))

    assert asks(FnApiRunner()) and asks(DirectRunner())
    assert not asks(PrismRunner()) and not asks(FlinkRunner())


def test_all_shards_of_a_bundle_take_all_steps(store_paths: Iterator[str]) -> None:
    run = begin(PLAN, next(store_paths))
    assert len(conducted(run, 3)) == 3 * 24
    stores.close_all()


def test_some_shards_alone_are_refused(store_paths: Iterator[str], refused: Refused) -> None:
    run = begin(PLAN, next(store_paths))
    refused(conducted, run, 2)
    stores.close_all()


_SHORT: dict[str, object] = {"skip": True, "weights": SelectionWeights(1.0, 2.0)}
#: Also windows that have one trigger, and ones that open at every trigger.
CASES = SKIPPING | {
    "one trigger": make_plan(triggers=1, windows=5, **_SHORT),  # type: ignore[arg-type]
    "at every trigger": make_plan(triggers=4, slide=1, windows=6, tests=(3, 4), **_SHORT),  # type: ignore[arg-type]
}
PACED = pytest.mark.parametrize("plan", CASES.values(), ids=list(CASES))


def stops_by_hand(plan: Plan) -> dict[int, list[tuple[int, int]]]:
    """Trigger time -> (window, step) of the tests that fall on it."""
    timeline, by_time = plan.timeline, dict[int, list[tuple[int, int]]]()
    for window in range(timeline.windows):
        for test in plan.design.test_triggers.tolist():
            by_time.setdefault(timeline.base(window) + test, []).append((window, test))
        if window and plan.design.remembers:  # its start, at which it reads what was published
            by_time.setdefault(timeline.base(window), [])
    return by_time


@PACED
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


@PACED
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


@PACED
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
