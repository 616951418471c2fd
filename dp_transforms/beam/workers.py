"""Work of one stage on several threads, with results in the order of the calls.

A runner calls a stage from one thread and fires the timers of its shards one by one.  The calls of
a bundle are asked for as they come and collected when it ends: what comes out, and in which order,
does not depend on the threads.  A stage that draws or digests with the secret reads it on its
worker (``Keyed``).

**The exchange of rows.** Rows are gathered over all shards, then split by the shard that processes
them.
"""

import contextlib
import functools
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import apache_beam as beam
import pyarrow as pa
from apache_beam.transforms.window import GlobalWindows, TimestampedValue
from apache_beam.utils.timestamp import MAX_TIMESTAMP, Timestamp

from dpstream.accounting.limits import SPLIT_BUFFER_BYTES, SPLIT_BUFFER_ROWS
from dpstream.dp_transforms.batches import concat, split_by_id
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.dp_transforms.telemetry import Counts, add_counts, counted_apart, guarded, timed

Tool = TypeVar("Tool")
Task = TypeVar("Task")


class HasKeys(Protocol):
    """The task of a stage that needs the secret."""

    @property
    def keys(self) -> SecretSource:
        """The reference to the secret, bound to the run."""


NeedsKeys = TypeVar("NeedsKeys", bound=HasKeys)
_LOCK = threading.Lock()


class Threads(NamedTuple):
    """The number of threads that a stage may use, and the run.

    Attributes:
        number: of threads; 1: the runner's own.
        run_id: id of the run at whose end they are stopped; see ``stop_workers``.
    """

    number: int = 1
    run_id: str = ""

    def ahead(self, each: int) -> int:
        """Return how many calls may be under way while the next are prepared, ``each`` for a
        thread.
        """
        return each * self.number if self.number > 1 else 0


class _StoppedError(Exception):
    """The work is not wanted any more."""


def no_tool() -> None:
    """Return ``None``, as the tool of calls that need none."""


class Workers(Generic[Tool]):
    """Calls on several threads whose results come back in the order of the calls.

    With one thread a call is made when its results are asked for, on the caller's own.

    Args:
        make: gives what a call works with and no two calls use at once (a key ring's ciphers
            have buffers of their own); called once for each thread.
        threads: see ``Threads``.
    """

    def __init__(self, make: Callable[[], Tool], threads: Threads) -> None:
        self._tools: queue.SimpleQueue[Tool] = queue.SimpleQueue()
        for _ in range(threads.number):
            self._tools.put(make())
        self._pool = _pool(threads.number) if threads.number > 1 else None
        self._pending: deque[Future[tuple[list[Any], Counts]] | Callable[[Tool], Iterable[Any]]] = (
            deque()
        )
        self._stopped = threading.Event()
        with _LOCK:
            _LIVE.setdefault(threads.run_id, weakref.WeakSet()).add(self)

    def ask(self, work: Callable[[Tool], Iterable[Any]], small: bool = False) -> None:
        """Have a call made by some thread, soon; a small one by the caller's own, in its turn."""
        if self._pool is None or small:
            self._pending.append(work)
        else:
            self._pending.append(self._pool.submit(self._work, work))

    def answers(self, leave: int = 0) -> Iterator[Any]:
        """Yield the results of the calls in order; wait until at most ``leave`` of them are left.

        Raises:
            Whatever the first call raised that failed, first in the order of the calls.  Those
            after it are given up, and none of them is running any more.
        """
        least = leave if self._pool is not None else 0
        while len(self._pending) > least:
            call = self._pending.popleft()
            if not isinstance(call, Future):
                yield from self._made_here(call)
                continue
            try:
                outputs, counts = call.result()
            except BaseException:
                self._pending.append(call)
                self.stop()
                raise
            add_counts(counts)
            del call
            yield from outputs

    def _made_here(self, work: Callable[[Tool], Iterable[Any]]) -> Iterator[Any]:
        tool = self._tools.get()
        try:
            yield from work(tool)
        except BaseException:
            self.stop()
            raise
        finally:
            self._tools.put(tool)

    def stop(self) -> None:
        """Give up what is left, and wait for the calls that are running."""
        self._stopped.set()
        under_way = [call for call in self._pending if isinstance(call, Future)]
        for future in under_way:
            future.cancel()
        wait(under_way)
        self._pending.clear()

    def _work(self, work: Callable[[Tool], Iterable[Any]]) -> tuple[list[Any], Counts]:
        tool, outputs = self._tools.get(), []
        try:
            with counted_apart() as counts:
                for one in work(tool):
                    outputs.append(one)
                    if self._stopped.is_set():
                        raise _StoppedError
        finally:
            self._tools.put(tool)
        return outputs, counts


#: Of this process, by run.
_LIVE: dict[str, weakref.WeakSet[Workers[Any]]] = {}


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """The threads of this process, shared by its stages."""
    return ThreadPoolExecutor(threads, thread_name_prefix="dpstream")


def stop_workers(run_id: str) -> None:
    """Give up what threads of this process are still asked for by a run that has ended."""
    with _LOCK:
        live = list(_LIVE.pop(run_id, ()))
    for workers in live:
        with contextlib.suppress(Exception):
            workers.stop()


class Tasked(beam.DoFn, Generic[Task]):
    """A stage with the public task that every worker of it has."""

    def __init__(self, task: Task) -> None:
        self._task = task


class Keyed(Tasked[NeedsKeys]):
    """Reads the secret when a worker begins, and destroys its key ring when the worker ends.

    Only the reference to the secret is pickled, with the task, never the secret.
    """

    @guarded("release")
    def setup(self) -> None:
        """Read the secret."""
        self._ring = self._task.keys.ring()

    def teardown(self) -> None:
        """Destroy the key ring."""
        self.__dict__.pop("_ring", None)


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
        column: of the 128-bit keyed ids that rows are sent by.
        shards: how many there are.
        schema: of the rows.
        threads: number of threads that split batches.
    """

    def __init__(
        self,
        column: str,
        shards: int,
        schema: pa.Schema,
        threads: Threads = Threads(),  # noqa: B008 - immutable
    ) -> None:
        self._column, self._shards, self._schema = column, shards, schema
        self._threads = threads

    @guarded("split")
    def setup(self) -> None:
        """Make ready to split."""
        self._workers = Workers(no_tool, self._threads)

    def teardown(self) -> None:
        """Let the threads go."""
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
        self, held: list[pa.RecordBatch], least: Timestamp, _: None
    ) -> Iterator[TimestampedValue]:
        with timed("split"):
            batch = concat(held, self._schema)
            held.clear()
            parts = list(split_by_id(batch, self._column, self._shards))
        for pair in parts:
            yield TimestampedValue(pair, least)
