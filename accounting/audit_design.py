"""Synthetic neighbours that show most of a plan's cost, designed from public figures alone.

A trial is one unit and a handful of keys nobody else's trial uses.  On D the keys hold other
units' records only, enough of them that the keys are selected at the first test and their
values are seen; on D' the unit adds its worst case: all C pairs, values beyond the clamps, at the
trigger and spread over the number of keys where the best statistic sees most (``visible``).
It sends twice as many records as count, on the same key or on further keys, so that a bound that
is missing shows as an effect the plan does not allow.
"""

import math

import msgspec
import numpy as np

from accounting.budget import Budget, StreamNoise
from accounting.limits import DECODE_BITS
from accounting.plan import Plan, ValueStream
from accounting.strategies.base import Float64, Int64
from accounting.visible import Seen, calendar, layouts, spread

#: Sds above the threshold at which others' records put a key that must be seen.
_ABOVE = 4.0
#: Triggers at which a key is filled again in mode ``rounds`` so that it is published again.
_ROUNDS = 6
#: Others on a key beyond which means are left out of the statistic: they need many.
_MAX_OTHERS = 1500


class Column(msgspec.Struct, frozen=True):
    """One published column as the statistic reads it, in grid units of its stream.

    Attributes:
        name, kind: of the aggregate; grid, middle: value = (middle + total / count) * grid for a
            mean, total * grid otherwise.
        noise: of its stream; effect: what a record of the unit adds; other: one of another unit.
        once: counts a unit once per key, however many records it has there.
    """

    name: str
    kind: str
    grid: float
    middle: int
    noise: StreamNoise
    effect: float
    other: float
    once: bool


class Design(msgspec.Struct, frozen=True, eq=False):
    """One kind of trial.

    Attributes:
        name: of the family of trials.
        keys: n, keys whose counts the unit may change; extra: keys it floods beyond its C pairs.
        pattern: key number of each of the unit's records, in order.
        heavy: pairs that count on key 0; all other keys: 1.
        others: other units on every key at every feed; feeds: triggers at which they come.
        trigger: at which the unit comes; at: (p,) triggers the statistic reads.
        columns: what it reads there.
        inputs: input column -> (the unit's value, the others' value).
        mu: the most the statistic can see of the plan's mu.
    """

    name: str
    keys: int
    extra: int
    pattern: Int64
    heavy: int
    others: int
    feeds: tuple[int, ...]
    trigger: int
    at: Int64
    columns: tuple[Column, ...]
    inputs: dict[str, tuple[float, float]]
    mu: float

    def weights(self, plan: Plan) -> Float64:
        """(p, columns) weights of the likelihood ratio, for a key with one pair of the unit."""
        parts = [
            Seen(plan, c.noise, self.at).weights(self.trigger) * c.effect for c in self.columns
        ]
        return np.stack(parts, axis=1)

    def expected(self) -> Float64:
        """(p, columns) what the others add to a key; known to the adversary."""
        fed = np.searchsorted(np.array(self.feeds), self.at, side="right") * self.others
        return np.stack([fed * c.other for c in self.columns], axis=1)


def designs(plan: Plan, budget: Budget) -> list[Design]:
    """Trials that read published values: the layout that shows most; with ``per_key_bound``
    also all C records on one key."""
    found = [_best(plan, budget)]
    if plan.privacy.per_key_bound and plan.privacy.contributions > 1:
        heap = _best(plan, budget, keys=1)
        pattern = np.zeros(plan.privacy.contributions, np.int64)
        found.append(msgspec.structs.replace(heap, name="one key", pattern=pattern))
    return found


def others_needed(plan: Plan, budget: Budget, above: float) -> int:
    """Units that put a key ``above`` sds over the threshold of its first test."""
    if budget.tau is None or budget.statistic is None:
        return 0
    alone, sd = budget.statistic.alone, float(budget.statistic.sd[0])
    goal = float(budget.tau[0]) / (1 << DECODE_BITS) + above * sd
    return max(plan.privacy.pre_threshold + 1, math.ceil(goal / alone))


