"""The answer of a batch on a runner: a bounded Beam pipeline, the same bytes as in one process.

A batch is a question with cells.  It is decided and charged as a whole (all or nothing, a point
pays once) before anything of this module runs; then the sums of all cells are computed, noise is
drawn for each, and the table is committed.  A draw that fails, or is interrupted, has released
nothing: the same question continues under its run id, at no charge, here or elsewhere.

    parts of the table -> exact sums by shard of cells -> one shuffle -> digest of all sums
        -> one shuffle -> noise of each shard -> one shuffle -> the released table, a file of the
        draft folder

Records are those of the table's parts: whole coordinates since they were loaded.  A part's sums
are combined before they are shuffled.  Every shard has an element of its own, so that cells
without a record are released like the others.  Noise is named by run, question and cell, so that
any worker draws the same, and the table is made of all cells at once: the bytes are those of one
process.  Workers get a reference to the secret, never the secret.

Of the engine's own stages it uses the coder of batches, ``split_by_shard``, the reference to the
secret, the exact one-shot draws, the estimates of queries, and the guard of errors.  It does not
use three, each for a reason: the reader of records, because a table's records were checked and
placed in the space when they were written; BOUND, because one record is the unit, so that nothing
about it must be remembered; RELEASE, because there is one answer, not one for each window and
trigger time.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import apache_beam as beam
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import RunError
from dpstream.accounting.regions.space import Space
from dpstream.accounting.sessions.aggregates import Needs, Question
from dpstream.accounting.sessions.calibration import calibrated
from dpstream.accounting.sessions.table import SessionTable
from dpstream.dp_transforms.beam.workers import Keyed, Tasked
from dpstream.dp_transforms.noise.inputs import combined
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.dp_transforms.session import (
    Totals,
    encoded,
    inputs_of,
    measured,
    nothing,
    released,
    tallied,
)
from dpstream.dp_transforms.session.totals import (
    columns_of,
    empty,
    gathered,
    joined,
    merged,
    packed,
    routed,
    shards_of,
)
from dpstream.dp_transforms.telemetry import guarded
from dpstream.pipelines.ask.draft import File, put
from dpstream.pipelines.connectors.folder.store import Folder
from dpstream.pipelines.runners.bounded import Runner, run_to_end
from dpstream.pipelines.session.records.manifest import Part, digest, read_manifest
from dpstream.pipelines.session.records.parts import USABLE, damaged, reading
from dpstream.state.disk_errors import file_errors
from dpstream.state.ledger.events import packed as packed_boxes
from dpstream.state.ledger.events import unpacked
from dpstream.state.locks import private_folder

ANSWER = "answer.arrow"
#: How the digest of a shard travels.
_DIGEST = pa.schema([("digest", pa.binary())])
#: (shard of cells, sums).
Routed = tuple[int, pa.RecordBatch]


class Task(NamedTuple):
    """The task of the workers; public, without the secret.

    Attributes:
        table: the table's public model.
        source: folder or URL of its parts.
        question: the question that was charged, in its canonical form.
        read: the boxes of its charge, packed.
        run_id: of the charge.
        folder: of the draft, or a URL.
        shards: number of shards of cells.
        keys: the reference to the secret.
    """

    table: SessionTable
    source: str
    question: Question
    read: str
    run_id: str
    folder: str
    shards: int
    keys: SecretSource

    @property
    def boxes(self) -> Int64:
        """Return (m, d, 2) the boxes that are read."""
        return unpacked(self.read)

    @property
    def needs(self) -> Needs:
        """Return the sums that the question needs of each cell."""
        return self.question.needs(self.table.space, self.boxes)

    def cells_of(self, shard: int) -> tuple[int, int]:
        """Return the first cell of a shard, and the one after its last."""
        first, last = shards_of(self.question.cells.count, self.shards)[shard : shard + 2].tolist()
        return first, last

    def totals_of(self, routed: Routed) -> tuple[Totals, int]:
        """Return the totals of a shard's cells, and the number of the first."""
        first, last = self.cells_of(routed[0])
        return gathered([routed[1]], first, last, self.needs), first


def build(pipeline: beam.Pipeline, task: Task, parts: Sequence[Part]) -> beam.PCollection:
    """Build the pipeline, which outputs the name of the answer's file."""
    every = (
        pipeline
        | "Shards" >> beam.Create(list(range(task.shards)))
        | "Begin" >> beam.Map(lambda shard: (shard, empty(task.needs))).with_output_types(Routed)
    )
    sums = (
        pipeline
        | "Parts" >> beam.Create([msgspec.json.encode(part).decode() for part in parts])
        | "Spread" >> beam.Reshuffle()
        | "Tally" >> beam.ParDo(Tally(task)).with_output_types(Routed)
    )
    totals = (
        [every, sums]
        | "All" >> beam.Flatten()
        | "ByShard" >> beam.GroupByKey()
        | "Gather" >> beam.ParDo(Gather(task)).with_output_types(Routed)
    )
    digests = totals | "Digest" >> beam.ParDo(Digest(task)).with_output_types(Routed)
    return (
        [totals, digests]
        | "WithDigests" >> beam.Flatten()
        | "Beside" >> beam.GroupByKey()
        | "Measure" >> beam.ParDo(Measure(task)).with_output_types(tuple[int, Routed])
        | "Together" >> beam.GroupByKey()
        | "Release" >> beam.ParDo(Release(task)).with_output_types(str)
    )


class Tally(Tasked[Task]):
    """Computes exact sums of a part, by shard."""

    @guarded("records")
    def process(self, part: str) -> Iterator[Routed]:
        """Yield rows of each shard in which the part has a record."""
        totals = totals_of(self._task, msgspec.json.decode(part, type=Part))
        yield from routed(totals, self._task.shards)


