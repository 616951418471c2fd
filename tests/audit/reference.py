"""The analysed mechanism: y = A x + z, decode, test, publish.

Written from mechanism.md.  It takes admitted pairs and says what the streams x are, what every
state must be and what must be released; the noise of a node is drawn afresh from its name by
code that was bound at import, so that a sabotaged product cannot sabotage its judge.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import flint
import numpy as np
import pyarrow as pa

from dpstream.accounting.budget.allocation import Budget, StreamNoise, allocate
from dpstream.accounting.fields import ValueStream
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.timeline import Timeline
from dpstream.dp_transforms.noise.continuous import ContinuousGaussian
from dpstream.dp_transforms.noise.ids import typed_ids
from dpstream.dp_transforms.noise.paths import NoiseStream, Sampler
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.sampler import RoundedGaussian
from tests.audit import encoders
from tests.audit.neighbours import PUBLIC
from tests.audit.recorder import Row
from tests.dp_transforms.exhaustive import test_of, tests_of, weights_of
from tests.dp_transforms.reference import bounds_keys, made_from_a_mean, remembers
from tests.streams import KEYS, RUN_ID

_Rounded, _Real = RoundedGaussian, ContinuousGaussian
_names, _stream = NoiseStream.names, NoiseStream.__init__
_draw = RoundedGaussian.draw
_exact: Any = ContinuousGaussian.exact
_thresholds_of, _typed_ids, _bounds = allocate, typed_ids, Timeline.window_bounds

#: (window, page) -> triggers at which the key was selected.
Transcript = Mapping[tuple[int, str], list[int]]
#: (window, page, stream, round) -> inputs by step of the stream.
Streams = dict[tuple[int, str, str], list[int]]


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """Public figures of a plan, computed once."""

    plan: Plan

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", _thresholds_of(self.plan))
        object.__setattr__(self, "values", self.plan.design.streams)
        object.__setattr__(self, "weights", weights_of(self.plan))
        object.__setattr__(self, "tests", frozenset(tests_of(self.plan)))
        object.__setattr__(self, "drawn", {})

    budget: Budget = dataclasses.field(init=False)
    values: tuple[ValueStream, ...] = dataclasses.field(init=False)
    weights: tuple[int, ...] | None = dataclasses.field(init=False)
    tests: frozenset[int] = dataclasses.field(init=False)
    drawn: dict[tuple[object, ...], list[Any]] = dataclasses.field(init=False)

    def steps(self, stream: str) -> int:
        """Steps of a stream: tests of a key for the selection stream, else triggers."""
        return self.step_index(stream, self.plan.timeline.triggers)

    def step_index(self, stream: str, trigger: int) -> int:
        """The step of a round at which data of its ``trigger``-th trigger counts."""
        return test_of(self.plan, trigger) if stream == "selection" else trigger

    def tested(self, trigger: int) -> bool:
        """Whether keys are tested at a trigger."""
        return trigger in self.tests

    @property
    def plain_units(self) -> str | None:
        """The stream that holds exact counts of units, if there is one."""
        if self.plan.design.selects and self.weights is None:
            return "selection"
        return "units" if self.plan.design.units_column is not None else None

    def unit_amounts(self, index: int) -> dict[str, int]:
        """What a unit that counts for the first time adds to each stream of units."""
        out = {} if self.plain_units is None else {self.plain_units: 1}
        if self.weights is not None:
            out["selection"] = self.weights[index] if index >= 0 else 0
        return out

    @property
    def plain_count(self) -> str | None:
        """The published stream that a combined statistic uses."""
        if not self.plan.privacy.combine:
            return None
        return "units" if self.plan.design.units_column is not None else "value count"

    @property
    def labels(self) -> set[tuple[str, str]]:
        """(role, name) of every stream that has noise."""
        out = {("value", spec.name) for spec in self.values}
        if self.plan.design.selects:
            out.add(("selection", "selection"))
        if self.plan.design.units_column is not None and self.plain_units == "units":
            out.add(("units", "units"))
        return out

    def noise_of(self, stream: str) -> StreamNoise:
        """Calibrated noise of a stream."""
        budget = self.budget
        if stream in ("selection", "units"):
            noise = budget.selection if stream == "selection" else budget.units
            assert noise is not None
            return noise
        return budget.values[self.value_index(stream)]

    def value_index(self, stream: str) -> int:
        """Number of the value column that a stream holds."""
        return [f"value {spec.name}" for spec in self.values].index(stream)

    def encoding(self, stream: str) -> encoders.Encoding:
        """The encoder of a stream, with a step for each test or trigger."""
        encoding = encoders.Encoding.of(self.noise_of(stream).strategy_object)
        assert encoding.triggers == self.steps(stream)
        return encoding

    def node_noise(self, window: int, page: str, stream: str) -> list[Any]:
        """z of every node of one tree, from its name alone: integers, or balls of real numbers."""
        place = (window, page, stream)
        if place in self.drawn:
            return self.drawn[place]
        noise = self.noise_of(stream)
        rounded = noise.strategy not in ("blt", "dense")
        sampler = sampler_of(noise.sigma, rounded)
        name = (bytes.fromhex(RUN_ID), (0).to_bytes(8, "little"), bytes.fromhex(self.plan.hash))
        window_bounds = _bounds(self.plan.timeline, window)
        path = object.__new__(NoiseStream)
        ring = key_ring()
        _stream(path, ring, name, window_bounds, stream.split(maxsplit=1)[0], noise, sampler)
        tweaks = _names(path, page_id(page))
        nodes = len(encoders.matrix(self.encoding(stream)))
        if isinstance(sampler, RoundedGaussian):
            zero = np.zeros(1, np.int64)
            drawn = [int(z) for z in _draw(sampler, ring.node, tweaks, zero, zero + nodes)[0]]
        else:
            with flint.ctx.workprec(encoders.PRECISION):
                drawn = list(_exact(sampler, ring.node, tweaks[0], nodes)(encoders.PRECISION))
        self.drawn[place] = drawn
        return drawn

    def prefixes(self, window: int, page: str, stream: str, inputs: list[int]) -> list[int]:
        """Decoded noisy prefix at every step, in units of 2^-DECODE_BITS."""
        z = self.node_noise(window, page, stream)
        return encoders.prefixes(self.encoding(stream), inputs, z)


@functools.lru_cache(maxsize=128)
def sampler_of(sigma: float, rounded: bool) -> Sampler:
    """The sampler of a sd; its table takes a while at large ones."""
    return _Rounded(sigma) if rounded else _Real(sigma)


@functools.cache
def key_ring() -> KeyRing:
    """The key ring of the fixed test secret."""
    return KEYS.ring()


@functools.cache
def page_id(page: str) -> np.ndarray:
    """(1, 2) keyed id of a page."""
    return _typed_ids(key_ring().key, [("string", pa.array([page]))])


def streams_of(mechanism: Mechanism, rows: Iterable[Row], transcript: Transcript) -> Streams:
    """x of every tree, given which keys were selected when."""
    plan = mechanism.plan
    out: Streams = {}
    counted: set[tuple[int, str, bytes]] = set()

    def add(name: tuple[int, str, str], step_index: int, amount: int) -> None:
        """Add at a trigger of the window."""
        inputs = out.setdefault(name, [0] * mechanism.steps(name[2]))
        inputs[mechanism.step_index(name[2], step_index) - 1] += amount

    for row in sorted(rows, key=lambda r: (r.step_index, r.rank)):
        earlier = [t for t in transcript.get((row.window, row.page), []) if t < row.step_index]
        closed = bool(earlier) and not plan.design.window_sets
        place = (row.window, row.page, row.unit)
        first = plan.design.unit_sets != "none" and not closed and place not in counted
        if bounds_keys(plan):  # BOUND says which pair is the first of its window and key
            first = row.rank >= 0
        if first:
            counted.add(place)
            for stream, amount in mechanism.unit_amounts(row.index).items():
                add((row.window, row.page, stream), row.step_index, amount)
        if first or bounds_keys(plan) or not plan.privacy.per_key_bound:
            amounts = iter(row.values)
            for spec in mechanism.values:
                amount = 1 if spec.column is None else next(amounts)
                add((row.window, row.page, f"value {spec.name}"), row.step_index, amount)
    return out


@dataclasses.dataclass
class KeyRun:
    """What must happen to one key of one window, by trigger."""

    counts: list[tuple[int, tuple[int, ...]]] = dataclasses.field(default_factory=list)
    selected_after: list[bool] = dataclasses.field(default_factory=list)
    selected: list[int] = dataclasses.field(default_factory=list)
    published: dict[int, dict[str, float]] = dataclasses.field(default_factory=dict)


def replay(mechanism: Mechanism, rows: Iterable[Row]) -> dict[tuple[int, str], KeyRun]:
    """Every key at every trigger, from the admitted pairs and the names of the nodes."""
    plan = mechanism.plan
    by_key: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        by_key.setdefault((row.window, row.page), []).append(row)
    if not plan.design.selects:
        for window in range(plan.timeline.windows):
            for page in PUBLIC:
                by_key.setdefault((window, page), [])
    out: dict[tuple[int, str], KeyRun] = {}
    selected: dict[str, list[int]] = {}  # page -> trigger times at which tests selected it
    for window in range(plan.timeline.windows):
        start = plan.timeline.base(window)
        remembered = {
            page
            for page, times in selected.items()
            if remembers(plan) and any(_lasts(plan, start - time) for time in times)
        }
        for page in sorted(remembered | {p for w, p in by_key if w == window}):
            mine = by_key.get((window, page), [])
            run = out[window, page] = _replay_key(mechanism, window, page, mine, page in remembered)
            selected.setdefault(page, []).extend(start + t for t in run.selected if t)
    return out


def _lasts(plan: Plan, ago: int) -> bool:
    """Whether a window knows what was selected so many triggers before its start."""
    lasting = plan.remember if isinstance(plan.remember, int) else math.inf
    return ago >= 0 and ago * plan.timeline.trigger_every < lasting


def _replay_key(
    mechanism: Mechanism, window: int, page: str, rows: list[Row], remembered: bool
) -> KeyRun:
    """``remembered``: the window knows it from earlier ones; it is selected at trigger 0."""
    plan, triggers, run = mechanism.plan, mechanism.plan.timeline.triggers, KeyRun()
    run.selected += [0] * remembered
    values, streams = {}, streams_of(mechanism, rows, {})
    for spec in mechanism.values:
        name = f"value {spec.name}"
        inputs = streams.get((window, page, name), [0] * triggers)
        noisy = mechanism.prefixes(window, page, name, inputs)
        values[spec.name] = (np.cumsum(inputs).tolist(), noisy)
    units = 0
    counted: set[bytes] = set()
    inputs_of = {s: [0] * mechanism.steps(s) for s in ("selection", "units")}
    for trigger in range(1, triggers + 1):
        for row in sorted((r for r in rows if r.step_index == trigger), key=lambda r: r.rank):
            closed = run.selected and not plan.design.window_sets
            first = plan.design.unit_sets != "none" and not closed and row.unit not in counted
            if row.rank >= 0 if bounds_keys(plan) else first:
                counted.add(row.unit)
                units += 1
                for stream, amount in mechanism.unit_amounts(row.index).items():
                    inputs_of[stream][mechanism.step_index(stream, trigger) - 1] += amount
        sums = [exact[trigger - 1] for exact, _ in values.values()]
        weighted = [] if mechanism.weights is None else [sum(inputs_of["selection"])]
        run.counts.append((units, (*sums, *weighted)))
        at = {name: noisy[trigger - 1] for name, (_, noisy) in values.items()}

        def noisy_units(stream: str, at_trigger: int) -> int:
            """A stream of units at a trigger, decoded from its noisy nodes."""
            inputs = inputs_of[stream]
            noisy = mechanism.prefixes(window, page, stream, inputs)
            return noisy[mechanism.step_index(stream, at_trigger) - 1]

        passed = False
        may = plan.design.selects and mechanism.tested(trigger) and not run.selected
        if may and units > plan.privacy.pre_threshold:
            plain = None
            if mechanism.plain_count is not None:
                combined = mechanism.plain_count
                plain = at["count"] if combined != "units" else noisy_units("units", trigger)
            step_index = mechanism.step_index("selection", trigger)
            passed = _passes(mechanism, step_index, noisy_units("selection", trigger), plain)
        if passed:
            run.selected.append(trigger)
        run.selected_after.append(bool(run.selected) or not plan.design.selects)
        if _published(plan, run, trigger, passed):
            people = None
            if plan.design.units_column is not None:
                assert mechanism.plain_units is not None
                people = noisy_units(mechanism.plain_units, trigger)
            run.published[trigger] = _columns(plan, at, people, _sd_of_count(mechanism, trigger))
    return run


def _sd_of_count(mechanism: Mechanism, trigger: int) -> float:
    if not mechanism.values or mechanism.values[0].name != "count":
        return 0.0
    return float(mechanism.budget.values[0].sd[trigger - 1])


def _passes(mechanism: Mechanism, step_index: int, selection: int, plain: int | None) -> bool:
    """Whether the noisy statistic, a function of published streams' nodes alone, exceeds tau."""
    tau, statistic = mechanism.budget.tau, mechanism.budget.statistic
    assert tau is not None and statistic is not None
    noisy = statistic.weighted * selection
    if plain is not None:
        noisy += statistic.counted * plain
    return noisy > int(tau[step_index - 1])


