"""The page of a report: texts and pictures for the template, which escapes them.

**Pictures** are of released values over time, with the noise of each.  The bands and bars are
+-1.96 sd of the noise.  They are cut at what the column can be (a mean's bound, 0 of a count), so
that a key with much noise does not flatten the picture; values never are.
"""

import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
from matplotlib import dates

from dpstream.accounting.aggregates import kind_of
from dpstream.accounting.arrays import Bool, Float64
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.figures import exact, human, human_up
from dpstream.accounting.guarantee import NOT_SOUND
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.batches import key_fields
from dpstream.pipelines.connectors.final import too_uncertain
from dpstream.pipelines.project.job_section import PublicationSection
from dpstream.pipelines.render import charts
from dpstream.pipelines.render.account import share_text
from dpstream.pipelines.render.charts import (
    MARKED,
    SERIES,
    WIDTH,
    Picture,
    axes_of,
    time_axis,
    values_axis,
)
from dpstream.pipelines.render.job_plan import trigger_rows
from dpstream.pipelines.render.layout import count
from dpstream.pipelines.render.page import document, embedded
from dpstream.pipelines.report.data import ReleaseFile, evenly, floats
from dpstream.pipelines.report.methodology import (
    cost_text,
    length_name,
    methodology,
    several,
)
from dpstream.pipelines.report.report import TRUTH_LABEL, Report
from dpstream.pipelines.report.text import (
    Column,
    drawn,
    instant,
    key_label,
    label_of,
    moment_text,
    public_source,
    publication_of,
    settings,
    table,
    visible,
    window_name,
    with_error,
)

#: Share of the longest bands, at either end, that may be cut: one value of which nothing is known
#: would flatten all others.
_CUT = 0.05
#: Room around values, as a share of the height.
_ROOM = 0.06


class Bounds(NamedTuple):
    """The bounds of a column; ``None``: no bound is known.  Noise may lead a value beyond."""

    low: float | None = None
    high: float | None = None


class Series(NamedTuple):
    """Values at times, NaN where there is none, and their sds."""

    when: Sequence[datetime]
    values: Float64
    sds: Float64


def bounds_of(aggregate: Aggregate) -> Bounds:
    """Return the range of a column's exact values: a mean lies within its bounds, a count is at
    least 0, a sum has the sign of its bounds.
    """
    if aggregate.bounds is None:
        return Bounds(0.0)
    low, high = aggregate.bounds
    if kind_of(aggregate).divides:
        return Bounds(float(low), float(high))
    return Bounds(0.0 if low >= 0 else None, 0.0 if high <= 0 else None)


def limits(values: Float64, reach: Float64, bounds: Bounds) -> tuple[float, float]:
    """Return the ends of the axis: all values, most bands within the bounds, 0 where it is a bound.

    Args:
        values, reach: (n,) finite values, and half the width of the band around each.
    """
    low = float(np.quantile(values - reach, _CUT))
    high = float(np.quantile(values + reach, 1 - _CUT))
    if bounds.low is not None:
        low = 0.0 if bounds.low == 0 and bounds.high is None else max(low, bounds.low)
    if bounds.high is not None:
        high = 0.0 if bounds.high == 0 and bounds.low is None else min(high, bounds.high)
    low, high = min(low, float(values.min())), max(high, float(values.max()))
    room = _ROOM * (high - low) or 1.0
    at_low, at_high = low == bounds.low, high == bounds.high
    return low - (0.0 if at_low else room), high + (0.0 if at_high else room)


def picture_over_time(
    name: str,
    line: Series,
    bounds: Bounds,
    words: str,
    joined: bool = True,
    labels: Sequence[str] = (),
) -> Picture:
    """Draw values over time, whose points can be pointed at.

    Args:
        line: a line with one finite value or more.
        joined: whether neighbours are values of one thing that grows (a band), not of windows of
            their own (bars, while there are few).
        labels: a text for each finite value.
    """
    figure, axes = axes_of(3.6, 2.2)
    _draw(axes, line, joined or len(line.when) > MARKED)
    # Windows without a value have room too: panels of one page have the same times.
    axes.dataLim.update_from_data_x(np.asarray(dates.date2num(line.when)), ignore=False)
    axes.autoscale_view(scaley=False)
    reach = WIDTH * line.sds
    defined = np.isfinite(line.values) & np.isfinite(reach)
    axes.set_ylim(*limits(line.values[defined], reach[defined], bounds))
    time_axis(axes.xaxis, 5)
    values_axis(axes.yaxis)
    seen = np.isfinite(line.values)
    when = np.asarray(dates.date2num(line.when))[seen]
    return Picture.of(figure, name, words, labels, (when, line.values[seen]))


