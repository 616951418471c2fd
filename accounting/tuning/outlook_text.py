"""The answers of ``outlook`` for a person: about 25 lines, the guarantee first."""

import textwrap
from typing import Any

from dpstream.accounting.budget.allocation import Budget
from dpstream.accounting.figures import duration, human
from dpstream.accounting.guarantee import describe
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.promises import promise_lines
from dpstream.accounting.tuning.answer import Tuned
from dpstream.accounting.tuning.outlook import SIZES, WORTH_A_LINE, outlook

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
    """The answers for a person, about 25 lines."""
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
    line = plan.timeline
    slide = "" if line.slide == line.window else f" every {duration(line.slide)}"
    times = -(-line.triggers // plan.design.refresh_every)
    often = f"published every {duration(line.trigger_every * plan.design.refresh_every)}"
    often = "published once each" if times == 1 else f"{often}, {times:,} times each"
    if plan.design.restarts:
        often = f"a key is tested, and published, up to {line.triggers:,} times each"
    return f"in windows of {duration(line.window)}{slide}, {often}"


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
    of = "epsilon" if shares["law"] == "geometric" else "mu^2"
    words = f"shares of {of}: {parts}{why}"
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
