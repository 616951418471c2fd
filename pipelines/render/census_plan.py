"""The plan of census tables as text: guarantee, load, and the 95% margin of every kind of figure.

The figures are those of `tabulation.inputs.figures`, which ``--json`` prints.
"""

from typing import Any

from dpstream.accounting.figures import up
from dpstream.pipelines.render.layout import each, labelled, page

_FIGURES = {"total": "total", "sex": "sex", "sex by age": "cell"}


def census_text(plan: dict[str, Any]) -> str:
    """Return the plan; figures of the guarantee are shortened upwards."""
    name = "epsilon" if plan["definition"] == "puredp" else "rho"
    lines = [
        *labelled("Plan", plan["plan_hash"] or "none yet"),
        *_groups(plan),
        *labelled("Guarantee", plan["guarantee"]["text"]),
        *labelled("Unit", f"{plan['unit']}; a household and its persons are two units"),
        *labelled("Noise", f"{plan['noise']}, estimates {plan['estimates']}"),
        *_cost(plan, name),
        *each("Stability", sorted({row["stability_rule"] for row in plan["levels"]})),
    ]
    for table in dict.fromkeys(row["table"] for row in plan["levels"]):
        lines += ["", *_margins([row for row in plan["levels"] if row["table"] == table], name)]
    lines += ["", *each("Note", plan["notes"]), *each("Warning", plan["warnings"])]
    return page(lines).rstrip() + "\n"


def _groups(plan: dict[str, Any]) -> list[str]:
    """Return the number of groups, if the plan is of lists that are there."""
    groups = {row["label"]: row["groups"] for row in plan["levels"]}
    if None in groups.values():
        return []
    return labelled("Groups", f"{sum(groups.values()):,} in {len(groups)} levels")


def _cost(plan: dict[str, Any], name: str) -> list[str]:
    """Return the charge, epsilon by each accounting, and the least budget with the same margins."""
    lines, sides, same = list[str](), plan["sides"], plan["same_margins"]
    if sides:
        us, pr = sides["us"], sides["pr"]
        lines += labelled(
            "Charged",
            f"{name} {up(max(us, pr))}: the larger of {up(us)} outside and {up(pr)} inside of "
            "Puerto Rico",
        )
    for row in plan["accountings"]:
        lines += labelled(
            "Epsilon" if row["holds"] else "No bound",
            f"{up(row['epsilon']):<10} at delta {up(row['delta'])}  {row['name']}: {row['note']}",
        )
    if same and same["budget"] < max(sides.values()):
        least = f"{name} {up(same['budget'])} (epsilon {up(same['epsilon'])})"
        lines += labelled("Or", f"{least} has the same margins of single counts: see --json")
    return lines


def _margins(levels: list[dict[str, Any]], budget: str) -> list[str]:
    """95% margins of one table: a line for each level, a column for each kind of figure."""
    kinds = dict.fromkeys(
        (f["table"], f["figure"], f["detail"]) for row in levels for f in row["figures"]
    )
    heads = [_head(*kind) for kind in kinds]
    widths = [max(len(head), 7) + 2 for head in heads]
    start = f"{levels[0]['table']:<14}{budget:>10}{'s':>5}{'scale':>11}  "
    lines = [f"{start}95% margins:", " " * len(start) + _cells(heads, widths)]
    for row in levels:
        margins = {(f["table"], f["figure"], f["detail"]): f["margin"] for f in row["figures"]}
        budget_text = "exact" if row["budget"] is None else up(row["budget"])
        cells = [f"{margins[kind]:,}" if kind in margins else "-" for kind in kinds]
        lines.append(
            f"{row['label']:<14}{budget_text:>10}{row['stability']:>5}"
            f"{row['scales']['detail']:>11.6g}  " + _cells(cells, widths)
        )
    return [line.rstrip() for line in lines]


def _head(table: str, figure: str, detail: int | None) -> str:
    if detail is None:
        return f"{table} only"
    name = _FIGURES.get(figure, figure.removeprefix("data cells ").replace(", ", ","))
    return f"{table}/{detail} {name}"


def _cells(texts: list[str], widths: list[int]) -> str:
    return "".join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=True))
