"""How keys are tested: what of delta is the tests', their noise's encoder, and their thresholds.

`budget.thresholds` has the rules and their proofs; here is which of them holds in a plan.
"""

import functools

from dpstream.accounting import limits
from dpstream.accounting.arrays import Int64
from dpstream.accounting.budget.shares import beyond_hundred, strategy_of
from dpstream.accounting.budget.thresholds import (
    joint_thresholds,
    one_trigger_tail,
    size_thresholds,
    thresholds,
)
from dpstream.accounting.gaussian import mu_of
from dpstream.accounting.plan.plan import Mechanism, Resolved
from dpstream.accounting.plan.privacy import Privacy
from dpstream.accounting.plan.timeline import shares_of_tests
from dpstream.accounting.strategies import DenseStrategy, Strategy
from dpstream.accounting.strategies.dense import rising_parameters
from dpstream.accounting.weights import Statistic

_SLACK = 1e-12
#: What the last test's squared error counts in the selection stream's encoder, the first one's
#: counting 1: late tests select most keys (mechanism.md section 9).  More of it finds more keys in
#: all and fewer by T/10.  A combined statistic has more to spare there; with 1,000 triggers, whose
#: values have more noise, the last keys of other jobs are worth less, and all tests count alike.
LAST_TEST, LAST_COMBINED = 3.5, 4.5


def delta_split(plan: Mechanism) -> tuple[float, float, float]:
    """(mu, theta, b)."""
    privacy = plan.privacy
    epsilon, delta, count = privacy.epsilon, privacy.delta, privacy.contributions
    if not plan.design.selects:
        return mu_of(epsilon, delta), 0.0, 0.0
    if _one_test(plan):
        mu = mu_of(epsilon, delta)
        return mu, 0.0, one_trigger_tail(epsilon, delta, mu, count)
    theta = privacy.theta
    mu_delta = delta * (1 - theta) * (1 - _SLACK)
    return mu_of(epsilon, mu_delta), theta, theta * delta / count * (1 - _SLACK)


def _one_test(plan: Mechanism) -> bool:
    """Whether the sharper rule of one test holds (mechanism.md section 4).

    Its proof takes j of a unit's C pairs away from the one test of their keys, and needs that the
    others cost (C-j)/C of the whole: not with weights, which differ by pair, nor where a bound per
    key leaves fewer pairs a larger part.  It also needs that what a unit adds to a key's statistic
    depends on no other test: not where pairs on published keys take no weight (``skips``), nor
    where what another window published is not tested any more (``remembers``).
    """
    design = plan.design
    uniform = design.weights is None and _even(plan.privacy)
    return plan.once and uniform and not design.skips and not design.remembers


def _even(privacy: Privacy) -> bool:
    """Whether a bound per key divides C.

    Else fewer pairs can cost more than their part: of C = 3 with at most 2 of a key, 2 pairs of one
    key have 4 of the 5 that all can have.
    """
    bound = privacy.per_key_bound
    return bound is None or privacy.contributions % min(bound, privacy.contributions) == 0


@functools.lru_cache(maxsize=64)
def testing_strategy(name: str, tests: int, last: float) -> Strategy:
    """The encoder of a selection stream that nobody sees but its tests, of a run that begins now.

    Late tests select most keys, so they get the smaller error: of all encoders the one with the
    smallest squared error of the tests, the first of which counts 1 and the last ``last``.  It is
    chosen where noise is real anyway; ``tree`` and ``toeplitz`` keep theirs.
    """
    if name not in ("blt", "dense") or not 1 < tests <= limits.MAX_DENSE_TRIGGERS:
        return strategy_of(name, tests)
    return DenseStrategy(tests, rising_parameters(tests, last))


def last_test(plan: Resolved) -> float:
    """What the last test counts in a plan."""
    if plan.privacy.combine:
        return LAST_COMBINED
    return float(LAST_TEST ** (1 - beyond_hundred(plan.design.triggers)))


def thresholds_of_tests(plan: Mechanism, tail: float, statistic: Statistic) -> Int64:
    """Thresholds of the tests: for all keys of a unit together where that is proven.

    Not where one person is several units of a window, whose indices repeat; nor where a key is
    selected again and again (``rounds``), or the selection stream goes on as a published count
    (its units weigh alike, so that nothing is won).
    """
    privacy, design = plan.privacy, plan.design
    mu_count, sd, rounding = privacy.pre_threshold, statistic.sd, statistic.rounding
    alone = statistic.alone, design.units_alone
    if design.restarts or design.selection_published:
        return thresholds(tail, mu_count, sd, rounding, *alone)
    shares = shares_of_tests(design.tests)
    if design.weights is None or design.units_alone > 1:
        return thresholds(tail, mu_count, sd, rounding, *alone, shares)
    integers = design.weights.integers(privacy.contributions)
    adds = statistic.weighted * integers + statistic.counted
    total = tail * privacy.contributions * (1 - _SLACK)
    if design.weights.by_size:
        return size_thresholds(total, mu_count, sd, rounding, adds)
    return joint_thresholds(total, shares, mu_count, sd, rounding, adds)
