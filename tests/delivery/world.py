"""Lives through a schedule, and says what came of it."""

import contextlib
import dataclasses
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa

from dpstream.dp_transforms import flow
from dpstream.dp_transforms.batches import concat, ids_of, record_schema
from dpstream.dp_transforms.beam.delivery import resume_point
from dpstream.dp_transforms.decision import Batch, expand
from dpstream.dp_transforms.flow import ReleaseCallback, SealFactory, run_in_memory
from dpstream.dp_transforms.ingest.records import CanonicaliserFactory
from dpstream.state import open as stores
from dpstream.state.arrow import to_bytes
from dpstream.state.idtable import shard_of
from dpstream.state.sqlite.store import SqliteStore
from tests.audit.neighbours import deliveries
from tests.audit.recorder import begin
from tests.bounded import ids_in
from tests.delivery.runner import ENDLESS, Runner
from tests.delivery.schedules import Back, Deliver, Fire, Keep, Schedule, Tick, WatermarkEvent
from tests.simulation.checks import (
    Decision,
    Problem,
    Record,
    check_skips,
    decisions,
    put_decision,
    still_there,
)
from tests.simulation.hooks import fast, memory_folder, nothing_expires
from tests.streams import sealed_bytes

#: (window, page, trigger) -> (units, sums) of a key when its step was committed.
Counts = dict[tuple[int, str, int], tuple[int, tuple[int, ...]]]
Placed = dict[int, list[tuple[int, int, int]]]
Indices = dict[int, list[int]]


@dataclasses.dataclass
class Came:
    """What came of a schedule.

    Attributes:
        placed: serial -> (window, step index, rank) of each admitted pair; decided: as committed;
        indices: serial -> which selection weights its pairs take, where the job skips;
        sink: (window, trigger) -> sealed bytes; counts: of every key at every step.
    """

    placed: Placed
    indices: Indices
    decided: dict[Record, Decision]
    sink: dict[tuple[int, int], bytes]
    counts: Counts
    fired: int = 0
    restores: int = 0


def watermark(world: "World", planned: int) -> int:
    """What a source says when it could say this much."""
    return planned


