"""The guarantee of a plan and its cost, as JSON-able figures, before any data is read.

They have full lists per trigger, and are a function of public parameters alone.

**Periods.** Both families of noise promise something for one period and for a person of all
periods.  Gaussian noise composes: k periods cost about sqrt(k) times one.  Two-sided geometric
noise is charged its epsilon: k periods cost k times one.  Where all periods are fixed beforehand
they cost less (below), which an account may not use, because there earlier answers decide what is
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
from typing import Any, Literal, NamedTuple

import numpy as np

from dpstream.accounting.aggregates import Prefix, Prefixes, kind_of, with_derived
from dpstream.accounting.arrays import Float64
from dpstream.accounting.budget.allocation import (
    ASSUMPTIONS,
    OPEN_PERIODS,
    Budget,
    StreamNoise,
    allocate,
    lone_chance,
)
from dpstream.accounting.errors import DpstreamError, required
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.figures import guarantee_pair
from dpstream.accounting.gaussian import bisected, epsilon_of
from dpstream.accounting.libraries import special
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.plan.design import hindrance
from dpstream.accounting.plan.plan import Plan, with_privacy
from dpstream.accounting.plan.privacy import StrategyName
from dpstream.accounting.plan.unit import identity_of, several_mu, together
from dpstream.accounting.strength import STATED_DELTA, weaknesses
from dpstream.accounting.tuning.answer import Tuned

#: Above this many units at the easiest trigger the figures warn that little is released.
_MANY_UNITS = 100_000
_TESTED = "keys are tested"

NOT_SOUND = "as published: the stated guarantee does NOT hold"
NEIGHBOURS = (
    "two inputs are neighbours if one has, in addition, all records of one unit; every other "
    "record keeps its content and its source stamp"
)
_FOR_EVER = (
    "neither end nor budget.covers: one budget covers the stream for ever. A unit's C "
    "pairs count once for all time, after them it counts nowhere again, so releases fade as "
    "units are used up, and the state of every unit ever seen is kept for ever. Set "
    "budget.covers (say '30d' or '365d', a multiple of the window): fresh pairs for every unit "
    "and period, state that stays bounded"
)
COMPUTATIONAL = (
    "delta grows by (blocks)^2/2^129 + (ids)^2/2^129 for AES-256 blocks drawn and unit ids "
    "hashed, and rests on AES-256 and keyed BLAKE2b-128 (2^40 blocks or ids: 2^-49 = 1.8e-15)"
)


def describe(
    plan: Plan, budget: Budget, tuned: Tuned | None = None, epochs: int = 1
) -> dict[str, Any]:
    """Return the figures of the guarantee and of the mechanism that ``dpstream plan`` prints.

    Args:
        tuned: where C and clamps come from, if the job says so.
        epochs: how often the run has drawn: a run that was restored without its input draws anew,
            and the guarantee is that of all epochs together (`accounting.facts`).

    Returns:
        ``guarantee``, ``unit``, ``split`` of delta and mu^2 (of epsilon where ``law`` is
        geometric, with ``mu`` 0), ``streams`` (sensitivity, sigma
        and sd_t per trigger in grid units; weighted counts in 2^-8 units), ``tau`` (per
        trigger, in counts of units that count in full),
        ``selection``, ``columns`` (expected error in the column's units), ``periods`` (what
        holds for a person of k of them, by ``periods_rule``), ``publishing``,
        ``warnings`` and ``assumptions``.  Figures keep the safe direction of ``allocate``: mu
        rounded down; sigma, sd_t, tau_t, epsilon, delta and b up.  ``unit.periods_met``: the
        most periods that one window can meet; ``unit.for_ever``: one budget covers a stream
        without end.
    """
    of_all = of_periods(plan, budget, epochs)
    return {
        "plan_hash": plan.hash,
        "guarantee": {
            "sound": budget.has_guarantee,
            "epsilon": of_all["epsilon"],
            "delta": of_all["delta"],
            "text": _guarantee_text(plan, budget, of_all),
            "neighbours": NEIGHBOURS,
            "computational": COMPUTATIONAL,
        },
        "unit": {
            "column": plan.unit.column,
            "period_micros": None if plan.timeline.calendar else plan.timeline.period,
            "covers": identity_of(plan).covers,
            "text": unit_text(plan),
            "periods_met": plan.timeline.periods_met,
            "contributions": plan.privacy.contributions,
            "for_ever": _for_ever(plan),
        },
        "split": {
            "law": "geometric" if budget.plain else "gaussian",
            "mu": budget.mu,
            "theta": budget.theta,
            "delta_gaussian": _delta_gaussian(budget),
            "delta_thresholds": budget.b * plan.privacy.contributions,
            "b": lone_chance(plan, budget),
            "shares_of_mu_squared": {s.name: s.share for s in budget.streams},
        },
        "streams": [_stream(plan, s) for s in budget.streams],
        "tau": None if budget.tau is None else _by_trigger(plan, _tau(budget)).tolist(),
        "selection": _selection(plan, budget),
        "columns": [_column(plan, budget, a) for a in plan.aggregates],
        "periods": _periods(plan, budget, epochs) if budget.has_guarantee else [],
        "periods_rule": _periods_rule(plan, budget),
        "publishing": _publishing(plan),
        "choice": tuned.describe(plan, budget) if tuned else None,
        "warnings": warnings_of(plan, budget) + (tuned.warnings() if tuned else []),
        "assumptions": list(ASSUMPTIONS),
    }


def unit_text(plan: Plan) -> str:
    """Return who is protected: which records of one unit count together."""
    unit = f"all records with one value of '{plan.unit.column}'"
    if plan.timeline.period is None:
        return f"{unit}, over the whole stream"
    return f"{unit} whose event time lies in one period of {identity_of(plan).covers}"


def _for_ever(plan: Plan) -> bool:
    return plan.timeline.end is None and plan.timeline.period is None


def _guarantee_text(plan: Plan, budget: Budget, of_all: dict[str, float]) -> str:
    figures = guarantee_pair(of_all["epsilon"], of_all["delta"])
    pure = " (pure epsilon)" if budget.plain and not budget.delta else ""
    claim = f"{figures}-differential privacy{pure} of everything published, for {unit_text(plan)}"
    return claim if budget.has_guarantee else f"{NOT_SOUND} ({claim})"


def _delta_gaussian(budget: Budget) -> float:
    return budget.delta * (1 - budget.theta)


def _by_trigger(plan: Plan, by_test: Float64) -> Float64:
    """(T,) figures of the tests of a key, each at all triggers whose data it holds."""
    return np.repeat(by_test, np.diff(plan.design.test_triggers, prepend=0))


def _mixed(plan: Plan) -> float:
    """sd of a typical cell (root mean square) in sds of a stream's own noise."""
    return 1.0 if plan.cells is None else plan.cells.rms_norm