def unbroken(values: Float64) -> bool:
    """Return whether a series has a value in each window since its first, and in three at least."""
    finite = np.isfinite(values)
    since = finite[int(finite.argmax()) :]
    return bool(since.all()) and len(since) > 2


def _draw(axes: Any, line: Series, band: bool) -> None:
    colour, reach = SERIES[0], WIDTH * line.sds
    few = len(line.when) <= MARKED
    if band and len(line.when) > 2:
        low, high = line.values - reach, line.values + reach
        axes.fill_between(line.when, low, high, color=colour, alpha=0.22, lw=0)
        mark = "o" if few else "." if np.isnan(line.values).any() else ""
        axes.plot(line.when, line.values, "-", marker=mark, ms=2.5, lw=1.2, color=colour)
        return
    # A band between two points, or over windows with gaps, cannot be seen.
    if unbroken(line.values):
        axes.plot(line.when, line.values, "-", lw=0.8, alpha=0.5, color=colour)
    axes.errorbar(line.when, line.values, reach, fmt="none", color=colour, lw=1, capsize=0)
    axes.plot(line.when, line.values, "o", ms=2.5, color=colour, clip_on=False)


# Noise by trigger, as the plan has it: pictures and a table for the report.


def noise(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """Return sd of the running sums by trigger, and with key selection the threshold.

    Args:
        figures: `accounting.guarantee.describe` of a plan.
    """
    streams, tau = figures["streams"], figures["tau"]
    of_units = [s for s in streams if s["name"] in ("selection", "units")][: bool(tau)]
    others = [s for s in streams if s not in of_units]
    out = []
    if tau:
        lines = [("threshold tau", tau), ("sd of the selection's noise", of_units[0]["sd"])]
        out.append(chart_of_lines("nt", "Key selection, in units", "units", lines))
    if others:
        lines = [(f"sd of {s['name']}", s["sd"]) for s in others]
        out.append(chart_of_lines("nv", "Running sums, in grid units", "sd, grid units", lines))
    return out


def chart_of_lines(
    chart: str, title: str, up: str, lines: list[tuple[str, list[float]]]
) -> dict[str, Any]:
    """Return a chart of lines by trigger, with its title, legend and description."""
    descriptions = (
        f"{n} from {human(v[0])} at the first to {human(v[-1])} at the last" for n, v in lines
    )
    words = f"{title}, by trigger: {'; '.join(descriptions)}"
    drawn = [np.asarray(values) for _, values in lines]
    picture = charts.lines(chart, drawn, words, "trigger of the window", up)
    legend = list(zip(charts.swatches(len(lines)), (name for name, _ in lines), strict=True))
    return {"title": title, "legend": legend, **picture._asdict()}


#: Columns with pictures; more would make a page heavy, and the table has them.
DRAWN_COLUMNS = 4
#: Keys whose growth within one window is drawn.
GROWN = 3
#: Windows of one small picture; further ones are skipped evenly.
DRAWN_WINDOWS = 400


def render(report: Report, live: str = "", downloads: Sequence[str] = ()) -> str:
    """Return the page: one self-contained HTML document.

    Args:
        live: of a served page, the state of the releases that it shows; it asks for a newer one.
        downloads: names of files that lie beside the page, which it links to.
    """
    values = context(report)
    return document(
        "report.html.j2", "report", script=True, live=live, downloads=downloads, **values
    )


def context(report: Report) -> dict[str, Any]:
    """Return the parameters of the template."""
    job, plan, publication = report.job, report.job.plan, publication_of(report.job)
    drawn = plan.aggregates[:DRAWN_COLUMNS] if report.findings.drawn_window else ()
    columns = [_column(report, a) for a in drawn]
    protected, *reading, citation = methodology(plan, report.figures, publication)
    return {
        "publication": publication,
        "span": _span(report),
        "cost": cost_text(plan, report.figures, publication),
        "window_noun": length_name(plan, plan.timeline.window),
        "windows_noun": several(length_name(plan, plan.timeline.window)),
        "complete": int(report.findings.complete.sum()),
        "planned": None if plan.timeline.end is None else plan.timeline.windows,
        "protected": protected[1],
        "account": _account_text(report, publication),
        "reading": reading,
        "citation": citation[1],
        "source": public_source(plan.source),
        **promise(plan, report.figures),
        "run_ids": report.run_ids,
        "stamps": report.stamps,
        "present": len(report.inventory.releases),
        "damaged": [visible(name) for name in sorted(report.damaged)],
        "incomplete": [
            (window_name(plan.timeline, window), ", ".join(names))
            for window, names in report.incomplete.items()
        ],
        "abandoned": [window_name(plan.timeline, window) for window in report.abandoned],
        "columns": columns,
        "trends": _window_count(report) > 1,
        "undrawn": len(plan.aggregates) > len(drawn),
        **(_table(report, publication) if drawn else {}),
        "truth": report.truth,
        "truth_label": TRUTH_LABEL,
        "settings": settings(job, report.plan),
        **_expert(report, columns),
    }


def _expert(report: Report, columns: list[dict[str, Any]]) -> dict[str, Any]:
    """Parameters of the part for experts and operators."""
    timeline, findings, every = report.job.plan.timeline, report.findings, report.findings.all_keys
    drawn_window = findings.drawn_window
    heads, rows = trigger_rows(report.figures)
    return {
        "released": [
            (
                "releases",
                f"{len(report.inventory.releases):,}"
                + ("" if report.expected is None else f" of {report.expected:,}"),
            ),
            ("keys released", f"{'' if every.exact else 'at least '}{every.distinct:,}"),
            (
                "windows with a key",
                f"{human(int((findings.keys > 0).sum()))} of {human(len(findings.windows))}",
            ),
            ("rows in all releases", human(sum(r.keys for r in report.inventory.releases))),
            *((f"median sd of {c['name']}", c["sd_in_words"]) for c in columns),
        ],
        "bought": bought(report.figures),
        "drawn_window": window_name(timeline, drawn_window[0].window) if drawn_window else None,
        "drawn_trigger": drawn_window[-1].trigger if drawn_window else None,
        "grows": timeline.triggers > 1,
        "keys_by": _keys_by(report) if drawn_window else [],
        "noise": noise(report.figures),
        "trigger_heads": [(head, "n") for head in heads],
        "trigger_rows": rows,
        "error_heads": [(f"{c['name']}: median error", "n") for c in report.figures["columns"]],
    }


def _span(report: Report) -> str:
    """The time that the figures are about: of the windows that have releases, else of the job."""
    timeline, windows = report.job.plan.timeline, report.findings.windows
    if not len(windows):
        return f"from {moment_text(timeline, timeline.start)}"
    begin, _ = timeline.window_bounds(int(windows[0]))
    _, end = timeline.window_bounds(int(windows[-1]))
    end = min(end, timeline.horizon)
    if timeline.calendar is not None:
        return timeline.calendar.days(begin, end)
    return f"{instant(begin)} to {instant(end)}"


def _account_text(report: Report, publication: PublicationSection) -> str | None:
    """What was spent on the data, what is left, and what the next period costs."""
    account, figures = report.account, report.figures["guarantee"]
    if account is None:
        return None
    unit, timeline = label_of(report.plan.unit.column, publication), report.plan.timeline
    per = "" if account["per"] is None else f" in {account['per']}"
    limit = account["limit"]
    left = math.floor(1000 * max(0.0, 1 - account["used"])) / 10
    text = (
        "All publications about these data together may cost at most epsilon "
        f"{exact(limit['epsilon'])} at delta {human_up(limit['delta'])} for one {unit}{per}. "
        f"{share_text(account['used'])} of it is spent, by {count(account['charges'], 'charge')}; "
        f"{left:g}% is left."
    )
    if timeline.period is None:
        return f"{text} Further releases of this series cost nothing more."
    period = length_name(report.plan, timeline.period)
    return (
        f"{text} Each {period} costs epsilon {human_up(figures['epsilon'])} and delta "
        f"{human_up(figures['delta'])} for whoever has records in it."
    )


def promise(plan: Plan, figures: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of the section on the guarantee.

    Args:
        figures: `accounting.guarantee.describe` of the plan.
    """
    timeline = plan.timeline
    return {
        "figures": figures,
        "plan": plan,
        "warnings": [w for w in figures["warnings"] if w != NOT_SOUND],  # it has a banner
        "windows_in_words": " every ".join(map(timeline.words, (timeline.window, timeline.slide))),
        "trigger_in_words": timeline.words(timeline.trigger_every),
        "periods": first_and_last(figures["periods"]),
    }


def bought(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what the budget bought, by name.

    Args:
        figures: `accounting.guarantee.describe` of a plan.
    """
    split = figures["split"]
    facts = [("mu (Gaussian DP)", human_up(split["mu"]))]
    if split["law"] == "geometric":
        facts = [("epsilon, charged plain", human_up(figures["guarantee"]["epsilon"]))]
    if figures["selection"]:
        facts.append(("theta, part of delta for thresholds", human(split["theta"])))
        facts.append(("b, chance per key and round", human_up(split["b"])))
    facts.append(("delta for noise", human_up(split["delta_gaussian"])))
    if figures["selection"]:
        facts.append(("delta for thresholds", human_up(split["delta_thresholds"])))
    return facts


def _window_count(report: Report) -> int:
    return int((report.findings.keys[report.findings.complete] > 0).sum())


def _table(report: Report, publication: PublicationSection) -> dict[str, Any]:
    plan, findings = report.job.plan, report.findings
    columns = [
        Column(a.name, label_of(a.name, publication), a.name, f"{a.name}_sd")
        for a in plan.aggregates
    ]
    unfinished = findings.windows[~findings.complete].tolist()
    every, file = findings.all_keys, "keys.csv"
    made = table(plan.key, every, plan.timeline, columns, file, unfinished, publication)
    return {"table": made, "data": embedded(made.data)}


def first_and_last(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return the guarantees of a unit of many periods: the first few and the last."""
    if len(rows) < 2:
        return []
    return rows if len(rows) <= 5 else [*rows[:4], rows[-1]]


def meaning(aggregate: Aggregate) -> str:
    """Return the meaning of a published column as text."""
    if aggregate.column is None or aggregate.bounds is None:
        return {"count": "number of records", "units": "each counted once"}[aggregate.kind]
    low, high = (human(bound) for bound in aggregate.bounds)
    return f"{aggregate.kind} of {aggregate.column}, bounded to {low} … {high}"


def _labels(report: Report) -> list[str]:
    names = [f.name for f in key_fields(report.job.plan)]
    return [key_label(row, names) for row in report.findings.busiest.to_pylist()]


def _column(report: Report, aggregate: Aggregate) -> dict[str, Any]:
    """Pictures of one published column: windows, one window's growth, relative noise."""
    index = report.job.plan.aggregates.index(aggregate)
    labels = _labels(report)
    trends = [
        (label, _trend(report, aggregate, key, label, f"c{index}w{key}"))
        for key, label in enumerate(labels if _window_count(report) > 1 else [])
    ]
    growth = [
        (label, _growth(report, aggregate, key, label, f"c{index}k{key}"))
        for key, label in enumerate(labels[: GROWN if trends else None])
        if report.job.plan.timeline.triggers > 1  # a single point does not grow
    ]
    values, sds = report.findings.scatter[aggregate.name]
    drawn = (values != 0) & (sds > 0)
    return {
        "name": label_of(aggregate.name, publication_of(report.job)),
        "meaning": meaning(aggregate),
        "trends": [pair for pair in trends if pair[1] is not None],
        "growth": [pair for pair in growth if pair[1] is not None],
        "sd_in_words": human(float(np.median(sds))) if len(sds) else "–",
        "scatter": scatter_of(f"c{index}r", values[drawn], sds[drawn]),
        "points": int(drawn.sum()),
    }


def _trend(
    report: Report, aggregate: Aggregate, key: int, label: str, chart: str
) -> Picture | None:
    """The final value of every complete window, NaN where the key was not released."""
    rows, windows = report.findings.all_keys.rows, report.findings.windows
    complete = report.findings.complete
    begin, end = np.searchsorted(rows["_key"].to_numpy(), (key, key + 1))
    mine = rows.slice(begin, end - begin)
    at = np.searchsorted(windows, mine["_window"].to_numpy())
    values, sds = np.full((2, len(windows)), np.nan)
    values[at] = floats(mine[aggregate.name])
    sds[at] = floats(mine[f"{aggregate.name}_sd"])
    windows, values, sds = windows[complete], values[complete], sds[complete]
    drawn_windows = evenly(len(windows), DRAWN_WINDOWS)
    timeline, numbers = report.job.plan.timeline, windows[drawn_windows].tolist()
    when = [drawn(timeline, timeline.window_bounds(number)[0]) for number in numbers]
    names = [window_name(timeline, number) for number in numbers]
    publication = publication_of(report.job)
    words = f"Final {label_of(aggregate.name, publication)} of {label} by window"
    finite = np.flatnonzero(np.isfinite(values))
    if unbroken(values) and len(finite) < len(windows):
        since, _ = timeline.window_bounds(int(windows[finite[0]]))
        words += f", in every one since {moment_text(timeline, since)}"
    line = Series(when, values[drawn_windows], sds[drawn_windows])
    share = publication.uncertain_above
    return over_time(chart, line, names, aggregate, words, joined=False, share=share)


def _growth(
    report: Report, aggregate: Aggregate, key: int, label: str, chart: str
) -> Picture | None:
    """One key's values over the triggers of the drawn window."""
    timeline, rows = report.job.plan.timeline, report.findings.series[key]
    base = timeline.base(report.findings.drawn_window[0].window)
    instants = [timeline.instant_of(base + int(t)) for t in rows["trigger"].to_pylist()]
    values, sds = floats(rows[aggregate.name]), floats(rows[f"{aggregate.name}_sd"])
    publication = publication_of(report.job)
    words = f"Released {label_of(aggregate.name, publication)} of {label} by trigger"
    line = Series([drawn(timeline, each) for each in instants], values, sds)
    names, share = [moment_text(timeline, each) for each in instants], publication.uncertain_above
    return over_time(chart, line, names, aggregate, words, share=share)


def over_time(
    chart: str,
    line: Series,
    names: Sequence[str],
    aggregate: Aggregate,
    words: str,
    joined: bool = True,
    share: float | None = None,
) -> Picture | None:
    """Return a picture whose points say their moment and value; ``None`` without any.

    Args:
        names: what each point is of.
        share: of which values are left out; see `connectors.final.too_uncertain`.
    """
    finite: Bool = np.isfinite(line.values) & np.isfinite(line.sds)
    finite &= ~too_uncertain(line.values, line.sds, share)
    if not finite.any():
        return None
    values, sds = np.where(finite, [line.values, line.sds], np.nan)
    labels = [
        f"{name}: {with_error(value, sd)}"
        for name, value, sd, there in zip(names, values, sds, finite, strict=True)
        if there
    ]
    last = int(np.flatnonzero(finite)[-1])
    newest = with_error(float(values[last]), float(sds[last]))
    words = f"{words}: {len(labels)} values, the last {newest}"
    drawn = Series(line.when, values, sds)
    return picture_over_time(chart, drawn, bounds_of(aggregate), words, joined, labels)


def scatter_of(chart: str, values: Any, sds: Any) -> Picture | None:
    """Return the chart of relative noise against size; ``None`` without values."""
    if not len(values):
        return None
    relative = sds / np.abs(values)
    words = (
        f"Relative noise against size of {len(values):,} released values: the sd is "
        f"{human(float(relative.min()))} to {human(float(relative.max()))} times the value, for "
        f"half of them less than {human(float(np.median(relative)))} times"
    )
    return charts.relative_noise(chart, values, sds, words)


def _keys_by(report: Report) -> list[tuple[str, Picture]]:
    """Numbers of released keys by complete window, and by trigger of the drawn one."""
    findings, out = report.findings, list[tuple[str, Picture]]()
    if findings.complete.sum() > 1:
        out.append(("Keys released in each complete window", _by_window(report)))
    if report.job.plan.timeline.triggers > 1:
        title = "Keys published at each trigger of this window"
        out.append((title, _by_trigger(findings.drawn_window)))
    return out


def _by_trigger(releases: tuple[ReleaseFile, ...]) -> Picture:
    at = np.array([release.trigger for release in releases], np.int64)
    keys = np.array([release.keys for release in releases], np.int64)
    words = (
        f"Keys published by trigger of one window: {keys[0]:,} at trigger {at[0]:,}, "
        f"{keys[-1]:,} at trigger {at[-1]:,}, at most {keys.max():,}"
    )
    return charts.counts("kt", at, keys, words, "trigger of the window")


def _by_window(report: Report) -> Picture:
    complete = report.findings.complete
    at, keys = report.findings.windows[complete], report.findings.keys[complete]
    words = (
        f"Distinct keys released by window: {len(at):,} windows, from {keys.min():,} to "
        f"{keys.max():,} keys"
    )
    return charts.counts("kw", at + 1, keys, words, "window")
