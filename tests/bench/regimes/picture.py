"""Which noise a count takes where, drawn from public plans alone.

    python -m tests.bench.regimes.picture docs/pictures/noise.svg

For contributions C and epsilon, at delta 1e-9: streams of public keys by their triggers, and
counts that are asked once, of C keys of a person each, whose keys are public or selected.  Colours
say what is taken, lines the sd of Gaussian noise over that of geometric noise.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.regimes import ours

CONTRIBUTIONS = np.unique(np.rint(np.geomspace(1, 256, 33)).astype(int))
EPSILONS = np.geomspace(0.1, 10, 33)
#: Title -> what is asked: triggers of a stream, or once with public keys or selected ones.
PANELS: dict[str, int | str] = {
    "asked once, public keys": "public",
    "asked once, selected keys": "selected",
    "stream, T = 16": 16,
    "stream, T = 100": 100,
    "stream, T = 1,000": 1000,
}
#: What can be taken, in the order of the colours.
TAKEN = ("gaussian", "geometric a step", "geometric, mixed rows")
COLOURS = ("#8fb4dc", "#f3c08f", "#e58a4e")
DELTA = 1e-9


def panel(kind: int | str) -> tuple[Any, Any]:
    """(epsilons, contributions) which of ``TAKEN``, and sds of Gaussian noise over geometric."""
    shape = len(EPSILONS), len(CONTRIBUTIONS)
    taken, ratio = np.zeros(shape, int), np.ones(shape)
    for i, epsilon in enumerate(EPSILONS.tolist()):
        for j, count in enumerate(CONTRIBUTIONS.tolist()):
            if isinstance(kind, int):
                name, (gaussian, plain) = ours.families_of_stream(count, kind, epsilon, DELTA)
            else:
                selects = kind == "selected"
                name, (gaussian, plain) = ours.families_of_totals(count, epsilon, DELTA, selects)
            taken[i, j], ratio[i, j] = TAKEN.index(name), gaussian / plain
    return taken, ratio


def draw(path: Path) -> None:
    """Write the picture, on a panel of its own, so that it reads on any background."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "dpstream"
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(9.6, 6.0), layout="constrained", facecolor="#fbfbfd")
    axes = figure.subplots(2, 3, sharex=True, sharey=True).ravel()
    for axis, (name, kind) in zip(axes, PANELS.items(), strict=False):
        taken, ratio = panel(kind)
        axis.pcolormesh(CONTRIBUTIONS, EPSILONS, taken, cmap=ListedColormap(COLOURS),
                        vmin=-0.5, vmax=2.5, shading="nearest", rasterized=True)  # fmt: skip
        lines = axis.contour(CONTRIBUTIONS, EPSILONS, np.log2(ratio), colors="#333", linewidths=0.8,
                             levels=[-1, 0, 1, 2, 3], linestyles="solid")  # fmt: skip
        axis.clabel(lines, fmt=lambda level: f"{2.0**level:g}×", fontsize=8)
        axis.set(xscale="log", yscale="log", title=name)
        axis.title.set_fontsize(10)
        axis.set_xticks([1, 4, 16, 64, 256], ["1", "4", "16", "64", "256"])
        axis.set_yticks([0.1, 0.5, 1, 2, 6], ["0.1", "0.5", "1", "2", "6"])
        axis.minorticks_off()
    for axis in (axes[2], axes[3], axes[4]):
        axis.set_xlabel("C, records of a person")
    for axis in (axes[0], axes[3]):
        axis.set_ylabel("ε")
    axes[5].set_axis_off()
    labels = ("Gaussian", "geometric, noise for each step", "geometric, rows of several steps")
    patches = [Patch(color=colour) for colour in COLOURS]
    legend = axes[5].legend(patches, labels, frameon=False, loc="upper left", fontsize=8.5,
                            title="taken at δ = 1e-9", alignment="left")  # fmt: skip
    note = axes[5].text(0.04, 0.45, "lines: sd of Gaussian noise\nover that of geometric noise",
                        fontsize=8.5, transform=axes[5].transAxes)  # fmt: skip
    for words in (legend, note):
        words.set_in_layout(False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path, help="PNG or SVG")
    draw(parser.parse_args().path)


if __name__ == "__main__":
    main()
