"""An execution as a Beam pipeline: pieces are counted, counts go to their shard, shards are drawn.

    pieces of the file -> counted (group and leaf, count) -> one shuffle -> summed
        -> digest of all counts -> measured and published

Exact counts of a piece are summed before they are shuffled.  Every part of every table has an
element of its own, so that parts without a record are published like the others.  Workers get the
reference to the secret, never the secret, and write files of the draft folder; the pipeline itself
has no output but the names and digests of the files that are there.

Of the engine's own stages it takes the coder of batches, the reference to the secret, the table
sampler, dead letters, durable files and the one way out for errors.  Three it does not take, each
for a reason: BOUND, because a record's groups follow from the record alone, so there is nothing to
remember of a unit; ``split_by_shard``, because counts are sorted by group and a shard is a slice of
them; RELEASE, because a table is there once, not by window and trigger.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import apache_beam as beam
import msgspec
import pyarrow as pa

from dpstream.dp_transforms.batches import numpy_view
from dpstream.dp_transforms.beam.workers import Keyed, Tasked
from dpstream.dp_transforms.noise.inputs import combined
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.dp_transforms.tabulation.expand import NONE, Pairs, summed
from dpstream.dp_transforms.telemetry import count, guarded
from dpstream.pipelines.ask.draft import write_file
from dpstream.pipelines.tabulation.inputs import Inputs, prepared
from dpstream.pipelines.tabulation.private import Piece, read_one
from dpstream.pipelines.tabulation.work import (
    counted,
    counts_digest,
    finished,
    pairs_of,
    parts_of,
)

#: (number of a part, pairs of keys and counts).
Routed = tuple[int, pa.RecordBatch]
_SCHEMA = pa.schema([("key", pa.int64()), ("count", pa.int64())])
_LETTERS = functools.partial(count, "operator_dead_letters")


class Task(NamedTuple):
    """The parameters of the workers; public, without the secret.

    Attributes:
        inputs: where the files are.
        run_id: run id of the charge.
        folder: the draft.
        letters: folder of refused records, ``None``: they refuse the file.
        keys: where a worker finds the secret.
    """

    inputs: Inputs
    run_id: str
    folder: str
    letters: str | None
    keys: SecretSource


def build(
    pipeline: beam.Pipeline, task: Task, pieces: Sequence[Piece], parts: int
) -> beam.PCollection:
    """Return the pipeline; its output are the files of each part that is done."""
    every = (
        pipeline
        | "Parts" >> beam.Create(list(range(parts)))
        | "Begin" >> beam.Map(lambda part: (part, _batch(NONE))).with_output_types(Routed)
    )
    counts = (
        pipeline
        | "Pieces" >> beam.Create([msgspec.json.encode(piece).decode() for piece in pieces])
        | "Spread" >> beam.Reshuffle()
        | "Count" >> beam.ParDo(Count(task)).with_output_types(Routed)
    )
    summed_parts = (
        [every, counts]
        | "All" >> beam.Flatten()
        | "ByPart" >> beam.GroupByKey()
        | "Sum" >> beam.ParDo(Sum()).with_output_types(Routed)
    )
    digest = (
        summed_parts
        | "Digest" >> beam.ParDo(Digest(task)).with_output_types(tuple[int, bytes])
        | "Digests" >> beam.GroupByKey()
        | "DigestOfAll" >> beam.Map(lambda met: combined(met[1])).with_output_types(bytes)
    )
    return summed_parts | "Publish" >> beam.ParDo(
        Publish(task), beam.pvalue.AsSingleton(digest)
    ).with_output_types(str)


def _batch(pairs: Pairs) -> pa.RecordBatch:
    columns = [pa.array(pairs.keys), pa.array(pairs.counts)]
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)


def _pairs(batch: pa.RecordBatch) -> Pairs:
    return Pairs(*(numpy_view(column) for column in batch))


class Count(Tasked[Task]):
    """Counts a piece exactly, by part."""

    @guarded("records")
    def process(self, encoded: str) -> Iterator[Routed]:
        """Yield a pair for each part of which the piece has a record."""
        piece, setup = msgspec.json.decode(encoded, type=Piece), prepared(self._task.inputs)
        letters = self._task.letters
        folder = None if letters is None else Path(letters)
        tally = counted(setup, read_one(piece, setup.lookup, folder, _LETTERS))
        for part in parts_of(setup):
            pairs = pairs_of(setup, tally, part)
            if len(pairs.keys):
                yield part.number, _batch(pairs)


class Sum(beam.DoFn):
    """Adds up the pieces of a part."""

    @guarded("records")
    def process(self, met: tuple[int, Iterable[pa.RecordBatch]]) -> Iterator[Routed]:
        """Yield the part's pairs in one batch."""
        yield met[0], _batch(summed([_pairs(batch) for batch in met[1]]))


class Digest(Keyed[Task]):
    """Computes the digest of a part's counts, for the name of the noise."""

    @guarded("release")
    def process(self, routed: Routed) -> Iterator[tuple[int, bytes]]:
        """Yield Keyed, and of all numbers that noise is added to."""
        setup = prepared(self._task.inputs)
        part = parts_of(setup)[routed[0]]
        yield 0, counts_digest(setup, part, _pairs(routed[1]), self._ring)


class Publish(Keyed[Task]):
    """Measures a part and writes its files."""

    @guarded("release")
    def process(self, routed: Routed, inputs: bytes) -> Iterator[str]:
        """Write the files, and yield their names."""
        task, (number, batch) = self._task, routed
        setup = prepared(task.inputs)
        part, pairs = parts_of(setup)[number], _pairs(batch)
        for file in finished(setup, part, pairs, self._ring, task.run_id, inputs):
            write_file(Path(task.folder), file)
            yield file.name
