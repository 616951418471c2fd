"""Several threads give the bytes of one: results in order, errors in order, nothing shared.

A stage with the key: it is read on the worker, and never pickled.

Rows on their way to shards: few batches however many shards, few bytes however large a row.
"""

import functools
import pickle
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pytest
from apache_beam.utils.timestamp import MAX_TIMESTAMP, Timestamp

from dpstream.accounting.errors import DpstreamError, RunError
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms import bounding, flow
from dpstream.dp_transforms.batches import ids_of
from dpstream.dp_transforms.beam import buffer, workers
from dpstream.dp_transforms.beam.buffer import BufferUntilTriggerTime
from dpstream.dp_transforms.beam.clock import Announced
from dpstream.dp_transforms.beam.workers import Keyed, SplitByShard, Threads, Workers, stop_workers
from dpstream.dp_transforms.flow import DPStream
from dpstream.dp_transforms.noise.prf import Prf
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.dp_transforms.run import Run
from dpstream.dp_transforms.step import Stepper
from dpstream.dp_transforms.telemetry import first_error, forget_error, operator_totals
from dpstream.state import open as stores
from dpstream.state.arrow import id_array
from tests.dp_transforms.test_flow import MODES, in_memory, options, ordered, through_beam
from tests.streams import begin, generate, make_plan


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    forget_error()
    monkeypatch.setattr(buffer, "_WORTH_A_THREAD", 0)
    yield
    stores.close_all()


def on(run: Run, threads: int) -> Run:
    return run._replace(performance=run.performance._replace(threads=threads))


# --- the threads alone -----------------------------------------------------------------


def slowly(number: int, tool: int) -> Iterator[tuple[int, int]]:
    """Later calls are done sooner."""
    time.sleep(0.03 / (1 + number))
    for part in range(2):
        yield number, part


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("small", [set(), {1, 2}, {0, 1, 2, 3, 4}])
def test_answers_come_in_the_order_of_the_calls(threads: int, small: set[int]) -> None:
    answers: list[tuple[int, int]] = []
    team = Workers(lambda: 0, Threads(threads, "run"))
    for number in range(12):
        team.ask(partial(slowly, number), small=number % 5 in small)
        answers += team.answers(Threads(threads).ahead(2))
        assert len(answers) // 2 >= number + 1 - (2 * threads if threads > 1 else 0)
    answers += team.answers()
    assert answers == [(number, part) for number in range(12) for part in range(2)]


def test_a_small_call_is_made_by_the_callers_own_thread_in_its_turn() -> None:
    team = Workers(lambda: 0, Threads(2, "run"))
    team.ask(lambda _: [threading.current_thread()])
    team.ask(lambda _: [threading.current_thread()], small=True)
    first, second = team.answers()
    assert first is not threading.current_thread()
    assert second is threading.current_thread()


def test_one_thread_is_the_callers_own() -> None:
    team = Workers(lambda: 0, Threads())
    team.ask(lambda _: iter([threading.get_ident()]))
    assert list(team.answers()) == [threading.get_ident()]


def test_no_two_calls_have_the_same_tool_at_once() -> None:
    taken: list[list[int]] = []

    def work(tool: list[int]) -> Iterator[int]:
        tool.append(1)
        assert len(tool) == 1
        time.sleep(0.002)
        yield tool.pop()

    def make() -> list[int]:
        taken.append([])
        return taken[-1]

    team = Workers(make, Threads(3, "run"))
    for _ in range(30):
        team.ask(work)
    assert sum(team.answers()) == 30
    assert len(taken) == 3


def test_the_first_error_is_the_first_in_order_and_nothing_works_on_after_it() -> None:
    at_work, done = set[int](), set[int]()

    def work(number: int, _: int) -> Iterator[int]:
        at_work.add(number)
        time.sleep(0.05 if number == 1 else 0.0)
        if number in (1, 2):
            raise ValueError(number)
        for part in range(1000):
            time.sleep(0.001)
            yield part
        done.add(number)

    team = Workers(lambda: 0, Threads(3, "run"))
    for number in (1, 2, 3, 4, 5):
        team.ask(partial(work, number))
    with pytest.raises(ValueError, match="1"):
        list(team.answers())
    begun = set(at_work)
    time.sleep(0.05)
    assert at_work == begun and not done, "a call went on, or was begun, after the error"
    assert list(team.answers()) == []


def test_the_end_of_a_run_stops_its_threads() -> None:
    going, ended = threading.Event(), threading.Event()

    def work(_: int) -> Iterator[int]:
        try:
            going.set()
            while True:
                time.sleep(0.001)
                yield 0
        finally:
            ended.set()

    team = Workers(lambda: 0, Threads(2, "a run"))
    team.ask(work)
    assert going.wait(10)
    stop_workers("another run")
    assert not ended.is_set()
    stop_workers("a run")
    assert ended.is_set()


