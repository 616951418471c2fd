"""Pictures of the experiments, as PNG and SVG beside the JSON.

One colour a method in fixed order, values written out, and the paper's printed figures as open
diamonds.  L1 is drawn as a share of all records (1 = nothing published), so that the paper's
figures can be read beside those of a smaller data set; its numbers of keys belong to its size.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from tests.bench.paper.paper import FIGURE10_BEST, PrintedFigures

mpl.use("Agg")
_COLOURS = ("#1f5fa8", "#c2571a", "#2f8f5b", "#8a4fa3", "#b3892b", "#4a4a4a", "#c43d6b", "#3aa0b5")
_PAPER = "#8a8a8a"
_MEASURES = (
    ("keys", "keys published"),
    ("l1", "L1 error"),
    ("l2", "L2 error"),
    ("linf", "Linf error"),
)
Row = dict[str, Any]


def table_chart(
    rows: Sequence[Row],
    printed: Mapping[int, Mapping[str, PrintedFigures]],
    records: int,
    title: str,
) -> Figure:
    """Keys and L1 of every method, one column for each T.

    Args:
        rows: results with method, triggers, keys, l1 and records; printed: the paper's figures by
            T and method, of ``records`` records.
    """
    methods = list(dict.fromkeys(row["method"] for row in rows))
    triggers = sorted({row["triggers"] for row in rows})
    height = 1.9 + 0.62 * len(methods)
    figure = Figure(figsize=(2.2 + 5.0 * len(triggers), height), layout="constrained")
    axes = figure.subplots(2, len(triggers), squeeze=False, sharey=True, sharex="row")
    for column, t in enumerate(triggers):
        mine = {row["method"]: row for row in rows if row["triggers"] == t}
        paper = {m: f for m, f in printed.get(t, {}).items() if m in methods}
        keys, share = axes[0][column], axes[1][column]
        figures = {m: row["keys"] for m, row in mine.items()}
        _dots(keys, methods, figures, {m: f.keys for m, f in paper.items()}, "{:,.0f}")
        keys.set_title(f"keys published, T = {t}", fontsize=10, loc="left")
        keys.set_xscale("symlog", linthresh=10)
        keys.set_xlim(-1.5, _top(rows, printed, methods))
        keys.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        figures = {m: row["l1"] / row["records"] for m, row in mine.items()}
        _dots(share, methods, figures, {m: f.l1 / records for m, f in paper.items()}, "{:.1%}")
        share.set_title(f"L1 error as a share of all records, T = {t}", fontsize=10, loc="left")
        share.set_xlim(0, 1.18)
        share.xaxis.set_major_formatter(PercentFormatter(1))
    _legend(figure, axes[0][0], records)
    figure.suptitle(title, fontsize=11)
    return figure


def _top(
    rows: Sequence[Row], printed: Mapping[int, Mapping[str, PrintedFigures]], methods: Sequence[str]
) -> float:
    key_counts = [f.keys for t in printed.values() for m, f in t.items() if m in methods]
    return 6.0 * float(max(10, *(row["keys"] for row in rows), *key_counts))


def _dots(
    axes: Any, methods: Sequence[str], values: Row, printed: Mapping[str, float], style: str
) -> None:
    """One line a method: a dot with its value, and the paper's diamond below it."""
    for place, method in enumerate(methods):
        colour = _COLOURS[place % len(_COLOURS)]
        axes.axhline(place, color="#e6e6e6", lw=0.8, zorder=0)
        if method in values:
            axes.plot(values[method], place, "o", ms=7, color=colour)
            _label(axes, values[method], place, style, colour, 5)
        if method in printed:
            axes.plot(printed[method], place + 0.3, "D", ms=5, mfc="white", mec=_PAPER)
            _label(axes, printed[method], place + 0.3, style, _PAPER, 0)
    axes.set_yticks(range(len(methods)), methods, fontsize=9)
    axes.set_ylim(len(methods) - 0.4, -0.6)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _label(axes: Any, x: float, y: float, style: str, colour: str, up: int) -> None:
    axes.annotate(
        style.format(x), (x, y), (7, up - 3), textcoords="offset points", fontsize=8, color=colour
    )


def _legend(figure: Figure, axes: Any, records: int) -> None:
    dot = axes.plot([], [], "o", ms=7, color="#4a4a4a", label="measured here")[0]
    words = f"printed in the paper ({records / 1e6:.1f}M records)"
    diamond = axes.plot([], [], "D", ms=5, mfc="white", mec=_PAPER, label=words)[0]
    figure.legend(
        handles=[dot, diamond], loc="outside lower center", ncols=2, frameon=False, fontsize=9
    )


def sweep_chart(rows: Sequence[Row], title: str) -> Figure:
    """Keys, L1, L2 and Linf against C, one line a method, the best C of each ringed."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    figure = Figure(figsize=(10.5, 7.2), layout="constrained")
    for axes, (measure, name) in zip(figure.subplots(2, 2).flat, _MEASURES, strict=True):
        for place, method in enumerate(methods):
            mine = sorted((r["contributions"], r[measure]) for r in rows if r["method"] == method)
            colour = _COLOURS[place % len(_COLOURS)]
            axes.plot(*zip(*mine, strict=True), "o-", ms=3.5, lw=1.5, color=colour, label=method)
            best = (max if measure == "keys" else min)(mine, key=lambda pair: pair[1])
            axes.plot(*best, "o", ms=11, mfc="none", mec=colour, mew=1.5)
        if measure in FIGURE10_BEST:
            at = FIGURE10_BEST[measure]
            axes.axvline(at, color=_PAPER, lw=1, ls=":")
            left = 2 * at > max(row["contributions"] for row in rows)
            axes.annotate(
                f"paper (10M users): C = {at}",
                (at, 0.0),
                (-5 if left else 5, 6),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                ha="right" if left else "left",
                fontsize=8,
                color=_PAPER,
            )
        axes.set_title(name, fontsize=10, loc="left")
        axes.set_xlabel("C, records of a user that count", fontsize=9)
        axes.margins(y=0.12)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.tick_params(labelsize=8)
        axes.yaxis.set_major_formatter(FuncFormatter(short_number))
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    return figure


def short_number(value: float, _: int = 0) -> str:
    """1234567 -> 1.23M."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def draw(figure: Figure, out: Path) -> list[str]:
    """Write ``figure`` beside ``out`` as PNG and SVG; returns the files' names."""
    files = [out.with_suffix(suffix) for suffix in (".png", ".svg")]
    for file in files:
        figure.savefig(file, dpi=130)
    return [file.name for file in files]
