"""How the statistics of reference keys grow over a window, test by test, in expectation.

A unit of the reference (``reference``) has J records, at least i with chance 1/i and C at most, at
even and independent times.  A record at time s of the window finds k earlier ones of its unit that
took a selection weight, and takes the k-th itself: with q(s) the chance that another record came
before s and took one, k is binomial of J - 1 and q(s), over the J of a record's unit.  Without
``skip`` every record takes one and q(s) = s.  With it those on keys that the last test had
published take none, so that

    q(s) = integral over 0 .. s of (1 - the share of records on published keys)

and a key's records go on with early, heavy weights.  The share follows from the chances of the
tests so far, test by test: nothing is drawn, and no data is read.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from dpstream.accounting import limits, special
from dpstream.accounting.arrays import Float64
from dpstream.accounting.budget.allocation import Budget
from dpstream.accounting.errors import InvariantError
from dpstream.accounting.limits import COIN_BITS, DECODE_BITS
from dpstream.accounting.plan.plan import Plan

#: Tests that are looked at: of more, so many in equal steps, the last among them.
_TESTS = 256
#: Chances q at which mean weights are computed, closer where they are small; between, lines.
_GRID = np.linspace(0, 1, 129) ** 2


class Published(NamedTuple):
    """Chances of being published.

    Attributes:
        times: (tests,) of the tests that are looked at, as parts of the window.
        chances: (tests, keys) of being published by each of them.
    """

    times: Float64
    chances: Float64

    def by(self, time: float) -> Float64:
        """(keys,) chances of being published by a part of the window."""
        before = int(np.searchsorted(self.times, time * (1 + 1e-9), side="right"))
        return self.chances[before - 1] if before else np.zeros(self.chances.shape[1])


def published(plan: Plan, budget: Budget, units: Float64, mass: Float64) -> Published:
    """When keys are published.

    A key is published by a test with the chance of passing the easiest so far, a lower bound of
    passing any.

    Args:
        units: (keys,) of each key at close, of the reference's mix of records.
        mass: (keys,) shares of all records that fall on such keys; they matter with ``skip``.
    """
    statistic, tau = budget.statistic, budget.tau
    if statistic is None or tau is None:
        raise InvariantError("statistic is not None and tau is not None")
    step = -(-len(tau) // _TESTS)
    looked = np.arange(len(tau) - 1, -1, -step)[::-1]
    times = plan.design.test_triggers[looked] / plan.design.triggers
    need, sd = tau[looked] / 2.0**DECODE_BITS, statistic.sd[looked]
    weighs = _mean_weights(plan, budget)
    # Weights taken while q goes from 0 to each point of the grid.
    summed = np.append(0.0, np.cumsum(np.diff(_GRID) * (weighs[1:] + weighs[:-1]) / 2))
    chances = np.zeros((len(looked), len(units)))
    best, before, taken, heavy = np.full(len(units), -np.inf), 0.0, 0.0, 0.0
    for j, time in enumerate(times.tolist()):
        skipped = float(mass @ special.ndtr(best)) if plan.design.skips else 0.0
        passed = time - before
        # q grows evenly between two tests; where all is published it stands.
        takes = max(passed * (1 - skipped), 1e-9)
        ends = np.interp([taken, taken + takes], _GRID, summed)
        heavy += passed * float(ends[1] - ends[0]) / takes
        before, taken = time, taken + takes
        adds = statistic.weighted * heavy + statistic.counted * time
        best = np.maximum(best, (units * adds - need[j]) / sd[j])
        chances[j] = special.ndtr(best)
    tested = budget.selection
    if tested is not None and tested.most:  # one test, at the close
        counts = (tested.most, tested.sooner, tested.scale, float(need[-1]))
        chances[-1] = _passed(np.floor(units), *counts)
    return Published(times, chances)


def _mean_weights(plan: Plan, budget: Budget) -> Float64:
    """(grid,) what a record adds to the weighted count, at each q."""
    if budget.weights is None:
        return np.ones(len(_GRID))
    count = plan.privacy.contributions
    if plan.design.by_size:  # a unit has n keys with chance 1/n - 1/(n + 1), and C with 1/C
        share = np.append(1 / np.arange(2.0, count + 1), 1.0)
        return np.full(len(_GRID), float((share * budget.weights).sum() / share.sum()))
    if count > limits.MAX_SKIPPING:  # the mean over all times: nothing is skipped there
        there = 1 / np.arange(1, count + 1)
        return np.full(len(_GRID), float((there * budget.weights).sum() / there.sum()))
    return np.asarray(_numbers(count) @ budget.weights)


@functools.lru_cache(maxsize=16)
def _numbers(contributions: int) -> Float64:
    """(grid, C) chances that a record takes the k-th weight, at each q; read-only."""
    chances = np.zeros((len(_GRID), contributions))
    binomial = np.zeros_like(chances)
    binomial[:, 0] = 1  # of J - 1 other records, J = 1, 2, ..
    q = _GRID[:, None]
    for records in range(1, contributions + 1):
        # A record's unit has J records with chance in proportion to J (1/J - 1/(J + 1)).
        chances += binomial * (1 if records == contributions else 1 / (records + 1))
        more = binomial * (1 - q)
        more[:, 1:] += binomial[:, :-1] * q
        binomial = more
    chances /= chances.sum(axis=1, keepdims=True)
    chances.setflags(write=False)
    return chances


def _passed(sizes: Float64, most: int, sooner: int, scale: float, least: float) -> Float64:
    """P[n + Z + coin > least] of counts n with truncated noise.

    Args:
        most, sooner: its k and coin (``accounting.mechanisms.optimum``).
    """
    coin = sooner / (1 << COIN_BITS)
    chance = _above(least - sizes, most, scale)
    if not sooner:
        return chance
    return np.asarray(coin * _above(least - 1 - sizes, most - 1, scale) + (1 - coin) * chance)


def _above(bound: Float64, most: int, scale: float) -> Float64:
    """P[Z > bound] of noise that is truncated to [-most, most]."""
    ratio = math.exp(-1 / scale)
    last = ratio ** (most + 1)
    total = 1 + ratio - 2 * last
    least = np.floor(bound) + 1
    outer = np.where(least > 0, least, 1 - least)
    upper = np.maximum(ratio**outer - last, 0) / total
    return np.asarray(np.where(least > 0, upper, 1 - upper))