# --- the flow --------------------------------------------------------------------------


@pytest.fixture
def dithering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that take turns at random."""
    rng, lock, real = np.random.default_rng(3), threading.Lock(), Workers._work

    def work(self: Workers[Any], call: Any) -> Any:
        with lock:
            wait = float(rng.uniform(0, 0.02))
        time.sleep(wait)
        return real(self, call)

    monkeypatch.setattr(Workers, "_work", work)


@MODES
def test_any_number_of_threads_gives_the_same_bytes(
    plan: Plan, store_paths: Iterator[str], tmp_path: Path, dithering: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(flow, "SPLIT_BUFFER_ROWS", 500)
    monkeypatch.setattr(workers, "SPLIT_BUFFER_ROWS", 500)
    source = generate(plan).batches(300)
    expected, letters = in_memory(plan, next(store_paths), source)
    totals = []
    for threads in (1, 2, 3, 8):
        operator_totals.clear()
        run = on(begin(plan, next(store_paths), **options(plan)), threads)  # type: ignore[arg-type]
        got, dead = through_beam(DPStream(plan, run), source, tmp_path / str(threads))
        assert got == expected
        assert ordered(dead) == ordered(letters)
        totals.append(dict(operator_totals))
        stores.close_all()
    assert totals[0]["operator_records_in"] == sum(batch.num_rows for batch in source)
    assert totals == [totals[0]] * 4


class Halves(beam.PTransform):
    """A clock that announces the trigger times of bounded input in two parts."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self._pulses = [(1, 1, last // 2), (1, last // 2 + 1, last)]

    def expand(self, begin: Any) -> Any:
        return begin | beam.Create(self._pulses, reshuffle=False)


@pytest.mark.parametrize(("bounded", "announced"), [(True, True), (True, False), (False, True)])
def test_what_waits_for_a_trigger_time_is_given_to_threads(
    store_paths: Iterator[str], monkeypatch: pytest.MonkeyPatch, bounded: bool, announced: bool
) -> None:
    """Reading is only where the input is all there: a stream's bundles are small."""
    read: list[int] = []
    split_init = SplitByShard.__init__

    def noted(self: SplitByShard, *args: Any) -> None:
        read.append((*args, Threads())[3].number)
        split_init(self, *args)

    monkeypatch.setattr(SplitByShard, "__init__", noted)
    seen: list[int] = []
    real = BufferUntilTriggerTime.__init__

    def init(
        self: BufferUntilTriggerTime,
        *args: Any,
        threads: Threads = Threads(),  # noqa: B008
        **more: Any,
    ) -> None:
        seen.append(threads.number)
        real(self, *args, threads=threads, **more)

    monkeypatch.setattr(BufferUntilTriggerTime, "__init__", init)
    plan = make_plan()
    timeline = plan.timeline
    clock = (
        Announced(timeline.last_trigger_time) if announced else Halves(timeline.last_trigger_time)
    )
    transform = DPStream(plan, on(begin(plan, next(store_paths)), 4), clock=clock)
    records = beam.Pipeline() | beam.Create(generate(plan).batches(300), reshuffle=False)
    records.is_bounded = bounded
    _ = records | transform
    assert seen == [4, 4] and read[0] == (4 if bounded else 1)


class Once(Prf):
    """Says when two threads use it at once."""

    def __init__(self, key: Any) -> None:
        super().__init__(key)
        self._at_work = threading.Lock()

    def blocks(self, blocks: Any) -> Any:
        assert self._at_work.acquire(blocking=False), "two threads in one cipher"
        try:
            time.sleep(0.0002)
            return super().blocks(blocks)
        finally:
            self._at_work.release()


