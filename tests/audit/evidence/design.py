"""Synthetic neighbours that show most of a plan's cost, designed from public figures alone.

A trial is one unit and a handful of keys nobody else's trial uses.  On D the keys hold other
units' records only, enough of them that the keys are selected at the first test and their
values are seen; on D' the unit adds its worst case: all C pairs, values beyond the clamps, at the
trigger and spread over the number of keys where the best statistic sees most (`visible`).
It sends twice as many records as count, on the same key or on further keys, so that a bound that
is missing shows as an effect the plan does not allow.

**What an observer of one unit's keys can see**: the best linear statistic and its mu.  A unit that
puts a records into one key at step l moves every released prefix from l on by a L, and the noise of
the prefixes released at triggers P has a public covariance sigma^2 S_P.  The likelihood ratio of
the released prefixes is linear in them with weights S_P^-1 e (e = 1 from l on), and two sides are
told apart by exactly

    mu^2 = (a L / sigma)^2 e' S_P^-1 e  <=  (a L / sigma)^2 col2,

with equality where every prefix is released and the decoder is invertible (all but the tree).
Of two-sided geometric noise the same statistic is told apart about as well as Gaussian noise of its
sd would be; it is no longer the best one, which only makes what it proves weaker.
Streams and keys have independent noise, so their mu^2 add up.  A unit of C pairs that touches n
keys has C - n + 1 pairs on one of them and one on each of the others; with at most k on each key it
shows most where it fills as few keys as C takes (mechanism.md section 4).
Key selection itself is another part of the budget, seen only through which keys appear when.
"""

import math

import msgspec
import numpy as np

from dpstream.accounting.aggregates import COUNT, kind_of
from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.budget.allocation import Budget, StreamNoise
from dpstream.accounting.errors import InvariantError, required
from dpstream.accounting.fields import ValueStream
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.strategies import (
    BltStrategy,
    DenseStrategy,
    GeometricStrategy,
    Strategy,
    TreeStrategy,
)

#: Prefixes a statistic uses: the first ones tell most, the others are taken evenly.
MAX_PREFIXES = 128


def prefix_covariance(strategy: Strategy, at: Int64) -> Float64:
    """Return (p, p) covariance of the released prefixes at steps ``at`` (rising) for node sd 1.

    Rounding of nodes and of the decoder is left out: it only makes the statistic slightly
    worse than the best, never a bound wrong.
    """
    if isinstance(strategy, TreeStrategy):
        return _tree_covariance(strategy, at)
    if isinstance(strategy, (DenseStrategy, GeometricStrategy)):
        return np.asarray(strategy.decoder[at - 1] @ strategy.decoder[at - 1].T)
    if not isinstance(strategy, BltStrategy):
        raise InvariantError("isinstance(strategy, BltStrategy)")
    rows = np.zeros((len(at), int(at[-1])))
    for row, step_index in zip(rows, at, strict=True):
        row[:step_index] = strategy.decoder[:step_index][::-1]
    return np.asarray(rows @ rows.T)


def _tree_covariance(strategy: TreeStrategy, at: Int64) -> Float64:
    """Prefixes s < t share the blocks of their common leading bits; the other blocks of s lie
    inside the block of t at the first bit that differs.  Blocks of levels k <= l, one inside
    the other, have covariance 2^k / (2^(l+1) - 1)."""
    low, high = np.minimum.outer(at, at), np.maximum.outer(at, at)
    levels = strategy.levels
    differ = low ^ high
    # Level of the highest bit that differs, -1 where the two are equal.
    first = np.where(differ > 0, np.frexp(differ.astype(np.float64))[1] - 1, -1)
    total = np.zeros(low.shape)
    for level in range(levels):
        has = (low >> level) & 1
        same = level > first
        inner = 2.0**level / (2.0 ** (np.where(same, level, first) + 1.0) - 1.0)
        total += has * inner
    return total


