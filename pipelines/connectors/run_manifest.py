"""The sink's manifest: the run of its releases, and whether a store may continue it.

The manifest names the run (as its releases are stamped), its epoch, the plan and the kind of sink:
a function of plan and run alone, written once, before the first release; a further epoch of the run
adds another.  With the list of what is published it is what a store is held against before anything
is drawn:

* *lost*: the sink has releases or a manifest, and there is no store;
* *foreign*: the manifest names another run, plan or kind of sink;
* *older*: a release is published that the store has not committed (lifted while a restored
  store replays; the sink compares each release as it is emitted again);
* *forked*: the latest release of a window (of the newest ones) differs from what the store would
  publish.

*Emptied* is a sink in which nothing was ever published, while the store of a stream without end
says that releases were delivered.

A sink that cannot be read back has no manifests and no list, so none of these is noticed there.

**The run of a restored store** writes committed releases again.  It compares with the sink whatever
is there and holds back the rest.  Only when all that is published has been committed again and
found the same is the rest published: at the end of a bounded run (`catch_up`), in the midst of one
without end (`CatchUpOutlet`, for DELIVERED).
"""

from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa

from dpstream.accounting.errors import DpstreamError, PolicyError
from dpstream.accounting.limits import SINK_RELEASES, SINK_ROWS
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.timeline import Timeline
from dpstream.dp_transforms.beam.delivery import delivered_through
from dpstream.dp_transforms.flow import SealFactory
from dpstream.dp_transforms.release import facts_of, in_groups, stamped_run_id
from dpstream.dp_transforms.run import Run
from dpstream.pipelines.connectors.sink import (
    FORMAT,
    PublishedRelease,
    ReadableSink,
    RunManifest,
    Sink,
    is_last,
    name_of_release,
)
from dpstream.pipelines.jobs.charging import lost_store
from dpstream.pipelines.project.job_section import SinkKind
from dpstream.state.retention import reached
from dpstream.state.store import Store

#: Windows whose latest release is compared before a run: a stream of years must begin soon.
COMPARED_WINDOWS = 1_000


def manifest_of(run: Run, kind: SinkKind) -> RunManifest:
    """Return the manifest a run gives its sink."""
    identity = run.open().identity
    facts = facts_of(run.plan, identity)
    run_id = facts["run"]["run_id"]
    return RunManifest(FORMAT, run_id, identity.epoch, identity.plan_hash, kind, facts)


def refuse_lost_store(sink: Sink) -> None:
    """Refuse a new store for a sink with releases of a run that the store does not know."""
    if sink.used():
        raise lost_store(sink.field, sink.another)


def refuse_emptied(run: Run, sink: Sink) -> None:
    """Refuse a stream without end whose delivered releases are no longer in its sink.

    Raises:
        PolicyError: they were delivered, and nothing was ever published here.
    """
    if delivered_through(run.open()) and sink.used() is False:
        raise PolicyError(
            sink.field,
            "is empty, but the store says that releases were delivered: it was emptied, made again"
            " or is another one",
            "bring back what it held, or write the store's releases to it with `dpstream state"
            " releases JOB`",
        )


def check_sink(run: Run, sink: Sink, replaying: bool = False) -> bool:
    """Refuse a store that is not the one whose releases the sink holds; draws nothing.

    Args:
        run: the run that was begun on the store.
        sink: where it will publish.
        replaying: a restored store may be behind its sink.

    Returns:
        Whether the store has committed everything that is published.

    Raises:
        PolicyError: foreign, older or forked; or the sink is not fit.
    """
    sink.prepare(replaying and not run.open().anew)
    refuse_foreign(manifest_of(run, sink.kind), sink)
    store = run.open()
    # In this order: what another worker publishes meanwhile is committed before.
    published = list(sink.published())
    committed, further = _compared(store, run.plan.timeline, published)
    caught_up, latest = not further, {one.window: one for one in committed}  # in order
    if not caught_up and not replaying:
        raise _older_store()
    if latest and isinstance(sink, ReadableSink):
        newest = sorted(latest)[-COMPARED_WINDOWS:]
        _refuse_forked(run, store, sink, {window: latest[window] for window in newest})
    if replaying:  # the sink compares these with what is committed again
        first = store.retained_windows.first
        caught_up = caught_up and not any(window >= first for window, _ in sink.unsealed())
    return caught_up


def refuse_older_store(store: Store, plan: Plan, sink: Sink) -> None:
    """Refuse a store that lacks releases of its run that the sink has.

    SQLite reads a damaged log only up to the damage, as if a loss of power had torn the rest.

    Raises:
        PolicyError: it lacks one; or the sink holds something that is no release.
    """
    run_id = stamped_run_id(plan, store.identity)
    manifests = sink.manifests()
    if store.restoring or not any(each is not None and each.run_id == run_id for each in manifests):
        return
    if _compared(store, plan.timeline, list(sink.published()))[1]:
        raise _older_store()


