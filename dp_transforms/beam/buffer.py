"""The stateful stage that waits for a trigger time; a timer fires it, and records decide its
content.

Rows of a shard wait in a bag until the watermark passes a trigger time that the clock has
announced; a callback then works on them and says which rows must wait on.  One timer per shard:
armed for the next trigger time to stop at, and armed again by the timer itself until the last
announced trigger time.

A timer holds the output watermark of its stage, and with it the stages behind, only until its
own instant.  So all shards of all stages stop at the same trigger times, whenever they hear of
them: what one shard would step through at a later stop, the next stage would not wait for.

What is kept beside the bag says how far the shard has come *in this pipeline's state*.  A runner
that goes back to a checkpoint goes back with both, and the store, which may be ahead, answers
what it decided before.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import apache_beam as beam
import pyarrow as pa
from apache_beam.coders import ListCoder, VarIntCoder
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import (
    BagStateSpec,
    ReadModifyWriteStateSpec,
    TimerSpec,
    on_timer,
)
from apache_beam.transforms.window import GlobalWindows
from apache_beam.utils.timestamp import Timestamp

from dpstream.accounting.plan.timeline import Timeline
from dpstream.dp_transforms.batches import ArrowBatchCoder
from dpstream.dp_transforms.beam.clock import clock_tick_of, instant
from dpstream.dp_transforms.beam.workers import Threads, Workers, no_tool
from dpstream.dp_transforms.telemetry import deliveries, guarded

#: Rows of a step below which a shard's calls do not pay on a thread: they are more Python than
#: numpy, and threads would only wait for each other (measured: 1.3 to 1.7 times
#: the CPU seconds).
_WORTH_A_THREAD = 1_000


class Held(NamedTuple):
    """The result of a callback for the rows of a shard.

    Attributes:
        outputs: to emit, in order; consumed before the waiting rows are put back.
        waiting: rows for a later trigger time, if any.
    """

    outputs: Iterator[Any]
    waiting: pa.RecordBatch | None = None


#: (shard, held batches, last complete trigger time, trigger time through which outputs were
#: emitted) -> Held
ShardCallback = Callable[[int, Iterable[pa.RecordBatch], int, int], Held]


class BufferUntilTriggerTime(beam.DoFn):
    """Holds the batches of a shard until a trigger time is complete, then hands them to a callback.

    Args:
        timeline: public time axis.
        make: builds the worker-side callback.
        ticks: milliseconds between the trigger time and the timer's instant: a stage must fire
            after the one that feeds it.
        catch_up_limit: most trigger times of a clock tick that one callback steps through, when the
            last of them is complete; ``None``: all.  A stage that keeps up has one to do.  Bounded
            input is read before any timer fires, and its bag only once.
        anew: begin with ``since = 0``: rows of trigger times before the first one are still asked
            for.
        threads: number of threads for the shards whose timers fire in one bundle.
        calls: steps that a callback takes at a trigger time, one for each window.
        per_shard: each shard has a callback of its own: what a store keeps of a shard from call to
            call may hold the callback's ciphers, and no two calls at once may share those.
    """

    ROWS = BagStateSpec("rows", ArrowBatchCoder())
    #: [since, done, armed, begin, through, begin, through, ...]: emitted through, stepped
    #: through, trigger time of the timer that is set (or ``done``), and what clock ticks have
    #: announced.
    PROGRESS = ReadModifyWriteStateSpec("progress", ListCoder(VarIntCoder()))
    TRIGGER_TIME = TimerSpec("trigger_time", TimeDomain.WATERMARK)

    def __init__(
        self,
        timeline: Timeline,
        make: Callable[[], ShardCallback],
        ticks: int = 0,
        *,
        catch_up_limit: int | None = None,
        anew: bool = False,
        threads: Threads = Threads(),  # noqa: B008 - immutable
        calls: int = 1,
        per_shard: bool = False,
    ) -> None:
        self._calls, self._per_shard = calls, per_shard
        self._timeline, self._make, self._ticks = timeline, make, ticks
        self._catch_up_limit, self._anew, self._threads = catch_up_limit, anew, threads

    @guarded("hold")
    def setup(self) -> None:
        """Open store and key on the worker."""
        self._of_shard: dict[int, ShardCallback] = {}
        self._pending: dict[int, _Pending] = {}
        self._workers = Workers(no_tool if self._per_shard else self._make, self._threads)

    def teardown(self) -> None:
        """Close the store and destroy the key."""
        self.__dict__.pop("_of_shard", None)
        self.__dict__.pop("_workers", None)

    @guarded("hold")
    def process(
        self,
        element: tuple[int, pa.RecordBatch],
        rows: Any = beam.DoFn.StateParam(ROWS),  # noqa: B008 - Beam's way to declare state
        progress: Any = beam.DoFn.StateParam(PROGRESS),  # noqa: B008
        timer: Any = beam.DoFn.TimerParam(TRIGGER_TIME),  # noqa: B008
    ) -> None:
        """Keep the batch; a clock tick arms the shard's timer, unless it is armed."""
        _, batch = element
        if batch.num_rows:
            rows.add(batch)
        clock_tick = clock_tick_of(batch)
        if clock_tick is None:
            return
        first, begin, through = clock_tick
        before = first - 1
        since, done, armed, *announced = progress.read() or [
            0 if self._anew else before,
            before,
            before,
        ]
        if begin <= done or begin in announced[::2]:
            return
        announced = sorted([*announced, begin, through])  # ranges that do not overlap
        if armed == done:
            armed = self._arm(timer, done, announced)
        progress.write([since, done, armed, *announced])

    def _arm(self, timer: Any, done: int, announced: list[int]) -> int:
        """Set the timer for the next trigger time to stop at, if it is known."""
        if not announced or announced[0] > done + 1:
            return done  # a clock tick is missing; on its way, it holds the watermark
        through = announced[1]
        trigger_time = (
            through if self._catch_up_limit is None else min(through, done + self._catch_up_limit)
        )
        timer.set(instant(self._timeline, trigger_time, self._ticks))
        return trigger_time

    @on_timer(TRIGGER_TIME)
    @guarded("trigger_time")
    def fire(
        self,
        shard: int = beam.DoFn.KeyParam,
        rows: Any = beam.DoFn.StateParam(ROWS),  # noqa: B008
        progress: Any = beam.DoFn.StateParam(PROGRESS),  # noqa: B008
        timer: Any = beam.DoFn.TimerParam(TRIGGER_TIME),  # noqa: B008
    ) -> Iterator[Any]:
        """Run what is due on the shard at its complete trigger time, and keep the rest."""
        since, done, upto, *announced = progress.read()
        if upto <= done:
            return
        deliveries.passed(map(self._timeline.instant_of, range(done + 1, upto + 1)))
        if shard in self._pending:  # its rows may wait for this trigger time
            yield from self._emitted()
        batches = list(rows.read())
        work = partial(outputs_of, self._callback_of(shard), shard, batches, upto, since)
        if self._threads.number > 1:
            least = _WORTH_A_THREAD * (upto - max(done, since)) * self._calls
            small = sum(batch.num_rows for batch in batches) < least
            self._pending[shard] = _Pending(rows, instant(self._timeline, upto, self._ticks))
            self._workers.ask(work, small)
            rows.clear()
        else:
            self._workers.ask(work)
            waiting: list[pa.RecordBatch] = []
            for _, output in self._answers({shard: waiting}):
                yield output
            rows.clear()
            for batch in waiting:
                rows.add(batch)
        left = announced[2:] if announced[1] == upto else announced
        progress.write([upto, upto, self._arm(timer, upto, left), *left])

    @guarded("trigger_time")
    def finish_bundle(self) -> Iterator[beam.utils.windowed_value.WindowedValue]:
        """Yield the outputs of the shards whose timers fired, in the order in which they fired.

        Beam writes a bundle's state when this has ended, so rows can still be put back.
        """
        yield from self._emitted()

    def _emitted(self) -> Iterator[beam.utils.windowed_value.WindowedValue]:
        requests, self._pending = self._pending, {}
        waiting: dict[int, list[pa.RecordBatch]] = {shard: [] for shard in requests}
        for shard, output in self._answers(waiting):
            yield GlobalWindows.windowed_value(output, requests[shard].at)
        for shard, batches in waiting.items():
            for batch in batches:
                requests[shard].rows.add(batch)

    def _answers(self, waiting: dict[int, list[pa.RecordBatch]]) -> Iterator[tuple[int, Any]]:
        """(shard, output) of all calls; rows that wait on are added to those of their shard."""
        for shard, waits, made in self._workers.answers():
            if waits:
                waiting[shard].append(made)
            else:
                yield shard, made

    def _callback_of(self, shard: int) -> ShardCallback | None:
        """The shard's callback, or ``None``: that of the thread which makes the call."""
        if not self._per_shard:
            return None
        if shard not in self._of_shard:
            self._of_shard[shard] = self._make()
        return self._of_shard[shard]


class _Pending(NamedTuple):
    """Where a call's waiting rows go, and the time of its outputs."""

    rows: Any
    at: Timestamp


def outputs_of(
    own: ShardCallback | None,
    shard: int,
    batches: list[pa.RecordBatch],
    upto: int,
    since: int,
    threads: Any = None,
) -> Iterator[tuple[int, bool, Any]]:
    """Yield (shard, whether the rows wait on, output or rows) of a call.

    Args:
        own: the shard's callback; ``None``: the thread's, which ``Workers`` give as ``threads``.
        batches: emptied as the call reads them.
    """
    held = (own or threads)(shard, _drained(batches), upto, since)
    for output in held.outputs:
        yield shard, False, output
    if held.waiting is not None and held.waiting.num_rows:
        yield shard, True, held.waiting


def _drained(batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Each of them, let go of here: the list stays with the call for as long as it takes."""
    batches.reverse()
    while batches:
        yield batches.pop()
