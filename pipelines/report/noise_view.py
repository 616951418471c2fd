"""Noise by trigger, as the plan has it: pictures and a table for the report."""

from typing import Any

import numpy as np

from dpstream.accounting.figures import human
from dpstream.pipelines.render import charts
from dpstream.pipelines.render.picture_fields import picture_fields


def noise(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """sd of the running sums by trigger, and with key selection the threshold.

    Args:
        figures: `accounting.guarantee.describe` of a plan.
    """
    streams, tau = figures["streams"], figures["tau"]
    of_units = [s for s in streams if s["name"] in ("selection", "units")][: bool(tau)]
    others = [s for s in streams if s not in of_units]
    out = []
    if tau:
        lines = [("threshold tau", tau), ("sd of the selection's noise", of_units[0]["sd"])]
        out.append(_chart("nt", "Key selection, in units", "units", lines))
    if others:
        lines = [(f"sd of {s['name']}", s["sd"]) for s in others]
        out.append(_chart("nv", "Running sums, in grid units", "sd, grid units", lines))
    return out


def _chart(chart: str, title: str, up: str, lines: list[tuple[str, list[float]]]) -> dict[str, Any]:
    descriptions = (
        f"{n} from {human(v[0])} at the first to {human(v[-1])} at the last" for n, v in lines
    )
    words = f"{title}, by trigger: {'; '.join(descriptions)}"
    drawn = [charts.ChartLine(name, np.asarray(values)) for name, values in lines]
    picture = charts.lines(chart, drawn, words, "trigger of the window", up)
    legend = list(zip(charts.swatches(len(lines)), (name for name, _ in lines), strict=True))
    return {"title": title, "legend": legend, **picture_fields(picture)}


def trigger_table(figures: dict[str, Any], last: int) -> dict[str, Any]:
    """sd and tau at a handful of triggers, of which ``last`` is the last."""
    streams, tau = figures["streams"], figures["tau"]
    steps = {1, 2, 3, -(-last // 4), -(-last // 2), -(-3 * last // 4), last}
    rows = [
        (t, [s["sd"][t - 1] for s in streams] + ([tau[t - 1]] if tau else []))
        for t in sorted(steps)
        if t <= last
    ]
    heads = [f"sd {s['name']}" for s in streams] + (["tau (units)"] if tau else [])
    return {"heads": heads, "rows": rows}
