"""The page of a table's account, and its pictures as files.

It shows what is left, over two dimensions and over time, and what was asked.  It is made of the
account and the names of allotments, which are public: neither records nor answers nor the secret
are read, so that every analyst may have it.  Pictures (SVG on the page, or PNG files) are the same
bytes for the same numbers.  Names of dimensions are the table's own, which are public; they appear
in pictures of the table and nowhere else.
"""

import io
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.figures import human, moment_of
from dpstream.accounting.regions.amounts import MICRO
from dpstream.accounting.regions.space import (
    Budget,
    BudgetKind,
    Category,
    Dimension,
    Space,
    Timestamp,
)
from dpstream.accounting.regions.spent import Spent
from dpstream.pipelines.render import charts
from dpstream.pipelines.render.charts import Picture
from dpstream.pipelines.render.page import document, mark_of, write_own
from dpstream.pipelines.session import sentences
from dpstream.pipelines.session.conditions import nonempty
from dpstream.pipelines.session.open_table import OpenTable
from dpstream.pipelines.session.overview import (
    HeatMap,
    Moment,
    heat_map,
    kinds,
    most_initial,
    over_time,
    overview,
    transcript,
)
from dpstream.pipelines.session.selection import Selection

_DPI = 160
#: Labels along a side.
_TICKS = 6
_MOST_TEXT = 28
#: Of a side, for missing values.
_WIDE = 0.14
#: The lines of spent budget, in their order.
LINES = ("most of any point", "mean over the space")


def heat_picture(space: Space, heat_map: HeatMap, kind: str, name: str) -> Picture:
    """Draw the map as SVG.

    Args:
        name: prefix of the SVG's ids, unique on its page.
    """
    # Describe the map as text.
    across, up = (space.dimensions[place].name for place in (heat_map.across, heat_map.up))
    blank = np.isnan(heat_map.left)
    least, most = (
        (float(np.nanmin(heat_map.left)), _top(heat_map)) if not blank.all() else (0.0, 0.0)
    )
    closed = "; what is blank has nothing left for ever" if blank.any() else ""
    initial_text = "" if heat_map.initial is None else f" of an initial {_amount(heat_map.initial)}"
    words = (
        f"Least {kind} left{initial_text}, over {across} (across) and {up} (up) and "
        f"whatever the other dimensions are: from {_amount(least)} to {_amount(most)}{closed}"
    )
    return Picture.of(_heat(space, heat_map, kind), f"map-{name}", words)


def heat_png(space: Space, heat_map: HeatMap, kind: str) -> bytes:
    """Draw the map as a PNG file."""
    return _png(_heat(space, heat_map, kind))


def _top(heat_map: HeatMap) -> float:
    return float(np.max(heat_map.left, where=~np.isnan(heat_map.left), initial=0.0))


def _heat(space: Space, heat_map: HeatMap, kind: str) -> Figure:
    figure, axes = charts.axes_of(6.4, 4.4)
    top = max(_top(heat_map), heat_map.initial or 0.0, 1e-6)
    axes.grid(False)
    columns, rows = heat_map.columns, heat_map.rows
    places = [
        _places(space.dimensions[p], e)
        for p, e in ((heat_map.across, columns), (heat_map.up, rows))
    ]
    image = axes.pcolormesh(
        *places,
        heat_map.left,
        cmap="viridis",
        vmin=0,
        vmax=top,
        rasterized=True,
    )
    bar = figure.colorbar(image, ax=axes, format=FuncFormatter(lambda v, _: human(v)))
    initial_text = "" if heat_map.initial is None else f" of {_amount(heat_map.initial)}"
    bar.set_label(f"{kind} left{initial_text}, at least")
    bar.outline.set_visible(False)
    _labels(axes.xaxis, space.dimensions[heat_map.across], columns, places[0])
    _labels(axes.yaxis, space.dimensions[heat_map.up], rows, places[1])
    return figure


def _null(dimension: Dimension, edges: Int64) -> bool:
    """Whether the last pixel is that of missing values alone."""
    return bool(edges[-1] > dimension.values and edges[-2] >= dimension.values)


def _places(dimension: Dimension, edges: Int64) -> Float64:
    """Where the edges of pixels are drawn: the one of missing values is wide enough to be seen."""
    positions = np.arange(len(edges), dtype=np.float64)
    if _null(dimension, edges):
        positions[-1] = max(positions[-1], positions[-2] + _WIDE * positions[-2])
    return positions


