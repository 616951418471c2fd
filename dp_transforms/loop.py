"""The loop of BOUND and RELEASE where pairs on published keys are skipped, in one process.

Input that is all there is bounded up to a test, released up to it, bounded up to the next: at most
as often as keys are tested.  Streams and runners with several workers do the same by their public
clock (`dp_transforms.pacing`); what is committed and released has the same bytes.

``Conductor`` has BOUND and RELEASE in one stage, for input that ends and an engine that has one
process.  Such an engine (Beam's FnApiRunner) runs a stage to its end before the next begins, so a
clock that waits for a stage behind it would wait for ever.  Here the timers of all unit shards fire
in one bundle, at the end of the input, and the bundle takes all steps.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.coders import ListCoder, VarIntCoder
from apache_beam.runners import DirectRunner
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import (
    BagStateSpec,
    ReadModifyWriteStateSpec,
    TimerSpec,
    on_timer,
)
from apache_beam.transforms.window import GlobalWindows

from dpstream.accounting.errors import RunError
from dpstream.accounting.limits import SPLIT_BUFFER_ROWS
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.batches import (
    ArrowBatchCoder,
    admitted_schema,
    concat,
    numpy_view,
    record_schema,
    split_by_id,
    split_by_shard,
)
from dpstream.dp_transforms.beam.buffer import ShardCallback, outputs_of
from dpstream.dp_transforms.beam.clock import clock_tick_of, instant
from dpstream.dp_transforms.beam.workers import Threads, Workers
from dpstream.dp_transforms.ingest.records import require_once
from dpstream.dp_transforms.pacing import stops
from dpstream.dp_transforms.release import ShardRelease
from dpstream.dp_transforms.run import Run
from dpstream.dp_transforms.telemetry import guarded, timed


class Stages(NamedTuple):
    """Builds the workers' side.

    Attributes:
        bound: for each thread.
        release: for each key shard: noise paths stay with the shard's states from test to test,
            and with them the ciphers that they were begun with, which no two calls may share.
    """

    bound: Callable[[], ShardCallback]
    release: Callable[[], ShardCallback]


def alternate(
    run: Run,
    stages: Stages,
    records: Sequence[list[pa.RecordBatch]],
    ends: Sequence[int],
    *,
    first: int = 1,
    threads: Threads = Threads(),  # noqa: B008 - immutable
    once: bool = False,
) -> Iterator[ShardRelease]:
    """Yield committed steps of all shards, test after test.

    Args:
        run: a run whose input ends.
        stages: builds what works on the shards.
        records: all canonical records of each unit shard; emptied.
        ends: ``stops``; first: trigger time whose steps, and those after it, are asked for.
        threads: number of threads that work on shards.
        once: refuse a position that occurs twice.
    """
    workers = Workers(stages.bound, threads)
    release = [stages.release() for _ in range(run.shards)]
    for shard in range(run.shards):
        workers.ask(functools.partial(_by_stop, run.plan, ends, shard, records[shard], once))
    intervals: list[list[pa.RecordBatch | None]] = [[None] * run.shards for _ in ends]
    for shard, number, part in workers.answers():
        intervals[number][shard] = part
    nothing = record_schema(run.plan).empty_table().to_batches()
    late: dict[int, list[pa.RecordBatch]] = {shard: nothing for shard in range(run.shards)}
    ahead: dict[int, list[pa.RecordBatch]] = {shard: [] for shard in range(run.shards)}
    # BOUND gives again what was decided before: it may be of steps that are asked for.
    since, taken = 0, first - 1
    for upto, parts in zip(ends, intervals, strict=True):
        for shard in range(run.shards):
            mine = [*late[shard], *([] if parts[shard] is None else [parts[shard]])]
            parts[shard] = None
            late[shard] = []
            workers.ask(functools.partial(_bounded, shard, mine, upto, since))
        admitted: list[pa.RecordBatch] = []
        for shard, waiting, batch in workers.answers():
            (late[shard] if waiting else admitted).append(batch)
        for group in _groups(admitted):
            workers.ask(functools.partial(_split, run, group))
        for shard, batch in workers.answers():
            ahead[shard].append(batch)
        for shard in range(run.shards):
            mine, ahead[shard] = ahead[shard], []
            workers.ask(functools.partial(outputs_of, release[shard], shard, mine, upto, taken))
        for shard, waiting, output in workers.answers():
            if waiting:
                ahead[shard].append(output)
            else:
                yield output
        since = taken = upto


def _by_stop(
    plan: Plan,
    ends: Sequence[int],
    shard: int,
    batches: list[pa.RecordBatch],
    once: bool,
    _: ShardCallback,
) -> Iterator[tuple[int, int, pa.RecordBatch]]:
    """(shard, number of the stop, its records), by the records' stamps; the batches go."""
    with timed("split"):
        records = concat(batches, record_schema(plan))
        batches.clear()
        if once:
            require_once(records)
        times = np.maximum(1, plan.timeline.trigger_time_of(numpy_view(records.column("stamp"))))
        number = np.minimum(np.searchsorted(np.array(ends), times), len(ends) - 1)
        parts = list(split_by_shard(records, number, len(ends)))
    for stop, part in parts:
        yield shard, stop, part


