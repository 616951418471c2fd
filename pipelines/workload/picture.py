"""A picture of a plan: error of every query, by strategy, against the floor."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from dpstream.accounting.arrays import Float64
from dpstream.accounting.errors import RunError, UsageError
from dpstream.pipelines.workload.cache import made
from dpstream.pipelines.workload.planning import Guarantee, Planned, errors

mpl.use("Agg")
#: Points of a curve.
_POINTS = 512
_NAMES = ("identity", "workload", "haar", "hierarchical", "eigen")


def curves(planned: Planned) -> dict[str, Float64]:
    """Sorted standard errors of all queries at mu = 1, by strategy.

    Raises:
        UsageError: more queries than are computed one by one.
    """
    found = {}
    for name in (planned.plan.strategy.name, *_NAMES):
        if name in found or (name in _NAMES and name not in planned.compared):
            continue
        chosen = planned.plan.strategy
        strategy = chosen if name == chosen.name else made(planned.workload, name)
        listed = errors(planned.workload, strategy)
        if listed is None:
            raise UsageError("--picture", "is for fewer queries", "plan a part of the workload")
        found[name] = np.sort(np.concatenate(listed))
    return found


def draw(planned: Planned, guarantee: Guarantee) -> Figure:
    """The figure."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, values in curves(planned).items():
        at = np.linspace(0, len(values) - 1, min(_POINTS, len(values))).astype(np.int64)
        own = name == planned.plan.strategy.name
        axes.plot(
            (at + 0.5) / len(values), values[at] * guarantee.scale, label=name,
            linewidth=2.4 if own else 1.2,
        )  # fmt: skip
    floor = planned.per_query(planned.plan.floor) * guarantee.scale
    axes.axhline(floor, color="#4a4a4a", linestyle="--", label=f"floor ({planned.plan.objective})")
    axes.set(xlabel="share of the queries, smallest error first", ylabel="standard error")
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def save(planned: Planned, guarantee: Guarantee, path: Path) -> None:
    """Write it; the ending says how (svg, png, pdf).

    Raises:
        UsageError: another ending.
        RunError: it cannot be written.
    """
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise UsageError("--picture", "ends with .svg, .png or .pdf", "name such a file")
    figure = draw(planned, guarantee)
    try:
        figure.savefig(path)
    except OSError:
        raise RunError("--picture", "cannot be written", "check the folder") from None