class World:
    """One run of a schedule."""

    def __init__(self, schedule: Schedule, folder: Path) -> None:
        self.schedule, self.plan = schedule, schedule.plan
        self.run = begin(schedule.plan, folder, schedule.shards)
        self.batches, serials = deliveries(schedule.records)
        ingest = CanonicaliserFactory(self.plan, self.run.keys, self.run.public)()
        good = [ingest(batch)[0] for batch in self.batches]
        self.records = concat(good, record_schema(self.plan))
        places = zip(
            *(self.records.column(c).to_pylist() for c in ("partition", "offset")), strict=True
        )
        self.serials = [serials[place] for place in places]
        self.row_of = {serial: row for row, serial in enumerate(self.serials)}
        self.stamp = self.records.column("stamp").to_numpy()
        self.shard = shard_of(ids_of(self.records.column("unit")), schedule.shards)
        self.event = {record.serial: record.event for record in schedule.records}
        self.delivered = np.zeros(len(self.serials), np.bool_)
        self.runner = Runner(self.run)
        self.snapshots: list[tuple[Any, Any]] = []
        self.sink: dict[tuple[int, int], bytes] = {}
        self.emitted: dict[tuple[int, int, int], bytes] = {}
        self.gone: dict[Record, Decision] = {}
        self.counts: Counts = {}
        self.fired = self.restores = 0
        self.latest_event = -ENDLESS

    def live(self) -> None:
        """Everything happens; then all that is due is done."""
        for event in self.schedule.events:
            self._happens(event)
        for stage in range(2):
            self._fire(Fire((True,) * 3, (False,) * 3, 1_000_000, stage))
        # Where published keys are skipped the clock waits for every test.
        for _ in range(self.plan.timeline.last_trigger_time):
            if not self.plan.design.skips or self.runner.state.left is None:
                break
            self.runner.tick(self.runner.now)
            self._fire(Fire((True,) * 3, (False,) * 3, 1_000_000, 2))

    def _happens(self, event: Any) -> None:
        if isinstance(event, Deliver):
            self.latest_event = max([self.latest_event, *(self.event[s] for s in event.serials)])
            self._deliver([self.row_of[s] for s in event.serials if s in self.row_of])
        elif isinstance(event, WatermarkEvent):
            self.runner.advance_watermark(watermark(self, event.micros))
        elif isinstance(event, Tick):
            self.runner.tick(event.micros)
        elif isinstance(event, Fire):
            self._fire(event)
        elif isinstance(event, Keep):
            self.snapshots.append((self.runner.state.copy(), self.delivered.copy()))
        else:
            self._back(event)

    def _deliver(self, rows: list[int]) -> None:
        self.delivered[rows] = True
        where = np.array(rows, np.int64)
        for shard in np.unique(self.shard[where]).tolist():
            mine = where[self.shard[where] == shard]
            self.runner.deliver(shard, self.records.take(pa.array(mine)))

    def _fire(self, event: Fire) -> None:
        shards = [n for n in range(self.run.shards) if event.shards[n]]
        before = [c.progress for c in self.runner.state.cells["bound"]]
        self.runner.fire_bound(shards, [n for n in shards if event.lost[n]])
        self.runner.work(random.Random(event.seed), event.most)
        cells = self.runner.state.cells["bound"]
        self.fired += sum(old != c.progress for old, c in zip(before, cells, strict=True))
        self._look()

    def _look(self) -> None:
        """What was emitted, also by bundles that were lost, has one value."""
        for window, trigger, shard, part in self.runner.emitted:
            name, data = (window, trigger, shard), to_bytes(part)
            if self.emitted.setdefault(name, data) != data:
                raise Problem("a release has two values")
        for batch in self.runner.sealed:
            metadata = batch.schema.metadata
            place = int(metadata[b"dpstream.window"]), int(metadata[b"dpstream.trigger"])
            data = sealed_bytes(batch)
            if self.sink.setdefault(place, data) != data:
                raise Problem("a release has two values")
        self.runner.emitted, self.runner.sealed = [], []

    def _back(self, event: Back) -> None:
        """Go back; what had come by then comes again, tardy records before any watermark moves."""
        draw, had, sealed = random.Random(event.seed), self.delivered, self.runner
        self.restores += 1
        begin_at = -ENDLESS
        if event.nth is None or not self.snapshots:
            reached = sealed.state.source
            stores.close_all()
            at = resume_point(self.run)
            begin_at, self.snapshots = at.begin, []
            self.runner = Runner(self.run, at.first)
            self.delivered = self.stamp < begin_at
        else:
            state, delivered = self.snapshots[-min(event.nth, len(self.snapshots))]
            reached = sealed.state.source
            self.runner.state, self.delivered = state.copy(), delivered.copy()
        owed = np.flatnonzero(had & ~self.delivered).tolist()
        tardy = [r for r in owed if self.serials[r] in self.schedule.tardy]
        rest = sorted(set(owed) - set(tardy), key=lambda r: int(self.stamp[r]))
        self._deliver(tardy)
        while rest:
            size = draw.randint(1, 80)
            self._deliver(rest[:size])
            rest = rest[size:]
            if rest and draw.random() < 0.5:
                self.runner.advance_watermark(min(reached, int(self.stamp[rest[0]])))
                self.runner.fire_bound(range(self.run.shards))
                self.runner.work(draw, draw.choice([0, 10, 1000]))
                self._look()
        self.runner.advance_watermark(reached)
        self.delivered |= had


@contextlib.contextmanager
def counts_kept(world: World) -> Iterator[None]:
    """Note what each step, in a commit of its own, has counted of every key."""

    def commit_step(
        store: Any, window: int, shard: int, trigger: int, states: Any, result: Any
    ) -> Any:
        pages = states.key_columns(np.arange(states.size)).column("page").to_pylist()
        for slot, page in enumerate(pages):
            counts = int(states.units[slot]), tuple(states.values[slot].tolist())
            world.counts[window, page, trigger] = counts
        return commit(store, window, shard, trigger, states, result)

    commit = SqliteStore.commit_step
    with (
        mock.patch.object(SqliteStore, "commit_step", commit_step),
        mock.patch.object(flow, "COMMIT_STEPS", 1),
    ):
        yield


