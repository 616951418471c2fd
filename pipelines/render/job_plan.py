"""The plan of a job as text: whether anything appears, how exact it is, and its guarantee.

The figures are those of `accounting.guarantee.describe`, `accounting.tuning.outlook` and
`accounting.promises`, which ``--json`` prints too: functions of public parameters alone.  Those of
a guarantee are shortened to six digits, never downwards.
"""

import math
from typing import Any

from dpstream.accounting.budget.allocation import Budget
from dpstream.accounting.figures import exact, guarantee_pair, human, up
from dpstream.accounting.guarantee import NEIGHBOURS, Promise, describe, promises
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.tuning.answer import Tuned
from dpstream.accounting.tuning.outlook import SIZES, outlook
from dpstream.pipelines.render.layout import INDENT, count, each, labelled, page, wrapped

#: Fewer keys to expect than this are none.
_NONE = 0.05


def summary_text(
    plan: Plan,
    budget: Budget,
    tuned: Tuned | None = None,
    units: int | None = None,
    keys: int | None = None,
    job: Plan | None = None,
) -> str:
    """Return the answers of `accounting.tuning.outlook.outlook`, about 15 lines.

    Args:
        tuned: where C and bounds come from, if the job says so.
        plan, budget, units, keys, job: as `outlook` takes them.
    """
    figures, sections = describe(plan, budget, tuned), outlook(plan, budget, units, keys, job)
    of_period = "" if plan.timeline.period is None else " and period"
    lines = [
        *labelled("Guarantee", figures["guarantee"]["text"]),
        *promise_lines(plan, budget),
        *labelled(
            "Counted",
            f"at most {count(plan.privacy.contributions, 'record')} of a unit{of_period} (C), "
            f"{_windows(plan)}",
        ),
        "",
        *_appears(plan, sections["appears"]),
        *_exact(sections["exact"]),
        *_by_epsilon(sections["by_epsilon"]),
        *_shares(sections["shares"]),
        "",
        *_helps_most(sections["helps_most"]),
        *_tuning(figures),
        *each("Warning", figures["warnings"]),
        *labelled("More", "--details: thresholds, noise at every trigger, what is assumed"),
    ]
    return page(lines)


def details_text(plan: Plan, budget: Budget, tuned: Tuned | None = None) -> str:
    """Return the guarantee and all figures of the mechanism, about 40 lines.

    Args:
        tuned: where C and bounds come from, if the job says so.
    """
    figures = describe(plan, budget, tuned)
    timeline = plan.timeline
    words = timeline.words
    zone = "" if timeline.calendar is None else f", in {timeline.calendar.zone}"
    for_ever = ", once for all time" if figures["unit"]["for_ever"] else ""
    lines = [
        *labelled("Guarantee", figures["guarantee"]["text"]),
        *labelled("Neighbours", NEIGHBOURS),
        *labelled("Delta", figures["guarantee"]["computational"]),
        *labelled(
            "Unit",
            f"{figures['unit']['text']}; at most {plan.privacy.contributions} admitted "
            f"(record, window) pairs{for_ever}",
        ),
        *labelled(
            "Windows",
            f"{words(timeline.window)} every {words(timeline.slide)}{zone}, a trigger every "
            f"{words(timeline.trigger_every)}, {timeline.triggers} triggers with the lateness",
        ),
        *labelled("Mechanism", f"strategy {budget.strategy}{_extras(plan)}"),
        *labelled("Published", figures["publishing"]),
        *_budget(figures["split"]),
    ]
    lines += [
        f"{s['name']:<16}  {s['share']:<14.6g}  {s['sensitivity']:<15.6g}  "
        f"{s['scale'] or s['sigma']:<15.6g}  {s['col2']}"
        for s in figures["streams"]
    ]
    lines += ["", *_triggers(figures), ""]
    lines.append("Column            expected error of a release (sd): mean over triggers, final")
    lines += [
        f"{c['name']:<16}  {c['sd_mean']:.6g}, {c['sd_final']:.6g} {c['note']}".rstrip()
        for c in figures["columns"]
    ]
    lines += _selection(figures, plan.design.by_size) + _periods(plan, figures) + _tuning(figures)
    lines += each("Warning", figures["warnings"])
    return page([*lines, *each("Assumed", figures["assumptions"])])


