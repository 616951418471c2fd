"""Committed releases written again, and how the run of a restored store ends.

Such a run compares with the sink whatever is there and holds back the rest.  Only when all that
is published has been committed again and found the same is the rest published.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from accounting.errors import DpstreamError, PolicyError
from dp_transforms.run import Run
from pipelines.sink_formats import name_of, release_files
from pipelines.sink_manifest import resealed
from pipelines.sinks import write_release
from state.store import Store


def diverged(error: DpstreamError, restoring: bool) -> DpstreamError:
    """Says what another release than the published one means for a restored store."""
    if not (restoring and isinstance(error, PolicyError) and error.field == "sink.path"):
        return error
    return PolicyError(
        "state.store",
        f"the restored store does not lead to what is published: the sink {error.rule}",
        "nothing was published; restore another backup, or give the open windows up with"
        " `dpstream state restore --replace --abandon`",
    )


def catch_up(run: Run, folder: Path, kind: str) -> None:
    """Publish what a restored run has committed beyond the sink, once all of that is compared.

    Raises:
        PolicyError: something is published that the store has not committed again.
    """
    store = run.open()
    done, first = store.completed(run.shards), store.marks.first
    for file in release_files(folder):
        window, trigger = name_of(file)
        if window >= first and trigger > done.get(window, 0):
            raise PolicyError(
                "state.store",
                "the restored store has not come to all that is published",
                "run it again; if this stays, the backup is of another run",
            )
    publish_committed(run, folder, kind)
    store.finish_restoring()


def publish_committed(
    run: Run,
    folder: Path,
    kind: str,
    progress: Callable[[int, int], None] | None = None,
    begin: Callable[[], None] = lambda: None,
) -> int:
    """Write every release that all shards have committed and the store still has; how many.

    Args:
        begin: called once the key is known to be the run's, before anything is written.
    """
    store = run.open()
    dropped, names = store.marks.dropped, list(committed_names(run, store))
    names = [name for name in names if name[0] >= dropped]
    batches = resealed(run, store, iter(names))  # refuses another key
    begin()
    for number, batch in enumerate(batches, 1):
        write_release(folder, kind, batch)
        if progress is not None:
            progress(number, len(names))
    return len(names)


def committed_names(run: Run, store: Store) -> Iterator[tuple[int, int]]:
    """(window, trigger) of every release that all shards have committed, in public order."""
    line, done = run.plan.timeline, store.completed(run.shards)
    last = max((line.base(window) + trigger for window, trigger in done.items()), default=0)
    for cut in range(1, last + 1):
        for window in line.windows_at(cut):
            trigger = cut - line.base(window)
            if trigger <= done.get(window, 0):
                yield window, trigger
