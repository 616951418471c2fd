"""Slow references in plain Python, written from mechanism.md and not from the code.

``accept`` is rule 0 for one record, ``SlowBound`` rule 1 for one unit shard, ``exhaustive``
tests every key at every trigger with noise recomputed from scratch.
"""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from fractions import Fraction

import numpy as np

from accounting.budget import Budget, StreamNoise, allocate
from accounting.plan import Plan
from dp_transforms.noise.continuous import ContinuousGaussian
from dp_transforms.noise.paths import NoiseStream, Sampler
from dp_transforms.noise.prf import KeyRing
from dp_transforms.noise.sampler import RoundedGaussian
from tests.streams import Stream, key_name, user_name


@dataclasses.dataclass(frozen=True)
class Accepted:
    """A raw record that passed the door."""

    unit: tuple[str, int]  # user and privacy period
    key: str
    event_cut: int
    stamp_cut: int
    order: tuple[int, int, int]  # (stamp, partition, offset)
    values: tuple[int, ...]  # per column stream, clamped, centred, in grid units


@dataclasses.dataclass(frozen=True)
class Pair:
    """An admitted (record, window) pair."""

    window: int
    leaf: int
    unit: tuple[str, int]
    key: str
    values: tuple[int, ...]


def trigger_of(plan: Plan, instant: int) -> int:
    """Number of the first public trigger after an instant; triggers are numbered from 1."""
    return (instant - plan.timeline.start) // plan.timeline.trigger_every + 1


