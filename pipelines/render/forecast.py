"""The page of an account's forecast: one picture, and the table of runs."""

from datetime import datetime
from pathlib import Path
from typing import Any

from dpstream.accounting.figures import exact
from dpstream.pipelines.render import charts
from dpstream.pipelines.render.account import forecast_text, person_text
from dpstream.pipelines.render.charts import Picture
from dpstream.pipelines.render.page import document, ending_of, mark_of, write_own


def write(figures: dict[str, Any], out: Path) -> None:
    """Write the page; raises as `write_own` does.

    Args:
        figures: `operate.forecast.forecast`.
    """
    ending_of(out, ("html", "htm"))
    page = document(
        "forecast.html.j2",
        "account forecast",
        figures=figures,
        picture=_picture(figures),
        text=forecast_text(figures),
    )
    write_own(out, page, mark_of("account forecast"))


def _picture(figures: dict[str, Any]) -> Picture:
    """What one person has spent by each date; the limit, where it is of all their records."""
    figure, axes = charts.axes_of(8, 3.2)
    dates = [datetime.fromisoformat(day.removesuffix("Z")) for day, _ in figures["by_date"]]
    values = [epsilon for _, (epsilon, _) in figures["by_date"]]
    axes.step(dates, values, where="post", color=charts.SERIES[0])
    limit = figures["limit"]["epsilon"]
    axes.axhline(limit, ls="--", lw=1, color=charts.SERIES[1])
    axes.set_ylim(bottom=0)
    axes.set_ylabel("epsilon")
    charts.time_axis(axes.xaxis, 8)
    charts.values_axis(axes.yaxis)
    last = person_text(figures["person"])
    words = f"Epsilon of one person by date: {last} on {figures['until']}; limit {exact(limit)}"
    return Picture.of(figure, "forecast", words)
