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
        stride: most announced cuts that one callback steps through, when the last of them is
            complete; ``None``: all.  A stage that keeps up has one to do.  Bounded input is read
            before any timer fires, and its bag only once.
        anew: begin with ``since = 0``: rows of cuts before the first one are still asked for.
    """

    ROWS = BagStateSpec("rows", ArrowBatchCoder())
    #: (since, done, armed, through): emitted through, stepped through, cut of the timer that is
    #: set (or ``done``), announced through.
    PROGRESS = ReadModifyWriteStateSpec("progress", TupleCoder([VarIntCoder()] * 4))
    CUT = TimerSpec("cut", TimeDomain.WATERMARK)

    def __init__(
        self,
        line: Timeline,
        make: Callable[[], ShardCallback],
        ticks: int = 0,
        *,
        stride: int | None = None,
        anew: bool = False,
    ) -> None:
        self._line, self._make, self._ticks = line, make, ticks
        self._stride, self._anew = stride, anew

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
        if (now := progress.read()) is None:
            now = (0 if self._anew else first - 1, first - 1, first - 1, first - 1)
        since, done, armed, through = now
        if announced > through:
            if armed == done:
                armed = self._arm(timer, done, announced)
            progress.write((since, done, armed, announced))

    def _arm(self, timer: Any, done: int, through: int) -> int:
        """Set the timer for the next announced cut that is to be waited for, if there is one."""
        cut = through if self._stride is None else min(through, done + self._stride)
        if cut > done:
            timer.set(instant(self._line, cut, self._ticks))
        return cut

    @on_timer(CUT)
    @guarded("cut")
    def cut(
        self,
        shard: int = beam.DoFn.KeyParam,
        rows: Any = beam.DoFn.StateParam(ROWS),  # noqa: B008
        progress: Any = beam.DoFn.StateParam(PROGRESS),  # noqa: B008
        timer: Any = beam.DoFn.TimerParam(CUT),  # noqa: B008
    ) -> Iterator[Any]:
        """The cut it was armed for is complete: run what is due on the shard, keep what is not."""
        since, done, upto, through = progress.read()
        if upto <= done:
            return
        deliveries.passed(map(self._line.cut_time, range(done + 1, upto + 1)))
        held = self._callback(shard, rows.read(), upto, since)
        yield from held.outputs
        rows.clear()
        if held.waiting is not None and held.waiting.num_rows:
            rows.add(held.waiting)
        progress.write((upto, upto, self._arm(timer, upto, through), through))
