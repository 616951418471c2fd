"""What an observer of one unit's keys can see: the best linear statistic and its mu.

A unit that puts a records into one key at step l moves every released prefix from l on by a L,
and the noise of the prefixes released at triggers P has a public covariance sigma^2 S_P.  The
likelihood ratio of the released prefixes is linear in them with weights S_P^-1 e (e = 1 from l
on), and two sides are told apart by exactly

    mu^2 = (a L / sigma)^2 e' S_P^-1 e  <=  (a L / sigma)^2 col2,

with equality where every prefix is released and the decoder is invertible (all but the tree).
Of two-sided geometric noise the same statistic is told apart about as well as Gaussian noise of its
sd would be; it is no longer the best one, which only makes what it proves weaker.
Streams and keys have independent noise, so their mu^2 add up.  A unit of C pairs that touches n
keys has C - n + 1 pairs on one of them and one on each of the others; with at most k on each key it
shows most where it fills as few keys as C takes (mechanism.md section 4).
Key selection itself is another part of the budget, seen only through which keys appear when.
"""

import numpy as np

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.budget.allocation import StreamNoise
from dpstream.accounting.errors import InvariantError
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.strategies import (
    DenseStrategy,
    GeometricStrategy,
    Strategy,
    TreeStrategy,
)
from dpstream.accounting.strategies.convolution import ConvolutionStrategy

#: Prefixes a statistic uses: the first ones tell most, the others are taken evenly.
MAX_PREFIXES = 128


def prefix_covariance(strategy: Strategy, at: Int64) -> Float64:
    """(p, p) covariance of the released prefixes at steps ``at`` (rising) for node sd 1.

    Rounding of nodes and of the decoder is left out: it only makes the statistic slightly
    worse than the best, never a bound wrong.
    """
    if isinstance(strategy, TreeStrategy):
        return _tree_covariance(strategy, at)
    if isinstance(strategy, (DenseStrategy, GeometricStrategy)):
        return np.asarray(strategy.decoder[at - 1] @ strategy.decoder[at - 1].T)
    if not isinstance(strategy, ConvolutionStrategy):
        raise InvariantError("isinstance(strategy, ConvolutionStrategy)")
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
    """Triggers of a window at which a key that is selected at once is published (sticky)."""
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
        """(p,) effect on the prefixes of one grid unit at each of these triggers."""
        step_indices = self._steps(triggers)
        return np.asarray(
            (step_indices <= self._step_indices[:, None]).sum(axis=1, dtype=np.float64)
        )

    def weights(self, moved: Float64) -> Float64:
        """(p,) weights of the likelihood ratio of an effect."""
        return np.asarray(self._inverse @ moved)

    def square(self, moved: Float64) -> float:
        """mu^2 of an effect."""
        return float(moved @ self.weights(moved))


def layouts(plan: Plan) -> Int64:
    """Numbers n of keys over which a unit's pairs are tried."""
    most = plan.privacy.contributions
    grid = np.geomspace(1, most, min(most, 64)).round().astype(np.int64)
    return np.unique(np.concatenate([[1, _fewest(plan), most], grid]))


def spread(plan: Plan, keys: int) -> tuple[int, int]:
    """(pairs that count on the first key, on each other key) of a unit that touches n keys.

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
