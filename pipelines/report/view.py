"""From a report to its page: texts and pictures for the template, which escapes them."""

from typing import Any

import numpy as np
from markupsafe import Markup

from dpstream.accounting.figures import duration, human
from dpstream.accounting.guarantee import NOT_SOUND
from dpstream.accounting.plan.fields import Aggregate
from dpstream.dp_transforms.batches import key_fields
from dpstream.pipelines.report import charts
from dpstream.pipelines.report.data import ReleaseFile, floats, ranked_by
from dpstream.pipelines.report.pages import pages
from dpstream.pipelines.report.report import MARK, TRUTH_LABEL, Report
from dpstream.pipelines.report.text import (
    key_label,
    moment_of,
    settings,
    window_name,
)


def render(report: Report) -> str:
    """The page: one self-contained HTML document."""
    return pages().get_template("report.html.j2").render(context(report))


def context(report: Report) -> dict[str, Any]:
    """What the template is given; only `Markup` is not escaped."""
    plan, line = report.job.plan, report.job.plan.timeline
    findings = report.findings
    latest = findings.latest
    return {
        "mark": Markup(MARK),
        "figures": report.figures,
        "plan": plan,
        "run_ids": report.run_ids,
        "stamps": report.stamps,
        "warnings": [w for w in report.figures["warnings"] if w != NOT_SOUND],  # it has a banner
        "present": len(report.found.releases),
        "expected": report.expected,
        "windows_in_words": f"{duration(line.window)} every {duration(line.slide)}",
        "trigger_in_words": duration(line.trigger_every),
        "periods": _some(report.figures["periods"]),
        "latest": window_name(line, latest[0].window) if latest else None,
        "latest_trigger": latest[-1].trigger if latest else None,
        "busiest": _busiest(report),
        "columns": [_column(report, a) for a in plan.aggregates] if latest else [],
        "keys_by": _keys_by(report) if latest else [],
        "truth": report.truth,
        "truth_label": TRUTH_LABEL,
        "noise": _noise(report),
        "trigger_table": _trigger_table(report),
        "settings": settings(report.job),
    }


