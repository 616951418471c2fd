"""RELEASE: commit, then emit; and one sealed object per (window, trigger).

The steps that are due on a shard run in order, a few of them in one transaction, and what was
committed is emitted.  The seal waits for all shards of a (window, trigger).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from apache_beam.coders import BytesCoder
from apache_beam.transforms.userstate import BagStateSpec, ReadModifyWriteStateSpec

from dpstream.accounting.arrays import Ids
from dpstream.accounting.budget.calibration import calibrated
from dpstream.accounting.limits import COMMIT_ROWS, COMMIT_STEPS
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.timeline import Timeline
from dpstream.dp_transforms.batches import (
    SHARD,
    TRIGGER,
    WINDOW,
    ArrowBatchCoder,
    concat,
    ids_of,
    key_fields,
    numpy_view,
    sealed_schema,
    shard_release_schema,
)
from dpstream.dp_transforms.noise.prf import Prf
from dpstream.dp_transforms.telemetry import count, guarded
from dpstream.state.arrow import id_array
from dpstream.state.store import RunIdentity

#: One step's committed rows on their way to the seal: (window, trigger) and a shard's batch.
ShardRelease = tuple[tuple[int, int], pa.RecordBatch]


def steps_through(
    timeline: Timeline, rows: pa.RecordBatch, upto: int, since: int = 0
) -> Iterator[tuple[int, int, pa.RecordBatch]]:
    """Yield (window, trigger, its rows) of every step of a shard up to a trigger time, by time.

    Args:
        rows: admitted pairs of one key shard; none may lie beyond ``upto``.
        since: steps of this trigger time and earlier ones were emitted; they are left out.
    """
    stride = timeline.stride
    window, trigger = numpy_view(rows.column("window")), numpy_view(rows.column("trigger"))
    # Rank of a row's step: by trigger time, then by window.
    step_trigger_time = window.astype(np.int64) * stride + trigger
    width = 1 + (int(window.max()) if len(window) else 0)
    rank = step_trigger_time * width + window
    order = np.argsort(rank, kind="stable")
    rank = rank[order]
    # The rows of a few steps at a time are put in order: all at once would be there twice.
    nothing = chunk = rows.slice(0, 0)
    first = 0
    for trigger_time in range(since + 1, upto + 1):
        for index in timeline.windows_at(trigger_time):
            name = trigger_time * width + index
            begin = end = 0
            if index < width:
                begin, end = np.searchsorted(rank, (name, name + 1)).tolist()
            if end > first + chunk.num_rows:
                first = begin
                chunk = rows.take(pa.array(order[begin : max(end, begin + COMMIT_ROWS)]))
            of_step = chunk.slice(begin - first, end - begin) if begin < end else nothing
            yield index, trigger_time - timeline.base(index), of_step


def due_by(
    timeline: Timeline, rows: pa.RecordBatch, upto: int
) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Return the rows of steps that are due by a trigger time, and the rows of later steps.

    Later steps have rows where events were stamped before they happened.

    Args:
        rows: of any kind that have a window and a trigger.
    """
    window, trigger = numpy_view(rows.column("window")), numpy_view(rows.column("trigger"))
    later = window.astype(np.int64) * timeline.stride + trigger > upto
    if not later.any():
        return rows, rows.slice(0, 0)
    return rows.filter(pa.array(~later)), rows.filter(pa.array(later))


def commit_groups(
    steps: Iterable[tuple[int, int, pa.RecordBatch]],
) -> Iterator[list[tuple[int, int, pa.RecordBatch]]]:
    """Yield the steps in groups that share one commit: few waits for the disk, little to repeat."""
    group: list[tuple[int, int, pa.RecordBatch]] = []
    rows = 0
    for step in steps:
        group.append(step)
        rows += step[2].num_rows
        if len(group) >= COMMIT_STEPS or rows >= COMMIT_ROWS:
            yield group
            group, rows = [], 0
    if group:
        yield group


