"""Stage 1 as a Beam pipeline: rows go to the shard of their unit, and each shard is processed once.

    pieces of files -> rows -> (shard of the unit, rows) -> one shuffle -> `Work` of each shard

A row whose unit is found by a key is first joined with the row that owns it, in a shuffle by that
key.  Shuffles use keyed hashes of units and of keys; no released byte depends on the number of
shards.  Workers get a reference to the secret, never the secret, and write files (`work`): the
pipeline itself outputs only the numbers of finished shards.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import apache_beam as beam
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.errors import required
from dpstream.accounting.query.bounds import BoundsDesign
from dpstream.dp_transforms.batches import split_by_shard
from dpstream.dp_transforms.beam.workers import Keyed, Tasked
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.dp_transforms.one_shot import aggregated
from dpstream.dp_transforms.one_shot.groups import keyed
from dpstream.dp_transforms.telemetry import guarded
from dpstream.pipelines.sql.work import KINDS, Work, place_of, write_counts, write_sums
from dpstream.pipelines.tables.catalog import Catalog, Table
from dpstream.pipelines.tables.engine import Engine
from dpstream.pipelines.tables.files import Piece
from dpstream.state.idtable import shard_of
from dpstream.state.numbers import arrow_numbers, values_of

#: Rows of a batch between stages.
BATCH_ROWS = 50_000
#: Columns on the way; no column of a table has a colon in its name.
_SHARD, _ID = "dpstream:shard", "dpstream:id"
#: (shard or bucket, (number of a table or side, rows)).
Routed = tuple[int, tuple[int, pa.RecordBatch]]


class Task(NamedTuple):
    """The task of the workers; public, without the secret.

    Attributes:
        work: the work of each shard.
        design: of the histograms, if the task counts histograms.
        catalog: the tables that are read, without a secret and without databases.
        columns: for each private table the columns that are needed; tables that own others come
            first.
        weights: selection weights of a unit of 1, 2, .. groups (``Selection.weights``).
        shards: number of shards.
        folder: the folder that workers write to.
        keys: the reference to the secret.
    """

    work: Work
    design: BoundsDesign | None
    catalog: Catalog
    columns: dict[str, tuple[str, ...]]
    weights: tuple[int, ...]
    shards: int
    folder: str
    keys: SecretSource


def build(pipeline: beam.Pipeline, task: Task, pieces: Sequence[Piece]) -> beam.PCollection:
    """Build the pipeline, which outputs the numbers of the finished shards."""
    owned: dict[str, beam.PCollection] = {}
    routed = [
        pipeline
        | "Shards" >> beam.Create(list(range(task.shards)))
        | "Begin" >> beam.ParDo(Begin(len(task.columns))).with_output_types(Routed)
    ]
    for number, name in enumerate(task.columns):
        mine = [msgspec.json.encode(piece).decode() for piece in pieces if piece.table == name]
        rows = (
            pipeline
            | f"Pieces{number}" >> beam.Create(mine)
            | f"Spread{number}" >> beam.Reshuffle()
            | f"Read{number}" >> beam.ParDo(Read(task)).with_output_types(pa.RecordBatch)
        )
        owned[name] = _owned(task, name, number, rows, owned)
        routed.append(
            owned[name]
            | f"ToShard{number}" >> beam.ParDo(ToShard(task, number)).with_output_types(Routed)
        )
    return (
        routed
        | "All" >> beam.Flatten()
        | "ByShard" >> beam.GroupByKey()
        | "Work" >> beam.ParDo(DoWork(task)).with_output_types(int)
    )


def _owned(
    task: Task, name: str, number: int, rows: Any, owned: dict[str, beam.PCollection]
) -> beam.PCollection:
    """Return rows with the shard of their unit."""
    table = task.catalog.tables[name]
    column = unit_of(table)
    if column is not None:
        own = Own(task, column)
        return rows | f"Own{number}" >> beam.ParDo(own).with_output_types(pa.RecordBatch)
    via = required(table.via, "the table has a path to its unit")
    pairs = sorted((theirs, mine) for mine, theirs in via.on)
    sides = [
        (owned[via.table], via.table, tuple(theirs for theirs, _ in pairs)),
        (rows, name, tuple(mine for _, mine in pairs)),
    ]
    met = [
        side
        | f"Key{number}{i}" >> beam.ParDo(ToKey(task, i, side_table, key)).with_output_types(Routed)
        for i, (side, side_table, key) in enumerate(sides)
    ]
    return (
        met
        | f"Both{number}" >> beam.Flatten()
        | f"ByKey{number}" >> beam.GroupByKey()
        | f"Owners{number}" >> beam.ParDo(Owners()).with_output_types(pa.RecordBatch)
    )


def unit_of(table: Table) -> str | None:
    """Return the table's own column with its unit; ``None`` if it has none."""
    return next((column for column in table.units if column in table.columns), None)


class Begin(beam.DoFn):
    """Emits an element for every shard, so that each shard writes its file."""

    def __init__(self, number: int) -> None:
        self._number = number

    def process(self, shard: int) -> Iterator[Routed]:
        """Yield an empty batch, of no table."""
        empty = pa.RecordBatch.from_arrays([arrow_numbers(np.zeros(0, np.int64))], ["nothing"])
        yield shard, (self._number, empty)


