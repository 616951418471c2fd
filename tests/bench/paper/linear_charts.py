"""Pictures of the eigen-design experiments: errors over the singular value bound, 1 the least."""

from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from dpstream.pipelines.workload.picture import show_matrix

mpl.use("Agg")
_COLOURS = {
    "optimum": "#1f5fa8", "eigen": "#c2571a", "haar": "#2f8f5b", "hierarchical": "#8a4fa3",
    "fourier": "#b3892b", "datacube": "#c43d6b", "workload": "#4a4a4a", "identity": "#3aa0b5",
    "gaussian": "#8a8a8a", "wavelet": "#2f8f5b", "Fourier": "#b3892b",
}  # fmt: skip
_PAPER = "#8a8a8a"
#: Distance of the methods of one place, in places.
_STEP = 0.14
Row = dict[str, Any]


def example4(rows: Sequence[Row]) -> Figure:
    """Errors of Example 4, and the strategies that have them."""
    [row] = rows
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    halves: Any = figure.subfigures(1, 2, width_ratios=[1, 1.15])
    left, right = halves
    axes, errors = left.subplots(), row["errors"]
    names = sorted(errors, key=errors.__getitem__, reverse=True)
    for place, name in enumerate(names):
        axes.barh(place, errors[name], color=_COLOURS[name], height=0.6)
        axes.annotate(f"{errors[name]:.4f}", (errors[name], place), (4, -3),
                      textcoords="offset points", fontsize=9)  # fmt: skip
    axes.axvline(1, color=_PAPER, lw=1, ls=":")
    axes.set_yticks(range(len(names)), names)
    axes.set(xlim=(0, 1.2 * max(errors.values())), xlabel="RMSE over the singular value bound")
    axes.set_title("error", fontsize=10, loc="left")
    _plain(axes)
    for panel, (name, matrix) in zip(
        right.subplots(2, 2).flat, row["matrices"].items(), strict=True
    ):
        show_matrix(right, panel, np.array(matrix))
        panel.set_title(rf"{name}: $(A^\top A)^{{1/2}}$", fontsize=10)
    figure.suptitle("Example 4: eight queries of eight cells", fontsize=11)
    return figure


