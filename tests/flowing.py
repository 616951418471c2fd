"""The streaming form in one process, one trigger time at a time: its real callbacks without a
runner.

BOUND, RELEASE, the seal, the sink's DoFn and DELIVERED get what `BufferUntilTriggerTime` would give
them when a source's watermark passes one trigger time after the other.  A new ``Flowing`` on a
store is a new
pipeline: nothing is held, and it begins where the store says.
"""

from collections import defaultdict
from collections.abc import Iterable

import msgspec
import pyarrow as pa
from apache_beam.pvalue import TaggedOutput
from apache_beam.utils.windowed_value import WindowedValue

from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.batches import ids_of, split_by_shard
from dpstream.dp_transforms.beam.delivery import (
    DeliveredCallback,
    Outlet,
    release_name_row,
    resume_point,
)
from dpstream.dp_transforms.flow import BoundCallback, ReleaseCallback, SealFactory
from dpstream.dp_transforms.ingest.records import CanonicaliserFactory
from dpstream.dp_transforms.run import Run
from dpstream.pipelines.connectors.run_manifest import CatchUpOutlet
from dpstream.pipelines.connectors.sink import Name, Sink
from dpstream.pipelines.connectors.write import WriteReleases
from dpstream.state.idtable import shard_of

Batches = list[pa.RecordBatch]


class Flowing:
    """A pipeline without end that its test moves on by hand.

    Args:
        run: the run that was begun.
        sink: where its releases go.
        keep: see `Delivered`.
        outlet: in the place of the sink, for DELIVERED.
    """

    def __init__(
        self, run: Run, sink: Sink, keep: int | None = None, outlet: Outlet | None = None
    ) -> None:
        self.run, self.store = run, run.open()
        self.resume = resume_point(run)
        self.decide, self.release = BoundCallback(run)(), ReleaseCallback(run)()
        self.seal = SealFactory(run)()
        self.writer = WriteReleases(sink, run=run)._dofn
        self.delivered = DeliveredCallback(run, outlet or CatchUpOutlet(run, sink), keep)()
        self.ingest = CanonicaliserFactory(run.plan, run.keys, run.public)()
        self.bound, self.at = 0, self.resume.first - 1
        self.units: dict[int, Batches] = defaultdict(list)
        self.keys: dict[int, Batches] = defaultdict(list)
        self.names: Batches = []
        self.out: dict[Name, pa.RecordBatch] = {}
        self.held: list[Name] = []

    def feed(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Source batches on their way to BOUND."""
        for batch in batches:
            records, _ = self.ingest(batch)
            shard = shard_of(ids_of(records.column("unit")), self.run.shards)
            for number, part in split_by_shard(records, shard, self.run.shards):
                self.units[number].append(part)

    def step(self, upto: int) -> None:
        """The watermark passes a trigger time: every timer up to it fires."""
        shards = range(self.run.shards)
        for shard in shards:
            held = self.decide(shard, self.units.pop(shard, []), upto, self.bound)
            for target, batch in held.outputs:
                self.keys[target].append(batch)
            if held.waiting is not None and held.waiting.num_rows:
                self.units[shard].append(held.waiting)
        parts: dict[Name, Batches] = defaultdict(list)
        for shard in shards:
            held = self.release(shard, self.keys.pop(shard, []), upto, self.at)
            for name, batch in held.outputs:
                parts[name].append(batch)
            if held.waiting is not None and held.waiting.num_rows:
                self.keys[shard].append(held.waiting)
        self._write([p for name, batches in parts.items() for p in self.seal(*name, batches)])
        waiting = self.delivered(0, self.names, upto, self.at).waiting
        self.names = [waiting] if waiting is not None and waiting.num_rows else []
        self.bound = self.at = upto

    def _write(self, batches: Batches) -> None:
        """A bundle of the sink."""
        self.writer.start_bundle()
        outputs = [out for batch in batches for out in self.writer.process(batch)]
        outputs += list(self.writer.finish_bundle())
        for batch in batches:
            metadata = batch.schema.metadata
            self.out[int(metadata[b"dpstream.window"]), int(metadata[b"dpstream.trigger"])] = batch
        for out in outputs:
            back = isinstance(out, TaggedOutput)
            value = out.value if back else out
            name = value.value if isinstance(value, WindowedValue) else value
            self.names.append(release_name_row(name, not back)[1])
            self.held += [name] * back


def endless(plan: Plan) -> Plan:
    """The same plan without an end."""
    line = msgspec.structs.replace(plan.timeline, end=None)
    return msgspec.structs.replace(plan, timeline=line).check()


def cells(plan: Plan, batches: Iterable[pa.RecordBatch]) -> dict[int, Batches]:
    """Source batches of one row each by the trigger time of their stamp."""
    out: dict[int, Batches] = defaultdict(list)
    for batch in batches:
        stamps = batch.column(plan.stamp if plan.stamp != "event_time" else plan.event_time)
        for row, stamp in enumerate(stamps.cast(pa.int64()).to_pylist()):
            trigger_time = max(1, (stamp - plan.timeline.start) // plan.timeline.trigger_every + 1)
            one = batch.slice(row, 1)
            first = int(batch.schema.metadata[b"dpstream.offset"]) + row
            metadata = {**batch.schema.metadata, b"dpstream.offset": str(first).encode()}
            out[trigger_time].append(one.replace_schema_metadata(metadata))
    return out