def _stream(plan: Plan, noise: StreamNoise) -> dict[str, Any]:
    tests = plan.design.selects and noise.triggers == plan.design.tests
    return {
        "name": noise.name,
        "strategy": noise.strategy,
        "triggers": noise.triggers,
        "col2": noise.col2,
        "sensitivity": noise.sensitivity,
        "share": noise.share,
        "sigma": noise.sigma,
        "scale": noise.scale,
        "sd": (_by_trigger(plan, noise.sd) if tests else noise.sd * _mixed(plan)).tolist(),
    }


def _tau(budget: Budget) -> Float64:
    """(T,) thresholds in units of what one unit adds at most (1 for plain counts)."""
    tau, statistic = required(budget.tau, _TESTED), required(budget.statistic, _TESTED)
    return np.asarray(tau / float(1 << DECODE_BITS) / statistic.alone)


def _least(plan: Plan, budget: Budget) -> float:
    """What a unit adds at least (its last pair), relative to the most it adds."""
    statistic, weights = budget.statistic, plan.design.weights
    if weights is None or statistic is None:
        return 1.0
    last = int(weights.integers(plan.privacy.contributions)[-1])
    return (statistic.weighted * last + statistic.counted) / statistic.alone


def _half(budget: Budget, test: int) -> int:
    """Smallest count above the threshold: there n_t > tau_t - count in half of all cases."""
    return math.floor(float(_tau(budget)[test - 1])) + 1


