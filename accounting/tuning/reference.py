"""The expected figures of a plan on a public reference population; it reads no data.

The population says how many keys of what size there are and how many records units have:

* keys have n units with density n^-1.7 (the sizes of a Zipf-Mandelbrot key distribution of
  exponent 1.4, the literature's; mechanism.md section 1), arriving evenly over the window;
* keys have at most ``LARGEST`` units, which decides what part of all records falls on published
  keys (and takes no weight where those are skipped): that of the exponent's own distribution;
* a unit has at least i records with chance 1/i, up to C: a heavy tail, as of commits, orders
  or visits.  What its records weigh at a key, and when, is that mix in expectation.

Figures are ratios of two plans on it, and honest as such: a key of n units is published if its
statistic passes the threshold at the easiest of the tests (a lower bound of passing at any).

``expected_keys`` is no ratio.  It asks for the number of units and keys and takes Zipf's law for
what is met: the r-th most popular of K keys 1/r as often, by every record anew.

**Growth** of the keys' statistics over a window, test by test, in expectation.  A unit of the
reference has J records, at least i with chance 1/i and C at most, at even and independent times.  A
record at time s of the window finds k earlier ones of its unit that took a selection weight, and
takes the k-th itself: with q(s) the chance that another record came before s and took one, k is
binomial of J - 1 and q(s), over the J of a record's unit.  Without ``skip`` every record takes one
and q(s) = s.  With it those on keys that the last test had published take none, so that

    q(s) = integral over 0 .. s of (1 - the share of records on published keys)

and a key's records go on with early, heavy weights.  The share follows from the chances of the
tests so far, test by test: nothing is drawn, and no data is read.
"""

import functools
import math
from typing import NamedTuple

import msgspec
import numpy as np

from dpstream.accounting import limits
from dpstream.accounting.arrays import Float64
from dpstream.accounting.budget.allocation import Budget
from dpstream.accounting.errors import required
from dpstream.accounting.libraries import special
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
        """Return (keys,) chances of being published by a part of the window."""
        before = int(np.searchsorted(self.times, time * (1 + 1e-9), side="right"))
        return self.chances[before - 1] if before else np.zeros(self.chances.shape[1])


