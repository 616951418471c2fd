"""The mechanism as published, for comparison on public data only, and the figures it printed.

Its guarantee does not hold, and the product has no such mode: ``Algorithm 2`` selects a key,
releases it and begins anew, and `tests.oracle.simulation` runs it with the numbers of the paper in
the place of those that ``budget.allocation`` would give.

Of Tables 1 and 2, at (epsilon, delta) = (6, 1e-9), the figures are by T and by our name of the
method: ``paper`` is the paper's DP-SQLP as published.
"""

import math
from typing import NamedTuple

import numpy as np

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.budget.allocation import (
    Budget,
    StreamNoise,
    check_ranges,
    encoder_of,
)
from dpstream.accounting.budget.thresholds import fixed_point, isf
from dpstream.accounting.errors import UsageError
from dpstream.accounting.gaussian import cdp_delta
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.weights import Statistic

TABLE1_RECORDS = 59_052_062
TABLE2_RECORDS = 3_848_330
#: Section 5.4: the best C by measure.
FIGURE10_BEST = {"keys": 5, "l1": 25, "l2": 30}


class PrintedFigures(NamedTuple):
    """Keys and errors at the last trigger."""

    keys: int
    linf: int
    l1: int
    l2: int


#: 10M users, 1M keys, C = 32; publishing nothing has L1 59,052,062.
TABLE1 = {
    100: {
        "paper": PrintedFigures(28_338, 1_391, 17_741_225, 50_039),
        "baseline1+published": PrintedFigures(435, 18_077, 50_835_203, 430_547),
        "baseline2+published": PrintedFigures(191, 21_913, 58_551_587, 576_425),
    },
    1000: {
        "paper": PrintedFigures(22_280, 1_563, 19_395_721, 58_237),
        "baseline1+published": PrintedFigures(0, 25_497, 59_052_062, 594_382),
        "baseline2+published": PrintedFigures(0, 25_497, 59_052_062, 594_382),
    },
}

#: 1.4M users, 3.8M posts, C = 17.
TABLE2 = {
    100: {
        "paper": PrintedFigures(1_473, 102_250, 989_249, 127_721),
        "baseline1+published": PrintedFigures(32, 267_147, 2_721_349, 322_739),
        "baseline2+published": PrintedFigures(63, 103_546, 2_376_937, 156_472),
    },
    1000: {
        "paper": PrintedFigures(1_181, 102_218, 1_074_724, 127_830),
        "baseline1+published": PrintedFigures(9, 266_391, 3_081_542, 341_557),
        "baseline2+published": PrintedFigures(3, 108_124, 3_074_655, 242_482),
    },
}


def published_budget(plan: Plan) -> Budget:
    """The mechanism as published (sections 3.3, 4.4, 5, Appendix B of the paper); NOT sound.

    Values: (epsilon/2, delta/3), L2 effect C L on one step.  Selection: (epsilon/2, 2 delta/3), C
    rounds composed in zCDP, of which delta/3 goes to the trees and delta/3 to the thresholds
    of all C rounds, (e^(epsilon/2) + 1) beta C = delta/3 (theorem 3.1), with no union over
    triggers.  The reported mu is that of both zCDP costs together, sqrt(2 rho).

    Simulated at full scale (10M users, 1M keys, C = 32) this reading gives 27,971 keys, L1
    17.82M, L2 49,955 at T = 100 with restarted trees indexed by window trigger (Table 1:
    28,338, 17.74M, 50,039), and 28.0k, 17.53M with trees restarted at leaf 1.

    Raises:
        UsageError: the plan is not of that mechanism.
    """
    privacy, streams = plan.privacy, plan.design.streams
    if privacy.strategy != "tree" or plan.design.tests != plan.timeline.triggers:
        raise UsageError("mechanism", "must be 'tree', with a test at every trigger", "correct it")
    half, third, count = privacy.epsilon / 2, privacy.delta / 3, privacy.contributions
    rho = 2 * cdp_rho(half, third)
    mu = math.sqrt(2 * rho)
    selection = _stream(plan, "selection", math.sqrt(count), 0.5, mu)
    weight = sum(stream.share for stream in streams)
    values = tuple(
        _stream(plan, s.name, count * float(s.sensitivity), 0.5 * s.share / weight, mu)
        for s in streams
    )
    tail = third / (count * (math.exp(half) + 1))
    tau = published_thresholds(tail, privacy.pre_threshold, selection.sd)
    rounding = selection.strategy_object.rounding
    budget = Budget(
        epsilon=privacy.epsilon,
        delta=privacy.delta,
        mu=mu,
        theta=1 / 3,
        b=tail,
        selection=selection,
        units=None,
        values=values,
        statistic=Statistic(1, 0, 1, selection.sd, np.asarray(rounding)),
        tau=tau,
        weights=None,
        has_guarantee=False,
    )
    check_ranges(plan, budget)
    return budget


def published_thresholds(tail: float, mu_count: int, sd: Float64) -> Int64:
    """The paper's time-dependent tau (section 3.3, equation 4): no union, no rounding bound.

    Understates the failure probability by a factor of about T (mechanism.md rule 7).
    """
    return fixed_point(mu_count + sd * isf(math.log(tail)))


def _stream(plan: Plan, name: str, step_effect: float, share: float, mu: float) -> StreamNoise:
    """Noise of one stream, by theorem 2.3: ceil(log2 T) nodes, one less than a leaf touches at
    T = 2^k.  ``step_effect``: the L2 effect of one unit on the steps
    themselves, which are the leaves of the tree."""
    triggers = plan.timeline.triggers
    encoder = encoder_of(plan.privacy.strategy, triggers)
    col2 = float(max(1, (triggers - 1).bit_length()))
    sensitivity = step_effect * math.sqrt(col2)
    sigma = sensitivity / (math.sqrt(share) * mu)
    return StreamNoise(name, encoder, sensitivity, share, sigma)


def cdp_rho(epsilon: float, delta: float) -> float:
    """Largest rho such that rho-zCDP implies (epsilon, delta)-DP, rounded down."""
    if epsilon < 0 or not 0 < delta < 1:
        raise ValueError("epsilon must be >= 0 and delta in (0, 1)")
    low, high = 0.0, epsilon + 1
    for _ in range(200):
        middle = (low + high) / 2
        if cdp_delta(middle, epsilon) <= delta:
            low = middle
        else:
            high = middle
    return low
