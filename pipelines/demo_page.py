"""The demo's pictures: released values beside the truth, as one chart and as a page.

A page is one file that needs neither script nor network; what it says of other files is nothing.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from markupsafe import Markup
from matplotlib import dates
from matplotlib.figure import Figure

from dpstream.accounting.budget.allocation import Budget
from dpstream.accounting.guarantee import describe
from dpstream.accounting.plan.plan import Plan
from dpstream.pipelines.render import charts
from dpstream.pipelines.render.pages import pages
from dpstream.pipelines.report.view import promise

PUBLIC_ONLY = "True values can be shown only because this data is public."
#: What the job clamps delays to, in minutes.
_BOUNDS = 60.0
Key = tuple[str, str]


class _Ink(NamedTuple):
    """Colours of a picture."""

    released: str
    true: str


_PRINTED = _Ink("#1f5fa8", "#8a8a8a")
_ON_PAGE = _Ink(charts.SERIES[0], charts.SERIES[1])


def chart(table: pa.Table, releases: pa.Table, keys: Sequence[Key]) -> Figure:
    """Counts and mean delays over the weeks, with error bars; and one week as it grows.

    Args:
        table: final releases beside the truth (`pipelines.demo.joined`).
        releases: all of them.
    """
    figure = Figure(figsize=(13, 9), layout="constrained")
    grid = figure.add_gridspec(len(keys) + 1, 2)
    for row, key in enumerate(keys):
        for column, name in enumerate(("flights", "mean_delay")):
            axes = figure.add_subplot(grid[row, column])
            _panel(axes, _of_key(table, key), name, _PRINTED)
            axes.set_title(f"{key[0]} {key[1]}: {_unit(name)}", fontsize=10, loc="left")
            # Counts are far above 0, so the legend covers nothing there.
            corner = "lower left" if name == "flights" else "upper right"
            axes.legend(fontsize=8, frameon=False, loc=corner, ncols=3)
    axes = figure.add_subplot(grid[len(keys), :])
    _growth(axes, _of_key(releases, keys[0]), _PRINTED)
    title = f"{keys[0][0]} {keys[0][1]}: the count of the week so far, over three weeks"
    axes.set_title(title, fontsize=10, loc="left")
    figure.suptitle(
        "Flights out of New York, 2013: released every 12 hours at epsilon 6 per aircraft and week"
        f"\npoints: released at week's close, bars: 2 sd of the noise; line: truth. {PUBLIC_ONLY}",
        fontsize=11,
    )
    return figure


def page(
    plan: Plan, budget: Budget, table: pa.Table, releases: pa.Table, keys: Sequence[Key], text: str
) -> str:
    """The page: a small picture for each key and column, and what was promised.

    Args:
        text: what was released, in lines.
    """
    pictures = {
        name: [
            _small(_of_key(table, key), name, key, f"{name}{row}") for row, key in enumerate(keys)
        ]
        for name in ("flights", "mean_delay")
    }
    made = pages().get_template("demo.html.j2")
    return made.render(
        lines=text.splitlines(),
        columns=[(_unit(name), picture) for name, picture in pictures.items()],
        growth=_figure(_grown(_of_key(releases, keys[0]), keys[0]), keys[0]),
        public_only=PUBLIC_ONLY,
        **promise(plan, describe(plan, budget)),
    )


def _unit(name: str) -> str:
    return "flights a week" if name == "flights" else "mean delay (minutes)"


def _of_key(table: pa.Table, key: Key) -> pa.Table:
    origin, carrier = (
        pc.equal(table[name], part) for name, part in zip(("origin", "carrier"), key, strict=True)
    )
    return table.filter(pc.and_(origin, carrier)).sort_by(
        [("window_start", "ascending"), ("trigger_time", "ascending")]
    )


def _small(mine: pa.Table, name: str, key: Key, chart_name: str) -> dict[str, Any]:
    figure, axes = charts.axes_of(4.4, 2.6)
    _panel(axes, mine, name, _ON_PAGE)
    words = f"{_unit(name)} of {key[0]} {key[1]}: {mine.num_rows} weeks released, beside the truth"
    return _figure(charts.Picture(charts.svg(figure, chart_name, words), words), key)


def _grown(mine: pa.Table, key: Key) -> charts.Picture:
    figure, axes = charts.axes_of(6.4, 2.6)
    _growth(axes, mine, _ON_PAGE)
    words = f"Flights of {key[0]} {key[1]} so far, every 12 hours, over three weeks"
    return charts.Picture(charts.svg(figure, "growth", words), words)


def _figure(picture: charts.Picture, key: Key) -> dict[str, Any]:
    # The picture's text is matplotlib's numbers and dates.
    return {"title": " · ".join(key), "svg": Markup(picture.svg), "text": picture.caption}


def _panel(axes: Any, mine: pa.Table, name: str, ink: _Ink) -> None:
    when = mine["window_start"].to_numpy()
    values, sd, true = (
        mine[column].to_numpy(zero_copy_only=False)
        for column in (name, f"{name}_sd", "true_flights" if name == "flights" else "true_delay")
    )
    axes.plot(when, true, color=ink.true, lw=1.2, label="true")
    if name == "flights":
        counted = mine["counted_flights"].to_numpy(zero_copy_only=False)
        axes.plot(when, counted, ":", color=ink.true, label="true, first 8 of each aircraft")
    axes.errorbar(when, values, 2 * sd, fmt="o", ms=3, lw=1, color=ink.released, label="released")
    axes.grid(alpha=0.25)
    axes.margins(y=0.25)
    if name == "flights":
        axes.set_ylim(bottom=0)
    else:  # a bar can reach beyond what a mean can be
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -_BOUNDS), min(high, _BOUNDS))
    _months(axes)


def _growth(axes: Any, mine: pa.Table, ink: _Ink) -> None:
    """Three weeks in the middle of the year, trigger by trigger."""
    starts = np.unique(mine["window_start"].to_numpy())[26:29]
    for start in starts:
        week = mine.filter(pa.array(mine["window_start"].to_numpy() == start))
        axes.errorbar(
            week["trigger_time"].to_numpy(),
            week["flights"].to_numpy(),
            2 * week["flights_sd"].to_numpy(),
            fmt="o-",
            ms=3,
            lw=1,
            color=ink.released,
        )
    axes.grid(alpha=0.25)
    _months(axes)


def _months(axes: Any) -> None:
    locator = dates.AutoDateLocator(minticks=3, maxticks=7)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))
