"""Every key tested at every trigger, in slow plain Python, written from mechanism.md.

Noise is recomputed from scratch; ``slow_weights`` are the weights of section 8, ``exhaustive``
keeps plain sets and sums and publishes by the public calendar.
"""

import contextlib
import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from typing import Any
from unittest import mock

import msgspec
import numpy as np

from dpstream.accounting.budget.allocation import Budget, StreamNoise, allocate
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms import step
from dpstream.dp_transforms.batches import ids_of, numpy_view
from dpstream.dp_transforms.noise.continuous import ContinuousGaussian
from dpstream.dp_transforms.noise.paths import NoiseStream, Sampler
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.sampler import GeometricNodes, RoundedGaussian, TruncatedNodes
from tests.dp_transforms.reference import (
    Accepted,
    Pair,
    bounds_keys,
    covers,
    made_from_a_mean,
    remembers,
    skips,
)
from tests.streams import key_name

#: Weighted counts are whole numbers of 2^-8.
LATTICE = 256


@functools.cache
def slow_weights(offset: float, power: float, contributions: int) -> tuple[int, ...]:
    """Section 8: proportional to (i + offset)^-power, sum of squares 1, rounded down to 2^-8."""
    digits = Context(prec=60, rounding=ROUND_FLOOR)
    ranks = range(1, contributions + 1)
    exact = [digits.power(Decimal(offset) + i, -Decimal(power)) for i in ranks]
    norm = digits.sqrt(sum((w * w for w in exact), Decimal(0)))
    weights = tuple(math.floor(digits.divide(w, norm) * LATTICE) for w in exact)
    assert sum(w * w for w in weights) <= LATTICE**2
    return weights