def _selection(plan: Plan, budget: Budget) -> dict[str, Any] | None:
    if budget.tau is None:
        return None
    easiest = int(np.argmin(budget.tau)) + 1
    return {
        "pre_threshold": plan.privacy.pre_threshold,
        "units_for_half_chance_first": _half(budget, 1),
        "units_for_half_chance_last": _half(budget, len(budget.tau)),
        "easiest_trigger": int(plan.design.test_triggers[easiest - 1]),
        "units_for_half_chance_easiest": _half(budget, easiest),
        "last_pair_counts": _least(plan, budget),
    }


def _column(plan: Plan, budget: Budget, aggregate: Aggregate) -> dict[str, Any]:
    """Mean (over triggers) and final sd of one column, in its own units; of a typical cell."""
    nothing = np.empty(0)
    streams = {
        stream.name: Prefix(stream, nothing, noise.sd * _mixed(plan))
        for stream, noise in zip(plan.design.streams, budget.values, strict=True)
    }
    units = None if budget.units is None else Prefix(None, nothing, budget.units.sd)
    prefixes = Prefixes(with_derived(streams, plan.design.derived), units)
    sd, note = kind_of(aggregate).expected_sd(aggregate, prefixes)
    made = next((made for made in plan.design.derived if made.name == aggregate.name), None)
    if made is not None:
        note = f"made from the sums behind '{made.mean}' and the count, at no cost of its own"
    return {
        "name": aggregate.name,
        "kind": aggregate.kind,
        "sd_mean": float(np.mean(sd)),
        "sd_final": float(sd[-1]),
        "note": note,
    }


def _periods(plan: Plan, budget: Budget, epochs: int) -> list[dict[str, float]]:
    """Guarantee for a person of k periods in all epochs; ``plan.unit`` and ``budget.thresholds``
    have the argument."""
    most = plan.timeline.periods or OPEN_PERIODS
    powers = [1 << i for i in range(most.bit_length())]
    numbers = sorted({*powers, most})
    return [of_periods(plan, budget, k * epochs) | {"periods": k} for k in numbers]


def of_periods(plan: Plan, budget: Budget, k: int) -> dict[str, float]:
    """Return ``mu``, ``epsilon`` and ``delta`` for a person of k ``periods``, rounded up."""
    if k == 1:
        pair, mu = (budget.epsilon, budget.delta), budget.mu
    elif budget.plain:
        pair, mu = (k * budget.epsilon * (1 + 1e-15), k * budget.delta * (1 + 1e-15)), 0.0
    else:
        mu, gaussian = several_mu(budget.mu, k, together(plan)), _delta_gaussian(budget)
        delta = (gaussian + k * plan.privacy.contributions * budget.b) * (1 + 1e-15)
        pair = epsilon_of(mu, gaussian), delta
    return {"periods": k, "mu": mu, "epsilon": pair[0], "delta": min(pair[1], 1.0)}


def _periods_rule(plan: Plan, budget: Budget) -> str:
    """How ``periods`` follow from mu and b, in words."""
    if budget.plain:
        return "a person of k periods has k epsilon"
    met = plan.timeline.periods_met
    if met == 1:
        return "a person of k periods has sqrt(k) mu"
    share = f"one window can meet m = {met} periods, so"
    if not plan.design.selects:
        return f"{share} a person of k periods has sqrt(k min(k, m)) mu"
    return f"{share} a person of k periods has k mu and k times the thresholds' part of delta"


