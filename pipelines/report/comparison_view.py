"""From a comparison of two runs to its page."""

from typing import Any

import numpy as np
from markupsafe import Markup

from dpstream.accounting.figures import human, human_up, percent
from dpstream.dp_transforms.batches import key_fields
from dpstream.pipelines.report import charts, series
from dpstream.pipelines.report.charts import Picture
from dpstream.pipelines.report.comparison import Comparison
from dpstream.pipelines.report.data import BUSIEST, evenly
from dpstream.pipelines.report.pages import pages
from dpstream.pipelines.report.releases import floats
from dpstream.pipelines.report.report import MARK, Report
from dpstream.pipelines.report.script import embedded, parts
from dpstream.pipelines.report.shown import shown
from dpstream.pipelines.report.table import Column, table, with_error
from dpstream.pipelines.report.text import instant, key_label, moment_of, settings, title_of
from dpstream.pipelines.report.view import DRAWN_COLUMNS, DRAWN_WINDOWS, keys_in_words, meaning


def render(found: Comparison) -> str:
    """The page: one self-contained HTML document."""
    return pages().get_template("comparison.html.j2").render(context(found))


def context(found: Comparison) -> dict[str, Any]:
    """What the template is given; only `Markup` is not escaped."""
    a, b = found.a, found.b
    seen = found.keys.rows.num_rows > 0
    drawn = found.columns[:DRAWN_COLUMNS] if seen else ()
    return {
        "mark": Markup(MARK),
        **parts(),
        "title": title_of(a.job) if title_of(a.job) == title_of(b.job) else "two data sets",
        "sides": [_side(name, report) for name, report in (("A", a), ("B", b))],
        "stamps": sorted({*a.stamps, *b.stamps}),
        "same_run": found.same_run,
        "windows": len(found.windows),
        "facts": _facts(found),
        "columns": [_column(found, name, index) for index, name in enumerate(drawn)],
        "undrawn": len(found.columns) - len(drawn),
        "legend": list(zip(charts.swatches(2), ("A", "B"), strict=True)),
        "keys_by": _keys_by(found) if seen else None,
        **(_table(found) if seen else {}),
        "differences": differences(a, b),
    }


def _side(name: str, report: Report) -> dict[str, Any]:
    return {
        "name": name,
        "title": title_of(report.job),
        "plan": report.job.plan.hash,
        "run_ids": report.run_ids,
        "promise": report.figures["guarantee"]["words"],
    }


def _facts(found: Comparison) -> list[tuple[str, str, str]]:
    """(what, of A, of B): guarantee, releases, keys, noise."""
    reports = (found.a, found.b)

    def of(name: str, *texts: str) -> tuple[str, str, str]:
        return (name, texts[0], texts[1])

    rows = [
        of("epsilon", *(human_up(r.figures["guarantee"]["epsilon"]) for r in reports)),
        of("delta", *(human_up(r.figures["guarantee"]["delta"]) for r in reports)),
        of("protects", *(r.figures["unit"]["words"] for r in reports)),
        of("releases written", *(human(len(r.found.releases)) for r in reports)),
        of("keys released", *(keys_in_words(r) for r in reports)),
        of("final values", *(f"{r.findings.all_keys.values:,}" for r in reports)),
    ]
    for name in found.columns:
        agreement = found.agreements[name]
        rows.append(of(f"median sd of {name}", human(agreement.sd_a), human(agreement.sd_b)))
    return rows


def differences(a: Report, b: Report) -> list[tuple[str, str, str]]:
    """Settings that are not the same: (name, of A, of B)."""
    left, right = dict(settings(a.job, a.plan)), dict(settings(b.job, b.plan))
    names = [*left, *(name for name in right if name not in left)]
    pairs = [(name, left.get(name, "–"), right.get(name, "–")) for name in names]
    return [row for row in pairs if row[1] != row[2]]


