"""The plan of a question as text: whether it would be answered, its cost, and the noise.

Questions are SQL statements, calls with a table in memory, and questions of a session.  The figures
are those that ``--json`` prints or ``as_dict`` returns: of `accounting.query.families`, and of the
plans of each front.
"""

import math
from collections.abc import Sequence
from typing import Any

from dpstream.accounting.figures import decimal_text, guarantee_pair, human, left_text, up
from dpstream.pipelines.render.account import acceptance_lines, accepted_lines
from dpstream.pipelines.render.layout import count, each, labelled, page

#: What the noise of a part is of.
_OF = {"tree": "rank", "square": "sum of squares", "sum": "sum"} | dict.fromkeys(
    ("count", "distinct"), "count"
)
#: The unit of a session's error, by what its noise is of.
_SESSION_UNITS = {"value": "", "value times records": " / records", "rank": " records of rank"}


def explanation_text(explanation: dict[str, Any]) -> str:
    """Return what statements would cost.

    Args:
        explanation: `sql.explain.as_builtins`.
    """
    lines = acceptance_lines(explanation["acceptance"], "Can ask", explanation["warnings"])
    for number, one in enumerate(explanation["statements"], 1):
        selections = [] if one["selection"] is None else [one["selection"]]
        statement = [
            *_accuracy(one["cost"], one["families"], one["columns"], selections, "group"),
            *_by_epsilon(one["by_epsilon"]),
            *each("Warning", one["warnings"]),
            *(line for offer in one["offers"] for line in _offer(offer)),
            "Plan",
            *(f"  {line}" for line in one["plan"].splitlines()),
        ]
        lines += [f"Statement {number}", *(f"  {line}" for line in statement)]
    together = explanation["together"]
    lines += labelled(
        "Together", f"epsilon {up(together['epsilon'])} at delta {up(together['delta'])}"
    )
    return page(lines)