@functools.cache
def slow_sizes(share: float, contributions: int) -> tuple[int, ...]:
    """Section 8: w with S n w^2 + (1 - S) n / C = 1 for units of n = 1 .. C, down to 2^-8."""
    exact, out = Fraction(share), []
    for n in range(1, contributions + 1):
        square = (1 - (1 - exact) * n / contributions) / (exact * n) * LATTICE**2
        out.append(math.isqrt(square.numerator // square.denominator))
    return tuple(out)


def weights_of(plan: Plan) -> tuple[int, ...] | None:
    """The plan's weights in 2^-8, by rank; ``None`` without."""
    given = plan.privacy.weights
    if given is None:
        return None
    if given.size_share is not None:
        return slow_sizes(given.size_share, plan.privacy.contributions)
    return slow_weights(given.offset, given.power, plan.privacy.contributions)


@functools.lru_cache(maxsize=64)
def _sampler(sigma: float, rounded: bool) -> Sampler:
    return RoundedGaussian(sigma) if rounded else ContinuousGaussian(sigma)


class SlowNoise:
    """Decoded noise of one named path, recomputed from its first step."""

    def __init__(self, plan: Plan, ring: KeyRing, identity: tuple[bytes, ...]) -> None:
        self._plan, self._ring, self._identity = plan, ring, identity
        self._paths: dict[tuple[object, ...], np.ndarray] = {}

    def path(
        self,
        role: str,
        noise: StreamNoise,
        window: int,
        key_id: bytes,
        tested: bool = False,
    ) -> np.ndarray:
        """(T,) n_t * 256 for t = 1 .. T; where it is ``tested`` and truncated with its coin."""
        name = (role, noise.name, window, key_id, tested)
        if name not in self._paths:
            sampler: Sampler = _sampler(noise.sigma, noise.strategy_object.rounds_nodes)
            if noise.scale:
                sampler = GeometricNodes(noise.scale)
            if noise.most:
                sampler = TruncatedNodes(noise.scale, noise.most, noise.sooner, tested)
            bounds = self._plan.timeline.window_bounds(window)
            stream = NoiseStream(self._ring, self._identity, bounds, role, noise, sampler)
            ids = np.frombuffer(key_id, np.uint64).reshape(1, 2)
            tweak = stream.names(ids)
            span = np.array([0]), np.array([noise.triggers])
            path = stream.advance(tweak, *span, stream.no_state(1), noise.triggers)
            self._paths[name] = path[0]
        return self._paths[name]


@dataclasses.dataclass
class _Key:
    """State of one key of one window."""

    streams: list[int]
    units: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    weighted: int = 0
    round: int = 0
    since_before: bool = False

    def feed(self, plan: Plan, pairs: Iterable[Pair]) -> None:
        """Apply one step's pairs; of a unit's several the lowest rank makes the unit count."""
        weights = weights_of(plan)
        for pair in sorted(pairs, key=lambda p: p.rank):
            first = pair.rank >= 0 if bounds_keys(plan) else pair.unit not in self.units
            if bounds_keys(plan):  # a unit has one first pair, and counts from its step on
                assert not first or pair.unit not in self.units
            if first or not bounds_keys(plan):
                self.units.add(pair.unit)
            number = pair.rank if pair.index is None else pair.index
            if first and weights is not None and number >= 0:
                self.weighted += weights[number]
            if first or bounds_keys(plan) or not plan.privacy.per_key_bound:
                columns = iter(pair.values)
                for i, stream in enumerate(plan.design.streams):
                    self.streams[i] += 1 if stream.column is None else next(columns)

    def statistic(self, plan: Plan, budget: Budget) -> int:
        """What the key is tested on, exactly: units, weight, or a mix of both."""
        if plan.privacy.weights is None:
            return len(self.units)
        assert budget.statistic is not None
        mixed = budget.statistic.counted * len(self.units) if plan.privacy.combine else 0
        return budget.statistic.weighted * self.weighted + mixed


@functools.lru_cache(maxsize=64)
def budget_of(plan: Plan) -> Budget:
    """The plan's budget; allocating it takes milliseconds."""
    return allocate(plan)


def refreshes_every(plan: Plan) -> int:
    """Triggers between two publications of a selected key."""
    return plan.privacy.refresh_every or max(1, plan.timeline.triggers // 100)


def tests_of(plan: Plan) -> list[int]:
    """Triggers of a window at which keys are tested."""
    last, privacy = plan.timeline.triggers, plan.privacy
    if isinstance(privacy.tests, tuple):
        return list(privacy.tests)
    if privacy.tests or skips(plan):
        n = min(privacy.tests or (10 if privacy.combine else 16), last)
        return sorted({math.ceil(Fraction(last) * Fraction(j, n) ** 2) for j in range(1, n + 1)})
    every = privacy.select_every or refreshes_every(plan)
    return [t for t in range(1, last + 1) if t % every == 0 or t == last]


def test_of(plan: Plan, t: int) -> int:
    """Number of the first test at or after a trigger, from 1."""
    return 1 + sum(test < t for test in tests_of(plan))


Row = tuple[str, dict[str, tuple[float | None, float | None]]]


def exhaustive(
    plan: Plan,
    pairs: Iterable[Pair],
    key_ids: Mapping[str, bytes],
    noise: SlowNoise,
    public: Iterable[str] = (),
) -> dict[tuple[int, int], list[Row]]:
    """(window, trigger) -> sorted released rows, every key tested at every trigger."""
    timeline = plan.timeline
    cells: dict[tuple[int, int], dict[str, list[Pair]]] = defaultdict(lambda: defaultdict(list))
    for pair in pairs:
        cells[pair.window, pair.step_index][pair.key].append(pair)
    out, log = {}, _Log(plan)
    states: dict[int, dict[str, _Key]] = {}
    for now in range(1, log.start(timeline.windows - 1) + timeline.triggers + 1):
        for window in range(timeline.windows):
            t = now - log.start(window)
            if t == 1:
                keys = {*public, *log.remembered(window)}
                none = [0] * len(plan.design.streams)
                states[window] = {k: _Key([*none], round=1, since_before=True) for k in keys}
            if 1 <= t <= timeline.triggers:
                fed = cells[window, t]
                out[window, t] = _step(plan, states[window], fed, noise, window, key_ids, t, log)
    return out


class _Log:
    """Which key was selected when, and what a window knows of it at its start (section 9)."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._selected = plan, list[tuple[int, str]]()

    def start(self, window: int) -> int:
        """Trigger time at which a window starts."""
        timeline = self._plan.timeline
        return window * (timeline.slide // timeline.trigger_every)

    def note(self, window: int, t: int, keys: Iterable[str]) -> None:
        """A test at a window's trigger has selected keys."""
        self._selected += [(self.start(window) + t, key) for key in keys]

    def remembered(self, window: int) -> set[str]:
        """Keys that were selected by the window's start, and no longer ago than is remembered."""
        plan, start = self._plan, self.start(window)
        if not remembers(plan):
            return set()
        every = plan.timeline.trigger_every
        lasting = plan.remember if isinstance(plan.remember, int) else math.inf
        return {key for at, key in self._selected if at <= start and (start - at) * every < lasting}


def _step(
    plan: Plan,
    keys: dict[str, _Key],
    fed: Mapping[str, list[Pair]],
    noise: SlowNoise,
    window: int,
    key_ids: Mapping[str, bytes],
    t: int,
    log: _Log,
) -> list[Row]:
    """Sorted released rows of one window and trigger; ``keys`` are its states."""
    for key, pairs in fed.items():
        keys.setdefault(key, _Key([0] * len(plan.design.streams))).feed(plan, pairs)
    selected = set(_selected(plan, keys, noise, window, key_ids, t))
    log.note(window, t, selected)
    chosen = _calendar(plan, keys, selected, t)
    return [
        (key, _figures(plan, keys[key], noise, window, key_ids[key], t)) for key in sorted(chosen)
    ]


def skipping(
    plan: Plan,
    records: Iterable[Accepted],
    key_ids: Mapping[str, bytes],
    noise: SlowNoise,
) -> dict[tuple[int, int], list[Row]]:
    """``exhaustive`` by section 9: a pair on a key that its window has published takes no weight.

    All records are delivered in time.  Trigger time by trigger time, first the pairs of its
    records are decided, then its steps are taken: what they publish is known to later pairs only.
    """
    timeline, out = plan.timeline, {}
    stride = timeline.slide // timeline.trigger_every
    states: dict[int, dict[str, _Key]] = defaultdict(dict)
    cells: dict[tuple[int, int], dict[str, list[Pair]]] = defaultdict(lambda: defaultdict(list))
    used: dict[tuple[str, int], int] = defaultdict(int)
    taken: dict[tuple[str, int], int] = defaultdict(int)
    of_key: set[tuple[tuple[str, int], int, str]] = set()
    by_time: dict[int, list[Accepted]] = defaultdict(list)
    log = _Log(plan)
    for record in records:
        by_time[max(1, record.stamp_trigger_time)].append(record)
    for now in range(1, (timeline.windows - 1) * stride + timeline.triggers + 1):
        for window in range(timeline.windows):
            if now == log.start(window) + 1:
                for key in log.remembered(window):
                    states[window][key] = _Key([0] * len(plan.design.streams), round=1)
        for record in sorted(by_time[now], key=lambda r: r.order):
            entry = max(record.event_trigger_time, now)
            event = timeline.start + (record.event_trigger_time - 1) * timeline.trigger_every
            for window in range(timeline.windows):
                step, unit = entry - window * stride, record.unit
                if not covers(plan, window, event) or step > timeline.triggers:
                    continue
                if used[unit] == plan.privacy.contributions:
                    continue
                if bounds_keys(plan) and (unit, window, record.key) in of_key:
                    continue
                of_key.add((unit, window, record.key))
                state = states[window].get(record.key)
                index = -1
                if state is None or not state.round:
                    index = taken[unit]
                    taken[unit] += 1
                pair = Pair(window, step, used[unit], unit, record.key, record.values, index)
                used[unit] += 1
                cells[window, step][record.key].append(pair)
        for window in range(timeline.windows):
            t = now - window * stride
            if 1 <= t <= timeline.triggers:
                fed = cells[window, t]
                out[window, t] = _step(plan, states[window], fed, noise, window, key_ids, t, log)
    return out


def _selected(
    plan: Plan,
    keys: Mapping[str, _Key],
    noise: SlowNoise,
    window: int,
    key_ids: Mapping[str, bytes],
    t: int,
) -> Iterator[str]:
    """Keys that pass their test at trigger t, if there is one."""
    budget = budget_of(plan)
    if t not in tests_of(plan):
        return
    for key, state in keys.items():
        if plan.public_keys is not None or state.round:
            continue
        assert budget.selection is not None and budget.tau is not None
        assert budget.statistic is not None
        step_index, name = test_of(plan, t), (window, key_ids[key])
        role = "value" if tests_its_count(plan) else "selection"
        at = step_of(plan, t) if role == "value" else step_index
        drawn = int(noise.path(role, budget.selection, *name, tested=True)[at - 1])
        if plan.privacy.weights is not None:
            drawn *= budget.statistic.weighted
        if plan.privacy.combine:
            # The very noise of the count that is published.
            count, of = (
                ("value", budget.values[0]) if budget.units is None else ("units", budget.units)
            )
            path = noise.path(count, of, *name)
            drawn += budget.statistic.counted * int(path[step_of(plan, t) - 1])
        statistic = (state.statistic(plan, budget) << 8) + drawn
        if len(state.units) > plan.privacy.pre_threshold and statistic > int(
            budget.tau[step_index - 1]
        ):
            yield key


def step_of(plan: Plan, t: int) -> int:
    """Step of a published stream at a trigger: the only one where keys are published once, at the
    close that is their only test."""
    private = plan.public_keys is None
    once = private and tests_of(plan) == [plan.timeline.triggers] and not remembers(plan)
    return 1 if once else t


def tests_its_count(plan: Plan) -> bool:
    """Whether keys are tested on the published count of records, of which a unit has one a key."""
    counted = {a.kind for a in plan.aggregates}
    if plan.privacy.strategy != "geometric" or plan.privacy.per_key_bound != 1:
        return False
    # One test takes truncated noise, which a count of several steps has not.
    last = plan.timeline.triggers
    fits = len(tests_of(plan)) > 1 or step_of(plan, last) == 1
    return fits and "units" not in counted and bool(counted & {"count", "mean"})


def _drawn(
    noise: SlowNoise, role: str, of: StreamNoise, state: _Key, window: int, key_id: bytes
) -> np.ndarray:
    """The noise of a column; of a key that was known before it is not truncated."""
    if state.since_before and of.most:
        return noise.path("known", msgspec.structs.replace(of, most=0, sooner=0), window, key_id)
    return noise.path(role, of, window, key_id)


def _calendar(plan: Plan, keys: Mapping[str, _Key], selected: set[str], t: int) -> set[str]:
    """Keys to publish at trigger t; marks those that are now selected for the window."""
    last = t == plan.timeline.triggers
    every = refreshes_every(plan)
    chosen = set(selected)
    for key in selected:
        keys[key].round = 1
    if last or t % every == 0:
        chosen |= {k for k, s in keys.items() if s.round}
    return chosen


def _figures(
    plan: Plan, state: _Key, noise: SlowNoise, window: int, key_id: bytes, t: int
) -> dict[str, tuple[float | None, float | None]]:
    budget = budget_of(plan)
    noisy, sd = {}, {}
    for i, stream in enumerate(plan.design.streams):
        drawn = _drawn(noise, "value", budget.values[i], state, window, key_id)
        noisy[stream.name] = ((state.streams[i] << 8) + int(drawn[step_of(plan, t) - 1])) / 256
        sd[stream.name] = float(budget.values[i].sd[step_of(plan, t) - 1])
    out: dict[str, tuple[float | None, float | None]] = {}
    for a in plan.aggregates:
        if a.kind == "count":
            out[a.name] = noisy["count"], sd["count"]
        elif made_from_a_mean(plan, a):
            out[a.name] = _sum_of_a_mean(plan, a, noisy, sd)
        elif a.kind == "sum":
            out[a.name] = noisy[a.name] * a.grid, sd[a.name] * a.grid
        elif a.kind == "units":
            assert budget.units is not None
            fused = plan.public_keys is None and plan.privacy.weights is None
            assert not (fused and skips(plan))
            role = "selection" if fused else "units"
            drawn = _drawn(noise, role, budget.units, state, window, key_id)
            step_index = test_of(plan, t) if fused else step_of(plan, t)
            exact = (len(state.units) << 8) + int(drawn[step_index - 1])
            out[a.name] = exact / 256, float(budget.units.sd[step_index - 1])
        else:
            out[a.name] = _mean(plan, a, noisy, sd)
    return out


def _sum_of_a_mean(
    plan: Plan, a: Aggregate, noisy: dict[str, float], sd: dict[str, float]
) -> tuple[float, float]:
    """The mean's centred sum and its middle for every record that was counted."""
    mean = next(b.name for b in plan.aggregates if b.kind == "mean" and b.column == a.column)
    middle = sum(a.grid_bounds()) // 2
    counted = middle * sd["count"]
    error = math.sqrt(sd[mean] * sd[mean] + counted * counted) * (1 + 1e-15)
    return (noisy[mean] + middle * noisy["count"]) * a.grid, error * a.grid


def _mean(
    plan: Plan, a: object, noisy: dict[str, float], sd: dict[str, float]
) -> tuple[float | None, float | None]:
    count = noisy["count"]
    if count < 1:
        return None, None
    lo, hi = a.grid_bounds()  # type: ignore[attr-defined]
    total = noisy[a.name]  # type: ignore[attr-defined]
    offset = total * count / (count * count + sd["count"] * sd["count"])
    value = ((lo + hi) // 2 + offset) * a.grid  # type: ignore[attr-defined]
    # Products, as numpy squares: Python's power may differ in the last digit.
    own, counted = sd[a.name], offset * sd["count"]  # type: ignore[attr-defined]
    error = math.sqrt(own * own + counted * counted)
    return value, error / count * a.grid  # type: ignore[attr-defined]


#: (window, key number) -> trigger at which it is selected.
Path_ = dict[tuple[int, int], int]


class Breach(Exception):
    """A rule that was broken, by the flow or by a sabotaged variant."""


@dataclasses.dataclass(frozen=True)
class AdmittedPair:
    """An admitted pair as it reaches the key shards."""

    unit: bytes
    window: int
    trigger: int
    page: str
    index: int


#: Called around each aggregation, with the states and the rows that come.
Around = Callable[[Any, list[AdmittedPair]], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def forced(
    plan: Plan,
    path: Path_,
    rows: list[AdmittedPair],
    around: Around = lambda *_: contextlib.nullcontext(),
) -> Iterator[None]:
    """Tests say what the path says; rows that are aggregated are kept."""
    window_of: dict[int, int] = {}
    honest, aggregate = step.Stepper._chosen, vars(step)["aggregate"]

    def remember(stepper: Any, states: Any, window: int, slots: Any, trigger: int) -> Any:
        window_of[id(states)] = window
        return honest(stepper, states, window, slots, trigger)

    def select(plan: Plan, _: Any, states: Any, slots: Any, trigger: int) -> Any:
        names = states.key_columns(slots).column("page").to_pylist()
        window = window_of[id(states)]
        chosen = {key_name(k) for (w, k), at in path.items() if w == window and at <= trigger}
        return np.array([name in chosen for name in names], np.bool_)

    def keep(plan: Plan, states: Any, batch: Any, weights: Any) -> Any:
        units, index = ids_of(batch.column("unit")), numpy_view(batch.column("_index"))
        columns = (batch.column(name).to_pylist() for name in ("window", "trigger", "page"))
        new = [
            AdmittedPair(unit.tobytes(), window, trigger, page, int(i))
            for unit, i, window, trigger, page in zip(units, index, *columns, strict=True)
        ]
        rows.extend(new)
        with around(states, new):
            return aggregate(plan, states, batch, weights)

    def predict(plan: Plan, _: Any, states: Any, slots: Any, trigger: int) -> None:
        later = [t for t in plan.design.test_triggers.tolist() if t > trigger]
        states.due[slots] = later[0] if later else np.iinfo(np.int32).max

    with (
        mock.patch.object(step.Stepper, "_chosen", remember),
        mock.patch.object(step, "select", select),
        mock.patch.object(step, "aggregate", keep),
        mock.patch.object(step, "predict", predict),
    ):
        yield
