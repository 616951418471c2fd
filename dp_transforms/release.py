"""RELEASE: commit, then emit; and the sealed release of each (window, trigger).

The steps that are due on a shard run in order, a few of them in one transaction, and what was
committed is emitted.  The seal waits for all shards of a (window, trigger).

**Parts.**  A release of more than ``RELEASE_ROWS`` rows has several parts: that many rows each, in
order of keys, so that its parts are functions of the plan and the released keys only, as a release
of one part is.  Every part says its number and how many there are.  A sink writes each like a
release, and shows none of them before all are written.

Memory is bounded by the part and by the largest step of a shard: the shards of such a release emit
no rows, but that these are in the store, and the seal reads one shard after the other.  It sorts as
many rows as a part has at a time, writes these runs to a temporary file, and merges them.
"""

import functools
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from apache_beam.coders import BytesCoder
from apache_beam.transforms.userstate import BagStateSpec, ReadModifyWriteStateSpec

from dpstream.accounting.arrays import Ids
from dpstream.accounting.budget.calibration import calibrated
from dpstream.accounting.facts import FACTS, RunStamp, encoded, release_facts, run_facts
from dpstream.accounting.limits import COMMIT_ROWS, MERGED_ROWS, RELEASE_ROWS
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.timeline import Timeline
from dpstream.dp_transforms.batches import (
    PART,
    SHARD,
    STORED,
    TRIGGER,
    WINDOW,
    ArrowBatchCoder,
    concat,
    empty,
    ids_of,
    in_batches_of,
    key_fields,
    numpy_view,
    sealed_schema,
    shard_release_schema,
)
from dpstream.dp_transforms.noise.prf import Prf
from dpstream.dp_transforms.telemetry import count, guarded
from dpstream.state.arrow import id_array
from dpstream.state.disk_errors import file_errors
from dpstream.state.retention_store import piece_bounds
from dpstream.state.store import RunIdentity

#: One step's committed rows on their way to the seal: (window, trigger) and a shard's batch, which
#: is empty where the seal reads the rows from the store.
ShardRelease = tuple[tuple[int, int], pa.RecordBatch]
Item = TypeVar("Item")


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


def in_groups(
    items: Iterable[Item], rows_of: Callable[[Item], int], most: int, most_rows: int
) -> Iterator[list[Item]]:
    """Yield the items in groups that end at ``most`` items, or at ``most_rows`` rows.

    A group is committed or written at once: few waits for the disk, little to repeat.
    """
    group: list[Item] = []
    rows = 0
    for item in items:
        group.append(item)
        rows += rows_of(item)
        if len(group) >= most or rows >= most_rows:
            yield group
            group, rows = [], 0
    if group:
        yield group


def emitted(released: pa.RecordBatch, shard: int, shards: int) -> pa.RecordBatch:
    """Return what a shard emits of a committed step: its rows, or, where the release may have
    several parts, an empty batch with the mark ``STORED``.
    """
    metadata = {SHARD: str(shard)}
    if released.num_rows * shards > RELEASE_ROWS:
        return released.slice(0, 0).replace_schema_metadata(metadata | {STORED: b""})
    return released.replace_schema_metadata(metadata)


