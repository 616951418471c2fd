"""The stage that records in the store through which trigger time all releases reached the sink.

A stream without end whose runner has lost its state begins again after that trigger time: what was
committed beyond it is emitted once more, and nothing before it.

While a restored store catches up, the sink holds back what is not published yet and sends its
names here.  Once everything that is published lies at or before a complete trigger time, all of it
has been committed again and compared: what was withheld is published, and the run continues like
any other.  A name that was withheld while that happened comes with the next trigger time.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import apache_beam as beam
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.plan.timeline import Timeline
from dpstream.dp_transforms.batches import concat, numpy_view
from dpstream.dp_transforms.beam.buffer import BufferUntilTriggerTime, Held, ShardCallback
from dpstream.dp_transforms.beam.clock import ToShards
from dpstream.dp_transforms.flow import stride
from dpstream.dp_transforms.release import due_by
from dpstream.dp_transforms.run import Run
from dpstream.state.retention import drop_delivered, reached, settled_trigger_time
from dpstream.state.store import Store
from dpstream.state.transfer import DELIVERED

#: Its timer fires one runner tick after the release step's.
DELIVERED_TICKS = 2
#: Releases that the sink has written, or withheld.
NAMES = pa.schema([("window", pa.int32()), ("trigger", pa.int32()), ("written", pa.bool_())])


#: (window, trigger) of a release.
Name = tuple[int, int]


class Outlet(Protocol):
    """The part of a sink that DELIVERED needs while a restored store catches up with it."""

    def caught_up(self, upto: int) -> bool:
        """Return whether all that is published lies at or before a trigger time."""

    def publish(self, names: Sequence[tuple[int, int]]) -> None:
        """Publish committed releases, durably; existing ones stay as they are."""


class Delivered(beam.PTransform):
    """Records the trigger times that the sinks have passed.

    Its inputs are: what the sink wrote, names it withheld, what the dead letters' sink gave, clock
    ticks.  It has no output.

    The sinks' watermarks pass a trigger time when all of its releases, and all that was refused
    before it, have gone through them.  The names are checked against the plan: a release that is
    committed and that no runner brought to the sink is written from the store.

    Args:
        run: the run.
        outlet: the sink.
        keep: how long (micros) releases stay in the store once the sink has them; ``None``: for
            ever.
    """

    def __init__(self, run: Run, outlet: Outlet, keep: int | None = None) -> None:
        super().__init__()
        self._run, self._make = run, DeliveredCallback(run, outlet, keep)

    def expand(self, pcolls: Any) -> beam.PCollection:
        """Record each trigger time on one shard."""
        written, withheld, refused, clock_ticks = pcolls
        typed = tuple[int, pa.RecordBatch]
        nothing = beam.FlatMap(_nothing).with_output_types(typed)
        to_shards = beam.ParDo(ToShards(1, NAMES)).with_output_types(typed)
        return (
            (
                written | "Written" >> beam.Map(release_name_row, True).with_output_types(typed),
                withheld | "Withheld" >> beam.Map(release_name_row, False).with_output_types(typed),
                refused | "Refused" >> nothing,
                clock_ticks | "ClockTicks" >> to_shards,
            )
            | beam.Flatten()
            | "Delivered" >> beam.ParDo(self.buffer()).with_output_types(typed)
        )

    def buffer(self) -> BufferUntilTriggerTime:
        """Return the stage itself."""
        timeline = self._run.plan.timeline
        return BufferUntilTriggerTime(
            timeline, self._make, DELIVERED_TICKS, catch_up_limit=stride(timeline)
        )


def _nothing(element: Any) -> tuple[()]:
    return ()


def release_name_row(name: Name, written: bool) -> tuple[int, pa.RecordBatch]:
    """Return (shard, row) of a release's name: written, or withheld."""
    columns = [*(pa.array([number], pa.int32()) for number in name), pa.array([written])]
    return 0, pa.RecordBatch.from_arrays(columns, schema=NAMES)


