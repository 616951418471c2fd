"""RELEASE: commit, then emit; and one sealed object per (window, trigger).

Timers say when, records say what.  The stateful stages hold their rows in a bag until the
watermark passes a cut; the callback then runs every step that is due, in order, a few of them in
one transaction, and emits what was committed.  With bounded input there is one timer at the
last trigger.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from apache_beam.coders import VarIntCoder
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import (
    BagStateSpec,
    ReadModifyWriteStateSpec,
    TimerSpec,
    on_timer,
)
from apache_beam.utils.timestamp import Timestamp

from accounting.limits import COMMIT_ROWS, COMMIT_STEPS
from accounting.plan import Plan
from accounting.timeline import Timeline
from dp_transforms.batches import (
    TRIGGER,
    WINDOW,
    ArrowBatchCoder,
    Ids,
    concat,
    id_array,
    ids_of,
    key_fields,
    numbers,
    release_schema,
    shard_release_schema,
)
from dp_transforms.noise.prf import Prf
from dp_transforms.telemetry import count, guarded
from state.store import RunIdentity

#: One step's committed rows on their way to the seal: (window, trigger) and a shard's batch.
ShardRelease = tuple[tuple[int, int], pa.RecordBatch]


class HoldUntilCut(beam.DoFn):
    """Holds the batches of a shard until a cut is complete, then hands them to a callback.

    Args:
        line: public time axis.
        make: builds the worker-side callback ``(shard, batches, cut) -> outputs``.
        early: how long before the cut's instant the timer is set, in micros: BOUND's fires
            one runner tick before the release step's.
    """

    ROWS = BagStateSpec("rows", ArrowBatchCoder())
    ARMED = ReadModifyWriteStateSpec("armed", VarIntCoder())
    CUT = TimerSpec("cut", TimeDomain.WATERMARK)

    def __init__(self, line: Timeline, make: Callable[[], "ShardCallback"], early: int = 0) -> None:
        self._line, self._make, self._early = line, make, early

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
        armed: Any = beam.DoFn.StateParam(ARMED),  # noqa: B008
        timer: Any = beam.DoFn.TimerParam(CUT),  # noqa: B008
    ) -> None:
        """Keep the batch; arm the shard's timer once."""
        _, batch = element
        if batch.num_rows:
            rows.add(batch)
        if not armed.read():
            armed.write(1)
            instant = self._line.cut_time(self._line.last_cut) - self._early
            timer.set(Timestamp(micros=instant))

    @on_timer(CUT)
    @guarded("cut")
    def cut(
        self,
        shard: int = beam.DoFn.KeyParam,
        rows: Any = beam.DoFn.StateParam(ROWS),  # noqa: B008
    ) -> Iterator[Any]:
        """All input is there: run every step of the shard in order."""
        yield from self._callback(shard, rows.read(), self._line.last_cut)
        rows.clear()


#: (shard, held batches, last complete cut[, cut through which outputs were emitted]) -> outputs
ShardCallback = Callable[..., Iterator[Any]]


def steps_through(
    line: Timeline, rows: pa.RecordBatch, upto: int, since: int = 0
) -> Iterator[tuple[int, int, pa.RecordBatch]]:
    """(window, trigger, its rows) of every step of a shard up to a cut, cuts in order.

    Args:
        rows: admitted pairs of one key shard; none may lie beyond ``upto``.
        since: cut whose steps and those before it were emitted; they are left out.
    """
    stride = line.slide // line.trigger_every
    window, leaf = numbers(rows.column("window")), numbers(rows.column("leaf"))
    # Rank of a row's step: by cut, then by window.
    step_cut = window.astype(np.int64) * stride + leaf
    width = 1 + (int(window.max()) if len(window) else 0)
    rank = step_cut * width + window
    order = np.argsort(rank, kind="stable")
    rows, rank = rows.take(pa.array(order)), rank[order]
    for cut in range(since + 1, upto + 1):
        for index in line.windows_at(cut):
            name = cut * width + index
            begin, end = np.searchsorted(rank, (name, name + 1)) if index < width else (0, 0)
            yield index, cut - line.base(index), rows.slice(int(begin), int(end - begin))


def commit_groups(
    steps: Iterable[tuple[int, int, pa.RecordBatch]],
) -> Iterator[list[tuple[int, int, pa.RecordBatch]]]:
    """The steps in runs that share one commit: few waits for the disk, little work to repeat."""
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
    """One release: the rows of all shards of a (window, trigger), sorted by key.

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
    time = plan.timeline.cut_time(plan.timeline.base(window) + trigger)
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
    arrays += [pa.array([identity.plan_hash] * size, pa.string())]
    arrays += [pa.array([stamped_run_id(plan, identity)] * size, pa.string())]
    metadata = {WINDOW: str(window).encode(), TRIGGER: str(trigger).encode()}
    return pa.RecordBatch.from_arrays(arrays, schema=release_schema(plan).with_metadata(metadata))


def stamped_run_id(plan: Plan, identity: RunIdentity) -> str:
    """The run id as releases show it: no insecure or unsound release looks like a sound one."""
    stamp = "INSECURE-" if identity.insecure else ""
    return ("UNSOUND-" if plan.privacy.mode == "paper" else "") + stamp + identity.run_id


class Seal(beam.DoFn):
    """Thin Beam twin of ``seal`` behind a GroupByKey on (window, trigger)."""

    def __init__(self, make: Callable[[], Callable[..., pa.RecordBatch]]) -> None:
        self._make = make

    @guarded("seal")
    def setup(self) -> None:
        """Load the release-id key on the worker."""
        self._twin = self._make()

    def teardown(self) -> None:
        """Let go of the key."""
        self.__dict__.pop("_twin", None)

    @guarded("seal")
    def process(
        self, element: tuple[tuple[int, int], Iterable[pa.RecordBatch]]
    ) -> Iterator[pa.RecordBatch]:
        """All shards of one (window, trigger)."""
        (window, trigger), parts = element
        count("releases_sealed")
        yield self._twin(window, trigger, parts)