def publication_chances(plan: Plan, budget: Budget, units: Float64, mass: Float64) -> Published:
    """Return the chances that keys are published, by test.

    A key's chance at a test is that of passing the easiest test so far, which is a lower bound of
    the chance of passing any of them.

    Args:
        units: (keys,) units of each key at the window's close, with the reference's mix of records.
        mass: (keys,) share of all records that falls on such keys; it matters with ``skip`` only.
    """
    statistic = required(budget.statistic, "keys are tested")
    tau = required(budget.tau, "tests have thresholds")
    step = -(-len(tau) // _TESTS)
    tests = np.arange(len(tau) - 1, -1, -step)[::-1]
    times = plan.design.test_triggers[tests] / plan.design.triggers
    threshold, sd = tau[tests] / 2.0**DECODE_BITS, statistic.sd[tests]
    weights = _mean_weights(plan, budget)
    # Weights taken while q goes from 0 to each point of the grid.
    weight_sums = np.append(0.0, np.cumsum(np.diff(_GRID) * (weights[1:] + weights[:-1]) / 2))
    chances = np.zeros((len(tests), len(units)))
    best, before, taken, heavy = np.full(len(units), -np.inf), 0.0, 0.0, 0.0
    for j, time in enumerate(times.tolist()):
        skipped = float(mass @ special.ndtr(best)) if plan.design.skips else 0.0
        passed = time - before
        # q grows evenly between two tests; where all is published it stands.
        takes = max(passed * (1 - skipped), 1e-9)
        ends = np.interp([taken, taken + takes], _GRID, weight_sums)
        heavy += passed * float(ends[1] - ends[0]) / takes
        before, taken = time, taken + takes
        adds = statistic.weighted * heavy + statistic.counted * time
        best = np.maximum(best, (units * adds - threshold[j]) / sd[j])
        chances[j] = special.ndtr(best)
    tested = budget.selection
    if tested is not None and tested.most:  # one test, at the close
        counts = (tested.most, tested.sooner, tested.scale, float(threshold[-1]))
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
    return np.asarray(chances_of_weights(count) @ budget.weights)


@functools.lru_cache(maxsize=16)
def chances_of_weights(contributions: int) -> Float64:
    """Return (grid, C) chances that a record takes the k-th weight, at each q; read-only."""
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
        most, sooner: the test's k and coin (``accounting.mechanisms.optimum``).
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


#: Epsilons that a table of errors compares, over a plan's own.
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
#: Sizes of the reference keys and the exponent of their density.
SIZES = np.geomspace(1, 1e6, 400)
DENSITY = -1.7
#: Units of the largest key: that of 60 million records on a million keys of the exponent's
#: distribution (mechanism.md section 1).
LARGEST = 25_000
#: Records of a unit, and popularities of keys, that ``expected_keys`` looks at.
_RECORDS, _RANKS = 2048, 400
#: Terms of a harmonic number that are added one by one.
_SUMMED = 100_000

SHAPE = (
    "keys with n units at density n^-1.7, units with at least i records with chance 1/i, spread "
    "evenly over the window"
)


#: Shares of the records that fall on keys of ``SIZES``, steps of equal ratio.
MASS = np.where(SIZES <= LARGEST, SIZES ** (DENSITY + 2), 0.0)
MASS /= MASS.sum()


class ReferenceFigures(msgspec.Struct, frozen=True):
    """What a plan is expected to publish of the public reference population.

    Attributes:
        keys: expected published keys at close, up to a factor that all plans share; infinite
            where keys are public.
        units: how many units a key must have to be published by the close with a chance of 1/2.
        noise: ``typical_sd`` by running sum, each in its own units (of counts and of the grid).
    """

    keys: float
    units: float
    noise: dict[str, float]

    def noise_against(self, other: "ReferenceFigures") -> float:
        """Return this one's sd over the other's: root mean square over the running sums of both."""
        names = self.noise.keys() & other.noise.keys()
        squares = [(self.noise[name] / other.noise[name]) ** 2 for name in names]
        return math.sqrt(sum(squares) / len(squares)) if squares else math.nan

    def keys_against(self, other: "ReferenceFigures") -> float:
        """Return the ratio of expected keys; not a number where neither publishes any."""
        if math.isinf(self.keys) or other.keys <= 0:
            return math.nan if self.keys <= 0 else math.inf
        return self.keys / other.keys


def reference_figures(plan: Plan, budget: Budget) -> ReferenceFigures:
    """Return the figures of a plan on the reference population."""
    noise = {n.name: typical_sd(n.sd) for n in (*budget.values, budget.units) if n is not None}
    if budget.units is not None:
        noise["units"] = noise.pop(budget.units.name)
    if budget.tau is None:
        return ReferenceFigures(math.inf, 0.0, noise)
    publication = published_sizes(plan, budget)
    units = float(np.interp(0.5, publication.chances[-1], SIZES))
    return ReferenceFigures(_of_density(publication.by(1.0)), units, noise)


def mean_over_keys(figures: Float64) -> float:
    """Return the mean of a figure over all keys of the reference population.

    Args:
        figures: (sizes,) of a key of each of ``SIZES`` units.
    """
    return _of_density(figures) / _of_density(np.ones(len(SIZES)))


def _of_density(figures: Float64) -> float:
    """Sum of a figure over the keys, with the density of ``SIZES``."""
    return float(np.trapezoid(SIZES**DENSITY * figures, SIZES))


def published_sizes(plan: Plan, budget: Budget) -> Published:
    """Return the chances that keys of ``SIZES`` units are published, by test."""
    return publication_chances(plan, budget, SIZES, MASS)


def typical_sd(sd: Float64) -> float:
    """Return the root mean square of the sd at a window's last trigger and of that over all
    triggers.

    The last is looked at most.  By itself it would favour the tree where T is a power of two, whose
    noise is least there and half as large again as that of others on the way.
    """
    return math.sqrt((float(sd[-1]) ** 2 + float(np.mean(np.square(sd)))) / 2)


def final_sd(plan: Plan, budget: Budget) -> float:
    """Return sd at close of the first published column, in records at the bound."""
    if budget.values:
        return float(budget.values[0].sd[-1]) / plan.design.streams[0].sensitivity
    return float(required(budget.units, "budget.units is there").sd[-1])


def harmonic(count: int) -> float:
    """Return 1 + 1/2 + ... + 1/count.

    Beyond a limit it is the expansion by Euler and Maclaurin, whose error is below count^-4 / 120.
    """
    if count <= _SUMMED:
        return float((1 / np.arange(1, count + 1)).sum())
    return math.log(count) + float(np.euler_gamma) + 1 / (2 * count) - 1 / (12 * count**2)


def expected_keys(plan: Plan, budget: Budget, units: int, keys: int) -> float:
    """Return the expected published keys of one window at its close.

    Args:
        units: number of units with records in the window; keys: K, the number of keys.
    """
    if budget.tau is None:
        return float(keys)
    edges = np.unique(np.geomspace(1, keys + 1, _RANKS).astype(np.int64))
    if edges[-1] <= keys:
        edges = np.append(edges, keys + 1)
    rank = np.sqrt(edges[:-1] * (edges[1:] - 1.0))  # one popularity for the ranks in between
    met = 1 / rank / harmonic(keys)
    first = np.arange(1, min(plan.privacy.contributions, _RECORDS) + 1)
    # A unit's i-th record is there with chance 1/i, and the key's first with p (1 - p)^(i - 1).
    chance = met[:, None] * (1 - met[:, None]) ** (first - 1) / first
    there, mass = np.diff(edges), met * np.diff(edges)
    publication = publication_chances(plan, budget, units * chance.sum(axis=1), mass / mass.sum())
    return float(there @ publication.chances[-1])
