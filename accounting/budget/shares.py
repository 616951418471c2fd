"""Division of mu^2: the cost of a unit to each stream, and shares that no unit can exceed.

A unit of C admitted pairs that touches n selections, n = 1..C, costs at most

    S s(n) + U n/C + V g(n) <= 1      for ALL n

with S, U, V the shares of key selection, of a plain count of units that is a stream of its
own, and of all value columns; s(n) the part of the selection stream's squared sensitivity n
selections can use (n/C, with weights the n largest squares), and g(n) the worst squared effect
on a value column, C pairs on one step being 1 (mechanism.md sections 4 and 8).
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from dpstream.accounting.arrays import Float64
from dpstream.accounting.plan.plan import Resolved
from dpstream.accounting.strategies import Strategy, make_strategy
from dpstream.accounting.weights import square_parts

#: Shares are cut by this much, far above the float error of a division.
SLACK = 1e-12
#: Share of selection where it adds to the share of the rest (per_key_bound, mechanism.md 7; a count
#: of units of its own).
SPLIT = 0.8
#: The same with weights, combined with the plain count (section 8).
COMBINED = 0.655
#: The most with weights alone where published keys are skipped: there the last tenth of the budget
#: buys few keys, and small ones, whose noise adds more error than their counts were (``spared``).
SPARED = 0.85
#: So much less with 1,000 triggers, whose values have more noise: there keys cost more error than
#: they count that with 100 triggers count more.
_SPARED_LATER = 0.12
#: Shares of selection are whole numbers of this.
_STEPS = 10_000


@functools.lru_cache(maxsize=64)
def strategy_of(name: str, triggers: int) -> Strategy:
    """Return the strategy of a plan; shared, stateless."""
    return make_strategy(name, triggers)


class Costs(NamedTuple):
    """(C,) costs as fractions of mu^2 for n = 1..C selections: s(n), n/C and g(n)."""

    selected: Float64
    counted: Float64
    values: Float64

    def most(self, selection: float, units: float, values: float) -> float:
        """Return the largest fraction of mu^2 any unit can use (safe: <= 1)."""
        total = self.selected * selection + self.counted * units + self.values * values
        return float(np.max(total))

    def largest(self, selection: float, units: float, values: float) -> float:
        """Return the largest t with ``most(S, t U, t V) <= 1``, rounded down; S in [0, 1)."""
        free = 1 - self.selected * selection
        return float(np.min(free / (self.counted * units + self.values * values))) * (1 - SLACK)


class Shares(NamedTuple):
    """Shares of mu^2: key selection, a separate count of units, all value columns."""

    selection: float
    units: float
    values: float


def costs_of(plan: Resolved) -> Costs:
    """Return the costs of a unit to the plan's streams."""
    privacy, count = plan.privacy, plan.privacy.contributions
    weights, counted = plan.design.weights, square_parts(None, count)
    selected = counted if weights is None else weights.squares(count)
    if privacy.per_key_bound is not None:
        squares = per_key_squares(privacy.per_key_bound, count)
        return Costs(selected, counted, squares / squares.max())
    return Costs(selected, counted, value_costs(count))