def calendar(plan: Plan) -> Int64:
    """Return the triggers of a window at which a key that is selected at once is published
    (sticky).
    """
    last = plan.timeline.triggers
    triggers = set(range(plan.design.refresh_every, last + 1, plan.design.refresh_every)) | {last}
    if plan.design.selects:
        first = int(plan.design.test_triggers[0])
        triggers = {t for t in triggers if t > first} | {first}
    every = np.array(sorted(triggers))
    if len(every) <= MAX_PREFIXES:
        return every
    half = MAX_PREFIXES // 2
    rest = np.linspace(half, len(every) - 1, half).round().astype(np.int64)
    return np.asarray(every[np.concatenate([np.arange(half), np.unique(rest)])])


class Seen:
    """The best statistic for one stream's prefixes at public triggers.

    Args:
        plan: gives the step of a trigger; noise: the stream; at: (p,) triggers, rising.
    """

    def __init__(self, plan: Plan, noise: StreamNoise, at: Int64) -> None:
        self._tests = plan.design.selection_step_index if noise.name == "selection" else None
        self._noise = noise
        step_indices = self._steps(at)
        self._step_indices = step_indices
        covariance = prefix_covariance(noise.strategy_object, step_indices) * noise.sigma**2
        self._inverse = np.linalg.inv(covariance)

    def _steps(self, triggers: Int64) -> Int64:
        if self._tests is None:
            return self._noise.steps_at(triggers)
        return np.array([self._tests(t) for t in triggers.tolist()], np.int64)

    def moved(self, triggers: Int64) -> Float64:
        """Return (p,) effect on the prefixes of one grid unit at each of these triggers."""
        step_indices = self._steps(triggers)
        return np.asarray(
            (step_indices <= self._step_indices[:, None]).sum(axis=1, dtype=np.float64)
        )

    def weights(self, moved: Float64) -> Float64:
        """Return (p,) weights of the likelihood ratio of an effect."""
        return np.asarray(self._inverse @ moved)

    def square(self, moved: Float64) -> float:
        """Return mu^2 of an effect."""
        return float(moved @ self.weights(moved))


def layouts(plan: Plan) -> Int64:
    """Return the numbers n of keys over which a unit's pairs are tried."""
    most = plan.privacy.contributions
    grid = np.geomspace(1, most, min(most, 64)).round().astype(np.int64)
    return np.unique(np.concatenate([[1, _fewest(plan), most], grid]))


def spread(plan: Plan, keys: int) -> tuple[int, int]:
    """Return (pairs that count on the first key, on each other key) of a unit that touches n keys.

    Of as few keys as its C pairs take, all but the first are full.
    """
    count, most = plan.privacy.contributions, _most(plan)
    if keys == _fewest(plan):
        return count - (keys - 1) * most, most
    return min(most, count - keys + 1), 1


def _most(plan: Plan) -> int:
    """Pairs of a unit that can count on one key."""
    return min(plan.design.per_key or plan.privacy.contributions, plan.privacy.contributions)


