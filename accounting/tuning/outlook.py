"""The first questions of a job's user: will anything appear, how exact is it, what would help.

All of it is public: a function of the plan, of two numbers that a person states (units in a window
and keys there are), and of the reference population (``reference``).

**Coverage** is what a budget covers (a window, a period or the whole stream), and the records that
C leaves out.  epsilon and C (the most records of a unit that count) hold for all windows that the
budget covers, together.  A unit with m records in each of them reaches C in window ceil(C / m) and
contributes to no later one.  Of R records of U units in a window, over w windows of the same units,
at most C U of R w count: so at least max(0, 1 - C U / (R w)) are cut, for any distribution of the
records; more, if few units have many records.  The figures depend on the plan and on assumed
numbers only, so they are public.
"""

import contextlib
import math
from typing import Any

import msgspec

from dpstream.accounting.aggregates import kind_of
from dpstream.accounting.budget.allocation import Budget, allocate
from dpstream.accounting.errors import DpstreamError, PolicyError
from dpstream.accounting.fields import Aggregate, job_field
from dpstream.accounting.figures import exact
from dpstream.accounting.guarantee import describe
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.strength import weaknesses
from dpstream.accounting.tuning.reference import FACTORS, SHAPE, expected_keys
from dpstream.accounting.tuning.starred import starred
from dpstream.accounting.weights import SelectionWeights

#: Records of a key that an error is told for.
SIZES = (100, 1_000)
#: Keys there are, unless somebody says.
KEYS = 1_000

WHY_MORE_THAN_ONE = (
    "more than 1 together because no unit can cost both the most: values cost most with all of a "
    "unit's records in one key, key selection with each in a key of its own. The costliest unit "
    "of all uses 1"
)


def outlook(
    plan: Plan,
    budget: Budget,
    units: int | None = None,
    keys: int | None = None,
    job: Plan | None = None,
) -> dict[str, Any]:
    """Return the answers to the three questions, JSON-able.

    Args:
        plan, budget: those of the run if one was begun, which it has committed; else the job's.
        units: number of units with records in a window; ``None``: the caller does not state it.
        keys: number of keys, stated together with ``units``.
        job: the job's own plan, of which a new run could change fields; default: ``plan``.

    Returns:
        ``appears``, ``exact`` (by column and size), ``by_epsilon`` (the same sd of each column at
        other epsilons of the same plan), ``shares``, ``helps_most`` (fields of the job
        with which the same figures of the same records have the best noise, ``keys`` and ``noise``
        over the job's; ``None``: the job's own are the best), ``reference`` in words.
    """
    figures = describe(plan, budget)
    return {
        "appears": _appears(plan, budget, figures, units, keys),
        "exact": _exact(plan, figures),
        "by_epsilon": _by_epsilon(plan),
        "shares": _shares(figures) | {"law": figures["split"]["law"]},
        "helps_most": _helps_most(job or plan),
        "reference": SHAPE,
    }


def _helps_most(plan: Plan) -> dict[str, Any] | None:
    """``None`` also for plans that are refused: nothing to compare with."""
    try:
        best = starred(plan)
    except PolicyError:
        return None
    if not best.settings:
        return None
    settings = {job_field(field): _written(field, value) for field, value in best.settings.items()}
    text = ", ".join(
        f"no {name}" if value is None else f"{name} = {_toml(value)}"
        for name, value in settings.items()
    )
    return {"settings": settings, "text": text, "keys": best.keys, "noise": best.noise}


def _written(field: str, value: Any) -> Any:
    """A setting as the job's file has it; weights are named by what is set of them."""
    if not isinstance(value, SelectionWeights):
        return "uniform" if field == "weights" and value is None else value
    if value.size_share is not None:
        return {"size_share": value.size_share}
    return {"offset": value.offset, "power": value.power}


def _toml(value: Any) -> str:
    """A setting as TOML writes it."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{name} = {exact(part)}' for name, part in value.items())} }}"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else exact(value)


def _appears(
    plan: Plan, budget: Budget, figures: dict[str, Any], units: int | None, keys: int | None
) -> dict[str, Any]:
    """Units for an even chance at the first and last test; with ``units``, keys to expect."""
    chosen = figures["selection"]
    appearance: dict[str, Any] = {
        "selects": chosen is not None,
        "units_for_half_chance_first": chosen and chosen["units_for_half_chance_first"],
        "units_for_half_chance_last": chosen and chosen["units_for_half_chance_last"],
        "units_if_last_records": None,
        "units": units,
        "keys": None,
        "expected_keys": None,
        "share_of_units": None,
    }
    if chosen is not None:
        last = chosen["units_for_half_chance_last"]
        appearance["units_if_last_records"] = math.ceil(last / chosen["last_pair_counts"])
        if units is not None:
            appearance["keys"] = keys or KEYS
            appearance["expected_keys"] = expected_keys(plan, budget, units, keys or KEYS)
            appearance["share_of_units"] = last / units
    return appearance


def _exact(plan: Plan, figures: dict[str, Any]) -> list[dict[str, Any]]:
    """sd at a window's last release for keys of so many records, by column."""
    return [
        {
            "name": aggregate.name,
            "kind": aggregate.kind,
            "of": _denominator(aggregate)[1],
            "sizes": [_of_size(aggregate, column["sd_final"], size) for size in SIZES],
        }
        for aggregate, column in zip(plan.aggregates, figures["columns"], strict=True)
    ]