class DeliveredCallback:
    """Builds the worker side, which writes down the trigger time."""

    def __init__(self, run: Run, outlet: Outlet, keep: int | None = None) -> None:
        self._run, self._outlet, self._keep = run, outlet, keep

    def __call__(self) -> ShardCallback:
        """Open the store on the worker."""
        store, timeline = self._run.open(), self._run.plan.timeline
        outlet, keep = self._outlet, self._keep

        def delivered(shard: int, batches: Iterable[pa.RecordBatch], upto: int, since: int) -> Held:
            names, restoring = concat(batches, NAMES), store.restoring
            if restoring and not outlet.caught_up(upto):
                return Held(iter(()), names)
            now, later = due_by(timeline, names, upto)
            # What came while the store caught up is all still here, from the note on.
            since = delivered_through(store) if restoring else since
            unwritten = _names(now.filter(pc.invert(now.column("written"))))
            absent = unwritten | missing(timeline, store, now, since, upto)
            if absent:
                outlet.publish(sorted(absent))
            if restoring:
                store.finish_restoring()
            before = store.metadata(DELIVERED)
            if upto > int(before or 0):
                # Should another worker have been faster, its trigger time is as good.
                store.swap_metadata(DELIVERED, before, str(upto))
            if keep is not None:
                drop_delivered(store, timeline, upto, keep)
            return Held(iter(()), later)

        return delivered


def missing(
    timeline: Timeline, store: Store, names: pa.RecordBatch, since: int, upto: int
) -> set[Name]:
    """Return the committed releases of trigger times after ``since`` that the sink did not get.

    A runner that loses an element (Prism did, where it split a bundle) must not lose a release.
    """
    first = store.retained_windows.first
    due = {
        (window, trigger_time - timeline.base(window))
        for trigger_time in range(since + 1, upto + 1)
        for window in timeline.windows_at(trigger_time)
        if window >= first
    }
    return due - _names(names)


def _names(names: pa.RecordBatch) -> set[Name]:
    window, trigger = (numpy_view(names.column(name)).tolist() for name in ("window", "trigger"))
    return set(zip(window, trigger, strict=True))


class Resume(NamedTuple):
    """The point from which a stream continues whose runner has lost its state.

    Attributes:
        first: first trigger time whose steps are run or read back.
        begin: instant (micros); records with earlier stamps belong to complete windows only.
    """

    first: int
    begin: int


def delivered_through(store: Store) -> int:
    """Return the last trigger time through which all releases have reached the sink; 0: none."""
    return int(store.metadata(DELIVERED) or 0)


def forget_delivered(store: Store) -> None:
    """Record deliveries from the beginning again, for input that is read from its first row.

    Whether its sink still has what an earlier attempt wrote is not known, so the end of that
    attempt is not the end of this one.
    """
    before = store.metadata(DELIVERED)
    if before is not None:
        # Should an earlier attempt still live and note a trigger time now, its releases are there.
        store.swap_metadata(DELIVERED, before, None)


def resume_point(run: Run) -> Resume:
    """Return where to continue, from the store alone; see `state.retention` for which records
    matter.
    """
    store, timeline = run.open(), run.plan.timeline
    settled = settled_trigger_time(timeline, reached(store, timeline).complete)
    begin = timeline.instant_of(settled) if settled else timeline.start - timeline.max_skew
    return Resume(delivered_through(store) + 1, begin)


def released_through(run: Run) -> int:
    """Return the last trigger time that all key shards have completed.

    Windows without steps count as completed.
    """
    store, timeline = run.open(), run.plan.timeline
    done, past = reached(store, timeline), timeline.base(store.retained_windows.first)
    latest = [timeline.base(window) + last for window, last in done.open.items() if last]
    if done.complete > store.retained_windows.abandoned:
        latest.append(timeline.base(done.complete - 1) + timeline.triggers)
    trigger_time = max(latest, default=0)
    if trigger_time <= past:
        return past
    # A shard takes trigger times in order: whoever has begun on this one is through with those
    # before.
    windows = (w for w in timeline.windows_at(trigger_time) if w >= store.retained_windows.first)
    complete = all(done.trigger(timeline, w) >= trigger_time - timeline.base(w) for w in windows)
    return trigger_time if complete else trigger_time - 1
