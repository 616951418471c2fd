"""DELIVERED: the store remembers through which cut every release has reached the sink.

A stream without end begins again, when its runner has lost its state, after that cut: what was
committed beyond it is emitted once more, and nothing before it.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import apache_beam as beam
import pyarrow as pa

from dp_transforms.clock import ToShards
from dp_transforms.flow import STRIDE
from dp_transforms.hold import Held, HoldUntilCut, ShardCallback
from dp_transforms.run import Run
from state.life import complete_windows, settled_cut
from state.store import Store

_NOTE = "delivered"
#: Its timer fires one runner tick after the release step's.
DELIVERED_TICKS = 2
_NOTHING = pa.schema([])


class Delivered(beam.PTransform):
    """(What each sink gave, of releases and of dead letters, pulses) -> nothing, but the note is
    kept.

    The sinks' outputs are there for their watermarks only: they pass a cut when all of the cut's
    releases, and what was refused before it, have gone through the sinks.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def expand(self, pcolls: Any) -> beam.PCollection:
        """One shard, which writes down each cut."""
        *written, pulses = pcolls
        line, typed = self._run.plan.timeline, tuple[int, pa.RecordBatch]
        hold = HoldUntilCut(line, DeliveredCallback(self._run), DELIVERED_TICKS, stride=STRIDE)
        nothing = beam.FlatMap(_nothing).with_output_types(typed)
        spread = beam.ParDo(ToShards(1, _NOTHING)).with_output_types(typed)
        marks = pulses | "Pulses" >> spread
        return (
            (*(one | f"Written{i}" >> nothing for i, one in enumerate(written)), marks)
            | beam.Flatten()
            | "Delivered" >> beam.ParDo(hold)
        )


def _nothing(element: Any) -> tuple[()]:
    return ()


class DeliveredCallback:
    """Builds the worker side: write down the cut."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __call__(self) -> ShardCallback:
        """Open the store on the worker."""
        store = self._run.open()

        def delivered(shard: int, batches: Iterable[pa.RecordBatch], upto: int, since: int) -> Held:
            before = store.note(_NOTE)
            if upto > int(before or 0):
                # Should another worker have been faster, its cut is as good.
                store.swap_note(_NOTE, before, str(upto))
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
    return int(store.note(_NOTE) or 0)


def resume_point(run: Run) -> Resume:
    """Where to go on, from the store alone; see `state.life` for which records still matter."""
    store, line = run.open(), run.plan.timeline
    windows = complete_windows(line, store.completed(run.shards), store.marks)
    settled = settled_cut(line, windows)
    begin = line.cut_time(settled) if settled else line.start - line.max_skew
    return Resume(delivered_through(store) + 1, begin)


def released_through(run: Run) -> int:
    """Last cut that all key shards have stepped through; windows that take no steps count."""
    store, line = run.open(), run.plan.timeline
    past = line.base(store.marks.first)
    completed = store.completed(run.shards)
    latest = max(
        (line.base(window) + trigger for window, trigger in completed.items() if trigger), default=0
    )
    if latest <= past:
        return past
    # A shard takes cuts in order: whoever has begun on this one is through with those before.
    open_windows = (w for w in line.windows_at(latest) if w >= store.marks.first)
    whole = all(completed.get(w, 0) >= latest - line.base(w) for w in open_windows)
    return latest if whole else latest - 1
