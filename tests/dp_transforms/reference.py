"""Slow references in plain Python, written from mechanism.md and not from the code.

``accept`` is rule 0 for one record, ``SlowBound`` rule 1 for one unit shard; what follows
BOUND is in ``exhaustive``.

Exact probabilities of the laws of noise in floats, and the chi-square that compares with them.

They are written from the definitions, not with the product's code.
"""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from dpstream.accounting.arrays import Float64
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.mechanisms.laws import DiscreteGaussianLaw, DiscreteLaplaceLaw
from dpstream.accounting.plan.plan import Plan
from tests.streams import Stream, key_name, user_name


@dataclasses.dataclass(frozen=True)
class Accepted:
    """A raw record that passed ingest."""

    unit: tuple[str, int]  # user and privacy period
    key: str
    event_trigger_time: int
    stamp_trigger_time: int
    order: tuple[int, int, int]  # (stamp, partition, offset)
    values: tuple[int, ...]  # per column stream, clamped, centred, in grid units


@dataclasses.dataclass(frozen=True)
class Pair:
    """An admitted (record, window) pair; ``rank`` of its unit's pairs were admitted before it.

    With a bound per key: so many of its unit's pairs that were the first of their (window, key),
    and -1 if it is none of these.
    ``index``: number of its selection weight where it is not the rank; -1: it takes none.
    """

    window: int
    step_index: int
    rank: int
    unit: tuple[str, int]
    key: str
    values: tuple[int, ...]
    index: int | None = None


def trigger_of(plan: Plan, instant: int) -> int:
    """Number of the first public trigger after an instant; triggers are numbered from 1."""
    return (instant - plan.timeline.start) // plan.timeline.trigger_every + 1


