"""The flow: the only place that joins the stages.

    stream = DPStream(plan, secret="file:noise.secret", store="sqlite:state.db")
    releases = (records | stream).releases

``records`` is a PCollection of Arrow batches with the plan's columns, each with the position
of its first row in its schema's metadata (``batches.PARTITION``, ``OFFSET``); the result has
``.releases`` (one sealed batch per (window, trigger)) and ``.dead_letter``.

Everything lives in the global window: Beam assigns, fires and drops nothing by event time.  A
step of a trigger time runs when the public clock has announced it and the watermark has passed
it; with bounded input all trigger times are announced at once and one callback of a shard steps
through them.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import apache_beam as beam
import msgspec
import pyarrow as pa
from apache_beam.typehints import no_annotations

from dpstream.accounting.arrays import Ids
from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.limits import COMMIT_ROWS, COMMIT_STEPS, DEFAULT_SHARDS, SPLIT_BUFFER_ROWS
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.timeline import Timeline
from dpstream.dp_transforms.batches import (
    SHARD,
    STORED,
    admitted_schema,
    concat,
    record_schema,
    split_by_id,
)
from dpstream.dp_transforms.beam.buffer import BufferUntilTriggerTime, Held, ShardCallback
from dpstream.dp_transforms.beam.clock import Announced, ToShards, WallClock, paced_clock
from dpstream.dp_transforms.beam.workers import (
    SplitByShard,
    Threads,
    reading_threads,
)
from dpstream.dp_transforms.bounding import decide as decide_records
from dpstream.dp_transforms.ingest.records import (
    CanonicaliserFactory,
    Records,
    public_key_ids,
    require_once,
)
from dpstream.dp_transforms.loop import Conductor, Stages, alternate, one_process
from dpstream.dp_transforms.noise.ids import key_ids
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.dp_transforms.pacing import Pace, note_waiting, stops
from dpstream.dp_transforms.published_keys import PublishedKeys
from dpstream.dp_transforms.release import (
    Gather,
    Seal,
    ShardRelease,
    due_by,
    emitted,
    in_groups,
    in_order,
    seal,
    steps_through,
)
from dpstream.dp_transforms.run import Account, Run, begin_run
from dpstream.dp_transforms.step import Stepper, run_name
from dpstream.dp_transforms.telemetry import count, step_done, timed, timed_each
from dpstream.state.ledger import lineage
from dpstream.state.passes import missing_names, noted_passes
from dpstream.state.retention import expire
from dpstream.state.store import OvertakenError

#: A watermark W promises only what lies before W, so BOUND fires at its trigger time, not before,
#: and the release step one runner tick later, when BOUND's outputs are there.
RELEASE_TICKS = 1
#: Most trigger times that one callback takes of a stream that is behind its clock: 8, or a 32nd of
#: a window's if that is more.  Each callback is a round of timers and bundles through the engine,
#: so fewer callbacks are faster; but the rows of all trigger times of a callback wait for it.
CATCH_UP_LIMIT, _PART_OF_WINDOW = 8, 32


def stride(timeline: Timeline) -> int:
    """Return how many announced trigger times one callback takes of a stream that is behind."""
    return max(CATCH_UP_LIMIT, timeline.triggers // _PART_OF_WINDOW)


class Output(NamedTuple):
    """Typed outputs of ``DPStream``.

    Attributes:
        releases: of `batches.sealed_schema`: the columns of a published release, of which plan and
            run are dictionaries of one text.
    """

    releases: beam.PCollection
    dead_letter: beam.PCollection
    clock_ticks: beam.PCollection


class DPStream(beam.PTransform):
    """Differentially private running counts and sums per key.

    Args:
        plan: the public plan.
        run: a run that was begun before (``dp_transforms.run.begin_run``); without it one is
            begun or resumed here, when the pipeline is built.
        secret: a reference to the secret (``file:PATH``, ``env:NAME``, ``gcp:...``); with store and
            shards for a run that is begun here.
        source: an identity of this input (a name, a version, a digest); needed to continue with an
            existing store, because equal node names must mean equal data.
        account: the account in which a run that is begun here is charged (``dpstream.account``);
            without it no account adds up what is spent.
        public: canonical public keys (``ingest.records.canonical_public_keys``), for a run that is
            begun here and a plan that has some.
        once: refuse bounded input in which a position occurs twice (``records.require_once``): for
            rows that were numbered elsewhere.
        clock: emits trigger times (`dp_transforms.beam.clock`).  Default: all of them for bounded
            input, a wall clock otherwise.
    """

    def __init__(
        self,
        plan: Plan,
        run: Run | None = None,
        *,
        secret: str | SecretSource | None = None,
        store: str = "sqlite:dpstream.db",
        shards: int = DEFAULT_SHARDS,
        source: str | None = None,
        clock: beam.PTransform | None = None,
        account: Account | None = None,
        public: pa.Table | None = None,
        once: bool = False,
    ) -> None:
        super().__init__()
        self._clock, self._once = clock, once
        if run is None:
            if not source:
                raise UsageError(
                    "source",
                    "is required: a store goes on only with the input it was begun with",
                    "give DPStream(source=...) a name or digest that tells this input from others",
                )
            keys = SecretSource.of(secret)
            parts = [source.encode()]
            run, _ = begin_run(
                plan, keys, store, shards, source=parts, account=account, public=public
            )
            if account is None and lineage.remembered(run.open()) is not None:
                raise PolicyError(
                    "ledger",
                    "this run was charged in an account, and DPStream names none",
                    "give DPStream(account=...) that account",
                )
        elif account is not None:
            raise UsageError("account", "is for a run that is begun here", "give it to begin_run")
        self._run = run
        if self._run.plan.hash != plan.hash:
            raise PolicyError("plan", "is not the plan of the run", "give the run's own plan")

    @no_annotations
    def expand(self, pcoll: beam.PCollection) -> Output:
        """Return the sealed releases and the dead letters of the records."""
        run, timeline, bounded = self._run, self._run.plan.timeline, pcoll.is_bounded
        if self._clock is None and bounded and timeline.end is None:
            raise UsageError("end", "is required for a bounded collection", "give the plan an end")
        clock = self._clock or (
            Announced(timeline.last_trigger_time) if bounded else WallClock(timeline)
        )
        threads = Threads(run.performance.threads, run.run_id)
        paced = run.plan.design.skips and not (
            bounded and isinstance(clock, Announced) and one_process(pcoll.pipeline)
        )
        if paced:
            clock = paced_clock(clock, timeline, Pace(run))
        catch_up_limit = None if bounded and not paced else stride(timeline)
        canonical = CanonicaliserFactory(run.plan, run.keys, run.public, run.joined)
        ingest = Records(canonical, reading_threads(threads, catch_up_limit))
        typed = beam.ParDo(ingest).with_output_types(
            pa.RecordBatch, **{Records.DEAD: pa.RecordBatch}
        )
        records = pcoll | "Records" >> typed.with_outputs(Records.DEAD, main="records")
        clock_ticks = pcoll.pipeline | "Clock" >> clock
        once = self._once and bounded and run.plan.record_id is None
        if run.plan.design.skips and not paced:
            releases = (records.records, clock_ticks) | Alternate(run, threads, once)
            return Output(releases, records[Records.DEAD], clock_ticks)
        admitted = (records.records, clock_ticks) | Bound(run, catch_up_limit, threads, once)
        releases = (admitted, clock_ticks) | Release(run, catch_up_limit, threads)
        return Output(releases, records[Records.DEAD], clock_ticks)


class Bound(beam.PTransform):
    """(Canonical records, clock ticks) -> admitted (record, window) pairs, sharded by key.

    Args:
        run: the run.
        catch_up_limit: see ``BufferUntilTriggerTime``; ``None`` for bounded input.
        threads: number of threads that split, and that bound shards.
        once: refuse a position that occurs twice.
    """

    def __init__(
        self,
        run: Run,
        catch_up_limit: int | None = None,
        threads: Threads = Threads(),  # noqa: B008
        once: bool = False,
    ) -> None:
        super().__init__()
        self._run, self._catch_up_limit, self._threads = run, catch_up_limit, threads
        self._once = once

    def expand(self, pcolls: Any) -> beam.PCollection:
        """Shuffle by unit shard, hold until the trigger time, admit, shuffle by key shard."""
        run, (records, clock_ticks) = self._run, pcolls
        schema, typed = record_schema(run.plan), tuple[int, pa.RecordBatch]
        # Beam would pickle records of a type that it does not know, past the coder of batches.
        reading = reading_threads(self._threads, self._catch_up_limit)
        by_unit = beam.ParDo(SplitByShard("unit", run.shards, schema, reading))
        hold = beam.ParDo(self.buffer())
        held = (
            (
                records | "ByUnit" >> by_unit.with_output_types(typed),
                clock_ticks | "UnitTicks" >> _to_shards(run, schema),
            )
            | "UnitInput" >> beam.Flatten()
            | "Bound" >> hold.with_output_types(pa.RecordBatch if self._gathers else typed)
        )
        if not self._gathers:
            return held
        split = SplitByShard("_id", run.shards, admitted_schema(run.plan), self._threads)
        return held | "ByKey" >> beam.ParDo(split).with_output_types(typed)

    @property
    def _gathers(self) -> bool:
        """Return whether the pairs of all unit shards are gathered before they are split by key.

        Split separately, those of many shards would be shards * shards tiny batches.  A stream's
        stage emits what it has before its bundle ends.
        """
        return self._catch_up_limit is None

    def buffer(self) -> BufferUntilTriggerTime:
        """Return the stage itself."""
        run = self._run
        return BufferUntilTriggerTime(
            run.plan.timeline,
            BoundCallback(run, self._gathers, self._once),
            catch_up_limit=self._catch_up_limit,
            anew=True,
            threads=self._threads,
        )


class Alternate(beam.PTransform):
    """(Canonical records, clock ticks) -> sealed releases, in one process, test after test.

    Args:
        run: a run that skips what is published.
        threads: number of threads that work on shards.
        once: refuse a position that occurs twice.
    """

    def __init__(self, run: Run, threads: Threads, once: bool) -> None:
        super().__init__()
        self._run, self._threads, self._once = run, threads, once

    def expand(self, pcolls: Any) -> beam.PCollection:
        """Shuffle by unit shard, take all steps, gather all shards of a (window, trigger)."""
        run, (records, clock_ticks) = self._run, pcolls
        schema, typed = record_schema(run.plan), tuple[tuple[int, int], pa.RecordBatch]
        by_unit = beam.ParDo(SplitByShard("unit", run.shards, schema, self._threads))
        conductor = Conductor(run, stages_of(run), self._threads, self._once)
        return (
            (
                records | "ByUnit" >> by_unit.with_output_types(tuple[int, pa.RecordBatch]),
                clock_ticks | "UnitTicks" >> _to_shards(run, schema),
            )
            | "UnitInput" >> beam.Flatten()
            | "Alternate" >> beam.ParDo(conductor).with_output_types(typed)
            | "Gather" >> beam.GroupByKey()
            | "Seal" >> beam.ParDo(Seal(SealFactory(run))).with_output_types(pa.RecordBatch)
        )


def stages_of(run: Run) -> Stages:
    """Return the workers' side of both stages, for `dp_transforms.loop`."""
    return Stages(BoundCallback(run, True), ReleaseCallback(run, True))