def _bounded(
    shard: int, batches: list[pa.RecordBatch], upto: int, since: int, decide: ShardCallback
) -> Iterator[tuple[int, bool, pa.RecordBatch]]:
    """(unit shard, whether it waits, records that wait or admitted pairs)."""
    return outputs_of(decide, shard, batches, upto, since)


def _groups(batches: list[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """The batches, many rows at a time: those of one shard would be split into tiny ones."""
    group, rows = [], 0
    while batches:
        batch = batches.pop(0)
        group.append(batch)
        rows += batch.num_rows
        if rows >= SPLIT_BUFFER_ROWS:
            yield group
            group, rows = [], 0
    if rows:
        yield group


def _split(
    run: Run, batches: list[pa.RecordBatch], _: ShardCallback
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """(key shard, its pairs)."""
    with timed("split"):
        pairs = concat(batches, admitted_schema(run.plan))
        batches.clear()
        yield from split_by_id(pairs, "_id", run.shards)


def one_process(pipeline: beam.Pipeline) -> bool:
    """Return whether the engine is one process that ends each stage before the next begins."""
    if isinstance(pipeline.runner, DirectRunner):
        return True
    from apache_beam.runners.portability.fn_api_runner import FnApiRunner  # 0.1 s

    return isinstance(pipeline.runner, FnApiRunner)


class Conductor(beam.DoFn):
    """(unit shard, canonical records) -> committed steps of all key shards.

    Args:
        run: a run whose input ends.
        stages: builds what works on the shards.
        threads: number of threads that work on shards.
        once: a position is refused that is there twice.
    """

    ROWS = BagStateSpec("rows", ArrowBatchCoder())
    #: First and last trigger time of the clock tick that armed the timer.
    ARMED = ReadModifyWriteStateSpec("armed", ListCoder(VarIntCoder()))
    END = TimerSpec("end", TimeDomain.WATERMARK)

    def __init__(self, run: Run, stages: Stages, threads: Threads, once: bool = False) -> None:
        self._run, self._stages, self._threads, self._once = run, stages, threads, once

    def start_bundle(self) -> None:
        """Begin with an empty buffer."""
        self._held: dict[int, list[pa.RecordBatch]] = {}

    @guarded("hold")
    def process(
        self,
        element: tuple[int, pa.RecordBatch],
        rows: Any = beam.DoFn.StateParam(ROWS),  # noqa: B008 - Beam's way to declare state
        armed: Any = beam.DoFn.StateParam(ARMED),  # noqa: B008
        timer: Any = beam.DoFn.TimerParam(END),  # noqa: B008
    ) -> None:
        """Keep the batch; a clock tick, which every shard gets, arms the timer."""
        _, batch = element
        if batch.num_rows:
            rows.add(batch)
        clock_tick = clock_tick_of(batch)
        if clock_tick is not None and not armed.read():
            first, _, through = clock_tick
            armed.write([first, through])
            timer.set(instant(self._run.plan.timeline, through))

    @on_timer(END)
    @guarded("trigger_time")
    def fire(
        self,
        shard: int = beam.DoFn.KeyParam,
        rows: Any = beam.DoFn.StateParam(ROWS),  # noqa: B008
        armed: Any = beam.DoFn.StateParam(ARMED),  # noqa: B008
    ) -> None:
        """Note that a shard's records are complete."""
        self._announced = armed.read()
        self._held[shard] = list(rows.read())
        rows.clear()

    @guarded("trigger_time")
    def finish_bundle(self) -> Iterator[beam.utils.windowed_value.WindowedValue]:
        """Yield all steps of all shards.

        Raises:
            RunError: the engine has given some shards only.
        """
        held, run = self._held, self._run
        if not held:
            return
        if len(held) < run.shards:
            raise RunError(
                "mechanism.skip",
                "this engine works on the shards of one stage apart, and was not told to wait",
                "name the engine with --runner, give DPStream a clock, or begin a run with "
                "mechanism.skip = false",
            )
        records = [held.pop(shard) for shard in range(run.shards)]
        first, through = self._announced
        ends, end = stops(run.explicit(), first, through), instant(run.plan.timeline, through)
        settings: dict[str, Any] = {"threads": self._threads, "once": self._once}
        for step in alternate(run, self._stages, records, ends, first=first, **settings):
            yield GlobalWindows.windowed_value(step, end)