def in_key_order(
    plan: Plan, batches: Iterable[pa.RecordBatch], schema: pa.Schema
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield (how many parts there are, a part): the rows by key, ``RELEASE_ROWS`` in each part.

    Args:
        schema: of the batches; it has the plan's key columns.
    """
    keys = [(f.name, "ascending") for f in key_fields(plan)]

    def order_of(rows: pa.RecordBatch) -> pa.Array:
        return pc.sort_indices(pa.Table.from_batches([rows]), sort_keys=keys)

    def merged() -> Iterator[pa.RecordBatch]:
        reader, chunks = pa.ipc.open_file(file), order_of(concat(first, schema)).to_pylist()
        rest: list[pa.RecordBatch] = []
        for at in piece_bounds(len(chunks), RELEASE_ROWS // MERGED_ROWS):
            rest += [reader.get_batch(number) for number in chunks[at]]
            # Chunks come in order of first rows: no later row precedes the last chunk's first row.
            beyond = sum(batch.num_rows for batch in rest[:-1])
            rows = concat(rest, schema)
            order = order_of(rows)
            end = len(order) if at.stop == len(chunks) else pc.index(order, beyond).as_py()
            yield rows.take(order[:end])
            rest = [rows.take(order[end:])]

    runs = in_batches_of(RELEASE_ROWS, batches, schema)
    run, another = next(runs), next(runs, None)
    if another is None:
        yield 1, run.take(order_of(run)) if run.num_rows else run
        return
    with (
        file_errors("TMPDIR", "a large release cannot be sorted there"),
        tempfile.TemporaryFile() as file,
    ):
        first, rows = list[pa.RecordBatch](), 0
        with pa.ipc.new_file(file, schema) as writer:
            for unordered in itertools.chain([run, another], runs):
                run = unordered.take(order_of(unordered))
                writer.write_table(pa.Table.from_batches([run]), MERGED_ROWS)
                first.append(run.take(pa.array(range(0, len(run), MERGED_ROWS))))
                rows += len(run)
        del unordered, run, another
        for part in in_batches_of(RELEASE_ROWS, merged(), schema):
            yield -(-rows // RELEASE_ROWS), part


def seal(
    plan: Plan,
    identity: RunIdentity,
    release_ids: Prf,
    run_prefix: Ids,
    window: int,
    trigger: int,
    shards: Iterable[pa.RecordBatch],
    missing: tuple[str, ...] = (),
) -> Iterator[pa.RecordBatch]:
    """Yield one release in parts: the rows of all shards of a (window, trigger), sorted by key.

    Their number, length, order and bytes are functions of the plan and the released keys only.
    The schema's metadata names the release, and holds its facts (`accounting.facts`).

    Args:
        identity: the run's, of the epoch that the window belongs to.
        missing: expected names of files that it is published without (`state.passes`).
    """
    schema, instant = sealed_schema(plan), pa.timestamp("us", "UTC")
    begin, end = plan.timeline.window_bounds(window)
    time = plan.timeline.instant_of(plan.timeline.base(window) + trigger)

    def sealed(rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows with their ids and all columns that are the same in each of them."""
        size = rows.num_rows
        if not size:
            return empty(schema)
        message = np.empty((size, 3, 2), np.uint64)
        message[:, 0] = run_prefix
        message[:, 1] = (np.uint64(window), np.uint64(trigger))
        message[:, 2] = ids_of(rows.column("_id"))
        ids = release_ids.mac(message.reshape(-1, 2), np.full(size, 3, np.int64))
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
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    facts = encoded(release_facts(plan, facts_of(plan, identity), window, trigger, missing))
    release = {WINDOW: str(window).encode(), TRIGGER: str(trigger).encode(), FACTS.encode(): facts}
    ordered = in_key_order(plan, shards, shard_release_schema(plan))
    for number, (parts, rows) in enumerate(ordered):
        part = {PART: f"{number}/{parts}".encode()} if parts > 1 else {}
        yield sealed(rows).replace_schema_metadata(release | part)


def stamped_run_id(plan: Plan, identity: RunIdentity) -> str:
    """Return the run id for releases, which marks an insecure or unsound release as such."""
    stamp = "INSECURE-" if identity.insecure else ""
    sound = calibrated(plan, identity.calibration).budget.has_guarantee
    return ("" if sound else "UNSOUND-") + stamp + identity.run_id


@functools.lru_cache(maxsize=16)
def facts_of(plan: Plan, identity: RunIdentity) -> dict[str, Any]:
    """Return the public facts of the releases of a run (`accounting.facts`)."""
    stamp = RunStamp(identity.plan_hash, stamped_run_id(plan, identity), identity.epoch)
    return run_facts(plan, calibrated(plan, identity.calibration).budget, stamp)


def in_order(
    timeline: Timeline,
    gathered: dict[tuple[int, int], list[pa.RecordBatch]],
    sealed: Callable[[int, int, Iterable[pa.RecordBatch]], Iterable[pa.RecordBatch]],
) -> list[pa.RecordBatch]:
    """Return sealed releases in order of (trigger time, window)."""
    stride = timeline.base(1)
    order = sorted(gathered, key=lambda name: (name[0] * stride + name[1], name[0]))
    return [part for name in order for part in sealed(*name, gathered[name])]


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

    def __init__(self, make: Callable[[], Callable[..., Iterable[pa.RecordBatch]]]) -> None:
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
        """Yield the parts of the release of one (window, trigger) from all shards."""
        (window, trigger), shards = element
        count("releases_sealed")
        yield from self._twin(window, trigger, shards)
