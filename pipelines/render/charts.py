"""Pictures of pages: SVG inside HTML, the same bytes for the same numbers.

No text of a job or of a key enters a picture: the page puts it beside them, escaped.  Colours
are variables of the page's style sheet, so that one picture serves light and dark.
"""

import re
from collections.abc import Sequence
from html import escape
from io import BytesIO
from typing import Any, NamedTuple

import matplotlib as mpl
import msgspec
import numpy as np
from markupsafe import Markup
from matplotlib import dates
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.errors import required
from dpstream.accounting.figures import human

#: Colours there are; further lines repeat them, dashed.
COLOURS = 6
#: Two-sided 95 % of a normal error.
WIDTH = 1.96
#: Points up to which each has a mark.
MARKED = 60
#: Points of one line; further ones are replaced by the least and largest of their neighbours.
LINE_POINTS = 1200
_INK, _FAINT = "#010203", "#040506"
SERIES = [f"#0a0b{i:02x}" for i in range(COLOURS)]
_VARIABLES = {
    _INK: "currentColor",
    _FAINT: "var(--faint)",
    **{c: f"var(--s{i})" for i, c in enumerate(SERIES)},
}
#: Attributes that say where something is, and the digits of them that nobody can see.
_PLACES = re.compile(r'\b(?:d|x|y|transform)="[^"]*"')
_DIGITS = re.compile(r"(\.\d\d)\d+")
STYLE = {
    "svg.fonttype": "none",
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.use_mathtext": False,
    "timezone": "UTC",
}


class Picture(NamedTuple):
    """An SVG element of a page, and its content as text (which the SVG has too).

    Attributes:
        tips: JSON of the points that can be pointed at: shares of the width from the left and of
            the height from above, and a text; empty without any.
    """

    svg: Markup
    text: str
    tips: str = ""

    @classmethod
    def of(
        cls,
        figure: Figure,
        name: str,
        words: str,
        labels: Sequence[str] = (),
        points: tuple[Any, Any] = ((), ()),
    ) -> "Picture":
        """Draw a figure.

        Args:
            labels: a text for each of the points; none: nothing can be pointed at.
            points: (n,) places of points across and up, as they were plotted.
        """
        drawn = Markup(svg(figure, name, words))  # of matplotlib's numbers and an escaped label
        tips = ""
        if labels:
            places = zip(_places(figure, *points).tolist(), labels, strict=True)
            tips = msgspec.json.encode([(*place, text) for place, text in places]).decode()
        return cls(drawn, words, tips)


def lines(name: str, series: Sequence[Float64], words: str, across: str, up: str) -> Picture:
    """Draw values by trigger, 1 .. T; the height is logarithmic where the values need it."""
    figure, axes = axes_of(6.4, 2.9)
    values = np.concatenate(series)
    for index, line in enumerate(series):
        x = drawn_positions(line)
        dash = "-" if index < COLOURS else "--"
        mark = "o" if len(x) <= 40 else ""
        colour = SERIES[index % COLOURS]
        axes.plot(x + 1, line[x], dash, marker=mark, ms=3, lw=1.4, color=colour)
    if len(values) and values.min() > 0 and values.max() > 20 * values.min():
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=min(0.0, float(values.min()) if len(values) else 0.0))
    axes.xaxis.set_major_locator(integers(8))
    _numbers(axes, across, up)
    return Picture.of(figure, name, words)


def swatches(count: int) -> list[str]:
    """Return the classes of the legend's marks, in the order of `lines`."""
    return [f"s{i % COLOURS}{' dashed' if i >= COLOURS else ''}" for i in range(count)]


def counts(name: str, at: Int64, values: Int64, words: str, across: str) -> Picture:
    """Draw numbers of keys: a stair without its risers, or points when they are few."""
    figure, axes = axes_of(5.2, 2.5)
    indices = drawn_positions(values.astype(np.float64))
    few = len(indices) <= MARKED
    axes.plot(at[indices], values[indices], "-", marker="o" if few else "", ms=3, color=SERIES[0])
    axes.set_ylim(0, 1.06 * max(1, int(values.max(initial=0))))
    axes.xaxis.set_major_locator(integers(6))
    axes.yaxis.set_major_locator(integers(5))
    _numbers(axes, across, "keys")
    return Picture.of(figure, name, words)