class Read(Tasked[Task]):
    """Reads the rows of a piece of a table, as statements see them."""

    @guarded("query")
    def process(self, encoded: str) -> Iterator[pa.RecordBatch]:
        """Yield the needed columns of the piece."""
        piece = msgspec.json.decode(encoded, type=Piece)
        columns = ", ".join(f'"{name}"' for name in self._task.columns[piece.table])
        with Engine(self._task.catalog, [piece.table], piece=piece) as engine:
            table = engine.run(f'SELECT {columns} FROM "{piece.table}"')
        yield from table.to_batches(max_chunksize=BATCH_ROWS)


class Own(Keyed[Task]):
    """Adds the shard to rows that have their unit; drops rows without a unit."""

    def __init__(self, task: Task, column: str) -> None:
        super().__init__(task)
        self._column = column

    @guarded("query")
    def process(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Compute the shard from the keyed id of the unit."""
        rows = rows.filter(pc.is_valid(rows.column(self._column)))
        if rows.num_rows:
            unit = self._task.catalog.unit.type
            ids = keyed(self._ring.unit, [unit], [rows.column(self._column)])
            shard = shard_of(ids, self._task.shards).astype(np.int64)
            yield rows.append_column(_SHARD, arrow_numbers(shard))


class ToKey(Keyed[Task]):
    """Routes rows by a key that they share: owners (side 0) and rows (side 1)."""

    def __init__(self, task: Task, side: int, table: str, columns: tuple[str, ...]) -> None:
        super().__init__(task)
        types = task.catalog.types[table]
        self._side, self._columns = side, columns
        self._kinds = [KINDS[types[column]] for column in columns]

    @guarded("query")
    def process(self, rows: pa.RecordBatch) -> Iterator[Routed]:
        """Route rows by the keyed id of the key; a key with a NULL matches nothing."""
        for column in self._columns:
            rows = rows.filter(pc.is_valid(rows.column(column)))
        if not rows.num_rows:
            return
        ids = keyed(self._ring.key, self._kinds, [rows.column(c) for c in self._columns])
        if self._side == 0:
            rows = rows.select([_SHARD])
        packed = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(16), len(ids), [None, pa.py_buffer(np.ascontiguousarray(ids))]
        )
        bucket = shard_of(ids, self._task.shards).astype(np.int64)
        for number, batch in split_by_shard(
            rows.append_column(_ID, packed), bucket, self._task.shards
        ):
            yield number, (self._side, batch)


class Owners(beam.DoFn):
    """Adds to rows the shard of the row that owns them; drops rows without an owner."""

    @guarded("query")
    def process(self, met: tuple[int, Iterable[tuple[int, pa.RecordBatch]]]) -> Iterator[Any]:
        """Use the one row with the same key."""
        sides: tuple[list[pa.RecordBatch], list[pa.RecordBatch]] = [], []
        for side, batch in met[1]:
            sides[side].append(batch)
        if not sides[0]:
            return
        owners = pa.Table.from_batches(sides[0]).combine_chunks()
        owner_ids = owners.column(_ID).combine_chunks()
        for rows in sides[1]:
            place = pc.index_in(rows.column(_ID), value_set=owner_ids)
            there = pc.is_valid(place)
            shard = owners.column(_SHARD).take(place.filter(there)).combine_chunks()
            owned_rows = rows.drop_columns([_ID]).filter(there)
            if owned_rows.num_rows:
                yield owned_rows.append_column(_SHARD, shard)


class ToShard(beam.DoFn):
    """Routes the rows of a table to their shard."""

    def __init__(self, task: Task, number: int) -> None:
        self._shards, self._number = task.shards, number

    @guarded("query")
    def process(self, rows: pa.RecordBatch) -> Iterator[Routed]:
        """Route rows by the number of their shard."""
        shard = values_of(rows.column(_SHARD))
        for number, batch in split_by_shard(rows.drop_columns([_SHARD]), shard, self._shards):
            yield number, (self._number, batch)


class DoWork(Keyed[Task]):
    """Computes stage 1 and the bounds of a shard's units, and their sums by group."""

    @guarded("query")
    def process(self, met: tuple[int, Iterable[tuple[int, pa.RecordBatch]]]) -> Iterator[int]:
        """Write the sums to a file, then yield the number of the shard."""
        task, (shard, batches) = self._task, met
        parts: list[list[pa.RecordBatch]] = [[] for _ in range(len(task.columns) + 1)]
        for number, batch in batches:
            parts[number].append(batch)
        rows = {
            name: pa.Table.from_batches(chunks) if chunks else None
            for name, chunks in zip(task.columns, parts, strict=False)
        }
        del parts
        with Engine(task.catalog, task.catalog.tables, rows=rows) as engine:
            groups = task.work.initial_groups(engine, self._ring)
            unit_rows = engine.run(task.work.stage_one())
        del rows
        place = place_of(Path(task.folder), shard)
        if task.design is not None:
            write_counts(place, task.work.counted(unit_rows, groups, self._ring, task.design))
        else:
            partials = task.work.partials(unit_rows, groups, self._ring)
            del unit_rows
            bounded_rows = task.work.bounded(partials, self._ring)
            write_sums(
                place, groups, aggregated(bounded_rows, len(groups.ids), task.weights), bounded_rows
            )
        yield shard