def _compared(
    store: Store, timeline: Timeline, published: Sequence[PublishedRelease]
) -> tuple[list[PublishedRelease], list[PublishedRelease]]:
    """Return the published releases that a store has committed, and those that it has not; those
    that it has dropped or abandoned are left out.
    """
    first, done = store.retained_windows.first, reached(store, timeline)
    retained = [one for one in published if one.window >= first]
    committed = [one for one in retained if one.trigger <= done.trigger(timeline, one.window)]
    further = [one for one in retained if one.trigger > done.trigger(timeline, one.window)]
    return committed, further


def _older_store() -> PolicyError:
    return PolicyError(
        "store",
        "is older than its sink: releases are published that it has not committed",
        "bring back the newest store, or restore this one with `dpstream state restore`",
    )


def write_manifest(run: Run, sink: Sink) -> None:
    """Name the run in its sink, once; before its first release.

    Raises:
        PolicyError: the sink belongs to another run, or to another kind of sink.
        RunError: it cannot be written.
    """
    mine = manifest_of(run, sink.kind)
    refuse_foreign(mine, sink)  # before the facts of this run lie beside another run's manifest
    sink.put_manifest(mine)
    refuse_foreign(mine, sink)


def resealed(run: Run, store: Store, names: Iterator[tuple[int, int]]) -> Iterator[pa.RecordBatch]:
    """Yield the committed releases of all shards, sealed again: the batches that the sink got.

    Raises:
        PolicyError: the key is not the run's (at once), or the store lacks a step it says is
            committed.
    """
    sealed = SealFactory(run)()
    return (
        part
        for window, trigger in names
        for part in sealed(
            window,
            trigger,
            (committed_step(store, window, n, trigger) for n in range(run.shards)),
        )
    )


def committed_step(store: Store, window: int, shard: int, trigger: int) -> pa.RecordBatch:
    """Return the rows of a step that the store says is committed.

    Raises:
        PolicyError: it is not there.
    """
    rows = store.committed_releases(window, shard, trigger)
    if rows is None:
        raise PolicyError("store", "lost a step it says is committed", "restore it from a backup")
    return rows


def published_epoch(sink: Sink, run_id: str) -> int:
    """Return the last epoch that a manifest of the run names; -1: none does."""
    named = [manifest for manifest in sink.manifests() if manifest is not None]
    mine = [manifest.epoch for manifest in named if manifest.run_id.rpartition("-")[2] == run_id]
    return max(mine, default=-1)


def refuse_foreign(mine: RunManifest, sink: Sink) -> None:
    """Refuse a sink that this run cannot publish to.

    Raises:
        PolicyError: a manifest is of another run, of a later epoch or of another kind of sink, or
            it cannot be read.
    """
    for manifest in sink.manifests():
        if manifest is None or manifest.format != FORMAT:
            raise PolicyError(
                sink.field,
                "holds a manifest that this program cannot read",
                f"use the program that wrote it, or {sink.another}; a damaged run.json may be"
                " removed: it is written again",
            )
        if (manifest.run_id, manifest.plan_hash) != (mine.run_id, mine.plan_hash):
            raise PolicyError(
                sink.field,
                "holds releases of another run than the store's",
                f"use the store that made them, or write this run's releases to {sink.another}",
            )
        if manifest.epoch > mine.epoch:
            raise PolicyError(
                "store",
                "is older than its sink: the run was restored in a later epoch since",
                "go on with the restored store",
            )
        if manifest.kind != mine.kind:
            raise PolicyError(
                "sink.kind",
                "is not the kind that this sink was begun with",
                "restore the old kind, or write the other with "
                "`dpstream state releases JOB --out FOLDER`",
            )


def _refuse_forked(
    run: Run, store: Store, sink: ReadableSink, latest: dict[int, PublishedRelease]
) -> None:
    """The last published release of every window says what all before it led to."""
    names = ((one.window, one.trigger) for one in latest.values())
    for batch in resealed(run, store, names):
        one = latest[name_of_release(batch)[0]]
        if not sink.same(one, batch):
            raise PolicyError(
                "store",
                f"is a fork: release of window {one.window}, trigger {one.trigger} was published "
                "with other content",
                f"go on with the store that made it, or use {sink.another} and a new store; a file"
                " that was damaged may be removed: it is written again",
            )


def diverged(error: DpstreamError, sink: Sink, restoring: bool) -> DpstreamError:
    """Return the error of a restored store whose releases differ from the published ones."""
    if not (restoring and isinstance(error, PolicyError) and error.field == sink.field):
        return error
    return PolicyError(
        "store",
        f"the restored store does not lead to what is published: the sink {error.rule}",
        "nothing was published; restore another backup, or give the open windows up with"
        " `dpstream state restore --replace --abandon`",
    )