def _some(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Guarantees of a unit of many periods: the first few and the last."""
    if len(rows) < 2:
        return []
    return rows if len(rows) <= 5 else [*rows[:4], rows[-1]]


def _meaning(aggregate: Aggregate) -> str:
    if aggregate.column is None or aggregate.clamp is None:
        return {"count": "count of records", "units": "count of units"}[aggregate.kind]
    low, high = (human(bound) for bound in aggregate.clamp)
    return f"{aggregate.kind} of {aggregate.column}, clamped to {low} … {high}"


def _labels(report: Report) -> list[str]:
    names = [f.name for f in key_fields(report.job.plan)]
    return [key_label(row, names) for row in report.findings.busiest.to_pylist()]


def _busiest(report: Report) -> dict[str, Any]:
    """The busiest keys' newest values as a table."""
    rows = report.findings.busiest.to_pylist()
    names = [a.name for a in report.job.plan.aggregates]
    return {
        "by": ranked_by(report.job.plan),
        "rows": [
            (label, [_with_error(row[name], row[f"{name}_sd"]) for name in names])
            for label, row in zip(_labels(report), rows, strict=True)
        ],
    }


def _with_error(value: float | None, sd: float | None) -> str:
    if value is None or sd is None:
        return "–"
    return f"{human(value)} ± {human(charts.WIDTH * sd)}"


def _column(report: Report, aggregate: Aggregate) -> dict[str, Any]:
    """Pictures of one published column: small multiples and relative noise."""
    index = report.job.plan.aggregates.index(aggregate)
    pictures = [
        (label, _band(report, aggregate.name, row, f"c{index}k{row}"))
        for row, label in enumerate(_labels(report))
    ]
    values, sds = report.findings.scatter[aggregate.name]
    drawn = (values != 0) & (sds > 0)
    return {
        "name": aggregate.name,
        "meaning": _meaning(aggregate),
        "multiples": [(label, picture) for label, picture in pictures if picture is not None],
        "scatter": _scatter(f"c{index}r", values[drawn], sds[drawn]),
        "points": int(drawn.sum()),
    }


def _band(report: Report, name: str, row: int, chart: str) -> dict[str, Any] | None:
    table = report.findings.series[row]
    values, sds = floats(table[name]), floats(table[f"{name}_sd"])
    known = np.isfinite(values) & np.isfinite(sds)
    if not known.any():
        return None
    line = report.job.plan.timeline
    base = line.base(report.findings.latest[0].window)
    triggers = table["trigger"].to_numpy()[known]
    when = [moment_of(line.instant_of(base + int(trigger))) for trigger in triggers]
    values, sds = values[known], sds[known]
    words = (
        f"Released {name} of key {_labels(report)[row]}: {len(when)} releases, the last "
        f"{_with_error(values[-1], sds[-1])}"
    )
    return _shown(charts.band(chart, when, values, sds, words))


def _shown(picture: charts.Picture) -> dict[str, Any]:
    # The picture's text is matplotlib's numbers and an escaped label; see report_charts.
    return {"svg": Markup(picture.svg), "words": picture.words}


def _scatter(chart: str, values: Any, sds: Any) -> dict[str, Any] | None:
    if not len(values):
        return None
    relative = sds / np.abs(values)
    words = (
        f"Relative noise against size of {len(values):,} released values: the sd is "
        f"{human(float(relative.min()))} to {human(float(relative.max()))} times the value, for "
        f"half of them less than {human(float(np.median(relative)))} times"
    )
    return _shown(charts.relative_noise(chart, values, sds, words))


def _keys_by(report: Report) -> list[tuple[str, dict[str, Any]]]:
    """Numbers of released keys by trigger of the latest window, and by window."""
    findings = report.findings
    return [
        ("Keys published at each trigger of the latest window", _by_trigger(findings.latest)),
        ("Distinct keys released in each window so far", _by_window(report)),
    ]


def _by_trigger(latest: tuple[ReleaseFile, ...]) -> dict[str, Any]:
    at = np.array([release.trigger for release in latest], np.int64)
    keys = np.array([release.keys for release in latest], np.int64)
    words = (
        f"Keys published by trigger of the latest window: {keys[0]:,} at trigger {at[0]:,}, "
        f"{keys[-1]:,} at trigger {at[-1]:,}, at most {keys.max():,}"
    )
    return _shown(charts.counts("kt", at, keys, words, "trigger of the window"))


def _by_window(report: Report) -> dict[str, Any]:
    at, keys = report.findings.windows, report.findings.keys
    words = (
        f"Distinct keys released by window: {len(at):,} windows, from {keys.min():,} to "
        f"{keys.max():,} keys"
    )
    return _shown(charts.counts("kw", at + 1, keys, words, "window"))


def _noise(report: Report) -> list[dict[str, Any]]:
    """sd of the running sums by trigger, and with key selection the threshold."""
    streams, tau = report.figures["streams"], report.figures["tau"]
    of_units = [s for s in streams if s["name"] in ("selection", "units")][: bool(tau)]
    others = [s for s in streams if s not in of_units]
    out = []
    if tau:
        lines = [("threshold tau", tau), ("sd of the selection's noise", of_units[0]["sd"])]
        out.append(_noise_chart("nt", "Key selection, in units", "units", lines))
    if others:
        lines = [(f"sd of {s['name']}", s["sd"]) for s in others]
        out.append(_noise_chart("nv", "Running sums, in grid units", "sd, grid units", lines))
    return out


def _noise_chart(
    chart: str, title: str, up: str, lines: list[tuple[str, list[float]]]
) -> dict[str, Any]:
    said = (f"{n} from {human(v[0])} at the first to {human(v[-1])} at the last" for n, v in lines)
    words = f"{title}, by trigger: {'; '.join(said)}"
    drawn = [charts.ChartLine(name, np.asarray(values)) for name, values in lines]
    picture = charts.lines(chart, drawn, words, "trigger of the window", up)
    legend = list(zip(charts.swatches(len(lines)), (name for name, _ in lines), strict=True))
    return {"title": title, "legend": legend, **_shown(picture)}


def _trigger_table(report: Report) -> dict[str, Any]:
    """sd and tau at a handful of triggers."""
    streams, tau = report.figures["streams"], report.figures["tau"]
    last = report.job.plan.timeline.triggers
    steps = {1, 2, 3, -(-last // 4), -(-last // 2), -(-3 * last // 4), last}
    rows = [
        (t, [s["sd"][t - 1] for s in streams] + ([tau[t - 1]] if tau else []))
        for t in sorted(steps)
        if t <= last
    ]
    heads = [f"sd {s['name']}" for s in streams] + (["tau (units)"] if tau else [])
    return {"heads": heads, "rows": rows}
