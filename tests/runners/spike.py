"""A small stream of the flow's shape: an endless source, two stages of held batches, timers.

It shows what an engine does, apart from the flow: state, timers and their order, holds, rounding.

Rows carry an event time and an amount.  Stage one holds each shard's batches and, one runner
tick before every trigger time, sends those before the trigger time to another shard; stage two
holds what it got and releases one sum per (shard, trigger time) at the trigger time.  ``expected``
computes the same without Beam.
"""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from apache_beam.coders import VarIntCoder
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from apache_beam.transforms.core import RestrictionProvider
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import (
    BagStateSpec,
    ReadModifyWriteStateSpec,
    TimerSpec,
    on_timer,
)
from apache_beam.utils.timestamp import Duration, Timestamp

from dpstream.accounting.errors import PolicyError
from dpstream.dp_transforms.batches import ArrowBatchCoder, concat, empty
from dpstream.dp_transforms.telemetry import guarded

SCHEMA = pa.schema([("time", pa.int64()), ("amount", pa.int64())])


class Shape(NamedTuple):
    """Sizes of a stream.

    Instants are micros; ``trigger_times`` of them follow the start, ``every`` apart.  Each of
    ``parts`` source partitions makes ``batches`` batches of ``rows`` rows, ``step`` of event time
    each, the first ``shift`` after the start; ``pace`` seconds pass before a batch.  An ``endless``
    source never says that it is at its end.  The stages' timers are set at the trigger time,
    rounded up to a millisecond, plus ``first_at`` and ``second_at``.  Stage one raises a coded
    error at trigger time ``fails_at``.
    """

    parts: int = 2
    batches: int = 24
    rows: int = 50
    shards: int = 4
    start: int = 1_700_000_000_000_123
    every: int = 1_000_000
    step: int = 500_000
    trigger_times: int = 12
    endless: bool = False
    pace: float = 0.0
    shift: int = 0
    first_at: int = 0
    second_at: int = 1_000
    fails_at: int = 0

    def begin(self, index: int) -> int:
        """Event time of a batch's first row."""
        return self.start + self.shift + index * self.step

    def instant_of(self, number: int) -> int:
        """Instant of a trigger time; the first is number 1."""
        return self.start + number * self.every


