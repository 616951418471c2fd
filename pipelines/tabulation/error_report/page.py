"""The page of a report: figures within their margins, and the detail that groups got."""

from typing import Any

import numpy as np
from markupsafe import Markup

from dpstream.accounting.arrays import Float64
from dpstream.accounting.evidence.bounds import rate_above, rate_below
from dpstream.accounting.figures import up
from dpstream.accounting.tabulation.margins import COVERAGE
from dpstream.pipelines.render import charts
from dpstream.pipelines.render.charts import pages, picture_fields
from dpstream.pipelines.report.report import MARK
from dpstream.pipelines.tabulation.error_report.files import WORKLOADS

#: Chance on either side of an interval.
_TAIL = 0.025


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
        "accountings": [row | {"epsilon_text": up(row["epsilon"])} for row in plan["accountings"]],
        "runs": figures["runs"],
        "margins": [_with_share(row) | {"name": _named(row)} for row in figures["margins"]],
        "held": _held(figures),
        "details": [_details(figures, table) for table in _tables(figures)],
        "totals": [row for row in figures["totals"] if row["groups"]],
        "combined": plan["estimates"] == "combined",
        "suppressed": any(row["suppressed_at"] is not None for row in plan["levels"]),
    }


def _with_share(row: dict[str, Any]) -> dict[str, Any]:
    """A kind of figure, with its RMSE as a part of what the sum of its cells would have."""
    census = row["census_rmse"]
    return row | {"of_census": row["rmse"] / census if census else None}


def _tables(figures: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(cell["table"] for cell in figures["cells"]))


def _held(figures: dict[str, Any]) -> dict[str, Any] | None:
    """The picture of the shares of figures within their margins, by level and kind."""
    if not figures["margins"]:
        return None
    levels = list(dict.fromkeys(row["label"] for row in figures["plan"]["levels"]))
    sums: dict[str, dict[int, tuple[int, int]]] = {}
    for row in figures["margins"]:
        of_kind = sums.setdefault(_kind(row), {})
        place = levels.index(row["level"])
        inside, count = of_kind.get(place, (0, 0))
        own = round(row["within"] * row["figures"])
        of_kind[place] = inside + own, count + row["figures"]
    series = [
        [_interval(place, *counts) for place, counts in sorted(of_kind.items())]
        for of_kind in sums.values()
    ]
    shares = [dot.value for dots in series for dot in dots]
    words = (
        f"{min(shares):.1%} to {max(shares):.1%} of the figures of a kind are within their margin, "
        f"over {len(levels)} levels and {len(sums)} kinds of figures; the bars are 95% intervals "
        "for figures that err independently, and sums that share cells do not"
    )
    across = "share of figures within their margin"
    picture = charts.intervals("held", levels, series, COVERAGE, words, across)
    legend = list(zip(charts.swatches(len(sums)), sums, strict=True))
    return {"picture": picture_fields(picture), "legend": legend, "text": words}


def _interval(place: int, inside: int, count: int) -> charts.Interval:
    """The share of figures within their margin, and where it may be by chance alone."""
    low, high = rate_below(inside, count, _TAIL), rate_above(inside, count, _TAIL)
    return charts.Interval(place, inside / count, low, high)


def _kind(row: dict[str, Any]) -> str:
    """What figures of all details are called together."""
    table, figure = row["table"], row["figure"]
    if figure.startswith("total of"):
        return f"{table} total only"
    if figure.startswith("data cells"):
        return f"{table} {'measured cells' if row['cells'] == 1 else 'sums of cells'}"
    return f"{table} {figure}"


def _named(row: dict[str, Any]) -> str:
    """What figures of a detail are called in the table."""
    if row["detail"] is None:
        return f"{row['table']} total only"
    return f"{row['table']} {row['figure']}, detail {row['detail']}"


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
        "picture": picture_fields(picture),
        "legend": list(zip(charts.swatches(len(heads)), heads, strict=True)),
    }


def _rows(sizes: list[str], counts: Float64, shares: Float64) -> list[dict[str, Any]]:
    return [
        {"size": size, "groups": int(count.sum()), "shares": share.tolist()}
        for size, count, share in zip(sizes, counts, shares, strict=True)
    ]