def _publishing(plan: Plan) -> str:
    chosen = "every selected key" if plan.design.selects else "every key of the public list"
    tested = ""
    if plan.design.schedule is not None:
        tested = f"; keys are tested at {plan.design.tests} triggers of a window"
        tested += ", and what is published takes no selection weight" * plan.design.skips
    elif plan.design.selects and plan.design.select_every > 1:
        tested = f"; keys are tested every {plan.design.select_every} triggers"
    why = hindrance(plan)
    if why is not None:
        tested += f"; what is published takes selection weight like other keys ({why})"
    rule = f"{chosen}, every {plan.design.refresh_every} trigger(s) and at window close{tested}"
    return rule + _remembered(plan)


def _remembered(plan: Plan) -> str:
    """What later windows publish of what earlier ones selected, in words."""
    if not plan.design.remembers:
        return ""
    words = "; what one window selects the later ones publish from their start, untested"
    if isinstance(plan.remember, int):
        words += f", for {plan.timeline.words(plan.remember)}"
    return words


def warnings_of(plan: Plan, budget: Budget) -> list[str]:
    """Return the warnings that a person must read before they rely on the figures."""
    return lacks_of(plan, budget) + weaknesses(budget.epsilon, budget.delta)


def lacks_of(plan: Plan, budget: Budget) -> list[str]:
    """Return the same without those of a large epsilon or delta, which a charge warns of."""
    warnings = [] if budget.has_guarantee else [NOT_SOUND]
    selection = _selection(plan, budget)
    if selection and selection["units_for_half_chance_easiest"] > _MANY_UNITS:
        warnings.append(
            f"a key needs about {selection['units_for_half_chance_easiest']} units in one window "
            "to be selected; with fewer nothing is released at this epsilon"
        )
    if _for_ever(plan):
        warnings.append(_FOR_EVER + (_over_periods(plan, budget) if budget.has_guarantee else ""))
    if budget.has_guarantee:
        warnings += _shared_windows(plan)
    return warnings


def _over_periods(plan: Plan, budget: Budget) -> str:
    """What a period that is a multiple of the window would cost a person of several."""
    if budget.plain:
        return ", and k epsilon over k periods"
    if plan.timeline.slide == plan.timeline.window:
        return ", and sqrt(k) mu over k periods"
    if not plan.design.selects:
        return ", and, as windows that slide meet two periods, sqrt(2 k) mu over k > 1 periods"
    return (
        ". Windows that slide meet two periods, so that selected keys need "
        "mechanism.periods_share_windows = true as well: thresholds one unit higher, and k mu over "
        "k periods"
    )


def _shared_windows(plan: Plan) -> list[str]:
    met = plan.timeline.periods_met
    if not plan.design.selects or met == 1:
        return []
    return [
        f"one window can meet {met} periods, and one person counts as up to {met} units in a key; "
        f"thresholds are at least {met - 1} units higher for it"
    ]


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
    flips = np.arange(count + 1)
    log_factorials = special.gammaln(flips + 1)  # reversed: those of count - flips
    ways = special.gammaln(count + 1) - log_factorials - log_factorials[::-1]
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
    other = _other(plan, "blt" if budget.plain else "geometric") if budget.has_guarantee else None
    chosen = [_promise(plan, budget, True)]
    return chosen if other is None else [*chosen, _promise(*other, False)]


def _promise(plan: Plan, budget: Budget, chosen: bool) -> Promise:
    column = describe(plan, budget)["columns"][0]
    periods = (plan.timeline.periods or _SHOWN_PERIODS) if budget.has_guarantee else 1
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
    other = with_privacy(plan, strategy=strategy, optimise="period")
    try:
        return other, allocate(other)
    except DpstreamError:
        return None
