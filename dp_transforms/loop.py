"""The loop of BOUND and RELEASE where pairs on published keys are skipped, in one process.

Input that is all there is bounded up to a test, released up to it, bounded up to the next: at most
as often as keys are tested.  Streams and runners with several workers do the same by their public
clock (`dp_transforms.pacing`); what is committed and released has the same bytes.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from dpstream.accounting.limits import SPLIT_BUFFER_ROWS
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.batches import (
    admitted_schema,
    concat,
    numbers,
    record_schema,
    split_by_shard,
)
from dpstream.dp_transforms.beam.buffer import ShardCallback
from dpstream.dp_transforms.beam.split import IdsOf
from dpstream.dp_transforms.beam.workers import Threads, Workers
from dpstream.dp_transforms.positions import require_once
from dpstream.dp_transforms.release import ShardRelease
from dpstream.dp_transforms.run import Run
from dpstream.dp_transforms.telemetry import timed
from dpstream.state.idtable import shard_of


class Tools(NamedTuple):
    """What a thread needs to bound records: the stage, and ids of keys."""

    decide: ShardCallback
    ids: IdsOf


class Stages(NamedTuple):
    """Builds the workers' side.

    Attributes:
        bound, ids: for each thread.
        release: for each key shard: noise paths stay with the shard's states from test to test,
            and with them the ciphers that they were begun with, which no two calls may share.
    """

    bound: Callable[[], ShardCallback]
    ids: Callable[[], IdsOf]
    release: Callable[[], ShardCallback]


def alternate(
    run: Run,
    stages: Stages,
    records: Sequence[list[pa.RecordBatch]],
    ends: Sequence[int],
    *,
    first: int = 1,
    threads: Threads = Threads(),  # noqa: B008 - immutable
    once: bool = False,
) -> Iterator[ShardRelease]:
    """Yield committed steps of all shards, test after test.

    Args:
        run: a run whose input ends.
        stages: builds what works on the shards.
        records: all canonical records of each unit shard; emptied.
        ends: ``stops``; first: trigger time whose steps, and those after it, are asked for.
        threads: number of threads that work on shards.
        once: refuse a position that occurs twice.
    """
    workers = Workers(lambda: Tools(stages.bound(), stages.ids()), threads)
    release = [stages.release() for _ in range(run.shards)]
    for shard in range(run.shards):
        workers.ask(functools.partial(_by_stop, run.plan, ends, shard, records[shard], once))
    intervals: list[list[pa.RecordBatch | None]] = [[None] * run.shards for _ in ends]
    for shard, number, part in workers.answers():
        intervals[number][shard] = part
    nothing = record_schema(run.plan).empty_table().to_batches()
    late: dict[int, list[pa.RecordBatch]] = {shard: nothing for shard in range(run.shards)}
    ahead: dict[int, list[pa.RecordBatch]] = {shard: [] for shard in range(run.shards)}
    # BOUND gives again what was decided before: it may be of steps that are asked for.
    since, taken = 0, first - 1
    for upto, parts in zip(ends, intervals, strict=True):
        for shard in range(run.shards):
            mine = [*late[shard], *([] if parts[shard] is None else [parts[shard]])]
            parts[shard] = None
            late[shard] = []
            workers.ask(functools.partial(_bounded, shard, mine, upto, since))
        admitted: list[pa.RecordBatch] = []
        for shard, waiting, batch in workers.answers():
            (late[shard] if waiting else admitted).append(batch)
        for group in _groups(admitted):
            workers.ask(functools.partial(_split, run, group))
        for shard, batch in workers.answers():
            ahead[shard].append(batch)
        for shard in range(run.shards):
            mine, ahead[shard] = ahead[shard], []
            workers.ask(functools.partial(_released, release[shard], shard, mine, upto, taken))
        for shard, released, batch in workers.answers():
            if released is None:
                ahead[shard].append(batch)
            else:
                yield released, batch
        since = taken = upto


def _by_stop(
    plan: Plan,
    ends: Sequence[int],
    shard: int,
    batches: list[pa.RecordBatch],
    once: bool,
    _: Tools,
) -> Iterator[tuple[int, int, pa.RecordBatch]]:
    """(shard, number of the stop, its records), by the records' stamps; the batches go."""
    with timed("split"):
        records = concat(batches, record_schema(plan))
        batches.clear()
        if once:
            require_once(records)
        times = np.maximum(1, plan.timeline.trigger_time_of(numbers(records.column("stamp"))))
        number = np.minimum(np.searchsorted(np.array(ends), times), len(ends) - 1)
        parts = list(split_by_shard(records, number, len(ends)))
    for stop, part in parts:
        yield shard, stop, part


def _bounded(
    shard: int, batches: list[pa.RecordBatch], upto: int, since: int, tools: Tools
) -> Iterator[tuple[int, bool, pa.RecordBatch]]:
    """(unit shard, whether it waits, records that wait or admitted pairs)."""
    held = tools.decide(shard, batches, upto, since)
    for batch in held.outputs:
        yield shard, False, batch
    if held.waiting is not None and held.waiting.num_rows:
        yield shard, True, held.waiting


def _groups(batches: list[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """The batches, many rows at a time: those of one shard would be split into tiny ones."""
    group, rows = [], 0
    while batches:
        batch = batches.pop(0)
        group.append(batch)
        rows += batch.num_rows
        if rows >= SPLIT_BUFFER_ROWS:
            yield group
            group, rows = [], 0
    if rows:
        yield group


def _split(
    run: Run, batches: list[pa.RecordBatch], tools: Tools
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """(key shard, its pairs)."""
    with timed("split"):
        pairs = concat(batches, admitted_schema(run.plan))
        batches.clear()
        yield from split_by_shard(pairs, shard_of(tools.ids(pairs), run.shards), run.shards)


def _released(
    release: ShardCallback,
    shard: int,
    batches: list[pa.RecordBatch],
    upto: int,
    since: int,
    _: Tools,
) -> Iterator[tuple[int, tuple[int, int] | None, pa.RecordBatch]]:
    """(key shard, (window, trigger) of a step or ``None`` for pairs that wait, rows)."""
    held = release(shard, batches, upto, since)
    for name, batch in held.outputs:
        yield shard, name, batch
    if held.waiting is not None and held.waiting.num_rows:
        yield shard, None, held.waiting