def batch_of(shape: Shape, part: int, index: int) -> pa.RecordBatch:
    """A source batch: a function of its position alone."""
    row = np.arange(shape.rows, dtype=np.int64)
    times = row * (shape.step // shape.rows)
    return pa.RecordBatch.from_arrays(
        [pa.array(shape.begin(index) + times), pa.array(row * 7 + index * 1000 + part)],
        schema=SCHEMA,
    )


def expected(shape: Shape) -> Counter[tuple[int, int]]:
    """Sum of the amounts by (shard of stage two, trigger time)."""
    sums: Counter[tuple[int, int]] = Counter()
    for trigger_time in range(1, shape.trigger_times + 1):
        for shard in range(shape.shards):
            sums[shard, trigger_time] = 0
    for part in range(shape.parts):
        for index in range(shape.batches):
            batch = batch_of(shape, part, index)
            first = (part + index) % shape.shards
            times = batch.column("time").to_numpy()
            trigger_times = np.maximum((times - shape.start) // shape.every + 1, 1)
            for trigger_time in np.unique(trigger_times):
                if trigger_time <= shape.trigger_times:
                    amount = int(
                        batch.column("amount").to_numpy()[trigger_times == trigger_time].sum()
                    )
                    sums[(first + 1) % shape.shards, int(trigger_time)] += amount
    return sums


#: Source element: a partition and the stream's sizes.
Part = tuple[int, Shape]


class _Restrictions(RestrictionProvider):
    """Positions of one partition, in batches."""

    def initial_restriction(self, element: Part) -> OffsetRange:
        shape = element[1]
        return OffsetRange(0, 2**62 if shape.endless else shape.batches)

    def create_tracker(self, restriction: OffsetRange) -> OffsetRestrictionTracker:
        return OffsetRestrictionTracker(restriction)

    def restriction_size(self, element: Part, restriction: OffsetRange) -> int:
        return min(restriction.size(), 100)


class Follow(beam.DoFn):
    """A splittable source that gives a few batches, hands back the rest and says how far it is."""

    AT_ONCE = 3

    @beam.DoFn.unbounded_per_element()
    def process(
        self,
        element: Part,
        tracker: Any = beam.DoFn.RestrictionParam(_Restrictions()),  # noqa: B008
        watermark: Any = beam.DoFn.WatermarkEstimatorParam(  # noqa: B008
            ManualWatermarkEstimator.default_provider()  # noqa: B008
        ),
    ) -> Iterator[Any]:
        part, shape = element
        position = tracker.current_restriction().start
        for index in range(position, position + self.AT_ONCE):
            if shape.endless and index >= shape.batches:
                # Nothing new; time goes on all the same, as it does for an idle source.
                watermark.set_watermark(
                    Timestamp(micros=shape.instant_of(shape.trigger_times) + shape.every)
                )
                tracker.defer_remainder(Duration(micros=200_000))
                return
            if not tracker.try_claim(index):
                return
            if shape.pace:
                time.sleep(shape.pace)
            instant = Timestamp(micros=shape.begin(index))
            shard = (part + index) % shape.shards
            yield beam.window.TimestampedValue((shard, batch_of(shape, part, index)), instant)
            watermark.set_watermark(Timestamp(micros=shape.begin(index + 1)))
        tracker.defer_remainder(Duration(micros=1_000))


class Hold(beam.DoFn):
    """Holds batches and runs every due trigger time when its timer fires; re-arms to the last."""

    ROWS = BagStateSpec("rows", ArrowBatchCoder())
    ARMED = ReadModifyWriteStateSpec("armed", VarIntCoder())
    TRIGGER_TIME = TimerSpec("trigger_time", TimeDomain.WATERMARK)

    def __init__(self, shape: Shape, wait: int, final: bool) -> None:
        self._shape, self._wait, self._final = shape, wait, final

    def process(
        self,
        element: tuple[int, pa.RecordBatch],
        rows: Any = beam.DoFn.StateParam(ROWS),  # noqa: B008
        armed: Any = beam.DoFn.StateParam(ARMED),  # noqa: B008
        timer: Any = beam.DoFn.TimerParam(TRIGGER_TIME),  # noqa: B008
    ) -> None:
        rows.add(element[1])
        if not armed.read():
            armed.write(1)
            timer.set(self._instant(1))

    def _instant(self, trigger_time: int) -> Timestamp:
        return Timestamp(
            micros=-(-self._shape.instant_of(trigger_time) // 1000) * 1000 + self._wait
        )

    @on_timer(TRIGGER_TIME)
    @guarded("trigger_time")
    def fire(
        self,
        shard: int = beam.DoFn.KeyParam,
        fired: Any = beam.DoFn.TimestampParam,
        rows: Any = beam.DoFn.StateParam(ROWS),  # noqa: B008
        armed: Any = beam.DoFn.StateParam(ARMED),  # noqa: B008
        timer: Any = beam.DoFn.TimerParam(TRIGGER_TIME),  # noqa: B008
    ) -> Iterator[Any]:
        shape, due = self._shape, armed.read()
        if due == shape.fails_at and not self._final:
            raise PolicyError("store", "was refused for a test", "do nothing")
        batch = concat(rows.read(), SCHEMA)
        times = batch.column("time")
        now = pc.less(times, shape.instant_of(due))
        ready = batch.filter(now)
        rows.clear()
        rows.add(batch.filter(pc.invert(now)))
        if due < shape.trigger_times:
            armed.write(due + 1)
            timer.set(self._instant(due + 1))
        if self._final:
            total = pc.sum(ready.column("amount")).as_py() or 0
            late = fired.micros - shape.instant_of(due)
            yield f"{shard},{due},{total},{late}"
        else:
            yield ((shard + 1) % shape.shards, ready)


class Regroup(beam.DoFn):
    """Gathers pairs and gives them on at the end of the bundle, as the flow's split does."""

    def start_bundle(self) -> None:
        self._held: list[Any] = []

    def process(self, element: Any) -> None:
        self._held.append(element)

    def finish_bundle(self) -> Iterator[Any]:
        for pair in self._held:
            yield beam.transforms.window.GlobalWindows.windowed_value(pair)


class Collect(beam.DoFn):
    """One file per result; a result that is made again appends to its file."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def process(self, element: str) -> None:
        with open(f"{self._folder}/{element}", "a") as file:
            file.write(f"{time.time()}\n")


def build(pipeline: beam.Pipeline, shape: Shape, folder: str) -> None:
    """The stream; a file per result, named by shard, trigger time, sum and lateness."""
    pair = tuple[int, pa.RecordBatch]

    def starts(name: str) -> Any:
        return pipeline | name >> beam.Create(
            [(shard, empty(SCHEMA)) for shard in range(shape.shards)], reshuffle=False
        ).with_output_types(pair)

    source = (
        pipeline
        | "Parts" >> beam.Create([(part, shape) for part in range(shape.parts)], reshuffle=False)
        | "Follow" >> beam.ParDo(Follow()).with_output_types(pair)
        | "Split" >> beam.ParDo(Regroup()).with_output_types(pair)
    )
    first = (
        ((source, starts("StartA")) | "InA" >> beam.Flatten())
        | "First" >> beam.ParDo(Hold(shape, shape.first_at, False)).with_output_types(pair)
        | "SplitAgain" >> beam.ParDo(Regroup()).with_output_types(pair)
    )
    _ = (
        ((first, starts("StartB")) | "InB" >> beam.Flatten())
        | "Second" >> beam.ParDo(Hold(shape, shape.second_at, True)).with_output_types(str)
        | "Collect" >> beam.ParDo(Collect(folder))
    )


def outputs(folder: Path) -> tuple[dict[tuple[int, int], int], Counter[int]]:
    """(sum by (shard, trigger time), how often a timer fired how many micros off its instant).

    Two different sums of one (shard, trigger time) are an error.
    """
    sums: dict[tuple[int, int], int] = {}
    off: Counter[int] = Counter()
    for file in folder.iterdir():
        shard, trigger_time, total, late = map(int, file.name.split(","))
        assert sums.setdefault((shard, trigger_time), total) == total, (shard, trigger_time)
        off[late] += 1
    return sums, off
