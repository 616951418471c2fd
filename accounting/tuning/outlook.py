"""The first questions of a job's user: will anything appear, how exact is it, what would help.

All of it is public: a function of the plan, of two numbers that a person states (units in a window
and keys there are), and of the reference population (``reference``).  As text it is about 25 lines,
the guarantee first.

**Coverage** is what a budget covers (a window, a period or the whole stream), and the records that
C leaves out.  epsilon and C (the most records of a unit that count) hold for all windows that the
budget covers, together.  A unit with m records in each of them reaches C in window ceil(C / m) and
contributes to no later one.  Of R records of U units in a window, over w windows of the same units,
at most C U of R w count: so at least max(0, 1 - C U / (R w)) are cut, for any distribution of the
records; more, if few units have many records.  The figures depend on the plan and on assumed
numbers only, so they are public.
"""

import math
import textwrap
from typing import Any

import msgspec

from dpstream.accounting.aggregates import kind_of
from dpstream.accounting.budget.allocation import Budget
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.figures import duration, human
from dpstream.accounting.guarantee import describe
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.promises import promise_lines
from dpstream.accounting.strength import weaknesses
from dpstream.accounting.tuning.answer import Tuned
from dpstream.accounting.tuning.changes import Change, changes
from dpstream.accounting.tuning.reference import SHAPE, expected_keys
from dpstream.accounting.tuning.starred import ways

