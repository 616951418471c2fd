"""The best way to noise a job as it stands: its columns, triggers and C stay.

What may change is what a unit's records weigh in key selection (``weights``) and the strategy: the
same figures are published, of the same records, at the same times and under the same guarantee.
Every candidate is compared on the public reference population (``reference``), never on data.

``starred`` has the largest keys^3 / noise of those with no fewer keys than the job: more keys are
bought with more noise as long as they are worth it.  It has not more noise at as many keys, so that
it is never worse in both; where no other is better than the job by 5%, the job itself is starred.

**The family of noise** that a stream with private keys takes by ``strategy = "auto"``.  Families
are compared by the error that a reader of the releases sees: the mean |released - true| over all
keys of the public reference population (``reference``) at a window's close, where a key that is not
released counts its truth.  Only the plan decides, before a record is read: the better of two
mechanisms by the data would not have the guarantee of either.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np

from dpstream.accounting import limits
from dpstream.accounting.budget.allocation import Budget, allocate
from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.accounting.plan.plan import Plan, suits_sizes, with_privacy
from dpstream.accounting.plan.privacy import StrategyName
from dpstream.accounting.tuning.reference import (
    SIZES,
    ReferenceFigures,
    mean_over_keys,
    published_sizes,
    reference_figures,
)
from dpstream.accounting.weights import EVEN, MILD, SPARED, STEEP, SelectionWeights, usual_weights

#: 1% more keys are worth 3% more noise: about the price of `budget.shares.knee`, where a threshold
#: 1% lower (0.7% more reference keys) is worth an error 2% larger.
_WORTH = 3.0
#: The job stays starred where no way is better than it by this factor.
_BETTER = 1.05
#: Another strategy is not worth a word where it saves less.
_ANOTHER = 0.99
_WEIGHTS = (
    None,
    MILD,
    EVEN,
    SelectionWeights(1, 0.75),
    SelectionWeights(1, 1),
    SelectionWeights(3, 1),
    STEEP,
)
#: Weights by the number of a unit's keys, with what selection takes beside them.
_SIZED = tuple(SelectionWeights(size_share=percent / 100) for percent in (10, 20, 35, 50))
#: Beyond this the optimum of ``dense`` takes longer than the whole rest of a plan.
_DENSE = 128


class Way(NamedTuple):
    """One way to noise the job: fields of ``Privacy`` that differ from it, and its standing."""

    settings: dict[str, Any]
    keys: float
    noise: float

    @property
    def worth(self) -> float:
        """What the way is compared by."""
        return float(self.keys**_WORTH / self.noise)


def starred(plan: Plan) -> Way:
    """Return the best way to noise a job: more keys if they are worth their noise.

    Raises:
        UsageError, PolicyError: the job itself cannot be run.
    """
    own = reference_figures(plan, allocate(plan))
    candidates = [Way({}, 1.0, 1.0)]
    for settings in _candidates(plan, own):
        figures = _figures_of(plan, settings)
        if figures is not None:
            keys = figures.keys_against(own) if plan.design.selects else 1.0
            candidates.append(Way(settings, keys, figures.noise_against(own)))
    return starred_of(candidates)


def starred_of(candidates: list[Way]) -> Way:
    """Return the way with the largest keys^3 / noise of those with no fewer keys than the first.

    Args:
        candidates: the job's own way first, which is taken if none is better by 5%.
    """
    own, *_ = candidates
    enough = [way for way in candidates if way.keys >= 1]
    best = max(enough, key=lambda way: (way.worth, -way.noise))  # a job without keys: all infinite
    return best if best.worth > _BETTER * own.worth else own


def _candidates(plan: Plan, own: ReferenceFigures) -> Iterator[dict[str, Any]]:
    """Fields of ``Privacy`` that differ from the job's; strategies first by themselves."""
    privacy, best, least = plan.privacy, plan.privacy.strategy, own
    for strategy in _other_strategies(plan):
        figures = _figures_of(plan, {"strategy": strategy})
        if figures is not None and figures.noise_against(least) < _ANOTHER:
            least, best = figures, strategy
            yield {"strategy": strategy}
    if not plan.design.selects:
        return
    # A strategy scales all sds alike, so that the rest is looked for with the best one alone.
    chosen = {} if best == privacy.strategy else {"strategy": best}
    for weights in _weights(plan):
        heavy = chosen if weights == privacy.weights else chosen | _named(plan, weights)
        if heavy:
            yield heavy