def verdict(plan: Plan, event: int, stamp: int) -> str | None:
    """Why rule 0 refuses a record with these times, ``None`` if it does not."""
    line = plan.timeline
    if not line.start <= event < line.end or event > stamp + line.max_skew:
        return "time"
    in_windows = [w for w in range(line.windows) if covers(plan, w, event)]
    if all(stamp >= last_instant(plan, w) for w in in_windows):
        return "late"
    if line.period is not None:
        end = line.start + ((event - line.start) // line.period + 1) * line.period
        if stamp >= end + line.allowed_lateness:
            return "late"
    return None


def covers(plan: Plan, window: int, event: int) -> bool:
    """Whether a window holds an event time."""
    begin = plan.timeline.start + window * plan.timeline.slide
    return begin <= event < begin + plan.timeline.window


def last_instant(plan: Plan, window: int) -> int:
    """End of a window and its lateness."""
    line = plan.timeline
    return line.start + window * line.slide + line.window + line.allowed_lateness


def on_grid(plan: Plan, value: float) -> tuple[int, ...]:
    """Clamped to the bounds snapped inward, rounded to the grid (ties to even), centred."""
    out = []
    for a in plan.aggregates:
        if a.kind in ("sum", "mean"):
            grid = Fraction(str(a.grid))
            lo = math.ceil(Fraction(str(a.clamp[0])) / grid)
            hi = math.floor(Fraction(str(a.clamp[1])) / grid)
            scaled = min(max(round(Fraction(value / a.grid)), lo), hi)
            out.append(scaled - ((lo + hi) // 2 if a.kind == "mean" else 0))
    return tuple(out)


def accept(plan: Plan, stream: Stream) -> dict[tuple[int, int], Accepted]:
    """(partition, offset) -> accepted record of a stream."""
    line, out = plan.timeline, {}
    for row in range(len(stream)):
        event, stamp = int(stream.event[row]), int(stream.stamp[row])
        if verdict(plan, event, stamp) is not None:
            continue
        where = (int(stream.partition[row]), int(stream.offset[row]))
        period = 0 if line.period is None else (event - line.start) // line.period
        out[where] = Accepted(
            (user_name(int(stream.user[row])), period),
            key_name(int(stream.key[row])),
            trigger_of(plan, event),
            trigger_of(plan, stamp),
            (stamp, *where),
            on_grid(plan, float(stream.value[row])),
        )
    return out


class SlowBound:
    """Rule 1 by hand: first C pairs of a unit in the order (stamp, partition, offset)."""

    def __init__(self, plan: Plan, records: Mapping[tuple[int, int], Accepted]) -> None:
        self.plan, self.records = plan, records
        self.decided = 0
        self.used: dict[tuple[str, int], int] = defaultdict(int)
        self.fate: dict[tuple[int, int], list[Pair]] = {}

    def deliver(self, positions: Iterable[tuple[int, int]], upto: int) -> list[Pair]:
        """Pairs of the delivered records whose cuts are complete, each position once."""
        delivered = set(positions)
        cut = {p: max(self.records[p].stamp_cut, 1) for p in delivered}
        for position in delivered - set(self.fate):
            if cut[position] <= self.decided:
                cut[position] = self.decided + 1
        fresh = [p for p in delivered if p not in self.fate and cut[p] <= upto]
        for position in sorted(fresh, key=lambda p: self.records[p].order):
            self.fate[position] = self._admit(self.records[position], cut[position])
        self.decided = max(self.decided, upto)
        return [pair for p in delivered for pair in self.fate.get(p, [])]

    def _admit(self, record: Accepted, cut: int) -> list[Pair]:
        line, out = self.plan.timeline, []
        leaf_cut = max(record.event_cut, cut)
        stride = line.slide // line.trigger_every
        event = line.start + (record.event_cut - 1) * line.trigger_every
        for window in range(line.windows):
            leaf = leaf_cut - window * stride
            is_open = covers(self.plan, window, event) and leaf <= line.triggers
            if is_open and self.used[record.unit] < self.plan.privacy.contributions:
                self.used[record.unit] += 1
                out.append(Pair(window, leaf, record.unit, record.key, record.values))
        return out


def admitted(plan: Plan, stream: Stream) -> list[Pair]:
    """All admitted pairs of a stream delivered at once."""
    records = accept(plan, stream)
    return SlowBound(plan, records).deliver(records, 1 << 40)


class SlowNoise:
    """Decoded noise of one named path, recomputed from its first leaf."""

    def __init__(self, plan: Plan, ring: KeyRing, identity: tuple[bytes, ...]) -> None:
        self._plan, self._ring, self._identity = plan, ring, identity
        self._samplers: dict[float, Sampler] = {}
        self._known: dict[tuple[object, ...], np.ndarray] = {}

    def path(
        self, role: str, noise: StreamNoise, window: int, key_id: bytes, round_number: int = 0
    ) -> np.ndarray:
        """(T,) n_t * 256 for t = 1 .. T."""
        name = (role, noise.name, window, key_id, round_number)
        if name not in self._known:
            sampler = self._samplers.get(noise.sigma)
            if sampler is None:
                rounded = noise.strategy_object.rounds_nodes
                kind = RoundedGaussian if rounded else ContinuousGaussian
                sampler = self._samplers[noise.sigma] = kind(noise.sigma)
            bounds = self._plan.timeline.window_bounds(window)
            stream = NoiseStream(self._ring, self._identity, bounds, role, noise, sampler)
            ids = np.frombuffer(key_id, np.uint64).reshape(1, 2)
            tweak = stream.names(ids, np.array([round_number]))
            leaves = np.array([0]), np.array([noise.triggers])
            path = stream.advance(tweak, *leaves, stream.no_state(1), noise.triggers)
            self._known[name] = path[0]
        return self._known[name]


@dataclasses.dataclass
class _Key:
    units: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    streams: list[int] = dataclasses.field(default_factory=list)
    round: int = 0
    base: int = 0


@functools.lru_cache(maxsize=32)
def budget_of(plan: Plan) -> Budget:
    """The plan's budget; allocating it takes milliseconds."""
    return allocate(plan)


Row = tuple[str, dict[str, tuple[float | None, float | None]]]


def exhaustive(
    plan: Plan,
    pairs: Iterable[Pair],
    key_ids: Mapping[str, bytes],
    noise: SlowNoise,
    public: Iterable[str] = (),
) -> dict[tuple[int, int], list[Row]]:
    """(window, trigger) -> sorted released rows, every key tested at every trigger."""
    budget, line = budget_of(plan), plan.timeline
    cells: dict[tuple[int, int], list[Pair]] = defaultdict(list)
    for pair in pairs:
        cells[pair.window, pair.leaf].append(pair)
    out = {}
    for window in range(line.windows):
        keys = {k: _Key(streams=[0] * len(plan.value_streams), round=1) for k in public}
        for t in range(1, line.triggers + 1):
            for pair in cells[window, t]:
                state = keys.setdefault(pair.key, _Key(streams=[0] * len(plan.value_streams)))
                state.units.add(pair.unit)
                columns = iter(pair.values)
                for i, stream in enumerate(plan.value_streams):
                    state.streams[i] += 1 if stream.column is None else next(columns)
            chosen, selected = set(), set()
            for key, state in keys.items():
                if plan.public_keys is None and (plan.privacy.mode == "rounds" or not state.round):
                    assert budget.selection is not None and budget.tau is not None
                    drawn = noise.path(
                        "selection", budget.selection, window, key_ids[key], state.round
                    )
                    leaf = t - state.base
                    statistic = (len(state.units) << 8) + int(drawn[leaf - 1])
                    tested = len(state.units) > plan.privacy.pre_threshold
                    if tested and statistic > int(budget.tau[leaf - 1]):
                        selected.add(key)
            chosen |= selected
            last = t == line.triggers
            every = plan.privacy.refresh_every or max(1, line.triggers // 100)
            if plan.privacy.mode == "sticky":
                for key in selected:
                    keys[key].round = 1
                if last or t % every == 0:
                    chosen |= {k for k, s in keys.items() if s.round}
            elif plan.privacy.final_flush and last:
                chosen |= {k for k, s in keys.items() if s.round}
            out[window, t] = [
                (key, _figures(plan, keys[key], noise, window, key_ids[key], t))
                for key in sorted(chosen)
            ]
            if plan.privacy.mode == "rounds":
                for key in selected:
                    state = keys[key]
                    state.units, state.round, state.base = set(), state.round + 1, t
    return out


def _figures(
    plan: Plan, state: _Key, noise: SlowNoise, window: int, key_id: bytes, t: int
) -> dict[str, tuple[float | None, float | None]]:
    budget = budget_of(plan)
    noisy, sd = {}, {}
    for i, stream in enumerate(plan.value_streams):
        drawn = noise.path("value", budget.values[i], window, key_id)
        noisy[stream.name] = ((state.streams[i] << 8) + int(drawn[t - 1])) / 256
        sd[stream.name] = float(budget.values[i].sd[t - 1])
    out: dict[str, tuple[float | None, float | None]] = {}
    for a in plan.aggregates:
        if a.kind == "count":
            out[a.name] = noisy["count"], sd["count"]
        elif a.kind == "sum":
            out[a.name] = noisy[a.name] * a.grid, sd[a.name] * a.grid
        elif a.kind == "units":
            assert budget.units is not None
            role = "selection" if plan.public_keys is None else "units"
            drawn = noise.path(role, budget.units, window, key_id)
            exact = (len(state.units) << 8) + int(drawn[t - 1])
            out[a.name] = exact / 256, float(budget.units.sd[t - 1])
        else:
            out[a.name] = _mean(a, noisy, sd)
    return out


def _mean(
    a: object, noisy: dict[str, float], sd: dict[str, float]
) -> tuple[float | None, float | None]:
    count = noisy["count"]
    if count < 1:
        return None, None
    lo, hi = a.grid_bounds()  # type: ignore[attr-defined]
    offset = noisy[a.name] / count  # type: ignore[attr-defined]
    value = min(max((lo + hi) // 2 + offset, lo), hi) * a.grid  # type: ignore[attr-defined]
    error = math.sqrt(sd[a.name] ** 2 + (offset * sd["count"]) ** 2)  # type: ignore[attr-defined]
    return value, error / count * a.grid  # type: ignore[attr-defined]
