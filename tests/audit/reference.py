"""The analysed mechanism in plain integers: y = A x + z, decode, test, publish.

Written from mechanism.md.  It takes admitted pairs and says what the streams x are, what every
state must be and what must be released; the noise of a node is drawn afresh from its name by
code that was bound at import, so that a sabotaged product cannot sabotage its judge.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping

import numpy as np
import pyarrow as pa

from accounting.budget import Budget, StreamNoise, allocate
from accounting.limits import DECODE_BITS
from accounting.plan import Plan, ValueStream
from accounting.strategies.tree import TreeStrategy
from accounting.timeline import Timeline
from dp_transforms.ids import typed_ids
from dp_transforms.noise.paths import NoiseStream
from dp_transforms.noise.prf import KeyRing
from dp_transforms.noise.sampler import RoundedGaussian
from tests.audit.neighbours import PUBLIC
from tests.audit.recorder import Row
from tests.streams import KEYS, RUN_ID

_Sampler = RoundedGaussian
_names, _draw, _stream = NoiseStream.names, RoundedGaussian.draw, NoiseStream.__init__
_thresholds_of, _typed_ids, _bounds = allocate, typed_ids, Timeline.window_bounds

#: (window, page) -> triggers at which the key was selected.
Transcript = Mapping[tuple[int, str], list[int]]
#: (window, page, stream, round) -> inputs by leaf of the stream's tree.
Streams = dict[tuple[int, str, str, int], list[int]]


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """Public figures of a plan, computed once."""

    plan: Plan

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", _thresholds_of(self.plan))
        object.__setattr__(self, "tree", TreeStrategy(self.plan.timeline.triggers).matrix())
        object.__setattr__(self, "samplers", {})
        object.__setattr__(self, "values", self.plan.value_streams)

    budget: Budget = dataclasses.field(init=False)
    tree: np.ndarray = dataclasses.field(init=False)
    samplers: dict[float, RoundedGaussian] = dataclasses.field(init=False)
    values: tuple[ValueStream, ...] = dataclasses.field(init=False)

    @property
    def units_stream(self) -> str:
        """The stream that holds exact counts of units."""
        return "selection" if self.plan.selects else "units"

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

    def node_noise(self, window: int, page: str, stream: str, number: int) -> list[int]:
        """z of every node of one tree, from its name alone."""
        noise = self.noise_of(stream)
        if noise.sigma not in self.samplers:
            self.samplers[noise.sigma] = _Sampler(noise.sigma)
        sampler = self.samplers[noise.sigma]
        name = (bytes.fromhex(RUN_ID), (0).to_bytes(8, "little"), bytes.fromhex(self.plan.hash))
        window_bounds = _bounds(self.plan.timeline, window)
        path = object.__new__(NoiseStream)
        ring = key_ring()
        _stream(path, ring, name, window_bounds, stream.split(maxsplit=1)[0], noise, sampler)
        tweaks = _names(path, page_id(page), np.array([number]))
        nodes = np.array([len(self.tree)])
        drawn, _ = _draw(sampler, ring.node, tweaks, np.zeros(1, np.int64), nodes)
        return [int(z) for z in drawn]

    def prefixes(
        self, window: int, page: str, stream: str, number: int, inputs: list[int]
    ) -> list[int]:
        """Decoded noisy prefix at every leaf, in units of 2^-DECODE_BITS."""
        exact = self.tree @ np.array(inputs, np.int64)
        z = self.node_noise(window, page, stream, number)
        return decode([int(y) + noise for y, noise in zip(exact, z, strict=True)], len(inputs))


@functools.cache
def key_ring() -> KeyRing:
    """The key ring of the fixed test key."""
    return KEYS.ring()


@functools.cache
def page_id(page: str) -> np.ndarray:
    """(1, 2) keyed id of a page."""
    return _typed_ids(key_ring().key, [("string", pa.array([page]))])


def decode(nodes: list[int], leaves: int) -> list[int]:
    """Bottom-up Honaker on noisy nodes in order of completion; no float, no noise apart."""
    blocks: dict[int, int] = {}
    out, node = [], 0
    for leaf in range(1, leaves + 1):
        level, total = 0, nodes[node]
        node += 1
        while leaf >> level & 1 == 0:
            total += blocks.pop(level)
            level += 1
            total += nodes[node] << level
            node += 1
        blocks[level] = total
        parts = []
        for height, block in blocks.items():
            divisor = (2 << height) - 1
            parts.append((2 * (block << DECODE_BITS) + divisor) // (2 * divisor))
        out.append(sum(parts))
    return out


def streams_of(mechanism: Mechanism, rows: Iterable[Row], transcript: Transcript) -> Streams:
    """x of every tree, given which keys were selected when."""
    plan = mechanism.plan
    triggers = plan.timeline.triggers
    sticky = plan.privacy.mode == "sticky"
    out: Streams = {}
    counted: set[tuple[int, str, int, bytes]] = set()

    def add(name: tuple[int, str, str, int], leaf: int, amount: int) -> None:
        out.setdefault(name, [0] * triggers)[leaf - 1] += amount

    for row in sorted(rows, key=lambda r: r.leaf):
        amounts = iter(row.values)
        for spec in mechanism.values:
            amount = 1 if spec.column is None else next(amounts)
            add((row.window, row.page, f"value {spec.name}", 0), row.leaf, amount)
        earlier = [t for t in transcript.get((row.window, row.page), []) if t < row.leaf]
        if not plan.counts_units or (sticky and earlier and not plan.keeps_counting_units):
            continue
        number, base = (0, 0) if sticky or not earlier else (len(earlier), earlier[-1])
        if (row.window, row.page, number, row.unit) not in counted:
            counted.add((row.window, row.page, number, row.unit))
            add((row.window, row.page, mechanism.units_stream, number), row.leaf - base, 1)
    return out


@dataclasses.dataclass
class KeyRun:
    """What must happen to one key of one window, by trigger."""

    counts: list[tuple[int, tuple[int, ...]]] = dataclasses.field(default_factory=list)
    marks: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    selected: list[int] = dataclasses.field(default_factory=list)
    published: dict[int, dict[str, float]] = dataclasses.field(default_factory=dict)


def replay(mechanism: Mechanism, rows: Iterable[Row]) -> dict[tuple[int, str], KeyRun]:
    """Every key at every trigger, from the admitted pairs and the names of the nodes."""
    plan = mechanism.plan
    by_key: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        by_key.setdefault((row.window, row.page), []).append(row)
    if not plan.selects:
        for window in range(plan.timeline.windows):
            for page in PUBLIC:
                by_key.setdefault((window, page), [])
    return {key: _replay_key(mechanism, *key, rows) for key, rows in by_key.items()}


def _replay_key(mechanism: Mechanism, window: int, page: str, rows: list[Row]) -> KeyRun:
    plan, budget = mechanism.plan, mechanism.budget
    triggers, run = plan.timeline.triggers, KeyRun()
    sticky = plan.privacy.mode == "sticky"
    values, streams = {}, streams_of(mechanism, rows, {})
    for spec in mechanism.values:
        name = f"value {spec.name}"
        inputs = streams.get((window, page, name, 0), [0] * triggers)
        noisy = mechanism.prefixes(window, page, name, 0, inputs)
        values[spec.name] = (np.cumsum(inputs).tolist(), noisy)
    base, number, inputs = 0, 0, [0] * triggers
    counted: set[bytes] = set()
    for trigger in range(1, triggers + 1):
        new = {row.unit for row in rows if row.leaf == trigger} - counted
        if plan.counts_units and not (sticky and run.selected and not plan.keeps_counting_units):
            counted |= new
            inputs[trigger - base - 1] += len(new)
        units, leaf = sum(inputs), trigger - base
        run.counts.append((units, tuple(exact[trigger - 1] for exact, _ in values.values())))
        passed = False
        if plan.selects and units > plan.privacy.pre_threshold and not (sticky and run.selected):
            assert budget.tau is not None
            noisy = mechanism.prefixes(window, page, "selection", number, inputs)
            passed = noisy[leaf - 1] > int(budget.tau[leaf - 1])
        if passed:
            run.selected.append(trigger)
            if not sticky:
                base, number, inputs, counted = trigger, number + 1, [0] * triggers, set()
        rounds = len(run.selected) if plan.selects else 1
        run.marks.append((rounds, base))
        if _published(plan, run, trigger, passed):
            noisy_units = None
            if plan.units_aggregate is not None:
                stream = mechanism.units_stream
                noisy_units = mechanism.prefixes(window, page, stream, 0, inputs)[trigger - 1]
            at = {name: noisy[trigger - 1] for name, (_, noisy) in values.items()}
            run.published[trigger] = _columns(plan, at, noisy_units)
    return run


def _published(plan: Plan, run: KeyRun, trigger: int, passed: bool) -> bool:
    """The public calendar: a selected key is published whether it has data or not."""
    closing = trigger == plan.timeline.triggers
    chosen = bool(run.selected) or not plan.selects
    if plan.privacy.mode == "sticky":
        return passed or (chosen and (closing or trigger % plan.refresh_every == 0))
    return passed or (chosen and closing and plan.privacy.final_flush)


def _columns(plan: Plan, noisy: Mapping[str, int], units: int | None) -> dict[str, float]:
    """Published columns from decoded integers alone."""
    scale = float(1 << DECODE_BITS)
    out: dict[str, float] = {}
    for aggregate in plan.aggregates:
        if aggregate.kind == "units":
            assert units is not None
            out[aggregate.name] = units / scale
        elif aggregate.kind == "count":
            out[aggregate.name] = noisy["count"] / scale
        elif aggregate.kind == "sum":
            out[aggregate.name] = noisy[aggregate.name] / scale * aggregate.grid
        elif noisy["count"] >= 1 << DECODE_BITS:
            spec = next(s for s in plan.value_streams if s.name == aggregate.name)
            middle = spec.mid + noisy[aggregate.name] / noisy["count"]
            out[aggregate.name] = min(max(middle, spec.lo), spec.hi) * aggregate.grid
        else:
            out[aggregate.name] = float("nan")
    return out