def relative_noise(name: str, values: Float64, sds: Float64, words: str) -> Picture:
    """Return sd/|value| against |value|, both logarithmic; the dashed line is noise as large as
    value.
    """
    figure, axes = axes_of(5.2, 3.2)
    size = np.abs(values)
    axes.plot(size, sds / size, "o", ms=3, color=SERIES[0], alpha=0.55, mew=0)
    axes.axhline(1.0, ls="--", lw=1, color=SERIES[1])
    axes.set_xscale("log")
    axes.set_yscale("log")
    _numbers(axes, "released value (size)", "sd / value")
    return Picture.of(figure, name, words)


def with_intervals(
    labels: Sequence[str], values: Sequence[float], ends: Sequence[Any], across: str, axes: Any
) -> Any:
    """Draw values below each other with their intervals; return the axes.

    Args:
        ends: the lower and the upper ones.
        axes: to draw on; ``None``: of a new figure, which a notebook shows.
    """
    if axes is None:
        from matplotlib import pyplot

        height = 1.2 + 0.24 * len(labels)
        axes = pyplot.subplots(figsize=(6.4, height), layout="constrained")[1]
    low, value, high = (np.array(part, np.float64) for part in (ends[0], values, ends[1]))
    places = np.arange(len(labels))
    axes.errorbar(value, places, xerr=[value - low, high - value], fmt="o", ms=4, capsize=2)
    axes.set_yticks(places, labels, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel(across, parse_math=False)
    return axes


def axes_of(width: float, height: float) -> tuple[Figure, Any]:
    """Return a figure of a size in inches, in the page's style, and its axes."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.add_subplot()


def integers(most: int) -> MaxNLocator:
    """Return ticks at integers alone, also where one integer is in sight."""
    return MaxNLocator(most, integer=True, min_n_ticks=1)


def time_axis(axis: Any, most: int) -> None:
    """Give an axis of times at most so many marks."""
    locator = dates.AutoDateLocator(minticks=2, maxticks=most)
    axis.set_major_locator(locator)
    axis.set_major_formatter(dates.ConciseDateFormatter(locator))


def values_axis(axis: Any) -> None:
    """Label an axis of values; where `human` shows no fraction, its ticks have none."""
    low, high = axis.get_view_interval()
    large = max(abs(low), abs(high)) >= 1000 and high - low >= 1
    axis.set_major_locator(integers(5) if large else MaxNLocator(5))
    axis.set_major_formatter(FuncFormatter(lambda value, _: human(value)))


def _numbers(axes: Any, across: str, up: str) -> None:
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        if axis.get_scale() == "log" and high < 10 * low:  # which may hold no power of ten
            axis.set_major_locator(MaxNLocator(4))
        axis.set_major_formatter(FuncFormatter(lambda value, _: human(value)))
        axis.set_minor_formatter(NullFormatter())


def drawn_positions(values: Float64) -> Int64:
    """Return the positions to draw: all, or of each stretch its least and largest value."""
    if len(values) <= LINE_POINTS:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), LINE_POINTS // 2 + 1).astype(np.int64)[:-1]
    stretch = np.repeat(np.arange(len(edges)), np.diff(edges, append=len(values)))
    order = np.lexsort((values, stretch))
    last = np.append(edges[1:], len(values)) - 1
    return np.unique(np.concatenate([order[edges], order[last], [0, len(values) - 1]]))


def _places(figure: Figure, across: Any, up: Any) -> Float64:
    """Return (n, 2) where points of a figure that was drawn lie; see `Picture`."""
    axes: Any = figure.axes[0]
    data = np.column_stack([np.asarray(axes.convert_xunits(across), float), np.asarray(up, float)])
    shares = figure.transFigure.inverted().transform(axes.transData.transform(data))
    return np.round(np.column_stack([shares[:, 0], 1 - shares[:, 1]]), 4)


def svg(figure: Figure, name: str, words: str) -> str:
    """Return the figure as an SVG element: ids of its own, no metadata, no size but its shape."""
    buffer = BytesIO()
    with mpl.rc_context({**STYLE, "svg.hashsalt": name}):
        metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(buffer, format="svg", transparent=True, metadata=metadata)
    text = buffer.getvalue().decode("utf-8")
    view = required(re.search(r'viewBox="([^"]*)"', text), "matplotlib writes a view box")
    text = text[text.index(">", text.index("<svg")) + 1 :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.S)
    text = _PLACES.sub(lambda match: _DIGITS.sub(r"\1", match[0]), text)
    text = re.sub(r"font-family: [^;]*; ", "", text)  # the page's style has one for all
    # Several pictures share one page: their ids must not meet.
    text = re.sub(r'\b(id="|xlink:href="#|url\(#)', rf"\g<1>{name}-", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    text = re.sub(r"\s*\n\s*", " ", text).strip()
    return f'<svg role="img" aria-label="{escape(words)}" viewBox="{view[1]}">{text}'
