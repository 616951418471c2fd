"""The exchange of rows: gathered over all shards, then split by the shard that processes them."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.transforms.window import GlobalWindows, TimestampedValue
from apache_beam.utils.timestamp import MAX_TIMESTAMP, Timestamp

from dpstream.accounting.arrays import Ids
from dpstream.accounting.limits import SPLIT_BUFFER_BYTES, SPLIT_BUFFER_ROWS
from dpstream.dp_transforms.batches import concat, ids_of, split_by_shard
from dpstream.dp_transforms.beam.workers import Threads, Workers
from dpstream.dp_transforms.noise.ids import key_ids
from dpstream.dp_transforms.run import Run
from dpstream.dp_transforms.telemetry import guarded, timed
from dpstream.state.idtable import shard_of

#: Rows -> the (n, 2) ids they are sent by.
IdsOf = Callable[[pa.RecordBatch], Ids]


def unit_ids() -> IdsOf:
    """Return the function that gives the ids of the units of records."""
    return lambda records: ids_of(records.column("unit"))


class KeyIds:
    """Builds, with the secret of a run, the function that gives the ids of the keys of rows."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __call__(self) -> IdsOf:
        """Read the secret on the worker."""
        plan, ring = self._run.plan, self._run.keys.ring()
        return lambda rows: key_ids(plan, ring.key, rows)


def reading_threads(threads: Threads, catch_up_limit: int | None) -> Threads:
    """Return the threads of the stages that read.

    A stream's bundles are small, and its stages work side by side: what is read next would wait for
    the shards that BOUND and RELEASE work on.

    Args:
        threads: of the stages behind; catch_up_limit: theirs, ``None`` for input that ends.
    """
    return threads if catch_up_limit is None else Threads()


class SplitByShard(beam.DoFn):
    """Routes rows to shards by their keyed id, gathering many rows before each split.

    What leaves has the least time of what was gathered: with a later one a watermark could pass
    a trigger time while rows of it are on their way.

    Args:
        make: gives, on the worker, the function from rows to the ids they are sent by.
        shards: how many there are.
        schema: of the rows.
        threads: number of threads that split batches.
    """

    def __init__(
        self,
        make: Callable[[], IdsOf],
        shards: int,
        schema: pa.Schema,
        threads: Threads = Threads(),  # noqa: B008 - immutable
    ) -> None:
        self._make, self._shards, self._schema = make, shards, schema
        self._threads = threads

    @guarded("split")
    def setup(self) -> None:
        """Make ready to split."""
        self._workers = Workers(self._make, self._threads)

    def teardown(self) -> None:
        """Destroy the key ring."""
        self.__dict__.pop("_workers", None)

    def start_bundle(self) -> None:
        """Begin a bundle with an empty buffer."""
        self._held: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0
        self._least = MAX_TIMESTAMP

    @guarded("split")
    def process(
        self,
        element: pa.RecordBatch,
        timestamp: Any = beam.DoFn.TimestampParam,
    ) -> Iterator[Any]:
        """Gather; split when there is enough."""
        self._held.append(element)
        self._rows += element.num_rows
        self._bytes += element.nbytes
        self._least = min(self._least, timestamp)
        if self._rows >= SPLIT_BUFFER_ROWS or self._bytes >= SPLIT_BUFFER_BYTES:
            self._give()
            yield from self._workers.answers(self._threads.ahead(1))

    @guarded("split")
    def finish_bundle(self) -> Iterator[beam.utils.windowed_value.WindowedValue]:
        """Split the rest; everything lives in the global window."""
        if self._held:
            self._give()
        for pair in self._workers.answers():
            yield GlobalWindows.windowed_value(pair.value, pair.timestamp)

    def _give(self) -> None:
        """Have what is gathered split."""
        work = functools.partial(self._split, self._held, self._least)
        self.start_bundle()
        self._workers.ask(work)

    def _split(
        self, held: list[pa.RecordBatch], least: Timestamp, ids: IdsOf
    ) -> Iterator[TimestampedValue]:
        with timed("split"):
            batch = concat(held, self._schema)
            held.clear()
            shard = shard_of(ids(batch), self._shards)
            parts = list(split_by_shard(batch, shard, self._shards))
        for pair in parts:
            yield TimestampedValue(pair, least)
