"""A small runner for the stages that wait: their real DoFns, cells, timers and watermarks.

What Beam promises and no more.  Times are whole milliseconds, rounded down.  A timer fires when
the watermark of its stage's input has reached it.  That watermark is held back by the stages
before it: by their own, by the timers they have set, and by elements that are on their way.
Elements of later stages are taken in any order; everything a runner keeps can be copied, and a
runner may go back to a copy while the store goes on.
"""

import dataclasses
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import pyarrow as pa
from apache_beam.io.restriction_trackers import OffsetRange
from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from apache_beam.runners.sdf_utils import RestrictionTrackerView, ThreadsafeRestrictionTracker
from apache_beam.utils.timestamp import Timestamp

from dpstream.dp_transforms import flow
from dpstream.dp_transforms.batches import record_schema
from dpstream.dp_transforms.beam import clock, delivery
from dpstream.dp_transforms.beam.clock import ToShards, WallClock
from dpstream.dp_transforms.pacing import Pace
from dpstream.dp_transforms.release import Gather
from dpstream.dp_transforms.run import Run

#: A watermark that nothing holds back.
ENDLESS = 1 << 62
STAGES = ("bound", "release", "delivered")


def floored(micros: int) -> int:
    """An instant as a runner knows it: whole milliseconds."""
    return micros // 1000 * 1000


@dataclasses.dataclass
class Cells:
    """What a runner keeps for one shard of a stage; it plays bag, value and timer."""

    rows: list[pa.RecordBatch] = dataclasses.field(default_factory=list)
    progress: list[int] | None = None
    armed: int | None = None

    def copy(self) -> "Cells":
        return Cells(list(self.rows), self.progress, self.armed)


class Bag:
    def __init__(self, cells: Cells) -> None:
        self._cells = cells

    def add(self, batch: pa.RecordBatch) -> None:
        self._cells.rows.append(batch)

    def read(self) -> list[pa.RecordBatch]:
        return list(self._cells.rows)

    def clear(self) -> None:
        self._cells.rows = []


class ValueCell:
    def __init__(self, cells: Cells) -> None:
        self._cells = cells

    def read(self) -> Any:
        return self._cells.progress

    def write(self, value: Any) -> None:
        self._cells.progress = value


class TimerCell:
    def __init__(self, cells: Cells) -> None:
        self._cells = cells

    def set(self, at: Timestamp) -> None:
        self._cells.armed = floored(at.micros)


@dataclasses.dataclass
class Part:
    """What a runner keeps for one (window, trigger) that is being gathered."""

    parts: list[pa.RecordBatch] = dataclasses.field(default_factory=list)
    seen: bytes | None = None

    def copy(self) -> "Part":
        return Part(list(self.parts), self.seen)


class _PartBag:
    def __init__(self, part: Part) -> None:
        self._part = part

    def add(self, batch: pa.RecordBatch) -> None:
        self._part.parts.append(batch)

    def read(self) -> list[pa.RecordBatch]:
        return self._part.parts

    def clear(self) -> None:
        self._part.parts = []


class _Seen:
    def __init__(self, part: Part) -> None:
        self._part = part

    def read(self) -> bytes | None:
        return self._part.seen

    def write(self, value: bytes) -> None:
        self._part.seen = value

    def clear(self) -> None:
        self._part.seen = None


@dataclasses.dataclass
class Element:
    """On its way to a stage; holds that stage's watermark at its time."""

    at: int
    value: Any


@dataclasses.dataclass
class State:
    """All that a runner keeps; micros, floored.

    Attributes:
        source: watermark of the source; clock, left: watermark of the clock and what is left of
            it; cells: of each stage's shards; coming: elements before each stage; parts: of the
            gathering stage; watermarks: input watermark of each stage, which never goes back.
    """

    source: int
    clock: int
    left: OffsetRange | None
    cells: dict[str, list[Cells]]
    coming: dict[str, list[Element]]
    parts: dict[tuple[int, int], Part]
    watermarks: dict[str, int]

    def copy(self) -> "State":
        return State(
            self.source,
            self.clock,
            self.left,
            {name: [c.copy() for c in cells] for name, cells in self.cells.items()},
            {name: list(elements) for name, elements in self.coming.items()},
            {name: part.copy() for name, part in self.parts.items()},
            dict(self.watermarks),
        )


