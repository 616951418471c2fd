"""The family of noise that a stream with private keys takes by ``strategy = "auto"``.

Families are compared by the error that a reader of the releases sees: the mean |released - true|
over all keys of the public reference population (``reference``) at a window's close, where a key
that is not released counts its truth.  Only the plan decides, before a record is read: the better
of two mechanisms by the data would not have the guarantee of either.
"""

import contextlib
import math

import msgspec
import numpy as np

from dpstream.accounting.budget.allocation import Budget, allocate
from dpstream.accounting.errors import UsageError
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.tuning.reference import SIZES, mean_over_keys, published_sizes

#: E |N| of a Gaussian of sd 1.
_ABSOLUTE = math.sqrt(2 / math.pi)


def resolved(plan: Plan) -> Plan:
    """The plan with one family of noise in the place of ``auto``; with public keys as it is.

    Geometric noise is charged plain, so that ``optimise = "lifetime"`` takes Gaussian noise.  So do
    settings that only Gaussian noise has: weights that a job names, combined statistics, rounds,
    and windows that share periods.  What the choice went by is no part of the plan that it gives.
    """
    privacy = plan.privacy
    if privacy.strategy != "auto" or plan.public_keys is not None:
        return plan
    gaussian = _with(plan, strategy="blt", optimise="period")
    named = privacy.weights is not None and not privacy.usual_weights
    made_for_gaussian = (
        named
        or privacy.combine
        or privacy.skip
        or privacy.periods_share_windows
        or privacy.mode != "sticky"
        or privacy.optimise == "lifetime"
    )
    if made_for_gaussian:
        return gaussian
    plain = _with(plan, strategy="geometric", weights=None, usual_weights=False, skip=None)
    try:
        most = mean_loss(gaussian, allocate(gaussian))
    except UsageError:
        most = math.inf
    with contextlib.suppress(UsageError):  # an estimate that cannot be made decides nothing
        if not mean_loss(once := _least(plain), allocate(once)) < most:
            return gaussian  # and no encoder of the triggers need be searched
    try:
        return plain if mean_loss(plain, allocate(plain)) < most else gaussian
    except UsageError:  # no such noise can be drawn, or there are too many triggers
        return gaussian


def _least(plan: Plan) -> Plan:
    """A plan with one trigger a window, whose loss is about the least of geometric noise.

    Args:
        plan: with geometric noise.

    Columns of an encoder A of L1 norm 1 have L2 norms of at most 1.  So the root mean squared sd of
    the prefixes of T steps is at least that of one noisy count times ||M||_* / T, M the (T, T) ones
    on and below the diagonal (Edmonds, Nikolov, Ullman 2020).  The plan has an epsilon that is
    smaller by this factor.  Its thresholds are those of one test.  Where epsilon is so large that
    whole numbers are coarse its loss may be larger, and the Gaussian loss is larger still.
    """
    steps = min(plan.design.value_steps, plan.design.tests)
    angles = (2 * np.arange(1, steps + 1) - 1) * math.pi / (4 * steps + 2)
    factor = float((1 / (2 * np.sin(angles))).mean())
    plan = _with(
        plan,
        epsilon=plan.privacy.epsilon / factor,
        refresh_every=None,
        select_every=None,
        tests=None,
    )
    length = plan.timeline.window
    timeline = msgspec.structs.replace(
        plan.timeline, slide=length, trigger_every=length, allowed_lateness=0
    )
    return msgspec.structs.replace(plan, timeline=timeline)


def mean_loss(plan: Plan, budget: Budget) -> float:
    """Mean |released - true| over the keys of the reference, in counts of records or units.

    Args:
        plan: with private keys.
        budget: of the plan.
    """
    chance = published_sizes(plan, budget).by(1.0)
    return mean_over_keys(chance * _noise(plan, budget) + (1 - chance) * SIZES)


def _noise(plan: Plan, budget: Budget) -> float:
    """Mean |noise| of a window's last release, in units of the most that a record adds: geometric
    mean over the columns."""
    bounds = [stream.sensitivity for stream in plan.design.streams]
    noises = list(zip(budget.values, bounds, strict=True))
    if budget.units is not None:
        noises.append((budget.units, 1))
    sds = [float(noise.sd[-1]) / most for noise, most in noises]
    return _ABSOLUTE * math.exp(sum(math.log(sd) for sd in sds) / len(sds))


def _with(plan: Plan, **settings: object) -> Plan:
    privacy = msgspec.structs.replace(plan.privacy, **settings)
    return msgspec.structs.replace(plan, privacy=privacy)