def _by_epsilon(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the half-widths of 95% intervals at several epsilons as a table."""
    lines = list[str]()
    for row in rows if any(row["columns"] for row in rows) else ():
        cells = [
            f"{column['name']} {_OF[part['what']]} ±{human(part['within'])}"
            + ("" if part["times"] is None else f" times {part['times']}")
            for column in row["columns"]
            for part in column["parts"]
        ]
        lines.append(f"{up(row['epsilon']):<8} {'; '.join(cells)}")
    return labelled("Epsilon", *lines) if lines else []


def _offer(offer: dict[str, Any]) -> list[str]:
    """Return a free statement about a stored answer, and how its figures differ."""
    first = f"another figure, from the answer of {offer['answered']}: {offer['differs']}"
    return labelled("Free", first, offer["statement"])


def question_text(plan: dict[str, Any]) -> str:
    """Return the plan of a question about a table in memory.

    Args:
        plan: `frames.plan.QuestionPlan.as_dict`.
    """
    lines = acceptance_lines(plan["acceptance"], "Can ask")
    if plan["left"] is not None:
        lines += labelled("Left", f"{left_text(plan['left'])}, after this one")
    if plan["cost"] is not None:
        lines += _accuracy(
            plan["cost"], plan["families"], plan["columns"], plan["thresholds"], "key"
        )
    return "\n".join([*lines, *each("Warning", plan["warnings"])])


def _accuracy(
    cost: dict[str, Any],
    families: Sequence[dict[str, Any]],
    columns: Sequence[dict[str, Any]],
    selections: Sequence[dict[str, float]],
    group: str,
) -> list[str]:
    """Return cost, families, thresholds and noise of a question."""
    pair = guarantee_pair(cost["epsilon"], cost["delta"], cost["mu"])
    lines = labelled("Cost", f"{pair} per unit")
    for family in sorted(families, key=lambda family: not family["taken"]):
        lines += labelled(family["mechanism"].capitalize(), _family(family))
    chosen = len(selections) > 1
    lines += each("Threshold", (_threshold(one, group, chosen) for one in selections))
    return lines + each("Noise", map(_noise, columns))


def _family(family: dict[str, Any]) -> str:
    noise = [
        f"{column['name']} {part['what']} sd{_at_most(part)} {part['sd']:.4g}"
        + ("" if part["times"] is None else f" times {part['times']}")
        for column in family["columns"]
        for part in column["parts"]
    ]
    if family["questions"] is not None:
        noise.append(f"the limit allows {count(family['questions'], 'such question')}")
    return "; ".join(["taken" if family["taken"] else "not taken", *noise])


def _at_most(part: dict[str, Any]) -> str:
    """Return the words before noise that is a multiple of a chosen bound.

    A count of at most one record per unit has less noise than that.
    """
    return "" if part["times"] is None else " at most"


def _threshold(one: dict[str, float], group: str, chosen: bool) -> str:
    groups, least, most = one["groups"], one["even_chance_one_group"], one["even_chance_all_groups"]
    counts = f"{groups} {group} of a unit counts" if groups == 1 else f"{groups} {group}s count"
    units = count(math.ceil(least), "unit")
    if groups > 1:
        units += f" of one {group} each, or {math.ceil(most)} of as many {group}s as count"
    condition = f"if {counts}: " if chosen else ""
    return f"{condition}tau {one['tau']:.4g} units; a {group} has a 50% chance with {units}"


def _noise(column: dict[str, Any]) -> str:
    """Noise of a column's parts: of a median's or quantile's rank, of squares for a variance."""
    times = [part["times"] for part in column["parts"]]
    note = ", of the bounds that the query chooses" if any(times) or column["automatic"] else ""
    if column["null_below"] is not None:
        note += f"; NULL if fewer than about {column['null_below']} units have a value"
    parts = [
        f"{_OF[part['what']]} sd{_at_most(part)} {part['sd']:.4g}, 95% within {part['within']:.4g}"
        + ("" if part["times"] is None else f", both times {part['times']}")
        for part in column["parts"]
    ]
    return f"{column['name']} ({column['kind']}): {'; '.join(parts)}{note}"


def session_text(plan: dict[str, Any]) -> str:
    """Return the plan of a session's question.

    Args:
        plan: `session.plan.as_builtins`.
    """
    lines = labelled("Question", plan["question"])
    lines += accepted_lines(plan["acceptance"], "Can ask")
    if plan["answered"]:
        lines += labelled("Answered", f"{plan['answered']}: asking it again is free")
    union = plan["union"]
    if union is not None:
        half = human((union["high"] - union["low"]) / 2)
        lines += labelled("Free", f"union = TRUE: from {union['parts']:,} parts, ±{half}")
    elif plan["union_searched"]:
        lines += labelled("Free", "no union of disjoint answers was found")
    if plan["acceptance"]["run_id"] is None:
        lines += _payment(plan)
    return page([*lines, *(f"  {line}" for line in lacking_lines(plan))])


def _payment(plan: dict[str, Any]) -> list[str]:
    """Return what points or an allotment would pay, and the errors; or which points lack budget."""
    paid = f"{plan['kind']} {decimal_text(plan['amount'])}"
    if not plan["accepted"]:
        if not plan["lacking_boxes"]:
            return []
        enough = f"all points have enough where {plan['enough']}; or drop = TRUE"
        return labelled(
            "Refused",
            f"points in {count(plan['lacking_boxes'], 'box', 'boxes')} lack {paid}; all points "
            f"have {decimal_text(plan['largest'])} or more",
            *([enough] if plan["enough"] else []),
        )
    if plan["allotment_left"] is not None:
        remaining = decimal_text(plan["allotment_left"])
        lines = labelled(
            "Draw", f"{paid} on the allotment, which has {remaining} left; no point pays"
        )
    else:
        waste = plan["charged_points_per_asked"]
        times = f", which are {human(waste)} times what is asked" if waste > 1.0001 else ""
        lines = labelled(
            "Charge",
            f"{paid} to each point of {count(plan['charged_boxes'], 'box', 'boxes')}{times}",
        )
        if plan["lacking_boxes"]:
            lines += labelled(
                "Dropped", f"{count(plan['lacking_boxes'], 'box', 'boxes')} with too little"
            )
        regions = f"{plan['regions']:,} now, {plan['regions_after']:,} after the charge"
        lines += labelled("Regions", regions)
    for error in plan["errors"]:
        within = f"{human(error['within'])}{_SESSION_UNITS[error['of']]}"
        lines += labelled("Error", f"{error['figure']}: 95% within {within}")
    return [*lines, *each("Rounding", plan["notes"]), *each("Warning", plan["warnings"])]


def lacking_lines(decision: dict[str, Any]) -> list[str]:
    """Return which points lack budget, and the least that each box has left.

    Args:
        decision: `session.plan.decision_as_builtins`.
    """
    lines = [
        f"{decimal_text(row['left'])} left where {row['where']}" for row in decision["lacking"]
    ]
    more = decision["lacking_boxes"] - len(decision["lacking"])
    return [*lines, f"... and {more:,} more boxes"] if more > 0 else lines