def verdict(plan: Plan, event: int, stamp: int) -> str | None:
    """Why rule 0 refuses a record with these times, ``None`` if it does not."""
    timeline = plan.timeline
    assert timeline.end is not None
    if not timeline.start <= event < timeline.end or event > stamp + timeline.max_skew:
        return "time"
    in_windows = [w for w in range(timeline.windows) if covers(plan, w, event)]
    if all(stamp >= last_instant(plan, w) for w in in_windows):
        return "late"
    if timeline.period is not None:
        end = timeline.start + ((event - timeline.start) // timeline.period + 1) * timeline.period
        if stamp >= end + timeline.allowed_lateness:
            return "late"
    return None


def covers(plan: Plan, window: int, event: int) -> bool:
    """Whether a window holds an event time."""
    begin = plan.timeline.start + window * plan.timeline.slide
    return begin <= event < begin + plan.timeline.window


def last_instant(plan: Plan, window: int) -> int:
    """End of a window and its lateness."""
    timeline = plan.timeline
    return timeline.start + window * timeline.slide + timeline.window + timeline.allowed_lateness


def on_grid(plan: Plan, value: float) -> tuple[int, ...]:
    """Clamped to the bounds snapped inward, rounded to the grid (ties to even), centred."""
    out = []
    for a in plan.aggregates:
        if a.kind in ("sum", "mean") and not made_from_a_mean(plan, a):
            # Floats divide exactly by a power of two; of other grids the decimals are meant.
            number = Fraction if math.frexp(a.grid)[0] == 0.5 else lambda x: Fraction(str(x))
            assert a.bounds is not None
            lo = math.ceil(number(a.bounds[0]) / number(a.grid))
            hi = math.floor(number(a.bounds[1]) / number(a.grid))
            scaled = min(max(round(Fraction(value / a.grid)), lo), hi)
            out.append(scaled - ((lo + hi) // 2 if a.kind == "mean" else 0))
    return tuple(out)


def made_from_a_mean(plan: Plan, a: Aggregate) -> bool:
    """Whether a sum stands beside a mean of the same numbers (and the job gives it no share)."""
    beside = (b for b in plan.aggregates if b.kind == "mean" and a.kind == "sum")
    same = any((b.column, b.bounds, b.grid) == (a.column, a.bounds, a.grid) for b in beside)
    return same and a.share is None


def accept(plan: Plan, stream: Stream) -> dict[tuple[int, int], Accepted]:
    """(partition, offset) -> accepted record of a stream."""
    timeline, out = plan.timeline, {}
    for row in range(len(stream)):
        event, stamp = int(stream.event[row]), int(stream.stamp[row])
        if verdict(plan, event, stamp) is not None:
            continue
        where = (int(stream.partition[row]), int(stream.offset[row]))
        period = 0 if timeline.period is None else (event - timeline.start) // timeline.period
        out[where] = Accepted(
            (user_name(int(stream.user[row])), period),
            key_name(int(stream.key[row])),
            trigger_of(plan, event),
            trigger_of(plan, stamp),
            (stamp, *where),
            on_grid(plan, float(stream.value[row])),
        )
    return out


def remembers(plan: Plan) -> bool:
    """Whether windows know what earlier ones have published, unless it says so."""
    if plan.public_keys is not None or plan.timeline.windows == 1:
        return False
    return plan.remember != "never"


def remembered_keys(plan: Plan, first: dict[tuple[int, str], int]) -> list[set[str]]:
    """By window: keys that tests selected by its start and that are not forgotten.

    Args:
        first: (window, key) -> trigger time of its first release.
    """
    timeline, key_sets, selected = plan.timeline, list[set[str]](), list[tuple[int, str]]()
    lasting = plan.remember // timeline.trigger_every if isinstance(plan.remember, int) else 1 << 40
    for window in range(timeline.windows):
        start = timeline.base(window)
        mine = {page for at, page in selected if start - lasting < at <= start}
        key_sets.append(mine if remembers(plan) else set())
        new = [(at, page) for (w, page), at in first.items() if w == window]
        selected += [(at, page) for at, page in new if page not in key_sets[window]]
    return key_sets


def skips(plan: Plan) -> bool:
    """Whether pairs on published keys take no weight: said, or wherever it can."""
    privacy, timeline = plan.privacy, plan.timeline
    if privacy.skip is not None:
        return privacy.skip
    goes = privacy.weights is not None and plan.public_keys is None
    goes = goes and (privacy.weights is None or privacy.weights.size_share is None)
    goes = goes and privacy.per_key_bound in (None, 1) and privacy.contributions < 1024
    goes = (
        goes
        and plan.record_id is None
        and timeline.max_skew == 0
        and timeline.window <= 11 * timeline.slide
    )
    goes = goes and (timeline.end is not None or timeline.slide >= 30_000_000)
    several = timeline.triggers > 1 and privacy.tests not in (1, (timeline.triggers,))
    several = several or remembers(plan)
    return goes and several and privacy.select_every is None


def bounds_keys(plan: Plan) -> bool:
    """Whether records beyond a bound per key are not admitted."""
    return plan.privacy.per_key_bound is not None


class SlowBound:
    """Rule 1 by hand: first C pairs of a unit in the order (stamp, partition, offset), with a bound
    per key those of them that are not beyond the first k of their window and key."""

    def __init__(self, plan: Plan, records: Mapping[tuple[int, int], Accepted]) -> None:
        self.plan, self.records = plan, records
        self.decided = 0
        self.used: dict[tuple[str, int], int] = defaultdict(int)
        self.firsts: dict[tuple[str, int], int] = defaultdict(int)
        self.of_key: dict[tuple[tuple[str, int], int, str], int] = defaultdict(int)
        self.fate: dict[tuple[int, int], list[Pair]] = {}

    def deliver(self, positions: Iterable[tuple[int, int]], upto: int) -> list[Pair]:
        """Pairs of the delivered records whose trigger times are complete, each position once."""
        delivered = set(positions)
        trigger_time = {p: max(self.records[p].stamp_trigger_time, 1) for p in delivered}
        for position in delivered - set(self.fate):
            if trigger_time[position] <= self.decided:
                trigger_time[position] = self.decided + 1
        fresh = [p for p in delivered if p not in self.fate and trigger_time[p] <= upto]
        for position in sorted(fresh, key=lambda p: self.records[p].order):
            self.fate[position] = self._admit(self.records[position], trigger_time[position])
        weights = self.plan.privacy.weights
        if weights is not None and weights.size_share is not None:
            self._number_by_size(fresh)
        self.decided = max(self.decided, upto)
        return [pair for p in delivered for pair in self.fate.get(p, [])]

    def _number_by_size(self, fresh: list[tuple[int, int]]) -> None:
        """Section 8: a pair of a unit of n, all of which are decided now, has number n - 1."""
        sizes = Counter(pair.unit for p in fresh for pair in self.fate[p])
        for p in fresh:
            self.fate[p] = [
                dataclasses.replace(pair, rank=sizes[pair.unit] - 1) for pair in self.fate[p]
            ]

    def _admit(self, record: Accepted, trigger_time: int) -> list[Pair]:
        timeline, out = self.plan.timeline, []
        entry_trigger_time = max(record.event_trigger_time, trigger_time)
        stride = timeline.slide // timeline.trigger_every
        event = timeline.start + (record.event_trigger_time - 1) * timeline.trigger_every
        for window in range(timeline.windows):
            step_index = entry_trigger_time - window * stride
            is_open = covers(self.plan, window, event) and step_index <= timeline.triggers
            if is_open and self.used[record.unit] < self.plan.privacy.contributions:
                rank = self.used[record.unit]
                if bounds_keys(self.plan):
                    place = (record.unit, window, record.key)
                    if self.of_key[place] == self.plan.privacy.per_key_bound:
                        continue
                    rank = self.firsts[record.unit] if self.of_key[place] == 0 else -1
                    self.firsts[record.unit] += self.of_key[place] == 0
                    self.of_key[place] += 1
                self.used[record.unit] += 1
                out.append(Pair(window, step_index, rank, record.unit, record.key, record.values))
        return out


def admitted(plan: Plan, stream: Stream) -> list[Pair]:
    """All admitted pairs of a stream delivered at once."""
    records = accept(plan, stream)
    return SlowBound(plan, records).deliver(records, 1 << 40)


#: A true sampler fails a test below this in one of a million runs; the keys are fixed anyway.
LEAST_P = 1e-6


def masses(law: Any, scale: float) -> Float64:
    """P[Z = k] for k = -K .. K of a law of that kind, K far in the tails."""
    kind = law if isinstance(law, type) else type(law)
    far = int((45 if kind is DiscreteLaplaceLaw else 12) * scale) + 12
    k = np.arange(-far, far + 1)
    if kind is DiscreteLaplaceLaw:
        mass = np.exp(-np.abs(k) / scale)
    elif kind is DiscreteGaussianLaw:
        mass = np.exp(-(k.astype(np.float64) ** 2) / (2 * scale**2))
    else:
        mass = stats.norm.cdf((k + 0.5) / scale) - stats.norm.cdf((k - 0.5) / scale)
    return np.asarray(mass / mass.sum())


def shape_p(noise: npt.NDArray[Any], mass: Float64) -> float:
    """p-value of a chi-square over bins of at least a 200th of the mass each."""
    far, flat = len(mass) // 2, noise.reshape(-1)
    bins = np.floor(np.cumsum(mass) * 200).astype(np.int64)
    bins = np.unique(bins, return_inverse=True)[1]
    chance = np.bincount(bins, mass)
    seen = np.bincount(bins[np.clip(flat, -far, far) + far], minlength=len(chance))
    few = chance * flat.size < 10
    if few.any():
        chance = np.append(chance[~few], chance[few].sum())
        seen = np.append(seen[~few], seen[few].sum())
    if chance[-1] * flat.size < 1:
        chance, seen = chance[:-1], seen[:-1]
    expected = chance / chance.sum() * seen.sum()
    return float(stats.chisquare(seen, expected).pvalue)