class Runner:
    """The flow from BOUND to the sink's note, on one run.

    Args:
        run: begun; first: the first trigger time that is announced.

    Attributes:
        now: what the clock on the wall shows, in micros.
    """

    def __init__(self, run: Run, first: int = 1) -> None:
        timeline, shards = run.plan.timeline, run.shards
        self.run, self.line, self.now = run, timeline, timeline.start
        self._dofns = {
            "bound": flow.Bound(run, flow.CATCH_UP_LIMIT).buffer(),
            "release": flow.Release(run, flow.CATCH_UP_LIMIT).buffer(),
            "delivered": delivery.Delivered(run, self).buffer(),
        }
        for dofn in self._dofns.values():
            dofn.setup()
        self._gather, self._seal = Gather(shards), flow.SealFactory(run)()
        wall = WallClock(timeline, first, lambda: self.now / 1e6)
        self._clock = (wall.paced(Pace(run)) if run.plan.design.skips else wall)._clock
        left = self._clock.initial_restriction(0)
        clock = self._clock.initial_estimator_state(0, left).micros
        counts = {"bound": shards, "release": shards, "delivered": 1}
        self.state = State(
            -ENDLESS,
            clock,
            left,
            {name: [Cells() for _ in range(n)] for name, n in counts.items()},
            {name: [] for name in (*STAGES, "gather", "sink")},
            {},
            dict.fromkeys((*STAGES, "gather", "sink"), -ENDLESS),
        )
        self.sealed: list[pa.RecordBatch] = []
        self.emitted: list[tuple[int, int, int, pa.RecordBatch]] = []

    # What DELIVERED asks of the sink.

    def caught_up(self, upto: int) -> bool:
        """No store is restored here."""
        raise AssertionError("nothing is being restored")

    def publish(self, names: Sequence[tuple[int, int]]) -> None:
        """DELIVERED missed releases that should have come: this runner loses none."""
        raise AssertionError("a release did not come to the sink")

    # Watermarks.

    def _holds(self, stage: str) -> int:
        """What holds the output watermark of a stage: its input and its timers."""
        armed = [c.armed for c in self.state.cells.get(stage, ()) if c.armed is not None]
        return min([self._input(stage), *armed])

    def _input(self, stage: str) -> int:
        state = self.state
        before = {
            "bound": lambda: min(state.source, state.clock),
            "release": lambda: min(self._holds("bound"), state.clock),
            "gather": lambda: self._holds("release"),
            "sink": lambda: self._input("gather"),
            "delivered": lambda: min(self._input("sink"), state.clock),
        }[stage]()
        watermark = min([before, *(element.at for element in state.coming[stage])])
        state.watermarks[stage] = max(state.watermarks[stage], watermark)
        return state.watermarks[stage]

    # What the world does.

    def deliver(self, shard: int, batch: pa.RecordBatch) -> None:
        """A batch of canonical records reaches BOUND."""
        self._put("bound", shard, batch)

    def advance_watermark(self, micros: int) -> None:
        """The source's watermark moves on."""
        self.state.source = max(self.state.source, floored(micros))

    def tick(self, now: int) -> None:
        """The clock looks at the clock on the wall."""
        state, self.now = self.state, now
        if state.left is None:
            return
        tracker = ThreadsafeRestrictionTracker(self._clock.create_tracker(state.left))
        estimator = ManualWatermarkEstimator(Timestamp(micros=state.clock))
        view = RestrictionTrackerView(tracker)
        with mock.patch.object(clock, "_HERE_SECONDS", 0.0):  # the schedule is the time here
            clock_ticks = list(self._clock.process(0, tracker=view, estimator=estimator))
        tracker.check_done()
        rest = tracker.deferred_status()
        state.clock = ENDLESS if rest is None else floored(estimator.current_watermark().micros)
        state.left = None if rest is None else rest[0]
        for clock_tick in clock_ticks:
            for stage, shards in (("bound", self.run.shards), ("release", self.run.shards)):
                self._announce(stage, shards, clock_tick)
            self._announce("delivered", 1, clock_tick)

    def _announce(self, stage: str, shards: int, clock_tick: Any) -> None:
        at = floored(clock_tick.timestamp.micros)
        schema = delivery.NAMES if stage == "delivered" else record_schema(self.run.plan)
        to_shards = ToShards(shards, schema)
        values = list(to_shards.process(clock_tick.value))
        self.state.coming[stage] += [Element(at, value) for value in values]

    def due(self, stage: str) -> list[int]:
        """Shards whose timer may fire."""
        watermark = self._input(stage)
        cells = self.state.cells[stage]
        return [n for n, c in enumerate(cells) if c.armed is not None and c.armed <= watermark]

    def fire(self, stage: str, shard: int, lost: bool = False) -> None:
        """A timer fires; of a bundle that is lost, the runner keeps nothing."""
        stored = self.state.cells[stage][shard]
        cells = stored.copy()
        at, cells.armed = cells.armed, None
        assert at is not None
        outputs = list(
            self._dofns[stage].fire(
                shard=shard, rows=Bag(cells), progress=ValueCell(cells), timer=TimerCell(cells)
            )
        )
        if stage == "release":
            self.emitted += [(*name, shard, part) for name, part in outputs]
        if lost:
            return
        self.state.cells[stage][shard] = cells
        target = {"bound": "release", "release": "gather"}.get(stage)
        if target is not None:
            self.state.coming[target] += [Element(at, value) for value in outputs]

    def moves(self) -> Iterator[tuple[str, int]]:
        """What the stages behind BOUND can do: take elements, fire timers that are due."""
        for stage, elements in self.state.coming.items():
            if stage == "bound":
                continue
            yield from (("take " + stage, n) for n in range(min(3, len(elements))))
        for stage in ("release", "delivered"):
            yield from ((stage, shard) for shard in self.due(stage))

    def work(self, draw: random.Random, most: int) -> None:
        """The stages behind BOUND do that many things, or all there is."""
        for _ in range(most):
            moves = list(self.moves())
            if not moves:
                return
            what, number = draw.choice(moves)
            if what.startswith("take "):
                self._take(what.removeprefix("take "), draw)
            else:
                self.fire(what, number, lost=draw.random() < 0.1)

    def _take(self, stage: str, draw: random.Random) -> None:
        elements = self.state.coming[stage]
        element = elements.pop(draw.randrange(len(elements)))
        if stage == "gather":
            name = element.value[0]
            part = self.state.parts.setdefault(name, Part())
            gathered = self._gather.process(element.value, parts=_PartBag(part), seen=_Seen(part))
            self.state.coming["sink"] += [Element(element.at, value) for value in gathered]
            if part.seen is None:
                del self.state.parts[name]
        elif stage == "sink":
            name, parts = element.value
            window, trigger = name
            self.sealed += self._seal(window, trigger, parts)
            self.state.coming["delivered"].append(
                Element(element.at, delivery.release_name_row(name, True))
            )
        else:
            self._put(stage, *element.value)

    def _put(self, stage: str, shard: int, batch: pa.RecordBatch) -> None:
        cells = self.state.cells[stage][shard]
        self._dofns[stage].process(
            (shard, batch), rows=Bag(cells), progress=ValueCell(cells), timer=TimerCell(cells)
        )

    def fire_bound(self, shards: Iterable[int], lost: Iterable[int] = ()) -> None:
        """These shards of BOUND get their clock ticks; their timers fire while they are due."""
        here, gone = set(shards), set(lost)
        coming = self.state.coming["bound"]
        for element in coming:
            if element.value[0] in here:
                self._put("bound", *element.value)
        self.state.coming["bound"] = [e for e in coming if e.value[0] not in here]
        for shard in sorted(here):
            while shard in self.due("bound"):
                if shard in gone:
                    gone.discard(shard)
                    self.fire("bound", shard, lost=True)
                self.fire("bound", shard)
