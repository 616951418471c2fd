"""The sink's manifest: whose releases it holds, and whether a store is theirs.

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
"""

from collections.abc import Iterator

import pyarrow as pa

from dpstream.accounting.errors import PolicyError
from dpstream.dp_transforms.beam.delivery import delivered_through
from dpstream.dp_transforms.flow import SealFactory
from dpstream.dp_transforms.release import stamped_run_id
from dpstream.dp_transforms.run import Run
from dpstream.pipelines.connectors.sink import (
    FORMAT,
    PublishedRelease,
    ReadableSink,
    RunManifest,
    Sink,
    manifests_of,
    releases_of,
    unsealed_of,
)
from dpstream.pipelines.jobs.charging import lost_store
from dpstream.pipelines.project.job_section import SinkKind
from dpstream.state.retention import reached
from dpstream.state.store import Store

#: Windows whose latest release is compared before a run: a stream of years must begin soon.
COMPARED_WINDOWS = 1_000


def manifest_of(run: Run, kind: SinkKind) -> RunManifest:
    """The manifest a run gives its sink."""
    identity = run.open().identity
    run_id = stamped_run_id(run.plan, identity)
    return RunManifest(FORMAT, run_id, identity.epoch, identity.plan_hash, kind)


def refuse_lost_store(sink: Sink) -> None:
    """A new store must not add to releases of a run it knows nothing of."""
    if isinstance(sink, ReadableSink) and sink.used():
        raise lost_store(sink.field, sink.another)


def refuse_emptied(run: Run, sink: Sink) -> None:
    """A stream without end must not go on behind releases that its sink does not have any more.

    Raises:
        PolicyError: they were delivered, and nothing was ever published here.
    """
    if not isinstance(sink, ReadableSink):
        return
    if delivered_through(run.open()) and not sink.used():
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
    _refuse_foreign(manifest_of(run, sink.kind), sink)
    store, latest, caught_up = run.open(), dict[int, PublishedRelease](), True
    # In this order: what another worker publishes meanwhile is committed before.
    published = releases_of(sink)
    line, first = run.plan.timeline, store.retained_windows.first
    done = reached(store, line)
    for one in published:
        if one.window < first:  # dropped from the store, or abandoned: the sink alone has it
            continue
        if one.trigger <= done.trigger(line, one.window):
            latest[one.window] = one  # the listing is in order
            continue
        caught_up = False
        if not replaying:
            raise PolicyError(
                "store",
                "is older than its sink: releases are published that it has not committed",
                "bring back the newest store, or restore this one with `dpstream state restore`",
            )
    if latest and isinstance(sink, ReadableSink):
        newest = sorted(latest)[-COMPARED_WINDOWS:]
        _refuse_forked(run, store, sink, {window: latest[window] for window in newest})
    if replaying:  # the sink compares these with what is committed again
        caught_up = caught_up and not any(window >= first for window, _ in unsealed_of(sink))
    return caught_up


def write_manifest(run: Run, sink: Sink) -> None:
    """Name the run in its sink, once; before its first release.

    Raises:
        PolicyError: the sink belongs to another run, or to another kind of sink.
        RunError: it cannot be written.
    """
    mine = manifest_of(run, sink.kind)
    sink.put_manifest(mine)
    _refuse_foreign(mine, sink)


def resealed(run: Run, store: Store, names: Iterator[tuple[int, int]]) -> Iterator[pa.RecordBatch]:
    """Committed releases of all shards, sealed once more: the bytes that the sink got.

    Raises:
        PolicyError: the key is not the run's (at once), or the store lacks a step it says is
            committed.
    """
    sealed = SealFactory(run)()
    return (
        sealed(window, trigger, [_part(store, window, n, trigger) for n in range(run.shards)])
        for window, trigger in names
    )


def _part(store: Store, window: int, shard: int, trigger: int) -> pa.RecordBatch:
    rows = store.committed_releases(window, shard, trigger)
    if rows is None:
        raise PolicyError("store", "lost a step it says is committed", "restore it from a backup")
    return rows


def published_epoch(sink: Sink, run_id: str) -> int:
    """The last epoch that a manifest of the run names; -1: none does."""
    named = [manifest for manifest in manifests_of(sink) if manifest is not None]
    mine = [manifest.epoch for manifest in named if manifest.run_id.rpartition("-")[2] == run_id]
    return max(mine, default=-1)


def _refuse_foreign(mine: RunManifest, sink: Sink) -> None:
    for manifest in manifests_of(sink):
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
    for one, batch in zip(latest.values(), resealed(run, store, names), strict=True):
        if not sink.same(one, batch):
            raise PolicyError(
                "store",
                f"is a fork: release of window {one.window}, trigger {one.trigger} was published "
                "with other content",
                f"go on with the store that made it, or use {sink.another} and a new store; a file"
                " that was damaged may be removed: it is written again",
            )
