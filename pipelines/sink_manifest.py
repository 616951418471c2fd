"""The sink's manifest: whose releases a folder holds, and whether a store is theirs.

``run.json`` names the run (as its releases are stamped), its epoch, the plan and the kind of
files: a function of plan and run alone, written once, before the first release.  A further epoch of
the run adds ``run-epoch-1.json``.  The set of published releases is the listing of the folder.
Together they are what a store is held against before anything is drawn:

* *lost*: the folder has releases or a manifest, and there is no store;
* *foreign*: the manifest names another run, plan or kind of files;
* *older*: a release is published that the store has not committed (lifted while a restored
  store replays; the sink compares each release as it is emitted again);
* *forked*: the latest release of a window differs from what the store would publish.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import pyarrow as pa

from accounting.errors import PolicyError, RunError
from dp_transforms.flow import SealFactory
from dp_transforms.release import stamped_run_id
from dp_transforms.run import Run
from pipelines.sink_formats import encode, put_once, release_files, same_content
from state.store import Store

FORMAT = 1


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose releases a folder holds.

    Attributes:
        format: version of this layout.
        run_id: as releases show it, stamps included.
        epoch: epoch of the run from which on this manifest holds.
        plan_hash: the public plan.
        kind: ``parquet``, ``csv`` or ``jsonl``.
    """

    format: int
    run_id: str
    epoch: int
    plan_hash: str
    kind: Literal["parquet", "csv", "jsonl"]


class Published(NamedTuple):
    """A release in the folder."""

    window: int
    trigger: int
    path: Path


def manifest_path(folder: Path, epoch: int = 0) -> Path:
    """Where the manifest of an epoch is."""
    return folder / ("run.json" if epoch == 0 else f"run-epoch-{epoch}.json")


def manifest_of(run: Run, kind: str) -> Manifest:
    """The manifest a run gives its sink."""
    identity = run.open().identity
    return msgspec.convert(
        {
            "format": FORMAT,
            "run_id": stamped_run_id(run.plan, identity),
            "epoch": identity.epoch,
            "plan_hash": identity.plan_hash,
            "kind": kind,
        },
        Manifest,
    )


def refuse_lost_store(folder: Path) -> None:
    """A new store must not add to releases of a run it knows nothing of."""
    if _manifests(folder) or any(release_files(folder)):
        raise PolicyError(
            "sink.path",
            "holds a run's releases, but the store is new: it was lost, moved or belongs elsewhere",
            "restore the run's store, or write this run's releases to an empty folder",
        )


def check_sink(run: Run, folder: Path, kind: str, replaying: bool = False) -> bool:
    """Refuse a store that is not the one whose releases the folder holds; draws nothing.

    Args:
        run: the run that was begun on the store.
        folder: the sink's folder.
        kind: of the files the run will write.
        replaying: a restored store may be behind its sink.

    Returns:
        Whether the store has committed everything that is published.

    Raises:
        PolicyError: foreign, older or forked.
    """
    _refuse_foreign(manifest_of(run, kind), folder)
    store, latest, caught_up = run.open(), dict[int, Published](), True
    # In this order: what another worker publishes meanwhile is committed before.
    published = list(_listing(folder))
    done, first = store.completed(run.shards), store.marks.first
    for one in published:
        if one.window < first:  # dropped from the store, or abandoned: the sink alone has it
            continue
        if one.trigger <= done.get(one.window, 0):
            latest[one.window] = one  # the listing is in order
            continue
        caught_up = False
        if not replaying:
            raise PolicyError(
                "state.store",
                "is older than its sink: releases are published that it has not committed",
                "bring back the newest store, or restore this one with `dpstream state restore`",
            )
    if latest:
        _refuse_forked(run, store, latest)
    return caught_up


def write_manifest(run: Run, folder: Path, kind: str) -> None:
    """Name the run in its sink, once; before its first release.

    Raises:
        PolicyError: the folder belongs to another run, or to other files.
        RunError: it cannot be written.
    """
    mine = manifest_of(run, kind)
    data = msgspec.json.format(msgspec.json.encode(mine), indent=2) + b"\n"
    try:
        put_once(manifest_path(folder, mine.epoch), data)
    except OSError:
        raise RunError("sink.path", "cannot be written", "check disk and permissions") from None
    _refuse_foreign(mine, folder)


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
        raise PolicyError(
            "state.store", "lost a step it says is committed", "restore it from a backup"
        )
    return rows


def _manifests(folder: Path) -> list[Path]:
    return [*folder.glob("run.json"), *sorted(folder.glob("run-epoch-*.json"))]


def published_epoch(folder: Path, run_id: str) -> int:
    """The last epoch that a manifest of the run names; -1: none does."""
    epochs = [-1]
    for path in _manifests(folder):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            found = msgspec.json.decode(path.read_bytes(), type=Manifest)
            if found.run_id.rpartition("-")[2] == run_id:
                epochs.append(found.epoch)
    return max(epochs)


def _refuse_foreign(mine: Manifest, folder: Path) -> None:
    for path in _manifests(folder):
        try:
            found: Manifest | None = msgspec.json.decode(path.read_bytes(), type=Manifest)
        except (OSError, msgspec.MsgspecError):
            found = None
        if found is None or found.format != FORMAT:
            raise PolicyError(
                "sink.path",
                "holds a manifest (run.json) that this program cannot read",
                "use the program that wrote it, or an empty folder",
            )
        if (found.run_id, found.plan_hash) != (mine.run_id, mine.plan_hash):
            raise PolicyError(
                "sink.path",
                "holds releases of another run than the store's",
                "use the store that made them, or write this run's releases to an empty folder",
            )
        if found.epoch > mine.epoch:
            raise PolicyError(
                "state.store",
                "is older than its sink: the run was restored in a later epoch since",
                "go on with the restored store",
            )
        if found.kind != mine.kind:
            raise PolicyError(
                "sink.kind",
                "is not the kind of files this folder was begun with",
                "restore the old kind, or export the others with `dpstream state releases`",
            )


def _listing(folder: Path) -> Iterator[Published]:
    """Published releases in order of (window, trigger)."""
    for path in release_files(folder):
        numbers = [part.rpartition("-")[2] for part in (path.parent.name, path.stem)]
        if not all(n.isdecimal() for n in numbers):
            raise PolicyError(
                "sink.path", "holds a file that is no release of this run", "use an empty folder"
            )
        yield Published(int(numbers[0]), int(numbers[1]), path)


def _refuse_forked(run: Run, store: Store, latest: dict[int, Published]) -> None:
    """The last published release of every window says what all before it led to."""
    names = ((one.window, one.trigger) for one in latest.values())
    for one, batch in zip(latest.values(), resealed(run, store, names), strict=True):
        kind = one.path.suffix[1:]
        if not same_content(one.path, encode(batch, kind), kind):
            raise PolicyError(
                "state.store",
                f"is a fork: release of window {one.window}, trigger {one.trigger} was published "
                "with other content",
                "go on with the store that made it, or use an empty folder and a new store",
            )
