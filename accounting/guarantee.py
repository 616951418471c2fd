"""The guarantee of a plan and its cost, as JSON-able figures, before any data is read.

They have full lists per trigger, and are a function of public parameters alone.
"""

import math
from typing import Any

import numpy as np

from dpstream.accounting.aggregates import Prefix, Prefixes, kind_of, with_derived
from dpstream.accounting.arrays import Float64
from dpstream.accounting.budget.allocation import OPEN_PERIODS, Budget, StreamNoise, lone_chance
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.figures import duration, guarantee_pair
from dpstream.accounting.gaussian import epsilon_of
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.plan.design import hindrance
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.unit import several_mu, together
from dpstream.accounting.strength import weaknesses
from dpstream.accounting.tuning.answer import Tuned

#: Above this many units at the easiest trigger the figures warn that little is released.
_MANY_UNITS = 100_000

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


def describe(plan: Plan, budget: Budget, tuned: Tuned | None = None) -> dict[str, Any]:
    """Return the figures of the guarantee and of the mechanism that ``dpstream plan`` prints.

    Args:
        tuned: where C and clamps come from, if the job says so.

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
    return {
        "plan_hash": plan.hash,
        "guarantee": {
            "sound": budget.sound,
            "epsilon": budget.epsilon,
            "delta": budget.delta,
            "text": _guarantee_text(plan, budget),
            "neighbours": NEIGHBOURS,
            "computational": COMPUTATIONAL,
        },
        "unit": {
            "column": plan.unit.column,
            "period_micros": plan.timeline.period,
            "text": _unit(plan),
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
        "periods": _periods(plan, budget) if budget.sound else [],
        "periods_rule": _periods_rule(plan, budget),
        "publishing": _publishing(plan),
        "choice": tuned.describe(plan, budget) if tuned else None,
        "warnings": warnings_of(plan, budget) + (tuned.warnings() if tuned else []),
        "assumptions": list(budget.assumptions),
    }


def _unit(plan: Plan) -> str:
    unit = f"all records with one value of '{plan.unit.column}'"
    if plan.timeline.period is None:
        return f"{unit}, over the whole stream"
    return f"{unit} whose event time lies in one period of {duration(plan.timeline.period)}"


def _for_ever(plan: Plan) -> bool:
    return plan.timeline.end is None and plan.timeline.period is None


def _guarantee_text(plan: Plan, budget: Budget) -> str:
    figures = guarantee_pair(budget.epsilon, budget.delta)
    pure = " (pure epsilon)" if budget.plain and not budget.delta else ""
    claim = f"{figures}-differential privacy{pure} of everything published, for {_unit(plan)}"
    return claim if budget.sound else f"{NOT_SOUND} ({claim})"


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
    if budget.tau is None or budget.statistic is None:
        raise ValueError("no key selection")
    return np.asarray(budget.tau / float(1 << DECODE_BITS) / budget.statistic.alone)


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


def _periods(plan: Plan, budget: Budget) -> list[dict[str, float]]:
    """Guarantee for a person of k periods; ``plan.unit`` and ``budget.thresholds`` have the
    argument."""
    most = plan.timeline.periods or OPEN_PERIODS
    rows = list[dict[str, float]]()
    gaussian = _delta_gaussian(budget)
    powers = [1 << i for i in range(most.bit_length())]
    for k in sorted({*powers, most}):
        if budget.plain:
            epsilon, delta = k * budget.epsilon * (1 + 1e-15), k * budget.delta * (1 + 1e-15)
            plain = (budget.epsilon, budget.delta) if k == 1 else (epsilon, min(delta, 1.0))
            rows.append({"periods": k, "mu": 0.0, "epsilon": plain[0], "delta": plain[1]})
            continue
        mu = several_mu(budget.mu, k, together(plan))
        delta = (gaussian + k * plan.privacy.contributions * budget.b) * (1 + 1e-15)
        epsilon = budget.epsilon if k == 1 else epsilon_of(mu, gaussian)
        rows.append({"periods": k, "mu": mu, "epsilon": epsilon, "delta": min(delta, 1.0)})
    rows[0]["delta"] = budget.delta
    return rows


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
        words += f", for {duration(plan.remember)}"
    return words


def warnings_of(plan: Plan, budget: Budget) -> list[str]:
    """Return the warnings that a person must read before they rely on the figures."""
    return lacks_of(plan, budget) + weaknesses(budget.epsilon, budget.delta)


def lacks_of(plan: Plan, budget: Budget) -> list[str]:
    """Return the same without those of a large epsilon or delta, which a charge warns of."""
    warnings = [] if budget.sound else [NOT_SOUND]
    selection = _selection(plan, budget)
    if selection and selection["units_for_half_chance_easiest"] > _MANY_UNITS:
        warnings.append(
            f"a key needs about {selection['units_for_half_chance_easiest']} units in one window "
            "to be selected; with fewer nothing is released at this epsilon"
        )
    if _for_ever(plan):
        warnings.append(_FOR_EVER + (_over_periods(plan, budget) if budget.sound else ""))
    if budget.sound:
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