def _labels(axis: Any, dimension: Dimension, edges: Int64, places: Float64) -> None:
    """Values at some edges of pixels; codes and missing values in the middle of their own."""
    pixels = len(edges) - 1
    at, texts = [], []
    if isinstance(dimension, Category):
        step = -(-pixels // 12)
        for pixel in range(0, pixels, step):
            if edges[pixel] < dimension.values:
                at.append((places[pixel] + places[pixel + 1]) / 2)
                texts.append(dimension.codes[int(edges[pixel])])
    else:
        valued = int(np.searchsorted(edges, dimension.values, side="right")) - 1
        for pixel in np.unique(np.linspace(0, valued, _TICKS).round().astype(int)).tolist():
            at.append(places[pixel])
            texts.append(_tick(dimension, int(edges[pixel])))
    if _null(dimension, edges):
        at.append((places[-2] + places[-1]) / 2)
        texts.append("null")
    axis.set_ticks(at, [text[:_MOST_TEXT] for text in texts])
    axis.set_label_text(dimension.name[:_MOST_TEXT])
    for text in (axis.label, *axis.get_ticklabels()):
        text.set_parse_math(False)  # a $ is a $


def _tick(dimension: Dimension, coordinate: int) -> str:
    if isinstance(dimension, Budget):
        coordinate = min(coordinate, dimension.values - 1)
    text = sentences.line(dimension, coordinate)
    return text.strip("'").removesuffix("T00:00:00Z") if isinstance(dimension, Timestamp) else text


def spending_picture(moments: Sequence[Moment], kind: str) -> Picture:
    """Draw the spent budget over time as SVG."""
    return Picture.of(_spending(moments, kind), f"time-{kind}", spending_text(moments, kind))


def spending_png(moments: Sequence[Moment], kind: str) -> bytes:
    """Draw the spent budget over time as a PNG file."""
    figure = _spending(moments, kind)
    _legend(figure.axes[0])
    return _png(figure)


def spending_text(moments: Sequence[Moment], kind: str) -> str:
    """Describe the picture of spending_picture over time as text."""
    if not moments:
        return f"Nothing of {kind} is spent"
    last = moments[-1]
    return (
        f"Spent {kind} by a point after each of {len(moments):,} charges: at most "
        f"{_amount(last.most)}, on average over the space {human(last.mean)}"
    )


def _spending(moments: Sequence[Moment], kind: str) -> Figure:
    figure, axes = charts.axes_of(6.4, 2.9)
    times = [moment_of(m.at) for m in moments]
    for index, values in enumerate(([m.most for m in moments], [m.mean for m in moments])):
        colour = charts.SERIES[index]
        mark = "o" if len(times) <= 60 else ""
        axes.plot(
            times,
            values,
            drawstyle="steps-post",
            color=colour,
            lw=1.4,
            marker=mark,
            ms=3,
            label=LINES[index],
        )
    axes.set_ylim(bottom=0)
    if times:
        charts.time_axis(axes.xaxis, 6)
    charts.values_axis(axes.yaxis)
    axes.set_xlabel("time of the charge (UTC)")
    axes.set_ylabel(f"{kind} spent")
    return figure


#: Colours of PNG files, which have no style sheet, in the place of the page's variables.
_LIGHT = {charts.SERIES[0]: "#1f5fa8", charts.SERIES[1]: "#c2410c"}


def _legend(axes: Any) -> None:
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(LINES))


def _png(figure: Figure) -> bytes:
    """A figure with the colours of the light page."""
    for axes in figure.axes:
        for drawn in axes.lines:
            drawn.set_color(_LIGHT.get(str(drawn.get_color()), drawn.get_color()))
        if axes.get_legend() is not None:
            _legend(axes)  # with the colours of its lines
        for grid in (*axes.get_xgridlines(), *axes.get_ygridlines()):
            grid.set_color("#d5dbe1")
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=_DPI, facecolor="white", metadata={"Software": None})
    return out.getvalue()


#: What a page begins with; a file that begins otherwise is never replaced.
MARK = mark_of("session")
_PNG = b"\x89PNG\r\n\x1a\n"
#: Entries on a page.
MOST_LINES = 500


class Chosen(NamedTuple):
    """The options of a page or picture.

    Attributes:
        by: dimensions of the maps; none: the first two that are not budgets.
        initial: initial budget of the points in the maps, in millionths; ``None``: the most.
        within: (d, 2) box that the maps show; ``None``: the whole space.
        kind: kind of budget of a picture; ``None``: the first.
        over_time: draw spending over time instead of a map.
    """

    by: tuple[tuple[str, str], ...] = ()
    initial: int | None = None
    within: Int64 | None = None
    kind: str | None = None
    over_time: bool = False


