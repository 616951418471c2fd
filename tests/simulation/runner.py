"""What a runner does for the stages: bags, timers, bundles that are kept whole or not at all.

The pure functions of BOUND and RELEASE run as work of ``Process``es, each with a store handle of
its own.  ``State`` is what the runner itself keeps and copies with a checkpoint.

Workers that take turns: threads of which exactly one runs, by order of the world.
"""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from dpstream.dp_transforms.flow import BoundCallback, ReleaseCallback
from dpstream.dp_transforms.run import Run
from dpstream.state.store import Store
from tests.simulation.source import Cursor


class Died(BaseException):
    """The worker is gone: nothing that it does from here on has an effect."""


class Fiber:
    """A piece of work that runs when it is told to, up to its next ``pause``."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.done = False
        self.error: BaseException | None = None
        self._thread.start()

    def _run(self) -> None:
        self._go.acquire()
        try:
            self._work()
        except BaseException as error:
            self.error = error
        self.done = True
        self._back.release()

    def resume(self) -> None:
        """Run the work until it pauses or ends; called by the world."""
        self._go.release()
        self._back.acquire()
        if self.done:
            self._thread.join()

    def pause(self) -> None:
        """Give the turn back; called by the work."""
        self._back.release()
        self._go.acquire()


Batches = list[pa.RecordBatch]
Name = tuple[int, int]


class WorldRun(Run):
    """A run whose store is the handle of one process."""

    handle: Store

    def open(self) -> Store:
        return self.handle


def run_on(run: Run, store: Store) -> WorldRun:
    """The run as a process with this handle sees it."""
    own = WorldRun(*run)
    own.handle = store
    return own


@dataclasses.dataclass
class State:
    """Durable state of the runner; batches are never changed, lists are copied.

    Attributes:
        held: records by unit shard; bound: trigger time through which a shard's admitted pairs were
            emitted.
        rows: admitted pairs by key shard; released: trigger time through which a shard has emitted.
        gathered: releases of a (window, trigger) by shard, until all are there.
    """

    cursor: Cursor
    shards: int
    watermark: int = 0
    held: list[Batches] = dataclasses.field(default_factory=list)
    bound: list[int] = dataclasses.field(default_factory=list)
    rows: list[Batches] = dataclasses.field(default_factory=list)
    released: list[int] = dataclasses.field(default_factory=list)
    gathered: dict[Name, dict[int, pa.RecordBatch]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.held:
            self.held = [[] for _ in range(self.shards)]
            self.rows = [[] for _ in range(self.shards)]
            self.bound, self.released = [0] * self.shards, [0] * self.shards

    def copy(self) -> "State":
        return State(
            self.cursor.copy(),
            self.shards,
            self.watermark,
            [list(b) for b in self.held],
            list(self.bound),
            [list(b) for b in self.rows],
            list(self.released),
            {name: dict(parts) for name, parts in self.gathered.items()},
        )

    def due(self) -> list[tuple[str, int, int, int]]:
        """(stage, shard, since, upto) of every timer that may fire."""
        out = []
        for shard in range(self.shards):
            if self.bound[shard] < self.watermark:
                out.append(("bound", shard, self.bound[shard], self.watermark))
            if self.released[shard] < min(self.bound):
                out.append(("release", shard, self.released[shard], min(self.bound)))
        return out


@dataclasses.dataclass
class Task:
    """One bundle on one process: the firing of a shard's timer.

    Attributes:
        token: the bundle counts while the runner waits for this token.
        calls: points it has passed; failed: a fault was injected into it.
        sleeps: it is not resumed before this event.
        held_back: rows of its batches that wait for a later trigger time.
    """

    stage: str
    shard: int
    since: int
    upto: int
    batches: Batches
    token: int
    process: "Process"
    fiber: Fiber | None = None
    calls: int = 0
    failed: bool = False
    sleeps: int = 0
    held_back: Batches = dataclasses.field(default_factory=list)
    outputs: list[Any] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.stage} {self.shard} ({self.since}, {self.upto}]"

    def work(self) -> Iterator[Any]:
        """Run the stage's pure function; yields what it emits as it does."""
        process = self.process
        function = process.decide if self.stage == "bound" else process.release
        held = function(self.shard, self.batches, self.upto, self.since)
        for output in held.outputs:
            self.outputs.append(output)
            yield output
        if held.waiting is not None and held.waiting.num_rows:
            self.held_back = [held.waiting]


class Process:
    """A worker process: one store handle, the pure functions built on it, one or two threads."""

    def __init__(self, number: int, run: Run, store: Store, threads: int) -> None:
        self.number, self.store, self.threads = number, store, threads
        self.dead = False
        self.tasks: list[Task] = []
        own = run_on(run, store)
        self.decide, self.release = BoundCallback(own)(), ReleaseCallback(own)()