def _by_epsilon(plan: Plan) -> list[dict[str, Any]]:
    """sd at a window's last release at other epsilons; without those that no noise fits."""
    rows = list[dict[str, Any]]()
    for factor in FACTORS:
        privacy = msgspec.structs.replace(plan.privacy, epsilon=factor * plan.privacy.epsilon)
        other = msgspec.structs.replace(plan, privacy=privacy)
        with contextlib.suppress(DpstreamError):
            columns = describe(other, allocate(other))["columns"]
            sds = {a.name: c["sd_final"] for a, c in zip(plan.aggregates, columns, strict=True)}
            rows.append({"epsilon": privacy.epsilon, "sd": sds})
    return rows


def _of_size(aggregate: Aggregate, sd: float, size: int) -> dict[str, float]:
    divided = sd / size if kind_of(aggregate).divides else sd
    scale = _denominator(aggregate)[0] * (1 if kind_of(aggregate).divides else size)
    return {"records": size, "sd": divided, "relative": divided / scale}


def _denominator(aggregate: Aggregate) -> tuple[float, str]:
    """What an error is a part of, for one record: the count, the bound, the bounds' width."""
    if aggregate.bounds is None:
        return 1.0, ""
    low, high = aggregate.bounds
    if kind_of(aggregate).divides:
        return high - low or 1.0, "of the bounds' width"
    return max(abs(low), abs(high)), "of records at the bound"


def _shares(figures: dict[str, Any]) -> dict[str, Any]:
    shares = figures["split"]["shares_of_mu_squared"]
    total = sum(shares.values())
    return {"of": shares, "sum": total, "why": WHY_MORE_THAN_ONE if total > 1.005 else ""}


def coverage(
    plan: Plan, budget: Budget, units: int | None, records: int | None, keys: int
) -> dict[str, Any]:
    """Return the records that the budget covers, JSON-able.

    Args:
        units, records: assumed numbers in one window; ``None``: not given.  Without records each
            unit is taken to have one.
        keys: number of keys.

    Returns:
        ``covers`` (window, period or lifetime); ``windows``: how many that is (``None``: no end);
        ``units_needed`` for a 50% chance of a key to be published (``None``: all keys are public);
        ``column``: the first one with its error; ``windows_counted``: to how many of them a unit
        with records in all contributes; ``share_cut``: least share of the records that C leaves out
        (``None`` without ``units`` and ``records``); ``keys_first`` and ``keys_middle``: keys to
        expect in the first and in the middle window (``None`` without ``units`` or selection);
        ``epsilon_always``: of a unit with records in all windows (``None``: no end, or no
        guarantee).
    """
    timeline, bound = plan.timeline, plan.privacy.contributions
    windows = _windows_covered(plan)
    each = max(1.0, records / units) if units and records else 1.0
    counted = math.ceil(bound / each)  # in the last of them with a part of its records
    cut = None
    if units and records and windows is not None:
        cut = max(0.0, 1 - bound * units / (records * windows))
    selects = plan.design.selects and units is not None
    first = expected_keys(plan, budget, units, keys) if selects and units else None
    middle = math.ceil(windows / 2) if windows is not None else counted + 1
    figures = describe(plan, budget)
    periods, selection = figures["periods"], figures["selection"]
    ends = timeline.end is not None and periods
    return {
        "covers": "lifetime" if timeline.period is None else "window" if windows == 1 else "period",
        "windows": windows,
        "units_needed": selection and selection["units_for_half_chance_last"],
        "column": figures["columns"][0] if figures["columns"] else None,
        "keys": keys,
        "windows_counted": counted if windows is None else min(windows, counted),
        "share_cut": cut,
        "keys_first": first,
        "keys_middle": first if first is None or counted >= middle else 0.0,
        "epsilon_always": periods[-1]["epsilon"] if ends else None,
    }


def _windows_covered(plan: Plan) -> int | None:
    """Windows that one budget covers."""
    timeline = plan.timeline
    if timeline.period is not None:
        return 1 if timeline.one_window_a_period else max(1, timeline.period // timeline.slide)
    return None if timeline.end is None else timeline.windows


def warnings_of(covered: dict[str, Any]) -> list[str]:
    """Return the warnings to read before the budget is spent."""
    out, windows, counted = list[str](), covered["windows"], covered["windows_counted"]
    if windows is not None and 2 * counted < windows:
        out.append(
            f"the budget covers {windows:,} windows, but a unit with records in all of them "
            f"contributes to at most {counted:,}: most windows will have few units or none, and "
            'the full budget is charged. Fix: cover less, such as budget.covers = "window", or '
            "raise contributions"
        )
    always = covered["epsilon_always"]
    if always is not None and covered["covers"] != "lifetime":
        out += weaknesses(always, 0.0, " of a unit with records in all windows")
    return out