def pairs_of(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return pairs of dimensions, each written as ``NAME,NAME``.

    Raises:
        UsageError: a text is not such a pair.
    """
    pairs = [tuple(part.strip() for part in text.split(",")) for text in texts]
    if any(len(pair) != 2 for pair in pairs):
        raise UsageError("--by", "must be two dimensions", "write NAME,NAME")
    return tuple((across, up) for across, up in pairs)


def frame_of(boxes: Int64) -> Int64:
    """Return (d, 2) the least box with all boxes in it.

    Raises:
        UsageError: there is no box.
    """
    nonempty(boxes)
    return np.stack([boxes[:, :, 0].min(axis=0), boxes[:, :, 1].max(axis=0)], axis=1)


def render(open_table: OpenTable, chosen: Chosen) -> str:
    """Return one self-contained HTML document."""
    values = context(open_table, chosen)
    return document("session.html.j2", "session", images=True, **values)


def png(open_table: OpenTable, chosen: Chosen) -> bytes:
    """Return one picture: a map, or spending over time.

    Raises:
        UsageError: the table has one dimension or not such budgets, or several maps are chosen.
    """
    kind: Any = chosen.kind or kinds(open_table.space)[0]
    open_table.space.budget_place(kind)
    if chosen.over_time:
        return spending_png(over_time(open_table.table, kind, open_table.account.history()), kind)
    by = chosen.by or default_by(open_table)
    if len(by) != 1:
        raise UsageError("--by", "must be one pair of dimensions for a .png", "name one pair")
    spent = open_table.account.spent(kind)
    heat = heat_map(spent, *by[0], chosen.initial, chosen.within)
    return heat_png(open_table.space, heat, kind)


def context(open_table: OpenTable, chosen: Chosen) -> dict[str, Any]:
    """Return the values of the template."""
    summary = overview(open_table, Selection(open_table.space))
    lines = transcript(open_table)[::-1]
    return {
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "insecure": open_table.insecure,
        "overview": summary,
        "both": len(summary["budgets"]) > 1,
        "kinds": [
            _kind(open_table, kind, summary["budgets"][kind], chosen)
            for kind in kinds(open_table.space)
        ],
        "legend": list(zip(charts.swatches(len(LINES)), LINES, strict=True)),
        "lines": [
            {
                **line._asdict(),
                "amount": sentences.amount(line.amount) if line.kind else "",
                "entry": line.entry,
            }
            for line in lines[:MOST_LINES]
        ],
        "more": len(lines) > MOST_LINES,
    }


def _kind(
    open_table: OpenTable, kind: BudgetKind, budget: dict[str, Any], chosen: Chosen
) -> dict[str, Any]:
    spent = open_table.account.spent(kind)
    maps = [
        heat_picture(
            open_table.space,
            heat_map(spent, *pair, _shown_initial(spent, chosen), chosen.within),
            kind,
            f"{kind}{n}",
        )
        for n, pair in enumerate(chosen.by or default_by(open_table))
    ]
    moments = over_time(open_table.table, kind, open_table.account.history())
    return {
        "kind": kind,
        "facts": [
            ("spent by a point, at most", _amount(budget["most_spent"])),
            ("spent by a point, at least", _amount(budget["least_spent"])),
            ("most that a record can have", _amount(budget["most_initial"])),
            ("regions", human(budget["regions"])),
        ],
        "maps": maps,
        "time": spending_picture(moments, kind) if moments else None,
        "rows": [
            row | {"spent": "closed" if row["spent"] is None else _amount(row["spent"])}
            for row in budget["rows"]
        ],
    }


def _shown_initial(spent: Spent, chosen: Chosen) -> int | None:
    """Return the chosen initial budget, if records can have it of this kind; else the most."""
    fits = chosen.initial is None or chosen.initial <= most_initial(spent)
    return chosen.initial if fits else None


def _amount(budget: float) -> str:
    return sentences.amount(round(budget * MICRO))


def default_by(open_table: OpenTable) -> tuple[tuple[str, str], ...]:
    """Return the first two dimensions that are not budgets; if there is only one, with a budget."""
    names = [d.name for d in open_table.space.dimensions if not isinstance(d, Budget)]
    names += [d.name for d in open_table.space.dimensions if isinstance(d, Budget)]
    return ((names[0], names[1]),) if len(names) > 1 else ()


def write(out: Path, content: str | bytes) -> None:
    """Write a page or picture; raises as `write_own` does."""
    write_own(out, content, MARK if isinstance(content, str) else _PNG)
