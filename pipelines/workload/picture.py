"""Pictures of a plan: the error of every query compared with the floor; and the strategy."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import scipy.linalg
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure

from dpstream.accounting.arrays import Float64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.libraries import one_thread
from dpstream.accounting.strategies.cells.mixing import matrices
from dpstream.accounting.strategies.cells.strategy import MAX_LISTED, CellStrategy
from dpstream.pipelines.render.page import ending_of
from dpstream.pipelines.workload.planning import Guarantee, Planned
from dpstream.state.disk_errors import file_errors

mpl.use("Agg")
#: Points of a curve.
_POINTS = 512


#: What the floor is a floor of, and what an error is, by objective.
_FLOORS = {
    "total": ("floor of the (weighted) RMSE", "standard error"),
    "relative": ("floor of the (weighted) RMSE", "standard error over the query's norm"),
    "worst": ("floor of the largest (weighted) error", "standard error (weighted)"),
}


def curve(planned: Planned) -> Float64:
    """Return sorted errors of all queries at mu = 1, as the objective measures them.

    Standard errors; for ``relative`` over the query's norm, for ``worst`` times the root of its
    weight.

    Raises:
        UsageError: too many queries to compute one by one.
    """
    workload, objective = planned.workload, planned.plan.objective
    weighted = workload.relative() if objective == "relative" else workload
    pairs = zip(workload.products, weighted.products, strict=True)
    factors = [
        own.weight if objective == "worst" else scaled.weight / own.weight for own, scaled in pairs
    ]
    if workload.queries > MAX_LISTED:
        raise UsageError(
            "--picture",
            f"is drawn of at most {MAX_LISTED:,} queries",
            "omit it, or plan a part of the workload",
        )
    listed = planned.plan.strategy.variances(weighted)
    each = [np.sqrt(f * variances) for f, variances in zip(factors, listed, strict=True)]
    return np.sort(np.concatenate(each))


def draw(planned: Planned, guarantee: Guarantee) -> Figure:
    """Draw the figure of errors."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    values = curve(planned)
    at = np.linspace(0, len(values) - 1, min(_POINTS, len(values))).astype(np.int64)
    axes.plot(
        (at + 0.5) / len(values),
        values[at] * guarantee.scale,
        label=planned.plan.strategy.name,
        linewidth=2.4,
    )
    floor = planned.per_query(planned.plan.floor) * guarantee.scale
    words, unit = _FLOORS[planned.plan.objective]
    axes.axhline(floor, color="#4a4a4a", linestyle="--", label=words, zorder=1)
    axes.set(xlabel="share of the queries, smallest error first", ylabel=unit)
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


@one_thread()
def strategy_matrices(strategy: CellStrategy, sizes: tuple[int, ...]) -> list[Float64]:
    """Return the strategy as (n, n) symmetric roots of X at sensitivity 1: one, or one for each
    axis.

    Raises:
        PolicyError: a strategy that is one matrix over too many cells.
    """
    roots = []
    for matrix in matrices(strategy, sizes):
        values, vectors = scipy.linalg.eigh(matrix / matrix.diagonal().max())
        roots.append(np.asarray((vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T))
    return roots


def draw_matrices(planned: Planned) -> Figure:
    """Draw the figure of the strategy.

    Raises:
        DpstreamError: the strategy is not a matrix of cells.
    """
    workload = planned.workload
    roots = strategy_matrices(planned.plan.strategy, workload.sizes)
    figure = Figure(figsize=(1 + 4.2 * len(roots), 4.4), layout="constrained")
    joint = len(roots) == 1 and len(workload.sizes) > 1
    names = ["all cells"] if joint else [a.name for a in workload.attributes]
    for axes, name, matrix in zip(
        figure.subplots(1, len(roots), squeeze=False)[0], names, roots, strict=True
    ):
        show_matrix(figure, axes, matrix)
        axes.set_title(f"{name}: {len(matrix):,} cells", fontsize=10)
    name = planned.plan.strategy.name
    figure.suptitle(rf"Strategy {name}: $(A^\top A)^{{1/2}}$ at sensitivity 1", fontsize=11)
    return figure


def show_matrix(figure: Any, axes: Any, matrix: Float64) -> None:
    """Draw numbers as colours, white 0, on a scale that is linear near 0.

    It is linear below a hundredth of the largest number.
    """
    most = float(np.abs(matrix).max())
    scale = SymLogNorm(most / 100, vmin=-most, vmax=most)
    image = axes.imshow(matrix, norm=scale, cmap="RdBu_r", interpolation="nearest")
    bar = figure.colorbar(
        image, ax=axes, shrink=0.85, ticks=[-most, -most / 10, 0, most / 10, most]
    )
    bar.ax.set_yticklabels([f"{value:.2g}" for value in bar.get_ticks()], fontsize=7)
    axes.tick_params(labelsize=7)


def save(
    planned: Planned, guarantee: Guarantee, path: Path | None, matrix: Path | None = None
) -> None:
    """Write the chosen figures; the endings define the format (svg, png, pdf).

    Args:
        path: file for the errors.
        matrix: file for the strategy.

    Raises:
        UsageError: another ending.
        RunError: the file cannot be written.
    """
    for option, file in (("--picture", path), ("--matrix", matrix)):
        if file is None:
            continue
        ending_of(file, ("svg", "png", "pdf"), option)
        figure = draw(planned, guarantee) if file is path else draw_matrices(planned)
        with file_errors(option, "cannot be written"):
            figure.savefig(file, dpi=130)
