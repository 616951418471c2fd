"""What a budget covers (a window, a period or the whole stream), and the records that C leaves out.

epsilon and C (the most records of a unit that count) hold for all windows that the budget covers,
together.  A unit with m records in each of them reaches C in window ceil(C / m) and contributes to
no later one.  Of R records of U units in a window, over w windows of the same units, at most C U of
R w count: so at least max(0, 1 - C U / (R w)) are cut, for any distribution of the records; more,
if few units have many records.  The figures depend on the plan and on assumed numbers only, so they
are public.
"""

import math
from typing import Any

from dpstream.accounting.budget.allocation import Budget
from dpstream.accounting.figures import duration, human
from dpstream.accounting.guarantee import describe
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.strength import weaknesses
from dpstream.accounting.tuning.reference import expected_keys


def coverage(
    plan: Plan, budget: Budget, units: int | None, records: int | None, keys: int
) -> dict[str, Any]:
    """What the budget covers, JSON-able.

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
    line, bound = plan.timeline, plan.privacy.contributions
    windows = _windows(plan)
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
    ends = line.end is not None and periods
    return {
        "covers": "lifetime" if line.period is None else "window" if windows == 1 else "period",
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


def _windows(plan: Plan) -> int | None:
    """Windows that one budget covers."""
    line = plan.timeline
    if line.period is not None:
        return max(1, line.period // line.slide)
    return None if line.end is None else line.windows


def coverage_lines(plan: Plan, covered: dict[str, Any]) -> list[str]:
    """The figures of `coverage` as text."""
    line, bound = plan.timeline, plan.privacy.contributions
    what = {
        "window": f"each window of {duration(line.window)} separately",
        "period": f"each period of {duration(line.period or 1)}",
        "lifetime": "the whole stream",
    }[covered["covers"]]
    several = covered["windows"]
    number = "no end" if several is None else f"{several:,} windows together"
    together = "" if several == 1 else f" ({number})"
    column = covered["column"]
    exact = ""
    if column:
        exact = f"; noise (sd) of {column['name']} at a window's end: {human(column['sd_final'])}"
    lines = [
        f"Publishes   {_published(covered)}{exact}",
        f"Covers      {what}{together}: epsilon and C = {bound:,} records of a unit",
    ]
    windows, counted = covered["windows"], covered["windows_counted"]
    if windows is None or counted < windows:
        of = "windows" if windows is None else f"{windows:,} windows"
        lines.append(
            f"            a unit with records in all {of} counts in at most {counted:,} of them"
        )
    if covered["share_cut"] is not None:
        share = covered["share_cut"]
        least = f"at least {100 * share:.3g}%" if share else "none"
        lines.append(
            f"Cut         C leaves out {least} of the records if the same units have equally many "
            "records in each window; otherwise more"
        )
    return lines


def _published(covered: dict[str, Any]) -> str:
    """Which keys are published, and how many to expect."""
    if covered["units_needed"] is None:
        return "every key of the public list"
    needed = f"keys with about {covered['units_needed']:,} units or more in a window"
    if covered["keys_first"] is None:
        return needed
    about = "NONE" if covered["keys_first"] < 0.05 else f"about {human(covered['keys_first'])}"
    later = ""
    if covered["keys_middle"] < 0.05 <= covered["keys_first"]:
        later = f", and NONE from window {covered['windows_counted'] + 1:,} on"
    return f"{needed}: {about} of {covered['keys']:,} in the first window{later}"


def warnings_of(covered: dict[str, Any]) -> list[str]:
    """Warnings to read before the budget is spent."""
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
