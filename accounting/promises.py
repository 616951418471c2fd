"""Promises of both families of noise: for one period, and for a person of all periods.

Gaussian noise composes: k periods cost about sqrt(k) times one.  Two-sided geometric noise is
charged its epsilon: k periods cost k times one.  Where all periods are fixed beforehand they cost
less (below), which an account may not use, because there earlier answers decide what is
asked next.  Lifetimes of both families are stated at k times the delta of a period.  Selected keys
use all of it for their thresholds; a fixed schedule then states as much again for its epsilon,
because deltas of the k periods and of their composition add up (Kairouz, Oh and Viswanath 2015).

**A fixed schedule** of k mechanisms of plain epsilon e each, where k and e are fixed beforehand.
They are dominated by k randomised responses with odds e^e, whose privacy loss is e (k - 2 j) with j
binomial of chance 1 / (1 + e^e) (Kairouz, Oh and Viswanath 2015).  This holds for interactive
mechanisms that run in parallel too (Lyu 2022).  So, exactly for responses and as a bound for all
others,

    delta(epsilon) = sum over j of  P[j] max(0, 1 - e^(epsilon - e (k - 2 j))).

k and e must not depend on outputs.  An account decides each charge after the answers before it, so
that it may not use this bound and adds epsilons up.
"""

import functools
import math
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np

from dpstream.accounting import limits
from dpstream.accounting.arrays import Float64
from dpstream.accounting.budget.allocation import Budget, allocate
from dpstream.accounting.errors import DpstreamError
from dpstream.accounting.gaussian import bisected, epsilon_of
from dpstream.accounting.guarantee import describe
from dpstream.accounting.plan.plan import Plan, with_privacy
from dpstream.accounting.plan.privacy import StrategyName
from dpstream.accounting.plan.unit import several_mu, together
from dpstream.accounting.strength import STATED_DELTA

#: Relative error allowed for logarithms of factorials and sums.
_UP = 1 + 1e-9
_STEPS = 100


def epsilon_of_responses(delta: float, each: float, count: int) -> float:
    """Return the least epsilon of ``count`` mechanisms of ``each`` plain epsilon at ``delta``.

    It is rounded up.

    Args:
        delta: 0 <= delta < 1; 0: the sum of their epsilons.
        each: e > 0.
        count: k >= 1.
    """
    low, high = 0.0, count * each
    if delta <= 0:
        return high
    losses = losses_of(each, count)
    if delta_of_losses(low, *losses) <= delta:
        return low
    return bisected(lambda e: delta_of_losses(e, *losses) <= delta, low, high, _STEPS)[1]


def losses_of(each: float, count: int) -> tuple[Float64, Float64]:
    """Return ((count + 1,) losses, logarithms of their chances) of so many randomised responses."""
    from scipy.special import gammaln  # a plan alone needs it

    flips = np.arange(count + 1)
    ways = gammaln(count + 1) - gammaln(flips + 1) - gammaln(count - flips + 1)
    chances = ways - flips * each - count * math.log1p(math.exp(-each))
    return np.asarray(each * (count - 2.0 * flips)), np.asarray(chances, np.float64)


def delta_of_losses(epsilon: float, losses: Float64, chances: Float64) -> float:
    """Return delta at an epsilon, rounded up, from losses and the logarithms of their chances."""
    above = losses > epsilon
    parts = np.exp(chances[above]) * -np.expm1(epsilon - losses[above])
    return min(1.0, float(parts.sum()) * _UP)


#: Periods of the person whose promise is shown where the stream has no end.
_SHOWN_PERIODS = 4


class Promise(NamedTuple):
    """One family's promise for a plan.

    Attributes:
        family: of the noise.
        chosen: whether the plan takes this family.
        epsilon, delta: the guarantee of one unit (of one period).
        column: name of the first published column.
        sd: mean sd of the noise over a window's releases, in units of the column.
        periods: number of periods of a person of all periods; a few for a stream without end.
        lifetime: (epsilon, delta) of a person of so many periods.
        fixed: the same where the schedule is fixed beforehand; ``None`` for Gaussian noise, whose
            ``lifetime`` holds for any schedule.
    """

    family: Literal["gaussian", "geometric"]
    chosen: bool
    epsilon: float
    delta: float
    column: str
    sd: float
    periods: int
    lifetime: tuple[float, float]
    fixed: tuple[float, float] | None


def promises(plan: Plan, budget: Budget) -> list[Promise]:
    """Return the promise of the plan's family, then that of the other one if the plan could take
    it.
    """
    other = _other(plan, "blt" if budget.plain else "geometric") if budget.sound else None
    chosen = [_promise(plan, budget, True)]
    return chosen if other is None else [*chosen, _promise(*other, False)]


def _promise(plan: Plan, budget: Budget, chosen: bool) -> Promise:
    column = describe(plan, budget)["columns"][0]
    periods = (plan.timeline.periods or _SHOWN_PERIODS) if budget.sound else 1
    return Promise(
        "geometric" if budget.plain else "gaussian",
        chosen,
        budget.epsilon,
        budget.delta,
        column["name"],
        column["sd_mean"],
        periods,
        _lifetime(plan, budget, periods),
        _fixed(plan, budget, periods) if budget.plain else None,
    )


def _lifetime(plan: Plan, budget: Budget, periods: int) -> tuple[float, float]:
    """(epsilon, delta) of a person of so many periods, rounded up."""
    if periods == 1:
        return budget.epsilon, budget.delta
    delta = min(1.0, periods * budget.delta * (1 + 1e-15))
    if budget.plain:
        exact = periods * Fraction(repr(float(budget.epsilon)))
        epsilon = float(exact)
        return (epsilon if epsilon >= exact else math.nextafter(epsilon, math.inf)), delta
    if not budget.theta:  # thresholds of the rule of one test come on top of mu's delta
        thresholds = periods * plan.privacy.contributions * budget.b
        delta = min(1.0, delta + thresholds * (1 + 1e-15))
    gaussian = periods * budget.delta * (1 - budget.theta) * (1 - 1e-12)
    mu = several_mu(budget.mu, periods, together(plan))
    return epsilon_of(mu, min(gaussian, 0.5)), delta


def _fixed(plan: Plan, budget: Budget, periods: int) -> tuple[float, float]:
    """(epsilon, delta) of a fixed schedule.

    With at most one record of a unit for each key, each of C keys costs epsilon / C.  The deltas
    of thresholds (``budget.delta``, 0 with public keys) add to that at which epsilons compose.
    """
    privacy = plan.privacy
    parts = privacy.contributions if privacy.per_key_bound == 1 else 1
    delta = min(0.5, periods * privacy.delta or STATED_DELTA)
    epsilon = epsilon_of_responses(delta, privacy.epsilon / parts, periods * parts)
    return epsilon, min(1.0, delta + periods * budget.delta * (1 + 1e-15))


@functools.lru_cache(maxsize=16)
def _other(plan: Plan, strategy: StrategyName) -> tuple[Plan, Budget] | None:
    """(plan, budget) with another strategy; ``None`` where the plan cannot have it."""
    if plan.design.triggers > limits.MAX_GEOMETRIC_TRIGGERS and strategy == "geometric":
        return None
    other = with_privacy(plan, strategy=strategy, optimise="period")
    try:
        return other, allocate(other)
    except DpstreamError:
        return None