def _column(found: Comparison, name: str, index: int) -> dict[str, Any]:
    [aggregate] = [a for a in found.a.job.plan.aggregates if a.name == name]
    agreement = found.agreements[name]
    labels = _labels(found)
    pictures = [
        (label, _trend(found, name, key, f"c{index}w{key}", label))
        for key, label in enumerate(labels)
    ]
    words = (
        f"{agreement.values:,} values are in both runs. Median sd: A {human(agreement.sd_a)}, B"
        f" {human(agreement.sd_b)}. Of the differences {percent(agreement.within)} are within 1.96"
        " of their own sd; noise alone would give 95 %, and what bounding leaves out, other clamps"
        " or other data give less"
    )
    return {
        "name": name,
        "meaning": meaning(aggregate),
        "pictures": [pair for pair in pictures if pair[1] is not None],
        "words": words if agreement.values else "No value is in both runs",
        "scatter": _against(agreement.points, name, index),
    }


def _labels(found: Comparison) -> list[str]:
    names = [f.name for f in key_fields(found.a.job.plan)]
    return [key_label(row, names) for row in found.keys.ranked.slice(0, BUSIEST).to_pylist()]


def _trend(found: Comparison, name: str, key: int, chart: str, label: str) -> dict[str, Any] | None:
    """Both runs' final values of a key by window."""
    rows, line = found.keys.rows, found.a.job.plan.timeline
    begin, end = np.searchsorted(rows["_key"].to_numpy(), (key, key + 1))
    mine = rows.slice(begin, end - begin)
    at = np.searchsorted(found.windows, mine["_window"].to_numpy())
    kept = evenly(len(found.windows), DRAWN_WINDOWS)
    bounds = [line.window_bounds(int(window)) for window in found.windows[kept]]
    when = [moment_of(low) for low, _ in bounds]
    lines = []
    for side in "ab":
        both = np.full((2, len(found.windows)), np.nan)
        both[:, at] = floats(mine[f"{side}:{name}"]), floats(mine[f"{side}:{name}_sd"])
        lines.append(series.Series(when, both[0, kept], both[1, kept]))
    if not any(np.isfinite(drawn.values).any() for drawn in lines):
        return None
    [aggregate] = [a for a in found.a.job.plan.aggregates if a.name == name]
    words = f"Final {name} of key {label} by window, in run A and in run B"
    picture = series.over_time(chart, lines, series.bounds_of(aggregate), words, joined=False)
    known = np.flatnonzero(np.isfinite(lines[0].values)).tolist()
    said = [f"{instant(bounds[i][0])} to {instant(bounds[i][1])}: {_both(lines, i)}" for i in known]
    return shown(picture, said)


def _both(lines: list[series.Series], at: int) -> str:
    return ", ".join(
        f"{side} {with_error(float(line.values[at]), float(line.sds[at]))}"
        for side, line in zip("AB", lines, strict=True)
    )


def _against(points: tuple[Any, Any], name: str, index: int) -> dict[str, Any] | None:
    if not len(points[0]):
        return None
    words = f"{name}: {len(points[0]):,} values of run B against those of run A"
    return shown(series.against(f"c{index}x", points[0], points[1], words))


def _keys_by(found: Comparison) -> dict[str, Any] | None:
    """Keys of both runs by window."""
    if len(found.windows) < 2:
        return None
    counts = [
        charts.ChartLine("A", (found.both + found.only_a).astype(np.float64)),
        charts.ChartLine("B", (found.both + found.only_b).astype(np.float64)),
    ]
    words = (
        f"Keys released in {len(found.windows):,} windows: {int(found.both.sum()):,} (window, key)"
        f" pairs by both, {int(found.only_a.sum()):,} by A alone, {int(found.only_b.sum()):,} by B"
        " alone"
    )
    picture: Picture = charts.lines("kw", counts, words, "window", "keys")
    return shown(picture)


def _table(found: Comparison) -> dict[str, Any]:
    plan = found.a.job.plan
    titles = {"a": "{} in A", "b": "{} in B", "d": "{}: B less A"}
    columns = [
        Column(title.format(name), f"{side}:{name}", f"{side}:{name}_sd")
        for name in found.columns
        for side, title in titles.items()
    ]
    made = table(plan.key, found.keys, plan.timeline, columns, "comparison.csv")
    return {"table": made, "data": embedded(made.data)}
