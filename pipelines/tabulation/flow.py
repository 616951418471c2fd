"""An execution as a Beam pipeline: pieces are counted, counts go to their shard, shards are drawn.

    pieces of the file -> counted (group and leaf, count) -> one shuffle -> measured and published

Exact counts of a piece are summed before they are shuffled.  Every part of every table has an
element of its own, so that parts without a record are published like the others.  Workers get the
place of the key, never the key, and write files of the draft folder; the pipeline itself has no
output but the numbers of parts that are done.

Of the engine's own stages it takes the coder of batches, the place of the key, the table sampler,
dead letters, durable files and the one way out for errors.  Three it does not take, each for a
reason: BOUND, because a record's groups follow from the record alone, so there is nothing to
remember of a unit; ``split_by_shard``, because counts are sorted by group and a shard is a slice of
them; RELEASE, because a table is there once, not by window and trigger.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import apache_beam as beam
import msgspec
import numpy as np
import pyarrow as pa

from dpstream.dp_transforms.batches import numbers
from dpstream.dp_transforms.run import KeySource
from dpstream.dp_transforms.tabulation.pairs import Pairs, summed
from dpstream.dp_transforms.telemetry import guarded
from dpstream.pipelines.tabulation.draft import write_file
from dpstream.pipelines.tabulation.inputs import Inputs, prepared
from dpstream.pipelines.tabulation.pieces import Piece
from dpstream.pipelines.tabulation.reading import read_one
from dpstream.pipelines.tabulation.work import counted, finished, pairs_of, parts_of

#: (number of a part, pairs of keys and counts).
Routed = tuple[int, pa.RecordBatch]
_SCHEMA = pa.schema([("key", pa.int64()), ("count", pa.int64())])


class Task(NamedTuple):
    """What the workers are told; public, without the key.

    Attributes:
        inputs: where the files are.
        run_id: that was charged.
        folder: the draft.
        letters: folder of refused records, ``None``: they refuse the file.
        keys: where a worker finds the key.
    """

    inputs: Inputs
    run_id: str
    folder: str
    letters: str | None
    keys: KeySource


def build(
    pipeline: beam.Pipeline, task: Task, pieces: Sequence[Piece], parts: int
) -> beam.PCollection:
    """The pipeline; its output are the numbers of the parts that are done."""
    every = (
        pipeline
        | "Parts" >> beam.Create(list(range(parts)))
        | "Begin" >> beam.ParDo(Begin()).with_output_types(Routed)
    )
    counts = (
        pipeline
        | "Pieces" >> beam.Create([msgspec.json.encode(piece).decode() for piece in pieces])
        | "Spread" >> beam.Reshuffle()
        | "Count" >> beam.ParDo(Count(task)).with_output_types(Routed)
    )
    return (
        [every, counts]
        | "All" >> beam.Flatten()
        | "ByPart" >> beam.GroupByKey()
        | "Publish" >> beam.ParDo(Publish(task)).with_output_types(int)
    )


def _batch(pairs: Pairs) -> pa.RecordBatch:
    columns = [pa.array(pairs.keys), pa.array(pairs.counts)]
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)


class Begin(beam.DoFn):
    """Something for every part."""

    def process(self, part: int) -> Iterator[Routed]:
        """No counts."""
        none = np.zeros(0, np.int64)
        yield part, _batch(Pairs(none, none))


class Count(beam.DoFn):
    """Exact counts of a piece, by part."""

    def __init__(self, task: Task) -> None:
        self._task = task

    @guarded("records")
    def process(self, encoded: str) -> Iterator[Routed]:
        """Pairs of each part that the piece has a record of."""
        piece, found = msgspec.json.decode(encoded, type=Piece), prepared(self._task.inputs)
        letters = self._task.letters
        folder = None if letters is None else Path(letters)
        tally = counted(found, read_one(piece, found.lookup, folder))
        for part in parts_of(found):
            pairs = pairs_of(found, tally, part)
            if len(pairs.keys):
                yield part.number, _batch(pairs)


class Publish(beam.DoFn):
    """Measures a part and writes its files."""

    def __init__(self, task: Task) -> None:
        self._task = task

    @guarded("release")
    def setup(self) -> None:
        """Read the key."""
        self._ring = self._task.keys.ring()

    def teardown(self) -> None:
        """Let go of the key."""
        self.__dict__.pop("_ring", None)

    @guarded("release")
    def process(self, met: tuple[int, Iterable[pa.RecordBatch]]) -> Iterator[int]:
        """Write the files; the number of the part says that they are there."""
        task, (number, batches) = self._task, met
        found = prepared(task.inputs)
        pairs = summed([Pairs(*(numbers(column) for column in batch)) for batch in batches])
        for file in finished(found, parts_of(found)[number], pairs, self._ring, task.run_id):
            write_file(Path(task.folder), file)
        yield number
