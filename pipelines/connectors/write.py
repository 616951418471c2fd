"""Writing of releases and dead letters.

``WriteReleases`` takes sealed releases: one `pa.RecordBatch` per (window, trigger), rows
sorted by key, possibly empty, with schema metadata ``dpstream.window`` and
``dpstream.trigger`` (decimal ASCII), and gives them to the job's `pipelines.connectors.sink.Sink`.

Dead letters (positions and reasons; for the operator only) are files with every sink, in
``dead_letter/`` beside the project file, so that who publishes the one does
not publish the other.  Nobody but their owner can read them.

The last stage counts releases that are in the sink on the public clock (`CountDelivered`).
"""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import apache_beam as beam
import pyarrow as pa
from apache_beam.typehints import no_annotations

from dpstream.accounting.limits import SINK_RELEASES, SINK_ROWS
from dpstream.accounting.plan.timeline import Timeline
from dpstream.dp_transforms.batches import DEAD_LETTER_SCHEMA
from dpstream.dp_transforms.run import Run
from dpstream.dp_transforms.telemetry import deliveries, guarded, timed
from dpstream.pipelines.connectors.inputs import wall_micros
from dpstream.pipelines.connectors.sink import Sink, name_of_release
from dpstream.pipelines.formats.encodings import encode
from dpstream.pipelines.jobs.job import Job
from dpstream.state.disk_errors import file_errors
from dpstream.state.durable import PRIVATE, put_again, put_once, sync_folders

#: Dead letters that one bundle buffers before they are written.
MAX_BUFFERED_ROWS = 1_000_000


def dead_letter_folder(job: Job) -> Path:
    """Return the folder of dead letters: ``dead_letter/JOB`` beside the project file, or as named.

    It is never the folder of the releases, which is published.
    """
    return Path(job.dead_letter)


#: Tag of the releases that the sink of a restored store withholds.
WITHHELD = "withheld"