def table2(rows: Sequence[Row]) -> Figure:
    """Factors between rivals and the eigen-design, and what is above the bound."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    factors, bounds = figure.subplots(1, 2, sharey=True, width_ratios=[1.5, 1])
    for place, row in enumerate(rows):
        best, worst, printed = row["best_factor"], row["worst_factor"], row["printed"]
        factors.plot([best, worst], [place] * 2, color="#d0d0d0", lw=2, zorder=1)
        for value, which in ((best, "best"), (worst, "worst")):
            factors.plot(value, place, "o", color=_COLOURS[row[which]], ms=7)
        factors.plot(printed[:2], [place + 0.28] * 2, "D", ms=5, mfc="white", mec=_PAPER)
        text = f"{row['best']} {best:.2f}"
        text += f", {row['worst']} {worst:.2f}" if row["worst"] != row["best"] else ""
        factors.annotate(text, (max(worst, printed[1]), place), (9, -3),
                         textcoords="offset points", fontsize=8)  # fmt: skip
        for name, at in (("eigen", place - 0.12), ("optimum", place + 0.12)):
            ratio = 1 / row["errors"][name]
            bounds.barh(at, ratio, color=_COLOURS[name], height=0.22)
            bounds.annotate(f"{ratio:.4f}", (max(ratio, printed[2]), at), (7, -3),
                            textcoords="offset points", fontsize=8)  # fmt: skip
        bounds.plot(printed[2], place - 0.12, "D", ms=5, mfc="white", mec=_PAPER)
    factors.set_yticks(range(len(rows)), [row["name"] for row in rows])
    factors.set_ylim(len(rows) - 0.4, -0.6)
    _logarithmic(factors.xaxis, factors.set_xscale, (0.5, 1, 2, 5, 10, 20))
    factors.set_xlim(0.8, 60)
    factors.set_title(
        "rivals' RMSE over the eigen-design's, best and worst", fontsize=10, loc="left"
    )
    bounds.set_title("bound over RMSE: eigen-design and optimum", fontsize=10, loc="left")
    bounds.set_xlim(0, 1.18)
    for axes in (factors, bounds):
        axes.axvline(1, color=_PAPER, lw=1, ls=":")
        _plain(axes)
    names = dict.fromkeys(name for row in rows for name in (row["best"], row["worst"]))
    marks = [_mark(factors, "o", name, _COLOURS[name]) for name in (*names, "eigen", "optimum")]
    marks.append(_mark(factors, "D", "printed in the paper", _PAPER))
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), frameon=False,
                  fontsize=8)  # fmt: skip
    figure.suptitle("Table 2: alternative workloads", fontsize=11)
    return figure


def figure3(rows: Sequence[Row]) -> Figure:
    """Ranges above, tables below; absolute errors by shape, relative ones by epsilon."""
    figure = Figure(figsize=(13, 8.2), layout="constrained")
    grid = figure.subplots(2, 3, width_ratios=[1.35, 1, 1])
    names = dict.fromkeys(name for row in rows for name in row["errors"])
    for line, kind in zip(grid, ("ranges", "tables"), strict=True):
        mine = [row for row in rows if row["kind"] == kind]
        _by_shape(line[0], [row for row in mine if row["figure"] == "absolute"])
        for axes, table in zip(line[1:], ("census", "adult"), strict=True):
            _by_epsilon(axes, [row for row in mine if row.get("table") == table])
            axes.set_title(f"{kind}: relative error, {table} shape", fontsize=10, loc="left")
        line[0].set_title(f"{kind}: RMSE over the singular value bound", fontsize=10, loc="left")
    marks = [_mark(grid[0][0], "o", name, _COLOURS[name]) for name in names]
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), frameon=False)
    figure.suptitle("Figure 3: absolute and relative errors", fontsize=11)
    return figure


def _by_shape(axes: Any, rows: Sequence[Row]) -> None:
    for place, row in enumerate(rows):
        names = list(row["errors"])
        for number, name in enumerate(names):
            at = place + _STEP * (number - (len(names) - 1) / 2)
            axes.plot(at, row["errors"][name], "o", ms=6, color=_COLOURS[name])
        axes.axvline(place + 0.5, color="#eeeeee", lw=0.8, zorder=0)
    axes.axhline(1, color=_PAPER, lw=1, ls=":")
    words = [row["workload"].split(" ") for row in rows]
    axes.set_xticks(range(len(rows)), [f"{first}\n{sizes}" for first, *_, sizes in words])
    _logarithmic(axes.yaxis, axes.set_yscale, (1, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20))
    axes.set_ylim(0.97, 1.08 * max(max(row["errors"].values()) for row in rows))
    _plain(axes)


def _by_epsilon(axes: Any, rows: Sequence[Row]) -> None:
    for number, workload in enumerate(dict.fromkeys(row["workload"] for row in rows)):
        mine = [row for row in rows if row["workload"] == workload]
        for name in mine[0]["errors"]:
            style = ("-", "--")[number]
            axes.plot([row["epsilon"] for row in mine], [row["errors"][name] for row in mine],
                      "o" + style, ms=3.5, lw=1.4, color=_COLOURS[name])  # fmt: skip
        axes.plot([], [], style, color="#4a4a4a", label=workload)
    _logarithmic(axes.xaxis, axes.set_xscale, tuple(row["epsilon"] for row in mine))
    axes.set_yscale("log")
    axes.set_xlabel("epsilon", fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    _plain(axes)


def figure4(rows: Sequence[Row]) -> Figure:
    """Error and CPU seconds of separation and principal vectors."""
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    figure = Figure(figsize=(11, 3.6 * len(workloads)), layout="constrained")
    words = {"separation": "vectors of a group", "principal": "principal vectors"}
    for line, workload in zip(
        figure.subplots(len(workloads), 2, squeeze=False), workloads, strict=True
    ):
        mine = [row for row in rows if row["workload"] == workload]
        full = next(row for row in mine if row["method"] == "full")
        for axes, method in zip(line, words, strict=True):
            method_rows = [row for row in mine if row["method"] == method]
            sizes = [row["size"] for row in method_rows]
            axes.plot(sizes, [row["error"] for row in method_rows], "o-", color="#1f5fa8")
            axes.axhline(full["error"], color="#1f5fa8", lw=1, ls="--")
            axes.set_ylim(0.99, 1.05 * max(row["error"] for row in mine))
            axes.set_ylabel("RMSE over the bound", color="#1f5fa8", fontsize=9)
            axes.set_xlabel(words[method], fontsize=9)
            _logarithmic(axes.xaxis, axes.set_xscale, tuple(sizes))
            axes.set_title(f"{workload}: {method}", fontsize=10, loc="left")
            seconds = axes.twinx()
            seconds.plot(
                sizes, [row["seconds"] for row in method_rows], "s-", color="#c2571a", ms=4
            )
            seconds.axhline(full["seconds"], color="#c2571a", lw=1, ls="--")
            _logarithmic(seconds.yaxis, seconds.set_yscale, [10.0**k for k in range(-3, 4)])
            least, most = (f(max(row["seconds"], 1e-4) for row in mine) for f in (min, max))
            seconds.set_ylim(least * (least / most) ** 0.5, 2 * most)  # above the errors
            seconds.set_ylabel("CPU seconds", color="#c2571a", fontsize=9)
            for one in (axes, seconds):
                one.tick_params(labelsize=8)
                one.spines["top"].set_visible(False)
    figure.suptitle("Figure 4: separation and principal vectors (dashed: all weights at once)",
                    fontsize=11)  # fmt: skip
    return figure


def figure5(rows: Sequence[Row]) -> Figure:
    """Errors of three sets of design queries."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(rows):
        for number, (name, error) in enumerate(row["errors"].items()):
            at = place + 0.26 * (number - 1)
            label = name if place == 0 else None
            axes.bar(at, error, width=0.24, color=_COLOURS[name], label=label)
            axes.annotate(f"{error:.3g}", (at, error), (0, 3), textcoords="offset points",
                          ha="center", fontsize=8)  # fmt: skip
    axes.axhline(1, color=_PAPER, lw=1, ls=":")
    axes.set_xticks(range(len(rows)), [row["workload"].replace(", ", ",\n") for row in rows])
    _logarithmic(axes.yaxis, axes.set_yscale, (1, 2, 3, 5, 10, 20))
    axes.set_ylim(0.9, 1.4 * max(max(row["errors"].values()) for row in rows))
    axes.set_ylabel("RMSE over the bound", fontsize=9)
    axes.legend(title="design queries", frameon=False, fontsize=9, title_fontsize=9)
    _plain(axes)
    figure.suptitle("Figure 5: which design queries are weighed", fontsize=11)
    return figure


def _logarithmic(axis: Any, scale: Callable[[str], None], ticks: Sequence[float]) -> None:
    scale("log")
    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _mark(axes: Any, marker: str, label: str, colour: str) -> Any:
    face = "white" if marker == "D" else colour
    return axes.plot([], [], marker, ms=6, mec=colour, mfc=face, label=label)[0]


def _plain(axes: Any) -> None:
    axes.tick_params(labelsize=8.5)
    axes.spines[["top", "right"]].set_visible(False)


CHARTS: dict[str, Callable[[Sequence[Row]], Figure]] = {
    "example4": example4, "table2": table2, "figure3": figure3, "figure4": figure4,
    "figure5": figure5,
}  # fmt: skip
