"""The history of one seed: what happens, in which order, to which worker.

A world draws everything that could differ between two executions of a job from one seed:
what the source delivers and when, how far the watermark moves, which worker runs what, where
its turn ends, which call of the store fails, who dies, and to which checkpoint the runner goes
back.  Whatever happens, ``checks`` must hold at the end.
"""

import functools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.accounting.errors import RunError
from dpstream.dp_transforms.batches import ids_of
from dpstream.dp_transforms.decision import Batch
from dpstream.dp_transforms.flow import SealFactory
from dpstream.dp_transforms.ingest.records import CanonicaliserFactory
from dpstream.dp_transforms.pacing import Pace
from dpstream.dp_transforms.run import Performance, Run
from dpstream.state.arrow import to_bytes
from dpstream.state.idtable import shard_of
from dpstream.state.store import RunIdentity, Store
from tests.simulation.checks import Decision, Problem, Record, came_again, still_there
from tests.simulation.faulty import FaultyStore
from tests.simulation.hooks import calibrated_once
from tests.simulation.runner import Died, Fiber, Process, State, Task, run_on
from tests.simulation.source import Source, draw_plan, public_of
from tests.simulation.stores import Habits, Make
from tests.streams import KEYS, RUN_ID, sealed_bytes

#: A world that is not through by then never ends.
MOST_EVENTS = 20_000
#: Points one attempt may pass for each of its steps; and failures without a fault or a winner.
MOST_CALLS, MOST_STRIKES = 200, 12


