"""What a unit uses of a query's budget, by the definition of its parts."""

import math

from dpstream.accounting.query.calibration import QueryBudget


def loss(budget: QueryBudget, groups: int) -> float:
    """What a unit of so many groups uses: of mu^2, or of epsilon."""
    if budget.selection is not None and budget.selection.optimum:
        return groups / budget.groups
    if budget.mu is None:
        moved = (p.part.l1(groups) * p.part.unit / p.scale for p in budget.parts)
        return budget.reserved + math.fsum(moved) / budget.epsilon
    used = [budget.reserved]
    used += [
        p.part.l2_squared(groups) * (p.part.unit / p.scale / budget.mu) ** 2 for p in budget.parts
    ]
    if budget.selection is not None:
        weight = budget.selection.weights[groups - 1]
        used.append(groups * (weight / budget.selection.sigma / budget.mu) ** 2)
    return math.fsum(used)
