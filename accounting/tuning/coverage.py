"""What a budget covers: a window, a period or the whole stream, and what is left out by that.

epsilon and C (records of a unit that count) are of all windows that the budget covers, together.
A unit that is there in each of them with m records has used C up in window ceil(C / m), and counts
in no later one.  Of R records of U units in a window, over w windows of the same units, at most
C U of R w count: so at least max(0, 1 - C U / (R w)) are cut, whatever their distribution; more,
where few units have many records.  All of it is public: the plan, and what a person assumes.
"""

import math
from typing import Any

from dpstream.accounting.budget import Budget
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
        units, records: in one window, as somebody assumes; ``None``: nobody says.  Without records
            each unit is taken to have one.
        keys: that there are.

    Returns:
        ``covers`` (window, period or lifetime), ``windows`` of it (``None``: no end),
        ``units_needed`` for an even chance of a key (``None``: all are public), ``column``: the
        first one with its error, ``windows_counted`` of a unit that is there in all of them,
        ``share_cut`` of the records at least (``None`` without ``units`` and ``records``),
        ``keys_first`` and ``keys_middle`` to expect in the first window and in the middle one
        (``None`` without ``units`` or selection), and ``epsilon_always`` of a unit that is there
        all the time (``None``: no end, or no guarantee).
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


def coverage_lines(plan: Plan, found: dict[str, Any]) -> list[str]:
    """The same for a person; the first line says what is covered."""
    line, bound = plan.timeline, plan.privacy.contributions
    what = {
        "window": f"each window of {duration(line.window)} by itself",
        "period": f"each period of {duration(line.period or 1)}",
        "lifetime": "the whole stream",
    }[found["covers"]]
    number = "without end" if found["windows"] is None else f"{found['windows']:,} windows together"
    together = "" if found["windows"] == 1 else f" ({number})"
    column = found["column"]
    exact = f"; the sd of {column['name']} is {human(column['sd_final'])}" if column else ""
    lines = [
        f"Publishes   {_published(found)}{exact}, at a window's end",
        f"Covers      {what}{together}: epsilon, and {bound:,} records (C) of a unit",
    ]
    windows, counted = found["windows"], found["windows_counted"]
    if windows is None or counted < windows:
        of = "windows" if windows is None else f"{windows:,} windows"
        lines.append(
            f"            a unit that is there in all {of} counts in at most {counted:,} of them"
        )
    if found["share_cut"] is not None:
        least = f"at least {100 * found['share_cut']:.3g}%" if found["share_cut"] else "none"
        lines.append(
            f"Cut         {least} of the records are left out by C, if the same units are in each "
            "window, with equally many records; more, if not"
        )
    return lines


def _published(found: dict[str, Any]) -> str:
    """Whether anything will appear."""
    if found["units_needed"] is None:
        return "every key of the public list"
    needed = f"keys of about {found['units_needed']:,} units or more in a window"
    if found["keys_first"] is None:
        return needed
    about = "NONE" if found["keys_first"] < 0.05 else f"about {human(found['keys_first'])}"
    later = ""
    if found["keys_middle"] < 0.05 <= found["keys_first"]:
        later = f", and NONE from window {found['windows_counted'] + 1:,} on"
    return f"{needed}: {about} of {found['keys']:,} in the first window{later}"


def warnings_of(found: dict[str, Any]) -> list[str]:
    """What a person must know before the budget is spent."""
    out, windows, counted = list[str](), found["windows"], found["windows_counted"]
    if windows is not None and 2 * counted < windows:
        out.append(
            f"the budget covers {windows:,} windows, and a unit that is there in all of them counts"
            f" in at most {counted:,}: most windows will have few units or none, and the budget is "
            "charged all the same. Cover less (privacy.period; `dpstream init --covers window`), "
            "or raise privacy.contributions"
        )
    always = found["epsilon_always"]
    if always is not None and found["covers"] != "lifetime":
        out += weaknesses(always, 0.0, " of a unit that is there all the time")
    return out