class World(Habits):
    """One history.

    Args:
        seed: decides everything; ``records``: how many there are (drawn if not given).
        make: makes the database that the workers share.
        skipping: the job skips what is published.
    """

    def __init__(
        self,
        seed: int,
        make: Make,
        folder: str,
        records: int | None = None,
        skipping: bool = False,
    ) -> None:
        self.seed, self.random = seed, random.Random(seed)
        rng = np.random.default_rng([seed, 23])
        self.plan = draw_plan(rng, skipping)
        self.shards = int(rng.integers(1, 5))
        size = int(rng.choice([40, 100, 200]))
        self.tardy = int(rng.integers(1, 9)) if rng.random() < 0.25 else 0
        self.source = Source(self.plan, rng, records or size, self.tardy)
        fingerprint, numbers = KEYS.ring().fingerprint, calibrated_once(self.plan)
        named = self.plan.hash, RUN_ID, 0, self.shards, fingerprint, "", "{}", True
        self.identity = RunIdentity(*named, calibration=numbers)
        tuned = Performance(look_ahead=int(rng.integers(1, 9)))
        self.run = Run(self.plan, KEYS, "", self.shards, RUN_ID, public_of(self.plan), tuned)
        self.folder = folder
        self.database: Any = make(self.identity, self.plan, folder, seed)
        self.ingest = CanonicaliserFactory(self.plan, KEYS, self.run.public)()
        self.state = State(self.source.start(), self.shards)
        self.checkpoints = [self.state.copy()]
        self.trace: list[str] = []
        self.current: Task | None = None  # whose turn it is; none: the world's own
        self.dead_letters: dict[tuple[int, int], str] = {}
        self.emitted: dict[tuple[int, int, int], bytes] = {}
        self.sink: dict[tuple[int, int], bytes] = {}
        self.decisions: dict[Record, Decision] = {}  # decisions whose positions may have gone
        self.totals: Counter[str] = Counter()
        self._draw_habits()
        self.raced: list[Task] = []
        self.started = 0
        self.fresh = False  # positions have gone since the runner last went back
        self.processes = [self._process() for _ in range(self.random.randint(1, 3))]
        self.seal = SealFactory(run_on(self.run, self.processes[0].store))()
        self.waiting: dict[tuple[str, int], int] = {}
        self.past: list[Task] = []
        self.strikes: Counter[tuple[str, int]] = Counter()
        self.tokens = 0
        self.event = 0

    def _process(self) -> Process:
        self.started += 1
        faulty: Any = FaultyStore  # the rest of the contract is set on the class
        store = faulty(self.database.open(), self.point, self.pause, self.keeps)
        return Process(self.started, self.run, store, self.threads)

    def say(self, what: str) -> None:
        """Names of steps only: a trace may be shown to anybody."""
        self.trace.append(f"{self.event:5d} {what}")

    # What happens in the thread of a task.

    def point(self, when: str, what: str) -> bool:
        """A call of a store: the turn may end here, the call may fail, the worker may die."""
        task = self.current
        if task is None:  # the world itself looks
            return False
        if task.process.dead:
            raise Died
        task.calls += 1
        if task.calls > MOST_CALLS * (2 + task.upto - task.since) * (
            1 + self.plan.timeline.windows_per_record
        ):
            raise Problem("a call is repeated without end")
        if self.random.random() < self.switches:
            if self.random.random() < 0.03:
                task.sleeps = self.event + self.random.randint(5, 80)
            self.pause()
        elif self.races and f"{when} {what}".startswith("before part") and self.splits(what):
            # Between the commits of one step another worker does all of it, and the next ones.
            self.races -= 1
            task.sleeps = self.event + self.random.randint(50, 500)
            self.raced.append(task)
            self.pause()
        self.say(f"w{task.process.number} {when} {what}")
        return self.faulted(task, f"{when} {what}")

    def pause(self) -> None:
        """The turn of the running task ends here."""
        task = self.current
        assert task is not None and task.fiber is not None
        task.fiber.pause()
        if task.process.dead:
            raise Died

    def faulted(self, task: Task, where: str) -> bool:
        """Whether a fault strikes here; a worker may die of it."""
        if not self.faults or self.random.random() >= self.fault_rate:
            return False
        self.faults -= 1
        task.failed = True
        self.totals["faults"] += 1
        if self.random.random() < 0.3:
            self.say(f"w{task.process.number} dies {where}")
            task.process.dead = True
            raise Died
        self.say(f"w{task.process.number} fails {where}")
        return True

    def strike(self, name: str) -> None:
        """Work between the calls of a store: it may fail, with states half changed."""
        task = self.current
        if task is not None and not task.process.dead and self.faulted(task, name):
            raise MemoryError

    def _emits(self, task: Task) -> None:
        for output in task.work():
            if task.stage == "release":
                (window, trigger), part = output
                self.sees((window, task.shard, trigger), part)

    def sees(self, name: tuple[int, int, int], part: pa.RecordBatch) -> None:
        """Somebody emits a shard's release, heard or not: everybody must emit the same."""
        if self.emitted.setdefault(name, to_bytes(part)) != to_bytes(part):
            raise Problem("a release has two values")

    def keeps(self, store: Store, shard: int) -> None:
        """Positions of a shard are about to go: the check at the end needs them."""
        before = len(self.decisions)
        still_there(store, shard, self.plan.design.ranked, self.decisions)
        self.totals["expired"] += len(self.decisions) - before
        self.fresh = True

    def recalled(self, batch: Batch) -> None:
        """Records were looked up that may have been delivered before."""
        self.totals["expired_came_again"] += came_again(batch, self.decisions)

    # What the world does.

    def _begin(self, stage: str, shard: int, since: int, upto: int, process: Process) -> None:
        self._start(self._fire(stage, shard, since, upto, process))

    def _start(self, task: Task) -> None:
        self.say(f"w{task.process.number} starts {task.name}")
        task.process.tasks.append(task)
        task.fiber = Fiber(lambda: self._emits(task))

    def _resume(self, task: Task) -> None:
        assert task.fiber is not None
        self.current = task
        task.fiber.resume()
        self.current = None
        if task.fiber.done:
            self._ended(task)
        for process in [p for p in self.processes if p.dead]:
            self._buried(process)

    def _buried(self, process: Process) -> None:
        """Drop all memory of a dead worker; another takes its place."""
        for task in list(process.tasks):
            while task.fiber is not None and not task.fiber.done:
                self.current = task
                task.fiber.resume()
            self.current = None
            self._ended(task)
        self.totals["deaths"] += 1
        process.store.close()
        self.processes[self.processes.index(process)] = self._process()

    def _ended(self, task: Task) -> None:
        if task not in task.process.tasks:
            return
        task.process.tasks.remove(task)
        place = task.stage, task.shard
        counts = self.waiting.get(place) == task.token
        error = task.fiber.error if task.fiber is not None else None
        if error is None:
            self.strikes[place] = 0
            self.past = [*self.past[-9:], task]
            if counts:
                del self.waiting[place]
                self._keep(task)
            self.say(f"w{task.process.number} ends {task.name}{'' if counts else ', unheard'}")
            return
        if counts:
            del self.waiting[place]
        if isinstance(error, Died):
            return
        if not isinstance(error, RunError | MemoryError):
            raise error
        self.say(f"w{task.process.number} gives up {task.name}")
        if not task.failed:
            beaten = isinstance(error, RunError) and "another worker" in error.rule
            self.strikes[place] += 1
            if not beaten or self.strikes[place] > MOST_STRIKES:
                raise Problem("a step fails without a fault")

    def _keep(self, task: Task) -> None:
        """A bundle is done: its outputs and its state, all at once."""
        state, shard = self.state, task.shard
        bag = state.held if task.stage == "bound" else state.rows
        taken = {id(batch) for batch in task.batches}
        bag[shard] = [batch for batch in bag[shard] if id(batch) not in taken] + task.held_back
        if task.stage == "bound":
            state.bound[shard] = task.upto
            for target, batch in task.outputs:
                state.rows[target].append(batch)
            return
        state.released[shard] = task.upto
        for name, part in task.outputs:
            parts = state.gathered.setdefault(name, {})
            if shard in parts:
                raise Problem("a shard releases twice")
            parts[shard] = part
            if len(parts) == self.shards:
                self._sealed(name[0], name[1], list(parts.values()))

    def _sealed(self, window: int, trigger: int, parts: list[pa.RecordBatch]) -> None:
        self.random.shuffle(parts)
        sealed = sealed_bytes(*self.seal(window, trigger, parts))
        self.say(f"sealed {window} {trigger}")
        if self.sink.setdefault((window, trigger), sealed) != sealed:
            raise Problem("a release has two values")

    def _deliver(self) -> None:
        good, dead = self.ingest(self.source.deliver(self.state.cursor))
        for letter in dead.to_pylist():
            where = letter["partition"], letter["offset"]
            if self.dead_letters.setdefault(where, letter["reason"]) != letter["reason"]:
                raise Problem("a record is refused for two reasons")
        self.add(good)

    def add(self, records: pa.RecordBatch) -> None:
        """Records into the bags of their shards."""
        shard = shard_of(ids_of(records.column("unit")), self.shards)
        for number in np.unique(shard).tolist():
            self.state.held[number].append(records.filter(pa.array(shard == number)))

    def _fire(self, stage: str, shard: int, since: int, upto: int, process: Process) -> Task:
        """The bundle of a timer, with what its bag holds now."""
        if self.random.random() < self.by_trigger_time:
            upto = since + 1
        elif self.random.random() < 0.3:
            upto = self.random.randint(since + 1, upto)
        held = list((self.state.held if stage == "bound" else self.state.rows)[shard])
        self.random.shuffle(held)
        self.tokens += 1
        self.waiting[stage, shard] = self.tokens
        return Task(stage, shard, since, upto, held, self.tokens, process)

    def _double(self, task: Task, process: Process) -> Task:
        """The same bundle once more, by a worker that the runner took for lost."""
        self.totals["zombies"] += 1
        since = task.since
        if task.stage == "release" and self.random.random() < 0.3:
            since = 0  # steps of before are read back
        token = task.token if since == task.since else -1
        return Task(task.stage, task.shard, since, task.upto, task.batches, token, process)

    def _restore(self) -> None:
        """The runner goes back to a checkpoint; what runs goes on unheard, or dies."""
        self.restores -= 1
        far = 2 if self.fresh and self.random.random() < 0.7 else None
        self.fresh = False
        self.totals["restores"] += 1
        self.source.seen(self.state.cursor)
        self.state = self.random.choice(self.checkpoints[:far]).copy()
        self.source.plan_reads(self.state.cursor)
        for piece in self.source.owed(self.state.cursor, self.state.watermark):
            self.state.cursor.pending.insert(0, piece)
            self._deliver()
        self.waiting.clear()
        self.say("back to a checkpoint")
        for process in list(self.processes):
            if self.random.random() < 0.5:
                process.dead = True
                self._buried(process)

    def _free(self) -> list[Process]:
        """Processes that can take a bundle: even one that is at work on an earlier try of it."""
        return [p for p in self.processes if len(p.tasks) < p.threads]

    def _choices(self) -> list[tuple[float, Callable[[], Any]]]:
        """What could happen next, with weights."""
        state, out = self.state, list[tuple[float, Callable[[], Any]]]()
        if state.cursor.pending:
            out.append((3.0, self._deliver))
        reach = self.source.reach(state.cursor)
        if self.plan.design.skips:  # the clock waits for the store
            pace = Pace(run_on(self.run, self.processes[0].store))
            reach = min(reach, pace(state.watermark + 1))
        if reach > state.watermark:
            far = reach if self.random.random() < 0.5 else state.watermark + 1
            out.append((1.0, lambda: setattr(state, "watermark", far)))
        for stage, shard, since, upto in state.due():
            free = self._free()
            if free and (stage, shard) not in self.waiting:
                start = stage, shard, since, upto, self.random.choice(free)
                out.append((1.0, functools.partial(self._begin, *start)))
        running = [task for process in self.processes for task in process.tasks]
        awake = [task for task in running if task.sleeps <= self.event]
        out += [(4.0, functools.partial(self._resume, task)) for task in awake]
        if self.zombies and (running or self.past):
            task = self.random.choice(running or self.past)
            if self.past and self.random.random() < 0.3:
                task = self.random.choice(self.past)
            free = self._free()
            if free:
                out.append((1.0, lambda: self._zombie(task, self.random.choice(free))))
        if others := [p for p in self._free() if self.raced and p is not self.raced[0].process]:
            out.append((20.0, lambda: self._race(self.random.choice(others))))
        if self.random.random() < 0.05:
            self.checkpoints = [self.checkpoints[0], *self.checkpoints[1:][-3:], state.copy()]
        if self.restores and (self.fresh or self.restores_early):
            out.append((1.0 if self.fresh else 0.02, self._restore))
        return out

    def _race(self, process: Process) -> None:
        task = self.raced.pop(0)
        if not task.process.dead:
            self._start(self._double(task, process))

    def _zombie(self, task: Task, process: Process) -> None:
        self.zombies -= 1
        self._start(self._double(task, process))

    def _through(self) -> bool:
        last = self.plan.timeline.last_trigger_time
        done = min(self.state.released) == last and not self.state.cursor.pending
        return done and not any(process.tasks for process in self.processes)

    def _once_more(self) -> bool:
        """Whether a job that is through runs again, although all has expired."""
        if again := self.restores > 0 and self.random.random() < 0.3:
            self._restore()
        return again

    def live(self) -> None:
        """Run the history to its end."""
        while not self._through() or self._once_more():
            self.event += 1
            if self.event > MOST_EVENTS:
                raise Problem("the run does not end")
            choices = self._choices()
            if not choices:  # all sleep
                sleeps = [task.sleeps for process in self.processes for task in process.tasks]
                self.event = max(self.event, min(sleeps, default=0) - 1)
                continue
            weights = [weight for weight, _ in choices]
            self.random.choices(choices, weights)[0][1]()
        self.totals["events"] += self.event

    def close(self) -> None:
        """End what still runs."""
        for process in list(self.processes):
            process.dead = True
            for task in process.tasks:
                while task.fiber is not None and not task.fiber.done:
                    self.current = task
                    task.fiber.resume()
            self.current = None
            process.store.close()
        self.database.close()