@pytest.mark.parametrize("shared", [False, True])
def test_no_cipher_is_used_by_two_threads(
    store_paths: Iterator[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """``shared``: the test notices if the threads were to share a callback."""
    monkeypatch.setattr("dpstream.dp_transforms.noise.prf.Prf", Once)
    if shared:
        real = Workers.__init__

        def init(self: Workers[Any], make: Any, threads: Threads) -> None:
            one = make()
            real(self, lambda: one, threads)

        monkeypatch.setattr(Workers, "__init__", init)
    plan = make_plan()
    run = on(begin(plan, next(store_paths), 8), 4)
    source = generate(plan).batches(100)
    if shared:
        with pytest.raises(Exception, match="AssertionError"):
            through_beam(DPStream(plan, run), source, tmp_path / "out")
    else:
        through_beam(DPStream(plan, run), source, tmp_path / "out")


@pytest.mark.parametrize("kind", ["bound", "step"])
def test_the_error_of_the_first_shard_is_the_runs(
    kind: str, store_paths: Iterator[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shard 2 fails at once, shard 1 later: the error is always shard 1's."""
    at_work = [0]

    def failing(shard: int) -> None:
        at_work[0] += 1
        try:
            time.sleep({0: 0.02, 1: 0.05}.get(shard, 0.0))
            if shard:
                raise RunError("store", f"failed at {shard}", "look")
        finally:
            at_work[0] -= 1

    if kind == "bound":
        real = bounding.decide

        def decide(plan: Any, store: Any, shard: int, *rest: Any) -> Any:
            failing(shard)
            return real(plan, store, shard, *rest)

        monkeypatch.setattr(flow, "decide_records", decide)
    else:
        steps = Stepper.steps

        def failing_steps(self: Any, shard: int, group: Any) -> Any:
            failing(shard)
            return steps(self, shard, group)

        monkeypatch.setattr(Stepper, "steps", failing_steps)
    plan = make_plan()
    run = on(begin(plan, next(store_paths), 4), 3)
    with pytest.raises(Exception, match="failed at 1"):
        through_beam(DPStream(plan, run), generate(plan).batches(300), tmp_path / "out")
    assert at_work == [0], "a thread worked on after the run had failed"
    error = first_error()
    assert isinstance(error, DpstreamError) and error.rule == "failed at 1"


def test_an_unforeseen_error_of_a_thread_shows_its_class_only(
    store_paths: Iterator[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decide(*_: Any) -> Any:
        raise ValueError("CANARY 7741")

    monkeypatch.setattr(flow, "decide_records", decide)
    plan = make_plan()
    run = on(begin(plan, next(store_paths), 4), 3)
    with pytest.raises(Exception, match="failed with ValueError") as caught:
        through_beam(DPStream(plan, run), generate(plan).batches(300), tmp_path / "out")
    error: BaseException | None = caught.value
    while error is not None:
        assert "CANARY" not in str(error)
        error = error.__cause__ or error.__context__


SECRET = "3f7a91c4d2e85b60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7e8"


class Work(NamedTuple):
    keys: SecretSource


class Prints(Keyed[Work]):
    def process(self, element: int) -> Iterator[str]:
        yield self._ring.fingerprint


def test_the_key_is_read_when_the_worker_begins() -> None:
    source = SecretSource(None, SECRET)
    stage = pickle.loads(pickle.dumps(Prints(Work(source))))  # noqa: S301 - our own bytes
    assert not hasattr(stage, "_ring")
    stage.setup()
    with source.ring() as ring:
        assert list(stage.process(1)) == [ring.fingerprint]
    stage.teardown()
    stage.teardown()
    assert not hasattr(stage, "_ring")


SHARDS = 24
SCHEMA = pa.schema([pa.field("unit", pa.binary(16), nullable=False), ("text", pa.string())])


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    stores.close_all()


def test_many_shards_are_not_their_square_of_batches(
    store_paths: Iterator[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What every key shard gets is split from the pairs of all unit shards together."""
    held: dict[int, int] = {}
    real = BufferUntilTriggerTime.process

    def process(self: BufferUntilTriggerTime, element: Any, *state: Any, **more: Any) -> Any:
        if self._ticks and element[1].num_rows:
            held[element[0]] = held.get(element[0], 0) + 1
        return real(self, element, *state, **more)

    functools.update_wrapper(process, real)  # Beam looks at the names of the arguments
    monkeypatch.setattr(BufferUntilTriggerTime, "process", process)
    plan = make_plan()
    source = generate(plan).batches(1000)
    expected = in_memory(plan, next(store_paths), source)[0]
    run = begin(plan, next(store_paths), SHARDS)
    assert through_beam(DPStream(plan, run), source, tmp_path / "out")[0] == expected
    assert held and max(held.values()) == 1


def rows_of(count: int, size: int) -> pa.RecordBatch:
    ids = id_array(ids_of(pa.array([n.to_bytes(16, "big") for n in range(count)], pa.binary(16))))
    return pa.RecordBatch.from_arrays([ids, pa.array(["x" * size] * count)], schema=SCHEMA)


@pytest.mark.parametrize(("size", "most"), [(8, 5000), (1024, 300)])
def test_large_rows_are_split_sooner(size: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "SPLIT_BUFFER_ROWS", 5000)
    monkeypatch.setattr(workers, "SPLIT_BUFFER_BYTES", 256 << 10)
    dofn = SplitByShard("unit", 3, SCHEMA)
    dofn.setup()
    dofn.start_bundle()
    gathered = out = 0
    for _ in range(300):
        out += sum(pair.value[1].num_rows for pair in dofn.process(rows_of(40, size), Timestamp(0)))
        gathered += 40
        assert gathered - out <= most
    assert out
    out += sum(pair.value[1].num_rows for pair in dofn.finish_bundle())
    assert out == gathered
    assert dofn._least == MAX_TIMESTAMP