def coverage_lines(plan: Plan, covered: dict[str, Any]) -> list[str]:
    """Return the figures of `accounting.tuning.outlook.coverage` as text, without its warnings."""
    timeline, bound = plan.timeline, plan.privacy.contributions
    what = {
        "window": f"each window of {timeline.words(timeline.window)} separately",
        "period": f"each period of {timeline.words(timeline.period or 1)}",
        "lifetime": "the whole stream",
    }[covered["covers"]]
    windows, counted, column = covered["windows"], covered["windows_counted"], covered["column"]
    number = "no end" if windows is None else f"{windows:,} windows together"
    together = "" if windows == 1 else f" ({number})"
    noise = (
        f"; noise (sd) of {column['name']} at a window's end: {human(column['sd_final'])}"
        if column
        else ""
    )
    lines = labelled("Publishes", f"{_expected(covered)}{noise}")
    records, more = count(bound, "record"), list[str]()
    if windows is None or counted < windows:
        spans = "windows" if windows is None else f"{windows:,} windows"
        more = [f"a unit with records in all {spans} counts in at most {counted:,} of them"]
    lines += labelled("Covers", f"{what}{together}: epsilon and C = {records} of a unit", *more)
    if covered["share_cut"] is not None:
        share = covered["share_cut"]
        least = f"at least {100 * share:.3g}%" if share else "none"
        lines += labelled(
            "Cut",
            f"C leaves out {least} of the records if the same units have equally many records in "
            "each window; otherwise more",
        )
    return lines


def promise_lines(plan: Plan, budget: Budget) -> list[str]:
    """Return both promises of each family of noise.

    There are none for one family and one period.
    """
    rows = promises(plan, budget)
    if len(rows) == 1 and rows[0].periods == 1:
        return []
    lines = each("Noise", (_promise(row, rows) for row in rows))
    if rows[0].periods > 1:
        endless = plan.timeline.end is None
        which = f"{rows[0].periods:,} periods" if endless else f"all {rows[0].periods:,} periods"
        parts = [f"{row.family} {_lifetime(row)}" for row in rows]
        if endless:
            parts.append("the stream has no end, so none holds for all of them")
        lines += labelled("Lifetime", f"a person of {which}: {'; '.join(parts)}")
    return lines


def _promise(row: Promise, rows: list[Promise]) -> str:
    per = "a period" if row.periods > 1 else "in all"
    mark = " (in force)" if row.chosen and len(rows) > 1 else ""
    guarantee = guarantee_pair(row.epsilon, row.delta)
    return f"{row.family}: {guarantee} {per}, {row.column} ±{human(row.sd)} on average{mark}"


def _lifetime(row: Promise) -> str:
    text = guarantee_pair(*row.lifetime, digits=(4, 3))
    if row.fixed is None:
        return text
    return f"{text}, {guarantee_pair(*row.fixed, digits=(4, 3))} on a schedule fixed beforehand"


# --- the summary ---------------------------------------------------------------------------------