class Release(beam.PTransform):
    """(Admitted pairs by key shard, clock ticks) -> sealed releases.

    Args:
        run: the run.
        catch_up_limit: see ``BufferUntilTriggerTime``; ``None`` for bounded input.
        threads: number of threads that compute steps of shards.
    """

    def __init__(
        self,
        run: Run,
        catch_up_limit: int | None = None,
        threads: Threads = Threads(),  # noqa: B008
    ) -> None:
        super().__init__()
        self._run, self._catch_up_limit, self._threads = run, catch_up_limit, threads

    def expand(self, pcolls: Any) -> beam.PCollection:
        """Hold until the trigger time, run the steps, gather all shards of a (window, trigger)."""
        run, (admitted, clock_ticks) = self._run, pcolls
        typed = tuple[tuple[int, int], pa.RecordBatch]
        gather = (
            beam.GroupByKey() if self._catch_up_limit is None else beam.ParDo(Gather(run.shards))
        )
        return (
            (admitted, clock_ticks | "KeyTicks" >> _to_shards(run, admitted_schema(run.plan)))
            | "KeyInput" >> beam.Flatten()
            | "Release" >> beam.ParDo(self.buffer()).with_output_types(typed)
            | "Gather" >> gather
            | "Seal" >> beam.ParDo(Seal(SealFactory(run))).with_output_types(pa.RecordBatch)
        )

    def buffer(self) -> BufferUntilTriggerTime:
        """Return the stage itself."""
        run, timeline = self._run, self._run.plan.timeline
        return BufferUntilTriggerTime(
            timeline,
            ReleaseCallback(run, self._catch_up_limit is None),
            RELEASE_TICKS,
            catch_up_limit=self._catch_up_limit,
            threads=self._threads,
            calls=-(-timeline.window // timeline.slide),
            per_shard=self._catch_up_limit is not None and self._threads.number > 1,
        )


def _to_shards(run: Run, schema: pa.Schema) -> beam.PTransform:
    """Clock ticks for every shard, so that shards without data take their steps too."""
    clock_ticks = beam.ParDo(ToShards(run.shards, schema))
    return clock_ticks.with_output_types(tuple[int, pa.RecordBatch])


class BoundCallback:
    """Builds BOUND's worker side: decide, commit, emit by key shard.

    Args:
        run: the run.
        gathers: emit batches that are still to be split by key shard.
        once: refuse a position that occurs twice.
    """

    def __init__(self, run: Run, gathers: bool = False, once: bool = False) -> None:
        self._run, self._gathers, self._once = run, gathers, once

    def __call__(self) -> ShardCallback:
        """Open the store on the worker."""
        run, store = self._run, self._run.open()
        # The tests of the run, not of this program: RELEASE goes by no others.
        plan, schema = run.explicit(), record_schema(run.plan)
        published = PublishedKeys.of_process(plan, store) if plan.design.skips else None
        ring = run.keys.ring()  # destroyed with the stage, not before

        def ids(rows: pa.RecordBatch) -> Ids:
            return key_ids(plan, ring.key, rows)

        def decide(
            shard: int, batches: Iterable[pa.RecordBatch], upto: int, since: int = 0
        ) -> Held:
            with timed("bound"):
                records = concat(batches, schema)
                if self._once:
                    require_once(records)
                decided = decide_records(plan, store, shard, records, upto, since, ids, published)
            for name, amount in decided.counts.items():
                count(name, amount)
            waiting = decided.waiting
            if upto == run.upto:
                note_waiting(plan, store, shard, upto, waiting)
                waiting = waiting.slice(0, 0)
            pieces = timed_each("bound", decided.pieces(SPLIT_BUFFER_ROWS))
            return Held(pieces if self._gathers else by_key(pieces), waiting)

        def by_key(pieces: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
            for piece in pieces:
                yield from split_by_id(piece, "_id", run.shards)

        return decide


class ReleaseCallback:
    """Builds RELEASE's worker side: one transaction per few steps, then emit what was committed.

    Args:
        run: the run.
        bounded: whether this process takes all steps of all shards.
    """

    def __init__(self, run: Run, bounded: bool = False) -> None:
        self._run, self._bounded = run, bounded
        self._done: set[int] = set()

    def __call__(self) -> ShardCallback:
        """Open store and key on the worker."""
        run, ring, timeline = self._run, self._run.keys.ring(), self._run.plan.timeline
        public = None
        if run.public is not None:
            public = (run.public, public_key_ids(run.plan, ring, run.public))
        store = run.open()
        stepper = Stepper(run.plan, ring, store, public, run.performance.look_ahead, run.mixing)
        schema = admitted_schema(run.plan)

        def release(
            shard: int, batches: Iterable[pa.RecordBatch], upto: int, since: int = 0
        ) -> Held:
            now, later = due_by(timeline, concat(batches, schema), upto)
            return Held(steps(shard, now, upto, since), later)

        def steps(
            shard: int, rows: pa.RecordBatch, upto: int, since: int
        ) -> Iterator[ShardRelease]:
            first = store.retained_windows.first
            due = (step for step in steps_through(timeline, rows, upto, since) if step[0] >= first)
            for group in in_groups(due, lambda s: s[2].num_rows, COMMIT_STEPS, COMMIT_ROWS):
                with timed("step"):
                    done = stepper.steps(shard, group)
                for (window, trigger, _), (released, computed) in zip(group, done, strict=True):
                    count("steps_committed" if computed else "steps_reemitted")
                    step_done()
                    yield (window, trigger), emitted(released, shard, run.shards)
            if self._bounded:
                # Nothing of a window can go before its last shard is done.
                if upto in (timeline.last_trigger_time, run.upto):
                    self._done.add(shard)
                if len(self._done) < run.shards:
                    return
            with timed("expire"):
                expire(store, timeline, timeline.width, run.plan.design.remembered_for)

        return release


class SealFactory:
    """Builds ``seal`` on a worker."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __call__(self) -> Callable[[int, int, Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
        """Bind plan, identity and release-id key."""
        run, store, ring = self._run, self._run.open(), self._run.keys.ring()
        identity, retained = store.identity, store.retained_windows
        # What an earlier epoch released keeps its ids.
        identities = {
            epoch: msgspec.structs.replace(identity, epoch=epoch)
            for epoch in (identity.epoch, *(e for e, _ in retained.epochs))
        }
        prefixes = {e: ring.name((*run_name(of), b"release")) for e, of in identities.items()}
        passes, timeline = noted_passes(store), run.plan.timeline  # committed before a row is read

        def rows_of(window: int, trigger: int, step: pa.RecordBatch) -> pa.RecordBatch:
            metadata = step.schema.metadata or {}
            if STORED not in metadata:
                return step
            rows = store.committed_releases(window, int(metadata[SHARD]), trigger)
            if rows is None:
                raise OvertakenError  # the sink has the release by now; the store has dropped it
            return rows

        def sealed(
            window: int, trigger: int, steps: Iterable[pa.RecordBatch]
        ) -> Iterator[pa.RecordBatch]:
            epoch = retained.epoch_of(window, identity.epoch)
            rows = (rows_of(window, trigger, step) for step in steps)
            named = run.plan, identities[epoch], ring.release, prefixes[epoch]
            missing = missing_names(passes, timeline, window, trigger)
            parts = seal(*named, window, trigger, rows, missing)
            with contextlib.suppress(OvertakenError):
                yield from timed_each("seal", parts)

        return sealed


def run_in_memory(
    run: Run, source: Iterable[pa.RecordBatch]
) -> tuple[list[pa.RecordBatch], list[pa.RecordBatch]]:
    """Run the same stages as ``DPStream`` without Beam, for tests and simulation.

    Returns:
        (sealed releases in order of (trigger time, window), dead letters).
    """
    canonical = CanonicaliserFactory(run.plan, run.keys, run.public)()
    decide, release, sealed = BoundCallback(run)(), ReleaseCallback(run)(), SealFactory(run)()
    parts = [canonical(batch) for batch in source]
    records = concat([good for good, _ in parts], record_schema(run.plan))
    upto = run.plan.timeline.last_trigger_time
    by_unit = dict(split_by_id(records, "unit", run.shards))
    gathered: dict[tuple[int, int], list[pa.RecordBatch]] = {}
    shards = [[by_unit[s]] if s in by_unit else [] for s in range(run.shards)]
    if run.plan.design.skips:
        released = alternate(run, stages_of(run), shards, stops(run.explicit()))
    else:
        by_key: list[list[pa.RecordBatch]] = [[] for _ in shards]
        for shard, held in enumerate(shards):
            for target, batch in decide(shard, held, upto, 0).outputs:
                by_key[target].append(batch)
        released = itertools.chain.from_iterable(
            release(shard, batches, upto, 0).outputs for shard, batches in enumerate(by_key)
        )
    for name, part in released:
        gathered.setdefault(name, []).append(part)
    dead_letters = [dead for _, dead in parts if dead.num_rows]
    return in_order(run.plan.timeline, gathered, sealed), dead_letters
