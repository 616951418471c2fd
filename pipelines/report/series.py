"""Pictures of released values over time, with the noise of each.

The bands and bars are +-1.96 sd of the noise.  They are cut at what the column can be (a mean's
bound, 0 of a count), so that a key with much noise does not flatten the picture; values never are.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
from matplotlib import dates
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dpstream.accounting.arrays import Float64
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.figures import human
from dpstream.pipelines.render.charts import (
    MARKED,
    SERIES,
    WIDTH,
    Picture,
    axes_of,
    places,
    svg,
)

#: Share of the longest bands, at either end, that may be cut: one value of which nothing is known
#: would flatten all others.
_CUT = 0.05
#: Room around values, as a share of the height.
_ROOM = 0.06


class Bounds(NamedTuple):
    """What a column can be; ``None``: no bound is known. Noise may lead a value beyond."""

    low: float | None = None
    high: float | None = None


class Series(NamedTuple):
    """Values at times, NaN where there is none, and their sds."""

    when: Sequence[datetime]
    values: Float64
    sds: Float64


def bounds_of(aggregate: Aggregate) -> Bounds:
    """A mean lies within its bounds, a count is at least 0, a sum has the sign of its bounds."""
    if aggregate.bounds is None:
        return Bounds(0.0)
    low, high = aggregate.bounds
    if aggregate.kind == "mean":
        return Bounds(float(low), float(high))
    return Bounds(0.0 if low >= 0 else None, 0.0 if high <= 0 else None)


def limits(values: Float64, reach: Float64, bounds: Bounds) -> tuple[float, float]:
    """Ends of the axis: all values, most bands as far as the bounds, 0 where it is a bound.

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


def over_time(name: str, line: Series, bounds: Bounds, words: str, joined: bool = True) -> Picture:
    """Values over time, whose points can be pointed at.

    Args:
        line: with a finite value at least.
        joined: whether neighbours are values of one thing that grows (a band), not of windows of
            their own (bars, while there are few).
    """
    figure, axes = axes_of(3.6, 2.2)
    _draw(axes, line, joined or len(line.when) > MARKED)
    # Windows without a value have room too: panels of one page have the same times.
    axes.dataLim.update_from_data_x(np.asarray(dates.date2num(line.when)), ignore=False)
    axes.autoscale_view(scaley=False)
    reach = WIDTH * line.sds
    defined = np.isfinite(line.values) & np.isfinite(reach)
    axes.set_ylim(*limits(line.values[defined], reach[defined], bounds))
    locator = dates.AutoDateLocator(minticks=2, maxticks=5)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: human(value)))
    drawn = svg(figure, name, words)
    seen = np.isfinite(line.values)
    when = np.asarray(dates.date2num(line.when))[seen]
    return Picture(drawn, words, places(figure, axes, when, line.values[seen]))


def unbroken(values: Float64) -> bool:
    """Whether a series has a value in each window since its first, and in three at least."""
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