def seal(
    plan: Plan,
    identity: RunIdentity,
    release_ids: Prf,
    run_prefix: Ids,
    window: int,
    trigger: int,
    parts: Iterable[pa.RecordBatch],
) -> pa.RecordBatch:
    """Return one release: the rows of all shards of a (window, trigger), sorted by key.

    Its length, order and bytes are functions of the plan and the released keys only.
    """
    rows = concat(parts, shard_release_schema(plan))
    order = pc.sort_indices(
        pa.Table.from_batches([rows]),
        sort_keys=[(f.name, "ascending") for f in key_fields(plan)],
    )
    rows = rows.take(order)
    size = rows.num_rows
    begin, end = plan.timeline.window_bounds(window)
    time = plan.timeline.instant_of(plan.timeline.base(window) + trigger)
    message = np.empty((size, 3, 2), np.uint64)
    message[:, 0] = run_prefix
    message[:, 1] = (np.uint64(window), np.uint64(trigger))
    message[:, 2] = ids_of(rows.column("_id"))
    ids = release_ids.mac(message.reshape(-1, 2), np.full(size, 3, np.int64))
    instant = pa.timestamp("us", "UTC")
    arrays = [
        id_array(ids),
        *(pa.array(np.full(size, t), pa.int64()).cast(instant) for t in (begin, end)),
        pa.array(np.full(size, trigger, np.int32)),
        pa.array(np.full(size, time), pa.int64()).cast(instant),
    ]
    for name in rows.schema.names:
        if name != "_id":
            column = rows.column(name)
            # A NaN of the arithmetic is a null of the release (a mean over nothing).
            floating = pa.types.is_floating(column.type)
            arrays.append(pc.if_else(pc.is_nan(column), None, column) if floating else column)
    for stamp in (identity.plan_hash, stamped_run_id(plan, identity)):
        arrays.append(pa.DictionaryArray.from_arrays(np.zeros(size, np.int8), [stamp]))
    metadata = {WINDOW: str(window).encode(), TRIGGER: str(trigger).encode()}
    return pa.RecordBatch.from_arrays(arrays, schema=sealed_schema(plan).with_metadata(metadata))


def stamped_run_id(plan: Plan, identity: RunIdentity) -> str:
    """Return the run id for releases, which marks an insecure or unsound release as such."""
    stamp = "INSECURE-" if identity.insecure else ""
    sound = calibrated(plan, identity.calibration).budget.has_guarantee
    return ("" if sound else "UNSOUND-") + stamp + identity.run_id


def in_order(
    timeline: Timeline,
    gathered: dict[tuple[int, int], list[pa.RecordBatch]],
    sealed: Callable[[int, int, Iterable[pa.RecordBatch]], pa.RecordBatch],
) -> list[pa.RecordBatch]:
    """Return sealed releases in order of (trigger time, window)."""
    stride = timeline.base(1)
    order = sorted(gathered, key=lambda name: (name[0] * stride + name[1], name[0]))
    return [sealed(*name, gathered[name]) for name in order]


class Gather(beam.DoFn):
    """Gathers the steps of the shards of a (window, trigger), and emits them together once.

    The unbounded form of a GroupByKey, which would wait for the end of the input.  Each step
    says of which shard it is, so that one that comes twice counts once.
    """

    PARTS = BagStateSpec("parts", ArrowBatchCoder())
    SEEN = ReadModifyWriteStateSpec("seen", BytesCoder())

    def __init__(self, shards: int) -> None:
        self._shards = shards

    @guarded("gather")
    def process(
        self,
        element: ShardRelease,
        parts: Any = beam.DoFn.StateParam(PARTS),  # noqa: B008 - Beam's way to declare state
        seen: Any = beam.DoFn.StateParam(SEEN),  # noqa: B008
    ) -> Iterator[tuple[tuple[int, int], list[pa.RecordBatch]]]:
        """Store a part; with the last one, yield all."""
        name, batch = element
        arrived = np.frombuffer(seen.read() or bytes(self._shards), np.uint8).copy()
        shard = int(batch.schema.metadata[SHARD])
        if arrived[shard]:
            return
        arrived[shard] = 1
        if not arrived.all():
            parts.add(batch)
            seen.write(arrived.tobytes())
            return
        gathered = [*parts.read(), batch]
        parts.clear()
        seen.clear()
        yield name, gathered


class Seal(beam.DoFn):
    """Thin transform around ``seal`` behind a GroupByKey on (window, trigger)."""

    def __init__(self, make: Callable[[], Callable[..., pa.RecordBatch]]) -> None:
        self._make = make

    @guarded("seal")
    def setup(self) -> None:
        """Load the release-id key on the worker."""
        self._twin = self._make()

    def teardown(self) -> None:
        """Destroy the key."""
        self.__dict__.pop("_twin", None)

    @guarded("seal")
    def process(
        self, element: tuple[tuple[int, int], Iterable[pa.RecordBatch]]
    ) -> Iterator[pa.RecordBatch]:
        """Yield the release of one (window, trigger) from all shards."""
        (window, trigger), parts = element
        count("releases_sealed")
        yield self._twin(window, trigger, parts)
