"""DELIVERED: the store remembers through which cut every release has reached the sink.

A stream without end begins again, when its runner has lost its state, after that cut: what was
committed beyond it is emitted once more, and nothing before it.

While a restored store catches up, the sink holds back what is not published yet and sends its
names here.  Once everything that is published lies at or before a complete cut, all of it has been
committed again and compared: what was held back is published, and the run goes on like any other.
A name that was held back while that happened comes with the next cut.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import apache_beam as beam
import pyarrow as pa

from dp_transforms.batches import concat, numbers
from dp_transforms.clock import ToShards
from dp_transforms.flow import STRIDE
from dp_transforms.hold import Held, HoldUntilCut, ShardCallback
from dp_transforms.run import Run
from state.copying import DELIVERED
from state.life import drop_delivered, reached, settled_cut
from state.store import Store

#: Its timer fires one runner tick after the release step's.
DELIVERED_TICKS = 2
#: Releases that were held back.
NAMES = pa.schema([("window", pa.int32()), ("trigger", pa.int32())])


class Outlet(Protocol):
    """What DELIVERED needs of a sink while a restored store catches up with it."""

    def caught_up(self, upto: int) -> bool:
        """Whether all that is published lies at or before a cut."""

    def publish(self, names: Sequence[tuple[int, int]]) -> None:
        """Write committed releases, durably; those that are there already stay as they are."""


class Delivered(beam.PTransform):
    """(What the sink gave for each release, names it held back, pulses) -> nothing, but the note
    is kept.

    The sink's outputs are there for their watermark: it passes a cut when all of the cut's releases
    have gone through the sink.

    Args:
        run: the run.
        outlet: the sink, for a store that was restored.
        keep: how long (micros) releases stay in the store once the sink has them; ``None``: for
            ever.
    """

    def __init__(self, run: Run, outlet: Outlet, keep: int | None = None) -> None:
        super().__init__()
        self._run, self._make = run, DeliveredCallback(run, outlet, keep)

    def expand(self, pcolls: Any) -> beam.PCollection:
        """One shard, which writes down each cut."""
        written, held, pulses = pcolls
        line, typed = self._run.plan.timeline, tuple[int, pa.RecordBatch]
        hold = HoldUntilCut(line, self._make, DELIVERED_TICKS, stride=STRIDE)
        nothing = beam.FlatMap(_nothing).with_output_types(typed)
        names = beam.Map(_named).with_output_types(typed)
        marks = beam.ParDo(ToShards(1, NAMES)).with_output_types(typed)
        return (
            (written | "Written" >> nothing, held | "Held" >> names, pulses | "Pulses" >> marks)
            | beam.Flatten()
            | "Delivered" >> beam.ParDo(hold)
        )


def _nothing(element: Any) -> tuple[()]:
    return ()


def _named(name: tuple[int, int]) -> tuple[int, pa.RecordBatch]:
    columns = [pa.array([number], pa.int32()) for number in name]
    return 0, pa.RecordBatch.from_arrays(columns, schema=NAMES)


class DeliveredCallback:
    """Builds the worker side: write down the cut."""

    def __init__(self, run: Run, outlet: Outlet, keep: int | None = None) -> None:
        self._run, self._outlet, self._keep = run, outlet, keep

    def __call__(self) -> ShardCallback:
        """Open the store on the worker."""
        store, line = self._run.open(), self._run.plan.timeline
        outlet, keep = self._outlet, self._keep

        def delivered(shard: int, batches: Iterable[pa.RecordBatch], upto: int, since: int) -> Held:
            held = concat(batches, NAMES)
            restoring = store.restoring
            if restoring and not outlet.caught_up(upto):
                return Held(iter(()), held)
            if held.num_rows:
                window, trigger = (numbers(column).tolist() for column in held.columns)
                outlet.publish(list(zip(window, trigger, strict=True)))
            if restoring:
                store.finish_restoring()
            before = store.note(DELIVERED)
            if upto > int(before or 0):
                # Should another worker have been faster, its cut is as good.
                store.swap_note(DELIVERED, before, str(upto))
            if keep is not None:
                drop_delivered(store, line, upto, keep)
            return Held(iter(()))

        return delivered


class Resume(NamedTuple):
    """Where a stream goes on whose runner knows nothing any more.

    Attributes:
        first: first cut whose steps are run or read back.
        begin: instant (micros); records with earlier stamps belong to complete windows only.
    """

    first: int
    begin: int


def delivered_through(store: Store) -> int:
    """Last cut through which all releases have reached the sink; 0: none."""
    return int(store.note(DELIVERED) or 0)


def resume_point(run: Run) -> Resume:
    """Where to go on, from the store alone; see `state.life` for which records still matter."""
    store, line = run.open(), run.plan.timeline
    settled = settled_cut(line, reached(store, line).complete)
    begin = line.cut_time(settled) if settled else line.start - line.max_skew
    return Resume(delivered_through(store) + 1, begin)


def released_through(run: Run) -> int:
    """Last cut that all key shards have stepped through."""
    store, line = run.open(), run.plan.timeline
    done = reached(store, line)
    latest = [line.base(window) + last for window, last in done.open.items() if last]
    if done.complete > store.marks.abandoned:
        latest.append(line.base(done.complete - 1) + line.triggers)
    if not latest:
        return 0
    cut = max(latest)
    # A shard takes cuts in order: whoever has begun on this one is through with those before.
    whole = all(done.trigger(line, w) >= cut - line.base(w) for w in line.windows_at(cut))
    return cut if whole else cut - 1