@functools.lru_cache(maxsize=64)
def per_key_squares(bound: int, contributions: int) -> Float64:
    """Return (C,) largest sum of squares of a unit's pairs per key, for n = 1..C keys.

    Each key has 1 .. ``bound`` pairs, C in all.  Squares are convex, so at the largest as many keys
    as possible are full, at most one stands in between and the rest have one pair.  With a bound of
    1 it is n; without a bound ((C - n + 1)^2 + n - 1).  Exact: whole numbers below 2^53.
    """
    n = np.arange(1, contributions + 1, dtype=np.int64)
    more = min(bound, contributions) - 1
    if more == 0:
        return n.astype(np.float64)
    left = contributions - n
    full = np.minimum(n, left // more)
    between = np.where(full < n, left - full * more, 0)
    ones = n - full
    # The one in between has 1 + its part pairs: (1 + p)^2 = 1 + p (p + 2) in the place of 1.
    return np.asarray(full * (more + 1) ** 2 + ones + between * (between + 2), np.float64)


def value_costs(contributions: int) -> Float64:
    """Return (C,) g(n) for n = 1..C without a bound per key.

    A (window, key) is selected once, so n selections are n keys, and the worst is C-n+1 pairs on
    one of them: ((C-n+1)^2 + n - 1) / C^2.  Rounded up.
    """
    n = np.arange(1, contributions + 1, dtype=np.float64)
    return np.asarray(((contributions - n + 1) ** 2 + n - 1) / contributions**2 * (1 + SLACK))


def divide(plan: Resolved, selection_share: float | None = None) -> Shares:
    """Return the plan's shares.

    Args:
        selection_share: see `accounting.plan.plan.Mechanism`.
    """
    costs, values = costs_of(plan), float(bool(plan.design.streams))
    units = float(plan.design.units_apart)
    if not plan.design.selects:
        if not units:
            return Shares(0.0, 0.0, costs.largest(0.0, 0.0, 1.0))
        u, v = direction_of(plan)
        scale = costs.largest(0.0, u, v)
        return Shares(0.0, scale * u, scale * v)
    if not values and not units:
        return Shares(1 - SLACK, 0.0, 0.0)
    share = selection_share or _selection_share(plan, costs)
    u, v = direction_of(plan) if units else (0.0, 1.0)
    scale = costs.largest(share, u, v)
    return Shares(share, scale * u, scale * v)


def _selection_share(plan: Resolved, costs: Costs) -> float:
    """Share of key selection where something else is published too."""
    weights = plan.design.weights
    if weights is not None and weights.size_share is not None:
        return weights.size_share
    if plan.privacy.combine:
        return COMBINED
    if plan.design.once_per_key or plan.design.units_apart:
        return SPLIT
    if plan.design.weights:
        return spared(costs, plan.design.triggers) if plan.design.skips else knee(costs)
    return (1 - SLACK) / costs.most(1.0, 0.0, 1.0)


def knee(costs: Costs) -> float:
    """Return the share S of selection with the largest S^2 V(S).

    V is the share that the joint condition leaves for values.

    V(S) is a falling, concave chain of lines, one for each number n of selections: flat while a
    unit with all its pairs in one key costs most, steep (C of V for each 1 of S) where one with
    C keys does.  sds fall with the root of a share, so at the largest S^2 V a threshold that is
    1% lower has the price of an error that is 2% larger; the bend in front of the steep part is
    there for small C.  S^2 V is log-concave, so a ternary search finds it.

    T and the columns cannot matter: a key is selected once a window, so that all of a unit's pairs
    in a key can lie on one step whatever T is, and columns divide V in proportions of their own.
    Other kinds have no bend.  With a bound of 1 per key, or a count of units of its own, a unit
    with C keys costs most at every S: the rest falls as 1 - S for all C, and the largest S^2 V, at
    2/3, would only trade noise of selection 10% larger for other noise 22% smaller: those shares
    stay constants.  Without weights the default is the bend itself, (S, V) with the two in full.
    A bound of k > 1 per key has a bend: the steep part falls by k of V for each 1 of S.
    """

    def worth(step: int) -> float:
        return (step / _STEPS) ** 2 * costs.largest(step / _STEPS, 0.0, 1.0)

    low, high = 1, _STEPS - 1
    while high - low > 2:
        third = (high - low) // 3
        left, right = low + third, high - third
        if worth(left) < worth(right):
            low = left + 1
        else:
            high = right
    return max(range(low, high + 1), key=worth) / _STEPS


def spared(costs: Costs, triggers: int) -> float:
    """Return the share of selection where every record counts and published keys are skipped.

    Skipping publishes a fifth more keys from the same budget, and those last ones are small: a
    record of each of C moves values, so that their noise is soon more than what they count.  The
    knee looks at thresholds and noise alone and goes on past that point for C above 16 or so; a
    constant in front of it does not, and for small C the knee stands.  With many triggers values
    have more noise, and the point comes earlier.  Found on the public reference data of the paper's
    Table 1 by ``tests.bench.front`` (docs/benchmarks.md), and checked on populations that it was
    not found on.
    """
    return min(knee(costs), SPARED - _SPARED_LATER * beyond_hundred(triggers))


def beyond_hundred(triggers: int) -> float:
    """Return log10(T / 100), within 0 and 1."""
    return min(1.0, max(0.0, math.log10(triggers) - 2))


def direction_of(plan: Resolved) -> tuple[float, float]:
    """Return (U, V) up to a factor, by the weights that the job gives its columns.

    Where the worst units of the two differ (no bound of 1 per key) the point of largest
    U^units V^values is the kink, both in full, unless one weight is C (k, with a bound of k per
    key) times the other.
    """
    privacy = plan.privacy
    # A unit with its pairs in as few keys as can be costs values so many times what one with C
    # keys does.
    total = min(privacy.per_key_bound or privacy.contributions, privacy.contributions)
    values = sum(s.share for s in plan.design.streams)
    aggregate = plan.design.units_column
    part = values / (values + ((aggregate and aggregate.share) or 1.0))
    if plan.design.once_per_key or not values:
        return 1 - part, part
    kink = total / (total + 1)
    if part > kink:
        return total * (1 - part), part
    if 1 - part > kink:
        return 1 - part, total * part
    return kink, kink