@contextlib.contextmanager
def watched(world: World) -> Iterator[None]:
    """Counts, and decisions whose positions are about to go, are noted."""

    def forget(store: SqliteStore, shard: int, trigger_time: int) -> None:
        still_there(store, shard, world.plan.design.ranked, world.gone)
        really(store, shard, trigger_time)

    really = SqliteStore.forget_positions
    with mock.patch.object(SqliteStore, "forget_positions", forget), counts_kept(world):
        yield


def live(schedule: Schedule, how: Callable[[World], None] | None = None) -> Came:
    """Live through a schedule and check what holds of it alone.

    Args:
        how: lives through it otherwise; fills ``sink``.

    Raises:
        Problem: a rule is broken.
    """
    with tempfile.TemporaryDirectory(dir=memory_folder()) as name, fast():
        folder = Path(name)
        try:
            world = World(schedule, folder)
            with watched(world):
                (how or World.live)(world)
            made = decisions(
                world.run.open(), world.plan, world.records, schedule.shards, world.gone
            )
            _complete(world)
            if world.plan.design.skips:
                check_skips(world.plan, world.records, made, world.sink)
            how_often = world.fired, world.restores
            came = Came(*placed(world, made), made, world.sink, world.counts, *how_often)
            _released(world, made, folder)
            return came
        finally:
            stores.close_all()


def _complete(world: World) -> None:
    timeline = world.plan.timeline
    names = {(w, t) for w in range(timeline.windows) for t in range(1, timeline.triggers + 1)}
    if world.sink.keys() != names:
        raise Problem("not one release for each (window, trigger)")
    done = world.run.open().completed(world.schedule.shards)
    if done != dict.fromkeys(range(timeline.windows), timeline.triggers):
        raise Problem("a step is lost")


def _filled(world: World, made: dict[Record, Decision]) -> Batch:
    """The records with what was decided on them."""
    batch = Batch(world.plan, world.records, ids_in(world.plan))
    for row in range(world.records.num_rows):
        record = int(batch.partition[row]), int(batch.offset[row]), batch.ids[row].tobytes()
        decision = made.get(record)
        if decision is not None:
            if world.plan.design.skips:
                decision = decision._replace(pairs=decision.pairs & 0xFFFF)
            put_decision(batch, row, decision)
    return batch


def placed(world: World, made: dict[Record, Decision]) -> tuple[Placed, Indices]:
    """Serial -> (window, step index, rank) of its admitted pairs, and their weights' indices."""
    batch, out, indices = _filled(world, made), Placed(), Indices()
    for row in np.flatnonzero(batch.pairs).tolist():
        pairs = expand(world.plan, world.records, np.array([row]), batch)
        ranks = (
            pairs.column("rank").to_pylist() if world.plan.design.ranked else [0] * pairs.num_rows
        )
        columns = (pairs.column(c).to_pylist() for c in ("window", "trigger"))
        out[world.serials[row]] = list(zip(*columns, ranks, strict=True))
        if world.plan.design.skips:
            indices[world.serials[row]] = pairs.column("_index").to_pylist()
    return out, indices


def _released(world: World, made: dict[Record, Decision], folder: Path) -> None:
    """Every release, and every count behind it, is that of the decisions: none lost or twice."""
    batch = _filled(world, made)
    rows = expand(world.plan, world.records, np.flatnonzero(batch.pairs), batch)
    stores.close_all()
    run = begin(world.plan, folder, 1)
    again = World.__new__(World)
    again.plan, again.counts = world.plan, {}
    with nothing_expires(), counts_kept(again):
        release, seal = ReleaseCallback(run)(), SealFactory(run)()
        last = world.plan.timeline.last_trigger_time
        sealed = {
            name: sealed_bytes(*seal(name[0], name[1], [part]))
            for name, part in release(0, [rows], last, 0).outputs
        }
    if again.counts != world.counts:
        raise Problem("a step has counted other records than were decided")
    if sealed != world.sink:
        raise Problem("a release is not that of its decisions")


def calm(schedule: Schedule) -> tuple[Placed, Indices]:
    """``placed`` when all records are there from the beginning."""
    with tempfile.TemporaryDirectory(dir=memory_folder()) as name, fast(), nothing_expires():
        try:
            world = World(schedule, Path(name))
            run_in_memory(world.run, world.batches)
            made = decisions(world.run.open(), world.plan, world.records, schedule.shards)
            return placed(world, made)
        finally:
            stores.close_all()
