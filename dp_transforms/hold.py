"""Timers say when, records say what: the stateful stage that waits for a cut.

Rows of a shard wait in a bag until the watermark passes a cut that the clock has announced; a
callback then works on them and says which rows must wait on.  One timer per shard: armed for
the first cut that is not done, and armed again by the timer itself until the last announced cut.

What is kept beside the bag says how far the shard has come *in this pipeline's state*.  A runner
that goes back to a checkpoint goes back with both, and the store, which may be ahead, answers
what it decided before.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import apache_beam as beam
import pyarrow as pa
from apache_beam.coders import TupleCoder, VarIntCoder
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import (
    BagStateSpec,
    ReadModifyWriteStateSpec,
    TimerSpec,
    on_timer,
)

from accounting.timeline import Timeline
from dp_transforms.batches import ArrowBatchCoder
from dp_transforms.clock import instant, pulse_of
from dp_transforms.telemetry import deliveries, guarded


class Held(NamedTuple):
    """What a callback makes of the rows of a shard.

    Attributes:
        outputs: to emit, in order; consumed before the waiting rows are put back.
        waiting: rows for a later cut, if any.
    """

    outputs: Iterator[Any]
    waiting: pa.RecordBatch | None = None


#: (shard, held batches, last complete cut, cut through which outputs were emitted) -> Held
ShardCallback = Callable[[int, Iterable[pa.RecordBatch], int, int], Held]


class HoldUntilCut(beam.DoFn):
    """Holds the batches of a shard until a cut is complete, then hands them to a callback.

    Args:
        line: public time axis.
        make: builds the worker-side callback.
        ticks: milliseconds between the cut's instant and the timer's: a stage must fire after
            the one that feeds it.
        at_once: step through all announced cuts in one callback, when the last is complete:
            bounded input is read before any timer fires, and its bag only once.
        anew: begin with ``since = 0``: rows of cuts before the first one are still asked for.
    """

    ROWS = BagStateSpec("rows", ArrowBatchCoder())
    #: (since, done, through): emitted through, stepped through, announced through.
    PROGRESS = ReadModifyWriteStateSpec("progress", TupleCoder([VarIntCoder()] * 3))
    CUT = TimerSpec("cut", TimeDomain.WATERMARK)

    def __init__(
        self,
        line: Timeline,
        make: Callable[[], ShardCallback],
        ticks: int = 0,
        *,
        at_once: bool = True,
        anew: bool = False,
    ) -> None:
        self._line, self._make, self._ticks = line, make, ticks
        self._at_once, self._anew = at_once, anew

    @guarded("hold")
    def setup(self) -> None:
        """Open store and key on the worker."""
        self._callback = self._make()

    def teardown(self) -> None:
        """Let go of store and key."""
        self.__dict__.pop("_callback", None)

    @guarded("hold")
    def process(
        self,
        element: tuple[int, pa.RecordBatch],
        rows: Any = beam.DoFn.StateParam(ROWS),  # noqa: B008 - Beam's way to declare state
        progress: Any = beam.DoFn.StateParam(PROGRESS),  # noqa: B008
        timer: Any = beam.DoFn.TimerParam(CUT),  # noqa: B008
    ) -> None:
        """Keep the batch; a pulse arms the shard's timer, unless it is armed."""
        _, batch = element
        if batch.num_rows:
            rows.add(batch)
        pulse = pulse_of(batch)
        if pulse is None:
            return
        first, announced = pulse
        begin = 0 if self._anew else first - 1
        since, done, through = progress.read() or (begin, first - 1, first - 1)
        if announced > through:
            progress.write((since, done, announced))
            if through == done:  # else the timer is armed
                self._arm(timer, done, announced)

    def _arm(self, timer: Any, done: int, through: int) -> None:
        cut = through if self._at_once else done + 1
        timer.set(instant(self._line, cut, self._ticks))

    @on_timer(CUT)
    @guarded("cut")
    def cut(
        self,
        shard: int = beam.DoFn.KeyParam,
        rows: Any = beam.DoFn.StateParam(ROWS),  # noqa: B008
        progress: Any = beam.DoFn.StateParam(PROGRESS),  # noqa: B008
        timer: Any = beam.DoFn.TimerParam(CUT),  # noqa: B008
    ) -> Iterator[Any]:
        """A cut is complete: run what is due on the shard, keep what is not."""
        since, done, through = progress.read()
        if done >= through:
            return
        upto = through if self._at_once else done + 1
        deliveries.cut_passed(self._line.cut_time(upto))
        held = self._callback(shard, rows.read(), upto, since)
        yield from held.outputs
        rows.clear()
        if held.waiting is not None and held.waiting.num_rows:
            rows.add(held.waiting)
        progress.write((upto, upto, through))
        if upto < through:
            self._arm(timer, upto, through)