def catch_up(run: Run, sink: Sink) -> None:
    """Publish what a restored run has committed beyond the sink, once all of that is compared.

    Raises:
        PolicyError: something is published that the store has not committed again.
    """
    store = run.open()
    done, first = store.completed(run.shards), store.retained_windows.first
    published = [(one.window, one.trigger) for one in sink.published()]
    for window, trigger in [*published, *sink.unsealed()]:
        if window >= first and trigger > done.get(window, 0):
            raise PolicyError(
                "store",
                "the restored store has not come to all that is published",
                "run it again, with the latest --through if its input grows; if it fails again, the"
                " backup is of another run",
            )
    publish_committed(run, sink)
    store.finish_restoring()


#: Note of a store: the content of its sink when it was last found complete.
_PUBLISHED = "published"


class CatchUpOutlet:
    """Tells a restored run which of its releases are in the sink, until it has caught up.

    It is a `dp_transforms.beam.delivery.Outlet`.

    Args:
        run: the run.
        sink: where its releases are.
    """

    def __init__(self, run: Run, sink: Sink) -> None:
        self._run, self._sink = run, sink
        self._last: int | None = None

    def caught_up(self, upto: int) -> bool:
        """Return whether all that is published, or begun to be, lies at or before a trigger
        time.
        """
        if self._last is None or self._last <= upto:
            # Once more at the end: a worker of the store that was replaced may have gone on.
            self._last = self._look()
        return self._last <= upto

    def _look(self) -> int:
        timeline, first = self._run.plan.timeline, self._run.open().retained_windows.first
        names = [(one.window, one.trigger) for one in self._sink.published()]
        names += self._sink.unsealed()
        return max((timeline.base(w) + trigger for w, trigger in names if w >= first), default=0)

    def publish(self, names: Sequence[tuple[int, int]]) -> None:
        """Write what was withheld.

        Raises:
            PolicyError: something else was published under one of the names meanwhile.
        """
        for batch in resealed(self._run, self._run.open(), iter(sorted(set(names)))):
            self._sink.write([batch])
        self._sink.close()


def publish_missing(run: Run, sink: Sink) -> None:
    """Write what is committed and what the runner did not bring to the sink, if there is any."""
    there = {(one.window, one.trigger) for one in sink.published()}
    store = run.open()
    names = [n for n in committed_names(run, store) if n[0] >= store.retained_windows.first]
    lost = [name for name in names if name not in there]
    if lost:
        CatchUpOutlet(run, sink).publish(lost)


def publish_committed(
    run: Run,
    sink: Sink,
    progress: Callable[[int, int], None] | None = None,
    begin: Callable[[], None] = lambda: None,
) -> int:
    """Write every release that all shards have committed and the store still has; how many.

    Args:
        begin: called once the key is known to be the run's, before anything is written.
    """
    store = run.open()
    dropped, names = store.retained_windows.dropped, list(committed_names(run, store))
    names = [name for name in names if name[0] >= dropped]
    batches = resealed(run, store, iter(names))  # refuses another key
    begin()
    written = 0
    # Releases that a sink writes at once: their waits for the disk overlap.
    for batch in in_groups(batches, len, SINK_RELEASES, SINK_ROWS):
        sink.write(batch)
        written += sum(map(is_last, batch))
        if progress is not None:
            progress(written, len(names))
    return len(names)


def complete(run: Run, sink: Sink) -> None:
    """Publish the releases that a finished run's sink lacks, and compare all others with the store.

    Where the sink is as it was when it was last found complete, there is nothing to compare.

    Raises:
        PolicyError: something else is published under one of the names.
    """
    noted = run.open().metadata(_PUBLISHED)
    if noted is None or noted != sink.content():
        publish_committed(run, sink)
        note_complete(run, sink)


def note_complete(run: Run, sink: Sink) -> None:
    """Remember the sink's content, if the run is finished and all of its releases are there."""
    content = sink.content() if finished(run) else None
    if content is None:
        return
    store, there = run.open(), {(one.window, one.trigger) for one in sink.published()}
    dropped = store.retained_windows.dropped
    if all(name in there for name in committed_names(run, store) if name[0] >= dropped):
        store.set_metadata(_PUBLISHED, content)


def finished(run: Run) -> bool:
    """Return whether all steps of a run that has an end are committed."""
    return all_committed(run.open(), run.plan.timeline)


def all_committed(store: Store, timeline: Timeline) -> bool:
    """Return whether a store has all steps of a run that has an end."""
    return timeline.end is not None and reached(store, timeline).complete >= timeline.windows


def committed_names(run: Run, store: Store) -> Iterator[tuple[int, int]]:
    """Yield (window, trigger) of every release that all shards have committed, in public order."""
    timeline, done = run.plan.timeline, store.completed(run.shards)
    names = [(window, trigger) for window, last in done.items() for trigger in range(1, last + 1)]
    yield from sorted(names, key=lambda name: (timeline.base(name[0]) + name[1], name))
