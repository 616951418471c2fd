"""The page of a report: margins held against their targets, and the detail that groups got."""

from typing import Any

import numpy as np
from markupsafe import Markup

from dpstream.accounting.arrays import Float64
from dpstream.accounting.figures import up
from dpstream.pipelines.report import charts
from dpstream.pipelines.report.pages import pages
from dpstream.pipelines.report.report import MARK
from dpstream.pipelines.tabulation.report_files import WORKLOADS

#: Groups and details of fewer figures say nothing about a margin; the tables still show them.
_FEW = 100


def render(figures: dict[str, Any]) -> str:
    """One self-contained HTML document.

    Args:
        figures: as `report.report` gives them.
    """
    return pages().get_template("tabulation.html.j2").render(context(figures))


def context(figures: dict[str, Any]) -> dict[str, Any]:
    """What the template is given; only `Markup` is not escaped."""
    plan = figures["plan"]
    return {
        "mark": Markup(MARK),
        "stamp": figures["stamp"],
        "plan": plan,
        # With as many digits as plans have: these differ from each other in the fourth.
        "accountings": [row | {"shown": up(row["epsilon"])} for row in plan["accountings"]],
        "runs": figures["runs"],
        "margins": [_with_share(row) for row in figures["margins"]],
        "held": _held(figures),
        "details": [_details(figures, table) for table in _tables(figures)],
        "totals": [row for row in figures["totals"] if row["groups"]],
        "combined": plan["estimates"] == "combined",
    }


def _with_share(row: dict[str, Any]) -> dict[str, Any]:
    """A kind of figure, with its RMSE as a part of what the sum of its cells would have."""
    census = row["census_rmse"]
    return row | {"of_census": row["rmse"] / census if census else None}


def _tables(figures: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(cell["table"] for cell in figures["cells"]))


def _held(figures: dict[str, Any]) -> dict[str, Any] | None:
    """The picture of measured margins against targets, by level."""
    levels = [row["label"] for row in figures["plan"]["levels"]]
    levels = list(dict.fromkeys(levels))
    kinds: dict[str, list[tuple[int, float]]] = {}
    for row in figures["margins"]:
        if row["target"] and row["figures"] >= _FEW:
            name = f"{row['table']}: {_kind(row['figure'])}"
            at = levels.index(row["level"])
            kinds.setdefault(name, []).append((at, row["measured"] / row["target"]))
    if not kinds:
        return None
    every = [ratio for dots in kinds.values() for _, ratio in dots]
    words = (
        f"Measured margins are {min(every):.2f} to {max(every):.2f} of their targets, over "
        f"{len(levels)} levels and {len(kinds)} kinds of figures"
    )
    picture = charts.ratios("held", levels, list(kinds.values()), words, "measured / target")
    legend = list(zip(charts.swatches(len(kinds)), kinds, strict=True))
    return {"picture": _marked(picture), "legend": legend, "words": words}


def _kind(figure: str) -> str:
    return "total only" if figure.startswith("total of") else figure.split(" cells", maxsplit=1)[0]


def _details(figures: dict[str, Any], table: str) -> dict[str, Any]:
    """Which detail groups of each size got in a table, over all levels and runs."""
    cells = [cell for cell in figures["cells"] if cell["table"] == table]
    sizes = {cell["power"]: cell["size"] for cell in sorted(cells, key=lambda c: c["power"])}
    persons = figures["program"] == "p"
    heads = ["only the total", *WORKLOADS] if persons else ["0", "1", "2", "3"]
    counts = np.zeros((len(sizes), len(heads)))
    for cell in cells:
        column = cell["detail"] + persons
        if cell["detailed_only"]:
            column = 0
        counts[list(sizes).index(cell["power"]), column] += cell["groups"]
    shares = counts / counts.sum(axis=1, keepdims=True)
    words = f"Detail of groups by their true size, of {table}"
    picture = charts.shares(f"detail-{table}", list(sizes.values()), shares, words, "share")
    return {
        "table": table,
        "heads": heads,
        "rows": _rows(list(sizes.values()), counts, shares),
        "picture": _marked(picture),
        "legend": list(zip(charts.swatches(len(heads)), heads, strict=True)),
    }


def _rows(sizes: list[str], counts: Float64, shares: Float64) -> list[dict[str, Any]]:
    return [
        {"size": size, "groups": int(count.sum()), "shares": share.tolist()}
        for size, count, share in zip(sizes, counts, shares, strict=True)
    ]


def _marked(picture: charts.Picture) -> dict[str, Any]:
    return {"svg": Markup(picture.svg), "words": picture.words}