def _windows(plan: Plan) -> str:
    timeline = plan.timeline
    slide = "" if timeline.slide == timeline.window else f" every {timeline.words(timeline.slide)}"
    times = -(-timeline.triggers // plan.design.refresh_every)
    often = f"published every {timeline.words(timeline.trigger_every * plan.design.refresh_every)}"
    often = "published once each" if times == 1 else f"{often}, {times:,} times each"
    return f"in windows of {timeline.words(timeline.window)}{slide}, {often}"


def _appears(plan: Plan, appearance: dict[str, Any]) -> list[str]:
    if not appearance["selects"]:
        return labelled("Appears", "every key of the public list, whatever the data")
    first = appearance["units_for_half_chance_first"]
    last = appearance["units_for_half_chance_last"]
    needed = (
        f"{first:,} units at a window's first test, or {last:,} at its last, has"
        if plan.design.tests > 1
        else f"{last:,} units in a window has"
    )
    more = list[str]()
    if appearance["units_if_last_records"] > last:
        more.append(
            f"(up to {appearance['units_if_last_records']:,} if the key has the last record of "
            "each unit, not the first)"
        )
    if appearance["units"] is None:
        more.append("--units N: number of keys to expect with N units in a window")
    else:
        share = appearance["share_of_units"]
        part = f"{100 * share:.2g}% of them" if share <= 1 else "more than there are"
        keys = appearance["expected_keys"]
        about = f"about {human(keys)}" if keys >= _NONE else "none"
        more += [
            f"of {appearance['units']:,} units that is {part}; of {appearance['keys']:,} keys "
            f"{about} appear, if the r-th most",
            "popular is met 1/r as often and a unit has at least i records with chance 1/i",
        ]
    return labelled("Appears", f"a key with {needed} a 50% chance of being published", *more)


def _exact(rows: list[dict[str, Any]]) -> list[str]:
    wide = max(len(row["name"]) for row in rows)
    sizes = "".join(f"{size:>14,} records" for size in SIZES)
    lines = [
        *labelled("Exact", "noise (sd) at a window's end, for a key of"),
        " " * (INDENT + wide) + sizes,
    ]
    for row in rows:
        errors = [
            f"±{human(size['sd'])} ({human(100 * size['relative'])}%)" for size in row["sizes"]
        ]
        cells = "".join(f"{error:>22}" for error in errors)
        lines += labelled("", f"{row['name']:<{wide}}{cells} {row['of']}".rstrip())
    return lines


def _by_epsilon(rows: list[dict[str, Any]]) -> list[str]:
    """Return one line for each column."""
    lines = []
    for name in rows[0]["sd"] if rows else ():
        noise = ", ".join(f"±{human(row['sd'][name])} at {up(row['epsilon'])}" for row in rows)
        lines.append(f"{name} {noise}")
    return labelled("Epsilon", *lines) if lines else []


def _shares(shares: dict[str, Any]) -> list[str]:
    if len(shares["of"]) < 2:
        return []
    parts = ", ".join(f"{name} {share:.2g}" for name, share in shares["of"].items())
    why = f"; {shares['why']}" if shares["why"] else ""
    unit = "epsilon" if shares["law"] == "geometric" else "mu^2"
    return wrapped("Budget", f"shares of {unit}: {parts}{why}")


def _helps_most(best: dict[str, Any] | None) -> list[str]:
    if best is None:
        return []
    return labelled(
        "Helps most",
        f"{best['text']}: keys x{best['keys']:.3g}, noise x{best['noise']:.3g} on a public "
        "reference shape, for the same figures",
    )


def _tuning(figures: dict[str, Any]) -> list[str]:
    choice = figures["choice"]
    return labelled("Tuning", choice["text"]) if choice and choice["how"] == "private" else []


def _expected(covered: dict[str, Any]) -> str:
    """Which keys are published, and how many to expect."""
    if covered["units_needed"] is None:
        return "every key of the public list"
    needed = f"keys with about {covered['units_needed']:,} units or more in a window"
    if covered["keys_first"] is None:
        return needed
    about = "NONE" if covered["keys_first"] < _NONE else f"about {human(covered['keys_first'])}"
    later = (
        f", and NONE from window {covered['windows_counted'] + 1:,} on"
        if covered["keys_middle"] < _NONE <= covered["keys_first"]
        else ""
    )
    return f"{needed}: {about} of {covered['keys']:,} in the first window{later}"


# --- the details ---------------------------------------------------------------------------------


def _budget(split: dict[str, Any]) -> list[str]:
    """What the noise costs, and the head of the table of streams."""
    if split["law"] == "geometric":
        return [
            *labelled(
                "Budget",
                "two-sided geometric noise, charged plain: the shares of epsilon add up"
                + _plain_thresholds(split),
            ),
            "",
            "Stream            share of eps    L1 sensitivity   scale per node   col2",
        ]
    return [
        *labelled(
            "Budget",
            f"mu {up(split['mu'])}; delta {up(split['delta_gaussian'], 3)} noise + "
            f"{up(split['delta_thresholds'], 3)} thresholds (b = {up(split['b'], 3)} per key and "
            "round)",
        ),
        "",
        "Stream            share of mu^2   L2 sensitivity   sigma per node   col2",
    ]


def _plain_thresholds(split: dict[str, Any]) -> str:
    """What thresholds add to plain epsilon."""
    if not split["b"]:
        return ""
    delta, b = up(split["delta_thresholds"], 3), up(split["b"], 3)
    return f"; thresholds have delta {delta} (b = {b} per key and window)"


def _extras(plan: Plan) -> str:
    """Options of the mechanism that change what a record counts."""
    privacy, parts = plan.privacy, list[str]()
    if privacy.per_key_bound is not None:
        many = privacy.per_key_bound
        most = "one record" if many == 1 else f"at most {many} records"
        of_key = f"{most} per unit, window and key count{'s' * (many == 1)}"
        parts.append(f"{of_key}, repeats take nothing")
    weights = plan.design.weights
    if weights is not None and weights.size_share is not None:
        parts.append(
            "a unit's records weigh in selection by their number, which has "
            f"{exact(weights.size_share)} of mu^2"
        )
    elif weights is not None:
        parts.append(
            f"the i-th pair of a unit weighs (i + {exact(weights.offset)})"
            f"^-{exact(weights.power)} in selection"
        )
    if privacy.combine:
        parts.append("tested together with the published count")
    if plan.cells is not None:
        parts.append(
            f"noise mixed over {plan.cells.size:,} cells, a record adds at most "
            f"{up(math.sqrt(plan.cells.inverse_norm2))} to what is noised; sds are a typical cell's"
        )
    return "".join(f"; {part}" for part in parts)


def trigger_rows(figures: dict[str, Any]) -> tuple[list[str], list[tuple[int, list[float]]]]:
    """Return heads, and at a handful of triggers sd_t of each stream and tau_t.

    Args:
        figures: `accounting.guarantee.describe` of a plan.
    """
    streams, tau = figures["streams"], figures["tau"]
    last = len(streams[0]["sd"])
    triggers = {1, 2, 3, -(-last // 4), -(-last // 2), -(-3 * last // 4), last}
    rows = [
        (t, [s["sd"][t - 1] for s in streams] + ([tau[t - 1]] if tau else []))
        for t in sorted(triggers)
        if t <= last
    ]
    return [f"sd {s['name']}" for s in streams] + (["tau (units)"] if tau else []), rows


def _triggers(figures: dict[str, Any]) -> list[str]:
    """The rows of `trigger_rows` as a table."""
    heads, rows = trigger_rows(figures)
    lines = ["Trigger   " + "".join(f"{head:<18}" for head in heads)]
    lines += [f"{t:<10}" + "".join(f"{figure:<18.6g}" for figure in row) for t, row in rows]
    return [line.rstrip() for line in lines]


def _selection(figures: dict[str, Any], by_size: bool) -> list[str]:
    chosen = figures["selection"]
    if chosen is None:
        return []
    least = f"{chosen['last_pair_counts']:.2g} of that"
    more = list[str]()
    if chosen["last_pair_counts"] < 1 and by_size:
        bound = figures["unit"]["contributions"]
        more = [
            f"if it is the only key of these units; each of a unit's {bound} keys counts {least}"
        ]
    elif chosen["last_pair_counts"] < 1:
        more = [f"if these are every unit's first pairs; a unit's last pair counts {least}"]
    return labelled(
        "Selection",
        f"a key with {chosen['units_for_half_chance_first']} units at the first trigger, or "
        f"{chosen['units_for_half_chance_last']} at the last, has a 50% chance",
        *more,
    )


def _periods(plan: Plan, figures: dict[str, Any]) -> list[str]:
    rows = figures["periods"]
    if len(rows) < 2:
        return []
    head = [f"{figures['periods_rule']}; epsilon at delta:"]
    if plan.timeline.end is None:
        head = [
            "the guarantee above is for each (unit, period); the stream has no end, so none",
            f"holds for a person in all periods: {figures['periods_rule']}:",
        ]
    listed = rows if len(rows) <= 5 else [*rows[:4], rows[-1]]
    return labelled(
        "Periods",
        *head,
        *(
            f"k = {r['periods']}: "
            + (f"mu {up(r['mu'])}, " if r["mu"] else "")
            + f"epsilon {up(r['epsilon'])} at delta {up(r['delta'], 3)}"
            for r in listed
        ),
    )


def shards_lines(state: dict[str, int]) -> list[str]:
    """Return how many changed keys a step commits at once; nothing without a Spanner store.

    Args:
        state: `jobs.shards.shard_figures`.
    """
    if not state:
        return []
    shards, most = state["shards"], state["keys_of_a_commit"]
    head = f"Spanner, {shards} key shards: a step of up to {most:,} changed keys is one"
    if "shards_needed" not in state:
        return labelled(
            "State",
            head,
            "commit, a larger one is committed in parts, by key. `--changed-keys N` says",
            "how many shards a trigger with N changed keys needs to avoid that.",
        )
    needed = state["shards_needed"]
    verdict = "enough here" if shards >= needed else f"set shards = {needed}"
    changed = f"{state['changed_keys']:,} changed keys a trigger need {needed:,} shards: {verdict}."
    return labelled("State", head, f"commit; {changed}")
