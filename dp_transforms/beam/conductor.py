"""BOUND and RELEASE in one stage, for input that ends and an engine that has one process.

Such an engine (Beam's FnApiRunner) runs a stage to its end before the next begins, so a clock that
waits for a stage behind it would wait for ever.  Here the timers of all unit shards fire in one
bundle, at the end of the input, and the bundle takes all steps (`dp_transforms.loop`).
"""

from collections.abc import Iterator
from typing import Any

import apache_beam as beam
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
from dpstream.dp_transforms.batches import ArrowBatchCoder
from dpstream.dp_transforms.beam.clock import clock_tick_of, instant
from dpstream.dp_transforms.beam.workers import Threads
from dpstream.dp_transforms.loop import Stages, alternate
from dpstream.dp_transforms.pacing import stops
from dpstream.dp_transforms.run import Run
from dpstream.dp_transforms.telemetry import guarded


def one_process(pipeline: beam.Pipeline) -> bool:
    """Whether a pipeline's engine is one process that ends each stage before the next begins."""
    if isinstance(pipeline.runner, DirectRunner):
        return True
    from apache_beam.runners.portability.fn_api_runner import FnApiRunner  # 0.1 s

    return isinstance(pipeline.runner, FnApiRunner)


class Conductor(beam.DoFn):
    """(unit shard, canonical records) -> committed steps of all key shards.

    Args:
        run: a run whose input ends.
        stages: builds what works on the shards.
        threads: that shards are worked on.
        once: a position is refused that is there twice.
    """

    ROWS = BagStateSpec("rows", ArrowBatchCoder())
    #: First and last trigger time of the clock tick that armed the timer.
    ARMED = ReadModifyWriteStateSpec("armed", ListCoder(VarIntCoder()))
    END = TimerSpec("end", TimeDomain.WATERMARK)

    def __init__(self, run: Run, stages: Stages, threads: Threads, once: bool = False) -> None:
        self._run, self._stages, self._threads, self._once = run, stages, threads, once

    def start_bundle(self) -> None:
        """Begin with nothing gathered."""
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
        """A shard's records are complete."""
        self._announced = armed.read()
        self._held[shard] = list(rows.read())
        rows.clear()

    @guarded("trigger_time")
    def finish_bundle(self) -> Iterator[beam.utils.windowed_value.WindowedValue]:
        """All steps of all shards.

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