def _fewest(plan: Plan) -> int:
    """Keys that C pairs take at least."""
    return -(-plan.privacy.contributions // _most(plan))


#: Sds above the threshold at which others' records put a key that must be seen.
_ABOVE = 4.0
#: Others on a key beyond which means are left out of the statistic: they need many.
_MAX_OTHERS = 1500


class TrialColumn(msgspec.Struct, frozen=True):
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


class TrialDesign(msgspec.Struct, frozen=True, eq=False):
    """One kind of trial.

    Attributes:
        name: of the family of trials.
        keys: n, keys whose counts the unit may change; extra: keys it floods beyond its C pairs.
        pattern: key number of each of the unit's records, in order; when: their triggers.
        heavy: pairs that count on key 0; each: on each other key.
        others: other units on every key at every feed; feeds: triggers at which they come.
        at: (p,) triggers the statistic reads.
        columns: what it reads there.
        inputs: input column -> (the unit's value, the others' value).
        mu: the most the statistic can see of the plan's mu.
    """

    name: str
    keys: int
    extra: int
    pattern: Int64
    when: Int64
    heavy: int
    each: int
    others: int
    feeds: tuple[int, ...]
    at: Int64
    columns: tuple[TrialColumn, ...]
    inputs: dict[str, tuple[float, float]]
    mu: float

    def weights(self, plan: Plan) -> tuple[Float64, Float64]:
        """Return (p, columns) weights of the likelihood ratio, for key 0 and for each other key."""
        first, rest = [], []
        for column in self.columns:
            seen = Seen(plan, column.noise, self.at)
            first.append(seen.weights(self._moved(seen, column, self.heavy)))
            rest.append(seen.weights(self._moved(seen, column, self.each)))
        return np.stack(first, axis=1), np.stack(rest, axis=1)

    def _moved(self, seen: Seen, column: TrialColumn, records: int) -> Float64:
        """(p,) effect on a column of a key of the unit's first records there."""
        return seen.moved(self.when[: 1 if column.once else records]) * column.effect

    def with_mu(self, plan: Plan) -> "TrialDesign":
        """Return the same design with the mu that its statistic measures."""
        square = 0.0
        for column in self.columns:
            seen = Seen(plan, column.noise, self.at)
            square += seen.square(self._moved(seen, column, self.heavy))
            square += (self.keys - 1) * seen.square(self._moved(seen, column, self.each))
        return msgspec.structs.replace(self, mu=math.sqrt(square))

    def expected(self) -> Float64:
        """(p, columns) the contribution of others to a key; known to the adversary."""
        fed = np.searchsorted(np.array(self.feeds), self.at, side="right") * self.others
        return np.stack([fed * c.other for c in self.columns], axis=1)


def designs(plan: Plan, budget: Budget) -> list[TrialDesign]:
    """Return trials that read published values.

    They have the layout that shows most.  Where a unit counts less than C times per key in some
    column, others have C records of it on one key, one after the other.
    """
    best = _best(plan, budget)
    count = plan.privacy.contributions
    most = min(plan.design.per_key or count, count)
    if count == 1 or not (most < count or any(c.once for c in best.columns)):
        return [best]
    starts = first_triggers(plan, np.arange(1, plan.timeline.triggers + 1))
    heap = msgspec.structs.replace(
        best,
        name="one key",
        keys=1,
        extra=0,
        pattern=np.zeros(count, np.int64),
        when=np.array([starts[min(i, len(starts) - 1)] for i in range(count)]),
        heavy=most,
    )
    return [best, heap.with_mu(plan)]


def others_needed(plan: Plan, budget: Budget, above: float) -> int:
    """Return how many units put a key ``above`` sds over the threshold of its first test."""
    if budget.tau is None or budget.statistic is None:
        return 0
    alone, sd = budget.statistic.alone, float(budget.statistic.sd[0])
    goal = float(budget.tau[0]) / (1 << DECODE_BITS) + above * sd
    return max(plan.privacy.pre_threshold + 1, math.ceil(goal / alone))


def _best(plan: Plan, budget: Budget) -> TrialDesign:
    at = calendar(plan)
    columns, inputs, more = columns_read(plan, budget, at)
    trigger, keys = _worst(plan, columns, at)
    heavy, each = spread(plan, keys)
    pattern = pattern_of(plan, keys, heavy, each)
    design = TrialDesign(
        name="values",
        keys=keys,
        extra=keys if keys > 1 else 0,
        pattern=pattern,
        when=np.full(len(pattern), trigger),
        heavy=heavy,
        each=each,
        others=max(others_needed(plan, budget, _ABOVE), more),
        feeds=(1,),
        at=at,
        columns=columns,
        inputs=inputs,
        mu=0.0,
    )
    return design.with_mu(plan)


def _worst(plan: Plan, columns: tuple[TrialColumn, ...], at: Int64) -> tuple[int, int]:
    """(trigger, keys) at and over which the statistic sees most of a unit's pairs."""
    seen = [(Seen(plan, c.noise, at), c) for c in columns]

    def squares(trigger: int) -> list[float]:
        here = np.array([trigger])
        return [s.square(s.moved(here)) * c.effect**2 for s, c in seen]

    def total(keys: int) -> float:
        first, rest = spread(plan, keys)
        apart = first**2 + (keys - 1) * rest**2
        return sum(
            q * (keys if c.once else apart) for q, c in zip(column_squares, columns, strict=True)
        )

    trigger = max(first_triggers(plan, at), key=lambda t: sum(squares(t)))
    column_squares = squares(trigger)
    return trigger, max((int(n) for n in layouts(plan)), key=lambda n: (total(n), -n))


def pattern_of(plan: Plan, keys: int, heavy: int, each: int) -> Int64:
    """Return twice C records: those that count, then as many more that must not."""
    if keys == 1:
        return np.zeros(2 * plan.privacy.contributions, np.int64)
    return np.concatenate([np.zeros(heavy, np.int64), np.arange(1, 2 * keys).repeat(each)])


def first_triggers(plan: Plan, at: Int64) -> list[int]:
    """Return when, in the first window alone, a unit's first record may come: after each read."""
    timeline = plan.timeline
    length = min(
        timeline.window,
        timeline.slide,
        (timeline.end or timeline.start + timeline.window) - timeline.start,
    )
    most = max(1, length // timeline.trigger_every)
    return [int(t) for t in (1, *(at[:-1] + 1)) if t <= most] or [1]


def columns_read(
    plan: Plan, budget: Budget, at: Int64
) -> tuple[tuple[TrialColumn, ...], dict[str, tuple[float, float]], int]:
    """Return (columns to read, values to send, number of others that means need)."""
    pairs = {s.name: (s, n) for s, n in zip(plan.design.streams, budget.values, strict=True)}
    inputs = {s.column: _values(plan, budget, s.column) for s in plan.design.streams if s.column}
    means = [a for a in plan.aggregates if kind_of(a).divides]
    needed = 0
    if means:
        noise = pairs[COUNT][1]
        sd = float(noise.sd[noise.steps_at(at) - 1].max())
        needed = math.ceil(6 * sd) + plan.privacy.contributions + 1
    use_means = needed <= _MAX_OTHERS or len(means) == len(plan.aggregates)
    columns = []
    made = {derived.name for derived in plan.design.derived}
    for a in plan.aggregates:
        if a.name in made or (kind_of(a).divides and not use_means):
            continue
        if kind_of(a).counts_units:
            units = required(budget.units, "units are counted")
            columns.append(TrialColumn(a.name, a.kind, 1.0, 0, units, 1.0, 1.0, True))
            continue
        stream, noise = pairs.get(a.name) or pairs[COUNT]
        own, other = 1.0, 1.0
        if stream.column is not None:
            own, other = (_entered(stream, v) for v in inputs[stream.column])
        columns.append(
            TrialColumn(a.name, a.kind, stream.grid, stream.mid, noise, own, other, False)
        )
    return tuple(columns), inputs, needed if means and use_means else 0


def _entered(stream: ValueStream, value: float) -> float:
    """What a record with this value adds to a stream."""
    return float(np.clip(np.rint(value / stream.grid), stream.lo, stream.hi) - stream.mid)


def _values(plan: Plan, budget: Budget, column: str) -> tuple[float, float]:
    """(the unit's value, the others') of an input column: beyond all clamps on the side where
    its effect is largest; in the middle of the first mean, or as near to 0 as clamps allow."""
    pairs = [
        (s, n)
        for s, n in zip(plan.design.streams, budget.values, strict=True)
        if s.column == column
    ]
    low = min(s.lo * s.grid for s, _ in pairs)
    high = max(s.hi * s.grid for s, _ in pairs)
    beyond = 2 * (high - low) + 1

    def size(value: float) -> float:
        return sum((_entered(s, value) / n.sigma) ** 2 for s, n in pairs)

    middles = [s.mid * s.grid for s, _ in pairs if s.mid]
    return max(low - beyond, high + beyond, key=size), middles[0] if middles else 0.0