def _named(plan: Plan, weights: SelectionWeights | None) -> dict[str, Any]:
    """Weights of the job's own; where the last of them vanish it must say that it skips."""
    vanish = weights is not None and not weights.integers(plan.privacy.contributions)[-1]
    return {"weights": weights} | ({"skip": True} if vanish and plan.design.skips else {})


def _other_strategies(plan: Plan) -> list[StrategyName]:
    """Return the strategies that the job may take instead of its own."""
    most = limits.MAX_TRIGGERS_OF | {"dense": _DENSE}
    names: tuple[StrategyName, ...] = ("blt", "dense", "tree")
    if plan.cells is not None:
        names = ("blt", "dense")
    elif not plan.design.selects:
        names += ("geometric",)
    triggers = plan.design.triggers
    return [
        name
        for name in names
        if name != plan.privacy.strategy and triggers <= most.get(name, triggers)
    ]


def _weights(plan: Plan) -> tuple[SelectionWeights | None, ...]:
    if plan.privacy.contributions > limits.MAX_WEIGHTED:
        return (plan.privacy.weights,)
    spared = (SPARED,) if plan.design.skips else ()
    sized = _SIZED if suits_sizes(plan) else ()
    return tuple(dict.fromkeys((plan.privacy.weights, *_WEIGHTS, *spared, *sized)))


def _figures_of(plan: Plan, settings: dict[str, Any]) -> ReferenceFigures | None:
    """``None`` where the job cannot be run so."""
    try:
        other = with_privacy(plan, **settings)
        return reference_figures(other, allocate(other))
    except DpstreamError:
        return None


def usual(plan: Plan) -> SelectionWeights | None:
    """Return the weights that the plan's job would have if it named none."""
    privacy = plan.privacy
    return usual_weights(
        privacy.contributions,
        combine=privacy.combine,
        selects=plan.design.selects,
        fused=plan.design.units_column is not None,
    )


#: E |N| of a Gaussian of sd 1.
_ABSOLUTE = math.sqrt(2 / math.pi)


def resolved(plan: Plan) -> Plan:
    """Return the plan with one family of noise in place of ``auto``; unchanged with public keys.

    Geometric noise is charged plain, so that ``optimise = "lifetime"`` takes Gaussian noise.  So do
    settings that only Gaussian noise has: weights that a job names, combined statistics, and
    windows that share periods.  What the choice went by is no part of the plan that it gives.
    """
    privacy = plan.privacy
    if privacy.strategy != "auto" or plan.public_keys is not None:
        return plan
    gaussian = with_privacy(plan, strategy="blt", optimise="period")
    named = privacy.weights is not None and not privacy.usual_weights
    made_for_gaussian = (
        named
        or privacy.combine
        or privacy.skip
        or privacy.periods_share_windows
        or privacy.optimise == "lifetime"
    )
    if made_for_gaussian:
        return gaussian
    plain = with_privacy(plan, strategy="geometric", weights=None, skip=None)
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
        plan: a plan with geometric noise.

    Columns of an encoder A of L1 norm 1 have L2 norms of at most 1.  So the root mean squared sd of
    the prefixes of T steps is at least that of one noisy count times ||M||_* / T, M the (T, T) ones
    on and below the diagonal (Edmonds, Nikolov, Ullman 2020).  The plan has an epsilon that is
    smaller by this factor.  Its thresholds are those of one test.  Where epsilon is so large that
    whole numbers are coarse its loss may be larger, and the Gaussian loss is larger still.
    """
    steps = min(plan.design.value_steps, plan.design.tests)
    angles = (2 * np.arange(1, steps + 1) - 1) * math.pi / (4 * steps + 2)
    factor = float((1 / (2 * np.sin(angles))).mean())
    plan = with_privacy(
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
    """Return the mean |released - true| over the keys of the reference, in counts of records or
    units.

    Args:
        plan: a plan with private keys.
        budget: the budget of the plan.
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
