"""The plan of a workload as text: its guarantee, its error, and the least error that is possible.

The figures are those of `workload.planning.figures`, which ``--json`` prints.
"""

from typing import Any

from dpstream.accounting.figures import exact, human, up
from dpstream.pipelines.render.layout import each, labelled, page

_ERRORS = {
    "total": "RMSE of a query (weighted)",
    "worst": "largest standard error of a query (weighted)",
    "relative": "RMSE of a query divided by its norm",
}
_WAYS = {
    "cells": "from noisy cells, all of which are published",
    "tables": "from noisy residual tables, without a histogram of all cells",
    "lattice": "from noisy sums of cells, all of which are published",
}


def workload_text(plan: dict[str, Any], most: int = 12) -> str:
    """Return the plan; of many products the first ones.

    Args:
        plan: `workload.planning.figures`, with ``most_answers``.
        most: number of products that are listed.
    """
    queries, cells, floor = plan["queries"], plan["cells"], plan["floor"]
    records = plan["guarantee"]["contributions"]
    within, note = list[str](), [plan["note"]] if plan["note"] else []
    if plan["objective"] == "total":
        half = human(plan["rmse"] * plan["half_width"])
        within = [f"an answer of this error has a 95% interval of ±{half}"]
    lines = [
        *labelled("Workload", f"{queries:,} queries of {cells:,} cells; {plan['workload'][:16]}"),
        *labelled("Guarantee", f"{_budget(plan['guarantee'])}; {records} record(s) of a unit"),
    ]
    if "families" in plan:
        lines += labelled("Mechanism", families_line(plan["families"]))
    lines += [
        *labelled("Answers", _ways(plan)),
        *labelled("Strategy", plan["strategy"]),
        *labelled("Error", f"{plan['rmse']:.6g}: {_ERRORS[plan['objective']]}", *within),
        *labelled(
            "Floor",
            f"{floor:.6g}: no {plan['floor_of']} has less (gap {plan['gap']:.2g} of the squared "
            "error)",
            *note,
        ),
    ]
    if plan["stored"] is not None:
        proof = "closed form" if not plan["certificate"] else "weights that prove the floor"
        lines += labelled("Certificate", f"{proof}, with the strategy in {plan['stored']}")
    lines += ["", f"{'Queries':<40}{'number':>10}{'RMSE':>12}{'least':>12}{'most':>12}"]
    lines += map(_product, plan["products"][:most])
    more = len(plan["products"]) - most
    lines += [f"... and {more:,} more products (--json)"] if more > 0 else []
    return page([*lines, *each("Warning", plan["warnings"])])


def _budget(guarantee: dict[str, Any]) -> str:
    if guarantee["mu"] is None:
        return f"pure epsilon {up(guarantee['epsilon'])}"
    if guarantee["epsilon"] is None:
        return f"mu {exact(guarantee['mu'])}"
    return f"({up(guarantee['epsilon'])}, {up(guarantee['delta'])}), mu {up(guarantee['mu'])}"


def families_line(families: list[dict[str, Any]]) -> str:
    """Return both families as text, the one that is used first."""
    parts = []
    for family in sorted(families, key=lambda family: not family["taken"]):
        if family["rmse"] is None:
            what = f"cannot: {family['refused']}"
        else:
            what = f"{'at least ' if family['at_least'] else ''}RMSE {human(family['rmse'])}"
        parts.append(f"{family['mechanism']}{' (taken)' if family['taken'] else ''} {what}")
    return "; ".join(parts)


def _ways(plan: dict[str, Any]) -> str:
    if plan["answered_by"] is None:
        return f"none, `dpstream workload answer` refuses: {plan['refused']}"
    way = _WAYS[plan["answered_by"]]
    if plan["queries"] > plan["most_answers"]:
        return f"{way}; too many for a table of {plan['most_answers']:,}: ask for parts with --from"
    return f"all, {way}"


def _product(product: dict[str, Any]) -> str:
    label = " x ".join(f"{a}: {k}" for a, k in product["attributes"].items()) or "total"
    errors = [product[name] for name in ("rmse", "least", "most")]
    figures = "".join(f"{'-' if error is None else f'{error:.6g}':>12}" for error in errors)
    count = product["queries"]
    number = f"{count:,}" if count < 10**8 else f"{count:.3g}"
    return f"{label[:39]:<40}{number:>10}{figures}"