class _WriteRelease(beam.DoFn):
    """Sealed releases -> the sink, several together; yields (window, trigger).

    With a run it asks the run's store, here on the worker, whether it is still catching up with
    what is published: as long as it is, nothing new is written, and its names go to
    ``WITHHELD``.
    """

    def __init__(self, sink: Sink, only_compare: bool = False, run: Run | None = None) -> None:
        self.sink, self.only_compare = sink, only_compare
        self._run, self._looked_up = run, False

    def start_bundle(self) -> None:
        """Begin a bundle with an empty buffer."""
        self._buffered: list[pa.RecordBatch] = []
        self._rows = 0

    @guarded("sink")
    def process(self, element: pa.RecordBatch) -> Iterator[Any]:
        """Gather; write when there is enough."""
        self._buffered.append(element)
        self._rows += element.num_rows
        if len(self._buffered) >= SINK_RELEASES or self._rows >= SINK_ROWS:
            written, withheld = self._flush()
            yield from written
            yield from (beam.pvalue.TaggedOutput(WITHHELD, name) for name in withheld)

    @guarded("sink")
    def finish_bundle(self) -> Iterator[Any]:
        """Write the rest: a bundle is done when its releases are durable."""
        windowed = beam.transforms.window.GlobalWindows.windowed_value
        written, withheld = self._flush()
        for name in written:
            yield windowed(name)
        for name in withheld:
            yield beam.pvalue.TaggedOutput(WITHHELD, windowed(name))

    def _flush(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(releases that are published now, those that are withheld)."""
        batches, self._buffered, self._rows = self._buffered, [], 0
        if not batches:
            return [], []
        if self._run is not None and (self.only_compare or not self._looked_up):
            # A store that has caught up does not fall behind again.
            self.only_compare, self._looked_up = self._run.open().restoring, True
        with timed("sink"):
            written = self.sink.write(batches, self.only_compare)
        if not self.only_compare:
            return written, []
        there = set(written)
        names = (name_of_release(batch) for batch in batches)
        return written, [name for name in names if name not in there]

    @guarded("sink")
    def teardown(self) -> None:
        """Let go of the sink's client."""
        self.sink.close()


class Outputs(NamedTuple):
    """The outputs: (window, trigger) of each release that the sink published, or withheld."""

    written: beam.PCollection
    withheld: beam.PCollection


class WriteReleases(beam.PTransform):  # type: ignore[misc]
    """Write sealed releases to a sink.

    Args:
        only_compare: of a run that ends: write none that is not there (see `Sink.write`).
        run: of a source without end, whose store may have been restored.
    """

    def __init__(self, sink: Sink, only_compare: bool = False, run: Run | None = None) -> None:
        super().__init__()
        self._dofn = _WriteRelease(sink, only_compare, run)

    @no_annotations
    def expand(self, releases: Any) -> Outputs:
        """Publish each element once, however often it comes, now or when the store has caught
        up.
        """
        name = tuple[int, int]
        names = beam.ParDo(self._dofn).with_output_types(name, **{WITHHELD: name})
        outputs = releases | names.with_outputs(WITHHELD, main="written")
        return Outputs(outputs.written, outputs[WITHHELD])


class _WriteDeadLetters(beam.DoFn):
    """Dead letters of a bundle -> one Parquet file named by its content."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def start_bundle(self) -> None:
        """Begin a bundle with an empty buffer."""
        self._buffered: list[pa.RecordBatch] = []
        self._rows = 0

    @guarded("dead_letter")
    def process(self, element: pa.RecordBatch) -> Iterable[Any]:
        """Gather; writes early only when a bundle refuses very many rows."""
        self._buffered.append(element.replace_schema_metadata(None))
        self._rows += element.num_rows
        if self._rows >= MAX_BUFFERED_ROWS:
            self.finish_bundle()
        return ()

    @guarded("dead_letter")
    def finish_bundle(self) -> None:
        """Write what the bundle refused."""
        with file_errors("dead_letter", "cannot be written"):
            write_dead_letters(Path(self.folder), self._buffered)
        self.start_bundle()


def write_dead_letters(folder: Path, batches: Iterable[pa.RecordBatch]) -> Path | None:
    """Write positions and reasons, sorted, to a file named by its content.

    Args:
        folder: see `dead_letter_folder`.
        batches: of ``DEAD_LETTER_SCHEMA``.

    Returns:
        The file, or ``None`` if there is nothing to write.  A repeated bundle changes nothing;
        one that repeats only a part adds a file, so a reader takes each row once.

    Raises:
        OSError: the file cannot be written.
    """
    table = pa.Table.from_batches(list(batches), schema=DEAD_LETTER_SCHEMA)
    if table.num_rows == 0:
        return None
    order = [(name, "ascending") for name in DEAD_LETTER_SCHEMA.names]
    data = encode(table.sort_by(order).combine_chunks().to_batches()[0], "parquet")
    path = folder / f"part-{hashlib.blake2b(data, digest_size=16).hexdigest()}.parquet"
    if not put_once(path, data, PRIVATE) and path.read_bytes() != data:
        put_again(path, data, PRIVATE)
        sync_folders([path])
    return path


class WriteDeadLetters(beam.PTransform):  # type: ignore[misc]
    """Write dead letters beside the releases, one file per bundle."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._dofn = _WriteDeadLetters(str(dead_letter_folder(job)))

    def expand(self, letters: Any) -> Any:
        """Return no output of interest: an empty collection."""
        return letters | beam.ParDo(self._dofn).with_output_types(pa.RecordBatch)


class CountDelivered(beam.PTransform):  # type: ignore[misc]
    """Counts the releases, (window, trigger), that are in the sink, and passes them on.

    Trigger times after this transform was made are the live ones.

    Args:
        timeline: the plan's time axis.
    """

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self._count = _Count(timeline, wall_micros())

    def expand(self, names: Any) -> Any:
        """Return one ParDo."""
        return names | beam.ParDo(self._count).with_output_types(tuple[int, int])


class _Count(beam.DoFn):
    """Tells telemetry of a release; the wall clock decides nothing but a latency."""

    def __init__(self, timeline: Timeline, began: int) -> None:
        self._timeline, self._began = timeline, began

    def setup(self) -> None:
        """What is live; a worker may be set up when the first release is there already."""
        deliveries.live_from(self._began)

    @guarded("delivered")
    def process(self, element: tuple[int, int]) -> list[tuple[int, int]]:
        """One release."""
        window, trigger = element
        deliveries.delivered(
            self._timeline.instant_of(self._timeline.base(window) + trigger), wall_micros()
        )
        return [element]