#: Records of a key that an error is told for.
SIZES = (100, 1_000)
#: Keys there are, unless somebody says.
KEYS = 1_000
#: A change that gains less is not worth a line there.
WORTH_A_LINE = 1.05


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
        plan, budget: what is in force, of a run that was begun what was committed then.
        units: that have records in a window; ``None``: nobody says.
        keys: that there are, with ``units``.
        job: the job's own plan, for what would be better in a new run; default: ``plan``.

    Returns:
        ``appears``, ``exact`` (by column and size), ``shares``, ``changes`` (``Change`` each, the
        first one starred), ``helps_most`` (one of them that is better in both figures for the same
        records, else by gain; or ``None``), ``reference`` in words.
    """
    figures = describe(plan, budget)
    rows = _changes(job or plan)
    helping = [row for row in rows if row.helps] or [
        row for row in rows if not row.same and row.gain >= WORTH_A_LINE
    ]
    best = max(helping, key=lambda row: row.gain, default=None)
    return {
        "appears": _appears(plan, budget, figures, units, keys),
        "exact": _exact(plan, figures),
        "shares": _shares(figures) | {"law": figures["split"]["law"]},
        "changes": [_fields(row) for row in rows],
        "helps_most": None if best is None else _fields(best),
        "reference": SHAPE,
    }


def exactness(plan: Plan, budget: Budget) -> list[dict[str, Any]]:
    """Return ``exact`` of `outlook`, without a search for better ways."""
    return _exact(plan, describe(plan, budget))


def _changes(plan: Plan) -> list[Change]:
    """Empty for plans that are refused: nothing to compare with."""
    try:
        return changes(plan, ways(plan))
    except PolicyError:
        return []


def _by_size_or_order(weights: dict[str, Any]) -> dict[str, Any]:
    """Weights as a job has them: by order or by size, never both."""
    names = ("offset", "power") if weights["size_share"] is None else ("size_share",)
    return {name: weights[name] for name in names}


def _fields(row: Change) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(row)
    weights = fields["settings"].get("mechanism.weights")
    if isinstance(weights, dict):  # by order or by size: a job names what is set
        fields["settings"]["mechanism.weights"] = _by_size_or_order(weights)
    return fields | {"gain": row.gain, "helps": row.helps}


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
    rows = []
    for aggregate, column in zip(plan.aggregates, figures["columns"], strict=True):
        sizes = [_of_size(aggregate, column["sd_final"], size) for size in SIZES]
        rows.append(
            {
                "name": aggregate.name,
                "kind": aggregate.kind,
                "of": _denominator(aggregate)[1],
                "sizes": sizes,
            }
        )
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


#: Changes that are listed without ``--details``.
_LISTED = 6


def outlook_text(
    plan: Plan,
    budget: Budget,
    tuned: Tuned | None = None,
    units: int | None = None,
    keys: int | None = None,
    job: Plan | None = None,
) -> str:
    """Return the answers for a person, about 25 lines."""
    figures, sections = describe(plan, budget, tuned), outlook(plan, budget, units, keys, job)
    lines = [
        f"Guarantee   {figures['guarantee']['text']}",
        *promise_lines(plan, budget),
        f"Counted     at most {plan.privacy.contributions} records of a unit"
        + ("" if plan.timeline.period is None else " and period")
        + f" (C), {_windows(plan)}",
        "",
        *_appears_lines(plan, sections["appears"]),
        *_exact_lines(sections["exact"]),
        *_shares_lines(sections["shares"]),
        "",
        *_change_lines(sections),
    ]
    if figures["choice"] and figures["choice"]["how"] == "private":
        lines.append(f"Tuning      {figures['choice']['text']}")
    lines += [f"Warning     {w}" for w in figures["warnings"]]
    lines.append("More        --details: thresholds, noise at every trigger, what is assumed")
    return "\n".join(lines) + "\n"


def _windows(plan: Plan) -> str:
    timeline = plan.timeline
    slide = "" if timeline.slide == timeline.window else f" every {duration(timeline.slide)}"
    times = -(-timeline.triggers // plan.design.refresh_every)
    often = f"published every {duration(timeline.trigger_every * plan.design.refresh_every)}"
    often = "published once each" if times == 1 else f"{often}, {times:,} times each"
    if plan.design.restarts:
        often = f"a key is tested, and published, up to {timeline.triggers:,} times each"
    return f"in windows of {duration(timeline.window)}{slide}, {often}"


def _appears_lines(plan: Plan, appearance: dict[str, Any]) -> list[str]:
    if not appearance["selects"]:
        return ["Appears     every key of the public list, whatever the data"]
    first, last = (
        appearance["units_for_half_chance_first"],
        appearance["units_for_half_chance_last"],
    )
    needed = f"{last:,} units in a window has"
    if plan.design.tests > 1:
        needed = f"{first:,} units at a window's first test, or {last:,} at its last, has"
    lines = [f"Appears     a key with {needed} a 50% chance of being published"]
    if appearance["units_if_last_records"] > last:
        lines.append(
            f"            (up to {appearance['units_if_last_records']:,} if the key has the last "
            "record of each unit, not the first)"
        )
    if appearance["units"] is None:
        lines.append("            --units N: number of keys to expect with N units in a window")
    else:
        share = appearance["share_of_units"]
        part = f"{100 * share:.2g}% of them" if share <= 1 else "more than there are"
        lines.append(
            f"            of {appearance['units']:,} units that is {part}; of "
            f"{appearance['keys']:,} keys {_about(appearance['expected_keys'])} appear, if the "
            "r-th most"
        )
        lines.append(
            "            popular is met 1/r as often and a unit has at least i records with "
            "chance 1/i"
        )
    return lines


def _about(keys: float) -> str:
    """A number of keys to expect; less than one in twenty is none."""
    return f"about {human(keys)}" if keys >= 0.05 else "none"


def _exact_lines(rows: list[dict[str, Any]]) -> list[str]:
    head = "Exact       noise (sd) at a window's end, for a key of"
    sizes = "".join(f"{size:>14,} records" for size in SIZES)
    wide = max(len(row["name"]) for row in rows)
    lines = [head, " " * (12 + wide) + sizes]
    for row in rows:
        cells = "".join(f"{_cell(of):>22}" for of in row["sizes"])
        lines.append(f"            {row['name']:<{wide}}{cells} {row['of']}".rstrip())
    return lines


def _cell(of: dict[str, float]) -> str:
    return f"±{human(of['sd'])} ({human(100 * of['relative'])}%)"


def _shares_lines(shares: dict[str, Any]) -> list[str]:
    parts = ", ".join(f"{name} {share:.2g}" for name, share in shares["of"].items())
    if len(shares["of"]) < 2:
        return []
    why = f"; {shares['why']}" if shares["why"] else ""
    unit = "epsilon" if shares["law"] == "geometric" else "mu^2"
    words = f"shares of {unit}: {parts}{why}"
    return textwrap.wrap(words, 100, initial_indent="Budget      ", subsequent_indent=" " * 12)


def _change_lines(changes: dict[str, Any]) -> list[str]:
    rows, best = changes["changes"], changes["helps_most"]
    if not rows:
        return []
    lines = []
    if best is not None:
        lines.append(
            f"Helps most  {best['text']}: {best['effect']}; {_against(best['keys'], 'keys')}, "
            f"{_against(best['noise'], 'noise')}"
        )
    others = [row for row in rows if not row["same"] and row["gain"] >= WORTH_A_LINE]
    lines.append(
        "Changes     compared with this job on a public reference shape, each change alone"
    )
    lines.append("  keys   noise  same output, different mechanism")
    lines += [_line(row) for row in rows if row["same"]]
    if others:
        lines.append("  keys   noise  different output: other figures, times or records")
    return lines + [_line(row) for row in others[:_LISTED]]


def _line(row: dict[str, Any]) -> str:
    mark = "*" if row["starred"] else " "
    keys = "all" if row["keys"] is None else f"x{row['keys']:.3g}"
    noise = f"x{row['noise']:.3g}"
    words = f"{row['text']}: {row['effect']}" if row["text"] else row["effect"]
    return f"{mark} {keys:<6} {noise:<6} {words}"


def _against(ratio: float | None, name: str) -> str:
    return f"all {name}" if ratio is None else f"{name} x{ratio:.3g}"


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
        return max(1, timeline.period // timeline.slide)
    return None if timeline.end is None else timeline.windows


def coverage_lines(plan: Plan, covered: dict[str, Any]) -> list[str]:
    """Return the figures of `coverage` as text."""
    timeline, bound = plan.timeline, plan.privacy.contributions
    what = {
        "window": f"each window of {duration(timeline.window)} separately",
        "period": f"each period of {duration(timeline.period or 1)}",
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
        spans = "windows" if windows is None else f"{windows:,} windows"
        lines.append(
            f"            a unit with records in all {spans} counts in at most {counted:,} of them"
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
