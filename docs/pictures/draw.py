"""Draw keys against error at the paper's scale: `python docs/pictures/draw.py`.

The figures are those of the table in docs/benchmarks.md, which names the command that measured
them.
"""

import re
from pathlib import Path

HERE = Path(__file__).parent
#: Colour of the points, by what counts: see the legend.
COLOURS = {"paper": "#8a8f98", "every": "#1f5fa8", "one": "#c2571a"}
LABELS = {
    "paper": "the paper, printed",
    "every": "dpstream, every record counts",
    "one": "dpstream, one record per user and key",
}
#: Points that are named in the picture, by how their row begins.
NAMED = {"paper, printed": "the paper", "default (": "default", "`combined`": "combined"}
ONE_PER_KEY = ("per_key", "fused", "combined")


def points(text: str) -> list[tuple[str, int, int, float]]:
    """(mode, T, keys, L1 in millions) of the rows of the table at the paper's scale."""
    table = text.partition("| mode | T = 100: keys / L1 | T = 1000: keys / L1 |\n")[2]
    points = []
    for row in table.partition("\n\n")[0].splitlines()[1:]:
        mode, *cells = (cell.strip(" *") for cell in row.strip("|").split("|"))
        for triggers, cell in zip((100, 1000), cells, strict=True):
            if match := re.fullmatch(r"([\d,]+) / ([\d.]+)M", cell):
                points.append((mode, triggers, int(match[1].replace(",", "")), float(match[2])))
    return points


def kind(mode: str) -> str:
    """Whose point it is."""
    if mode.startswith("paper"):
        return "paper"
    return "one" if mode.strip("`").startswith(ONE_PER_KEY) else "every"


def draw(path: Path) -> None:
    """Write the picture, on a panel of its own, so that it reads on any background."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "dpstream"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained", facecolor="#fbfbfd")
    axis = figure.subplots()
    axis.set_facecolor("#fbfbfd")
    for mode, triggers, keys, wrong in points((HERE.parent / "benchmarks.md").read_text()):
        colour = COLOURS[kind(mode)]
        face = colour if triggers == 100 else "#fbfbfd"
        axis.scatter(wrong, keys, s=52, color=face, edgecolors=colour, lw=1.6, zorder=3)
        name = next((NAMED[begin] for begin in NAMED if mode.startswith(begin)), None)
        if triggers == 100 and name is not None:
            axis.annotate(name, (wrong, keys), (8, 7), fontsize=10,
                          textcoords="offset points", color=colour, weight="bold")  # fmt: skip
    for name, label in LABELS.items():
        axis.scatter([], [], s=52, color=COLOURS[name], label=label)
    for face, label in (("#555", "T = 100"), ("#fbfbfd", "T = 1000")):
        axis.scatter([], [], s=52, color=face, edgecolors="#555", lw=1.6, label=label)
    axis.set_xlabel("L1 error at the last trigger, millions (left is better)")
    axis.set_ylabel("keys published (up is better)")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.set_xlim(7.5, 21.5)
    axis.set_ylim(0, 150_000)
    axis.grid(color="#e4e6ea", lw=0.6, zorder=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="lower left", fontsize=9)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(HERE / "front.svg")
