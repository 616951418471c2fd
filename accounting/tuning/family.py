"""The family of noise that a stream with private keys takes by ``strategy = "auto"``.

Families are compared by the error that a reader of the releases sees: the mean |released - true|
over all keys of the public reference population (``reference``) at a window's close, where a key
that is not released counts its truth.  Only the plan decides, before a record is read: the better
of two mechanisms by the data would not have the guarantee of either.
"""

import math

import msgspec

from dpstream.accounting.budget import Budget, allocate
from dpstream.accounting.errors import UsageError
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.tuning.reference import SIZES, mean_over_keys, published_sizes

#: E |N| of a Gaussian of sd 1.
_ABSOLUTE = math.sqrt(2 / math.pi)


def resolved(plan: Plan) -> Plan:
    """The plan with one family of noise in the place of ``auto``; with public keys as it is.

    Geometric noise is charged plain, so that ``optimise = "lifetime"`` takes Gaussian noise.  So do
    settings that only Gaussian noise has: weights that a job names, combined statistics, rounds,
    and windows that share periods.
    """
    privacy = plan.privacy
    if privacy.strategy != "auto" or plan.public_keys is not None:
        return plan
    gaussian = _with(plan, strategy="blt")
    named = privacy.weights is not None and not privacy.usual_weights
    made_for_gaussian = (
        named or privacy.combine or privacy.skip or privacy.periods_share_windows
        or privacy.mode != "sticky" or privacy.optimise == "lifetime"
    )  # fmt: skip
    if made_for_gaussian:
        return gaussian
    plain = _with(plan, strategy="geometric", weights=None, usual_weights=False, skip=None)
    try:
        loss = mean_loss(plain, allocate(plain))
    except UsageError:  # no such noise can be drawn, or there are too many triggers
        return gaussian
    try:
        return plain if loss < mean_loss(gaussian, allocate(gaussian)) else gaussian
    except UsageError:
        return plain


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