def _best(plan: Plan, budget: Budget, keys: int | None = None) -> Design:
    feeds: tuple[int, ...] = (1,)
    if plan.privacy.mode == "sticky":
        at = calendar(plan)
    else:
        last = plan.timeline.triggers
        feeds = tuple(range(1, min(_ROUNDS, last) + 1))
        at = np.array(sorted({*feeds, *([last] if plan.privacy.final_flush else [])}))
    others = others_needed(plan, budget, _ABOVE)
    columns, inputs, more = _columns(plan, budget, at)
    others = max(others, more)
    seen = {c.name: Seen(plan, c.noise, at) for c in columns}
    trigger = max(
        _starts(plan, at),
        key=lambda t: sum(seen[c.name].square(t) * c.effect**2 for c in columns),
    )
    square = {c.name: seen[c.name].square(trigger) * c.effect**2 for c in columns}
    tried = {n: _square(plan, columns, square, n) for n in ([keys] if keys else layouts(plan))}
    chosen = int(max(tried, key=lambda n: (tried[n], -n)))
    heavy, _ = spread(plan, chosen)
    return Design(
        name="values",
        keys=chosen,
        extra=chosen if chosen > 1 else 0,
        pattern=_pattern(plan, chosen, heavy),
        heavy=heavy,
        others=others,
        feeds=feeds,
        trigger=trigger,
        at=at,
        columns=columns,
        inputs=inputs,
        mu=math.sqrt(tried[chosen]),
    )


def _square(plan: Plan, columns: tuple[Column, ...], square: dict[str, float], keys: int) -> float:
    """mu^2 that all keys and columns together show of a unit on so many keys."""
    first, rest = spread(plan, keys)
    return sum(
        square[c.name] * (keys if c.once else first**2 + (keys - 1) * rest**2) for c in columns
    )


def _pattern(plan: Plan, keys: int, heavy: int) -> Int64:
    """Twice C records: those that count, then as many more that must not."""
    if keys == 1:
        return np.zeros(2 * plan.privacy.contributions, np.int64)
    return np.concatenate([np.zeros(heavy - 1, np.int64), np.arange(2 * keys)])


def _starts(plan: Plan, at: Int64) -> list[int]:
    """Triggers at which a unit's first record may come: one after each that is read, inside the
    first window (and no other)."""
    line = plan.timeline
    length = min(line.window, line.slide, (line.end or line.start + line.window) - line.start)
    most = max(1, length // line.trigger_every)
    return [int(t) for t in (1, *(at[:-1] + 1)) if t <= most] or [1]


def _columns(
    plan: Plan, budget: Budget, at: Int64
) -> tuple[tuple[Column, ...], dict[str, tuple[float, float]], int]:
    """(columns to read, values to send, others that means need)."""
    pairs = {s.name: (s, n) for s, n in zip(plan.value_streams, budget.values, strict=True)}
    inputs = {s.column: _values(plan, budget, s.column) for s in plan.value_streams if s.column}
    means = [a for a in plan.aggregates if a.kind == "mean"]
    needed = 0
    if means:
        sd = float(pairs["count"][1].sd[at - 1].max())
        needed = math.ceil(6 * sd) + plan.privacy.contributions + 1
    use_means = needed <= _MAX_OTHERS or len(means) == len(plan.aggregates)
    columns = []
    for a in plan.aggregates:
        if a.kind == "mean" and not use_means:
            continue
        if a.kind == "units":
            assert budget.units is not None
            columns.append(Column(a.name, a.kind, 1.0, 0, budget.units, 1.0, 1.0, True))
            continue
        stream, noise = pairs["count" if a.kind == "count" else a.name]
        own, other = 1.0, 1.0
        if stream.column is not None:
            own, other = (_entered(stream, v) for v in inputs[stream.column])
        columns.append(Column(a.name, a.kind, stream.grid, stream.mid, noise, own, other, False))
    return tuple(columns), inputs, needed if means and use_means else 0


def _entered(stream: ValueStream, value: float) -> float:
    """What a record with this value adds to a stream."""
    return float(np.clip(np.rint(value / stream.grid), stream.lo, stream.hi) - stream.mid)


def _values(plan: Plan, budget: Budget, column: str) -> tuple[float, float]:
    """(the unit's value, the others') of an input column: beyond all clamps on the side where
    its effect is largest; in the middle of the first mean, or as near to 0 as clamps allow."""
    pairs = [
        (s, n) for s, n in zip(plan.value_streams, budget.values, strict=True) if s.column == column
    ]
    low = min(s.lo * s.grid for s, _ in pairs)
    high = max(s.hi * s.grid for s, _ in pairs)
    beyond = 2 * (high - low) + 1

    def size(value: float) -> float:
        return sum((_entered(s, value) / n.sigma) ** 2 for s, n in pairs)

    middles = [s.mid * s.grid for s, _ in pairs if s.mid]
    return max(low - beyond, high + beyond, key=size), middles[0] if middles else 0.0