def totals_of(task: Task, part: Part) -> Totals:
    """Return the sums of the records of a part.

    Raises:
        RunError: the part cannot be read, or differs from what was written.
    """
    space, cells, boxes = task.table.space, task.question.cells, task.boxes
    needs = task.question.needs(space, boxes)
    names = columns_of(space, boxes, cells, needs)
    columns = [f"x{space.place(name)}" for name in names]
    with (
        file_errors("table.coordinates", "cannot be read"),
        Folder(task.source).stream(part.name) as file,
    ):
        content = file.read()
    if digest(content) != part.digest:
        raise damaged()
    totals = nothing(cells.count, needs)
    file_ = pq.ParquetFile(pa.BufferReader(content))
    for group in range(file_.num_row_groups):
        rows = file_.read_row_group(group, columns=[*columns, USABLE], use_threads=False)
        at = {
            name: rows.column(column).to_numpy().astype(np.int64)
            for name, column in zip(names, columns, strict=True)
        }
        usable = rows.column(USABLE).to_numpy()
        totals = totals.plus(tallied(space, boxes, cells, needs, at, usable))
    return totals


class Gather(Tasked[Task]):
    """Adds up the parts' sums of a shard of cells."""

    @guarded("records")
    def process(self, met: tuple[int, Iterable[pa.RecordBatch]]) -> Iterator[Routed]:
        """Yield the shard's rows in one batch."""
        yield met[0], merged(met[1], *self._task.cells_of(met[0]), self._task.needs)


class Digest(Keyed[Task]):
    """Computes the digest of a shard's totals, for the name of the noise of every shard.

    It is passed on by the shuffle: as a side input it failed on Flink (ClassCastException).
    """

    @guarded("release")
    def process(self, routed: Routed) -> Iterator[Routed]:
        """Yield the keyed digest of all numbers that noise is added to."""
        totals, first = self._task.totals_of(routed)
        column = pa.array([inputs_of(totals, self._ring, first)], pa.binary())
        for shard in range(self._task.shards):
            yield shard, pa.RecordBatch.from_arrays([column], schema=_DIGEST)


class Measure(Keyed[Task]):
    """Draws the noise of a shard of cells."""

    @guarded("release")
    def process(self, met: tuple[int, Iterable[pa.RecordBatch]]) -> Iterator[tuple[int, Routed]]:
        """Yield measured sums of its cells; they are public.

        Raises:
            RunError: the sums of the shard, or a digest, are missing.
        """
        task, batches = self._task, list(met[1])
        digests = [batch.column(0)[0].as_py() for batch in batches if batch.schema == _DIGEST]
        sums = [batch for batch in batches if batch.schema != _DIGEST]
        if len(digests) != task.shards or len(sums) != 1:
            raise RunError("runner", "has not handed over all cells", "run again")
        totals, first = task.totals_of((met[0], sums[0]))
        paid = task.table.space, task.question, task.boxes
        noisy = measured(*paid, totals, self._ring, task.run_id, combined(digests), first)
        yield 0, (met[0], packed(noisy))


class Release(Tasked[Task]):
    """Writes the released table of all cells."""

    @guarded("release")
    def process(self, met: tuple[int, Iterable[Routed]]) -> Iterator[str]:
        """Write the table, then yield the file's name.

        Raises:
            RunError: a shard is missing.
        """
        task, shards = self._task, list(met[1])
        if sorted(shard for shard, _ in shards) != list(range(task.shards)):
            raise RunError("runner", "has not handed over all cells", "run again")
        space, question, boxes = task.table.space, task.question, task.boxes
        parts = [len(measures.each[0].noises) for measures in calibrated(space, question, boxes)]
        table = released(space, question, boxes, joined(shards, parts))
        put(task.folder, File(ANSWER, encoded(table)))
        yield ANSWER


#: Draws of a shard: a second of a core, and some megabytes.
_DRAWS = 1 << 20


def shards_for(space: Space, question: Question, read: Int64, parallelism: int) -> int:
    """Return the number of shards of the cells; no byte depends on it."""
    leaves = sum(tree.size for tree in question.needs(space, read).leaves)
    draws = question.cells.count * (2 * leaves + 2 * len(question.aggregates))
    return min(question.cells.count, max(parallelism, 1 + draws // _DRAWS))


def spread(
    runner: Runner,
    beside: Path,
    folder: Path,
    table: SessionTable,
    question: Question,
    read: Int64,
    keys: SecretSource,
    run_id: str,
) -> pa.Table:
    """Draw the answer by a runner's workers.

    Args:
        question: in its canonical form.
        beside: a folder that workers share, for their results.
        folder: folder of the table.
        read: (m, d, 2) boxes of the charge; run_id: its own.
        keys: the reference to the secret, bound to the run (``SecretSource.of_run``).

    Raises:
        DpstreamError: the pipeline failed.
    """
    shards = shards_for(table.space, question, read, runner.parallelism)
    with private_folder(beside, "account.path") as draft, reading(folder):
        parts = read_manifest(folder, table).usable()
        source, place = str(folder.resolve()), str(draft)
        task = Task(table, source, question, packed_boxes(read), run_id, place, shards, keys)
        run_to_end(
            runner,
            run_id,
            lambda pipeline: build(pipeline, task, parts),
            (draft / ANSWER).exists,
            lambda: [damaged()],
        )
        with pa.ipc.open_stream((draft / ANSWER).read_bytes()) as reader:
            return reader.read_all()