def _published(plan: Plan, run: KeyRun, trigger: int, passed: bool) -> bool:
    """The public calendar: a selected key is published whether it has data or not."""
    closing = trigger == plan.timeline.triggers
    chosen = bool(run.selected) or not plan.design.selects
    return passed or (chosen and (closing or trigger % plan.design.refresh_every == 0))


def _columns(
    plan: Plan, noisy: Mapping[str, int], units: int | None, counts_sd: float
) -> dict[str, float]:
    """Published columns from decoded integers, and the sd of the count, alone."""
    scale = float(1 << DECODE_BITS)
    out: dict[str, float] = {}
    for aggregate in plan.aggregates:
        if aggregate.kind == "units":
            assert units is not None
            out[aggregate.name] = units / scale
        elif aggregate.kind == "count":
            out[aggregate.name] = noisy["count"] / scale
        elif made_from_a_mean(plan, aggregate):
            of = (b for b in plan.aggregates if b.kind == "mean" and b.bounds == aggregate.bounds)
            middle = sum(aggregate.grid_bounds()) // 2
            total = noisy[next(of).name] + middle * noisy["count"]
            out[aggregate.name] = total / scale * aggregate.grid
        elif aggregate.kind == "sum":
            out[aggregate.name] = noisy[aggregate.name] / scale * aggregate.grid
        elif noisy["count"] >= 1 << DECODE_BITS:
            spec = next(s for s in plan.design.streams if s.name == aggregate.name)
            count, sd = noisy["count"] / scale, counts_sd
            offset = noisy[aggregate.name] / scale * count / (count**2 + sd**2)
            out[aggregate.name] = (spec.mid + offset) * aggregate.grid
        else:
            out[aggregate.name] = float("nan")
    return out
