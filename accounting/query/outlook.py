"""How exact a query's answer would be: noise and thresholds, before a row is read.

All of it is public.  What the query chooses from the rows (bounds, rows and groups of a unit) is
not decided then, but how noise grows with it is: each part has its noise for bounds (0, 1), one row
and one group, and says by what of the choice it is to be multiplied (``times``).

* A sum of r rows, and a count of them, move by r times what one row adds: noise is r times larger.
* kappa groups move the vector of all groups by sqrt(kappa) times as much in L2, where noise is
  Gaussian, and by kappa times as much in L1, where it is geometric.

Thresholds grow with kappa in no such way: they are given for the fewest and for the most groups.
"""

import math
from typing import Any, NamedTuple

import msgspec

from dpstream.accounting.limits import COIN_BITS
from dpstream.accounting.query.calibration import QueryBudget, expected
from dpstream.accounting.query.grids import ASSUMED, Gridded
from dpstream.accounting.query.plan import MAX_ROWS, QueryPlan

#: What noise grows with, by kind of column and part; that of others is the same for all bounds.
_TIMES = {
    ("count", "count"): "high",
    ("sum", "sum"): "max(|low|, |high|)",
    ("mean", "sum"): "high - low",
    ("var", "sum"): "high - low",
    ("var", "square"): "(high - low)^2",
    ("stddev", "sum"): "high - low",
    ("stddev", "square"): "(high - low)^2",
}
#: A bound of a count that makes it more than one of units.
_ROWS = 16.0
_OF = {"tree": "rank", "square": "sum of squares", "sum": "sum", "count": "count"}


class Outlook(NamedTuple):
    """Public figures of a query.

    Attributes:
        columns: name, kind, whether bounds are ``automatic``, which were ``assumed`` then, and each
            part's noise: ``sd`` and ``within``, the half-width of its 95% interval; both times
            ``times``, if that is not ``None``, of what the query will choose.
        selections: how groups are selected; for the fewest and for the most groups of a unit where
            the query chooses their number; empty if no groups are selected.  ``groups`` of a unit
            that count, tau in units, and how many units a group needs for an even chance to be
            shown, each in one group or in as many as count.
    """

    columns: list[dict[str, Any]]
    selections: list[dict[str, float]]

    def lines(self, group: str = "group") -> list[str]:
        """Thresholds and noise as text.

        Args:
            group: what a group is called.
        """
        chosen = len(self.selections) > 1
        return [
            *(_threshold(one, group, chosen) for one in self.selections),
            *(_noise(column) for column in self.columns),
        ]


def outlook(gridded: Gridded) -> Outlook:
    """The outlook of a query."""
    plan, columns = _sketched(gridded), []
    budget = gridded.budget(plan)
    for row, column in zip(expected(plan, budget), gridded.plan.columns, strict=True):
        for part in row["parts"]:
            factors = list[tuple[str, float]]()
            if column.automatic and (row["kind"], part["what"]) in _TIMES:
                most = _ROWS if row["kind"] == "count" else 1.0
                factors.append((_TIMES[row["kind"], part["what"]], most))
            if column.automatic_rows:
                factors.append(("rows", float(MAX_ROWS)))
            if gridded.plan.automatic_groups:
                most, gaussian = float(plan.most_groups), budget.mu is not None
                factors.append(("sqrt(groups)", math.sqrt(most)) if gaussian else ("groups", most))
            for figure in ("sd", "within"):
                part[figure] /= math.prod(factor for _, factor in factors)
            part["times"] = _product([text for text, _ in factors])
        assumed = list(ASSUMED) if column.automatic else None
        columns.append({**row, "automatic": column.automatic, "assumed": assumed})
    if not plan.selects:
        return Outlook(columns, [])
    selections = [_selection(plan, budget)]
    if gridded.plan.automatic_groups:
        fewest = msgspec.structs.replace(plan, groups=1)
        selections.insert(0, _selection(fewest, gridded.budget(fewest)))
    return Outlook(columns, selections)


def _sketched(gridded: Gridded) -> QueryPlan:
    """The plan with bounds.

    A count of one row of each unit is one of units: it joins the test of groups, which leaves more
    of the budget for noise.  Of a count whose bounds are chosen that is not assumed, so that noise
    and thresholds may be smaller than it says, never larger.
    """
    plan, columns = gridded.sketched(), []
    for column, original in zip(plan.columns, gridded.plan.columns, strict=True):
        more = original.automatic and original.kind == "count"
        columns.append(msgspec.structs.replace(column, high=_ROWS) if more else column)
    return msgspec.structs.replace(plan, columns=tuple(columns))


def _product(factors: list[str]) -> str | None:
    if len(factors) > 1:
        factors = [f"({text})" if " - " in text else text for text in factors]
    return " * ".join(factors) or None


def _selection(plan: QueryPlan, budget: QueryBudget) -> dict[str, float]:
    chosen, least = budget.selection, plan.min_units
    if chosen is None:
        return {}
    noise = None if chosen.tested is None else budget.parts[chosen.tested]
    count = 0.0 if noise is None else noise.part.alone
    sooner = 0.0 if noise is None else noise.sooner / (1 << COIN_BITS)
    return {
        "groups": budget.groups,
        "tau": chosen.tau / chosen.most,
        "even_chance_one_group": chosen.even_chance(1, least, count, sooner),
        "even_chance_all_groups": chosen.even_chance(budget.groups, least, count, sooner),
        "min_units": least,
    }


def _threshold(one: dict[str, float], group: str, chosen: bool) -> str:
    groups, least, most = one["groups"], one["even_chance_one_group"], one["even_chance_all_groups"]
    counts = f"{groups} {group} of a unit counts" if groups == 1 else f"{groups} {group}s count"
    units = f"{math.ceil(least)} units"
    if groups > 1:
        units += f" of one {group} each, or {math.ceil(most)} of as many {group}s as count"
    condition = f"if {counts}: " if chosen else ""
    tau = f"tau {one['tau']:.4g} units"
    return f"Threshold  {condition}{tau}; a {group} has a 50% chance with {units}"


def _noise(column: dict[str, Any]) -> str:
    """Noise of a column's parts: of a median's or quantile's rank, of squares for a variance."""
    times = [part["times"] for part in column["parts"]]
    note = ", of the bounds that the query chooses" if any(times) or column["automatic"] else ""
    parts = [
        f"{_OF[part['what']]} sd {part['sd']:.4g}, 95% within {part['within']:.4g}"
        + ("" if part["times"] is None else f", both times {part['times']}")
        for part in column["parts"]
    ]
    return f"Noise      {column['name']} ({column['kind']}): {'; '.join(parts)}{note}"
