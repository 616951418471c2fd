"""Committed releases written again, and how the run of a restored store ends.

Such a run compares with the sink whatever is there and holds back the rest.  Only when all that
is published has been committed again and found the same is the rest published: at the end of a
bounded run (`catch_up`), in the midst of one without end (`Catching`, for DELIVERED).
"""

from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa

from dpstream.accounting.errors import DpstreamError, PolicyError
from dpstream.accounting.limits import SINK_RELEASES, SINK_ROWS
from dpstream.dp_transforms.run import Run
from dpstream.pipelines.connectors.run_manifest import resealed
from dpstream.pipelines.connectors.sink import ReadableSink, Sink, releases_of, unsealed_of
from dpstream.state.retention import reached
from dpstream.state.store import Store


def diverged(error: DpstreamError, sink: Sink, restoring: bool) -> DpstreamError:
    """Says what another release than the published one means for a restored store."""
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
    published = [(one.window, one.trigger) for one in releases_of(sink)]
    for window, trigger in [*published, *unsealed_of(sink)]:
        if window >= first and trigger > done.get(window, 0):
            raise PolicyError(
                "store",
                "the restored store has not come to all that is published",
                "run it again; if this stays, the backup is of another run",
            )
    publish_committed(run, sink)
    store.finish_restoring()


#: Note of a store: the content of its sink when it was last found complete.
_PUBLISHED = "published"


class Catching:
    """The sink as `dp_transforms.beam.delivery.Outlet`: used while a restored run catches up.

    Args:
        run: the run.
        sink: where its releases are.
    """

    def __init__(self, run: Run, sink: Sink) -> None:
        self._run, self._sink = run, sink
        self._last: int | None = None

    def caught_up(self, upto: int) -> bool:
        """Whether all that is published, or begun to be, lies at or before a trigger time."""
        if self._last is None or self._last <= upto:
            # Once more at the end: a worker of the store that was replaced may have gone on.
            self._last = self._look()
        return self._last <= upto

    def _look(self) -> int:
        line, first = self._run.plan.timeline, self._run.open().retained_windows.first
        names = [(one.window, one.trigger) for one in releases_of(self._sink)]
        names += unsealed_of(self._sink)
        return max((line.base(w) + trigger for w, trigger in names if w >= first), default=0)

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
    there = {(one.window, one.trigger) for one in releases_of(sink)}
    store = run.open()
    names = [n for n in committed_names(run, store) if n[0] >= store.retained_windows.first]
    lost = [name for name in names if name not in there]
    if lost:
        Catching(run, sink).publish(lost)


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
    for batch in _together(batches):
        sink.write(batch)
        written += len(batch)
        if progress is not None:
            progress(written, len(names))
    return len(names)


def complete(run: Run, sink: Sink) -> None:
    """Publish what a finished run's sink lacks, and compare all else with the store.

    Where the sink is as it was when it was last found complete, there is nothing to compare.

    Raises:
        PolicyError: something else is published under one of the names.
    """
    noted = run.open().metadata(_PUBLISHED)
    if noted is None or noted != _content(sink):
        publish_committed(run, sink)
        note_complete(run, sink)


def note_complete(run: Run, sink: Sink) -> None:
    """Remember the sink's content, if the run is finished and all of its releases are there."""
    content = _content(sink) if finished(run) else None
    if content is None:
        return
    store, there = run.open(), {(one.window, one.trigger) for one in releases_of(sink)}
    dropped = store.retained_windows.dropped
    if all(name in there for name in committed_names(run, store) if name[0] >= dropped):
        store.set_metadata(_PUBLISHED, content)


def _content(sink: Sink) -> str | None:
    return sink.content() if isinstance(sink, ReadableSink) else None


def _together(batches: Iterator[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Releases that a sink writes at once: their waits for the disk overlap."""
    held, rows = list[pa.RecordBatch](), 0
    for batch in batches:
        held.append(batch)
        rows += batch.num_rows
        if len(held) >= SINK_RELEASES or rows >= SINK_ROWS:
            yield held
            held, rows = [], 0
    if held:
        yield held


def finished(run: Run) -> bool:
    """Whether all steps of a run that has an end are committed."""
    line = run.plan.timeline
    return line.end is not None and reached(run.open(), line).complete >= line.windows


def committed_names(run: Run, store: Store) -> Iterator[tuple[int, int]]:
    """(window, trigger) of every release that all shards have committed, in public order."""
    line, done = run.plan.timeline, store.completed(run.shards)
    names = [(window, trigger) for window, last in done.items() for trigger in range(1, last + 1)]
    yield from sorted(names, key=lambda name: (line.base(name[0]) + name[1], name))
