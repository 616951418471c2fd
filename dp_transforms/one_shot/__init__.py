"""Stage 2 of a query: partials per (unit, group) become a private table, at once and in numpy.

    rows = bounded(plan, partials, keys, run_name)
    totals = aggregated(rows, len(group_ids), budget.weights)  # by shards of units: totals.plus(..)
    found = answer(plan, budget, totals, [rows], group_ids, keys, run_name)

``bounded`` limits what a unit adds, ``aggregated`` sums over units exactly, ``answer`` draws the
noise, selects the groups and estimates the columns; ``counted`` and ``choose_bounds`` come before,
for columns without bounds.  No Beam, no store, no database.
"""

from dpstream.dp_transforms.one_shot.answers import QueryAnswer, answer
from dpstream.dp_transforms.one_shot.bounding import bounded, choose_bounds, counted
from dpstream.dp_transforms.one_shot.estimates import Estimate
from dpstream.dp_transforms.one_shot.partials import Bounded, Partials, Rows, Totals, aggregated

__all__ = [
    "Bounded",
    "Estimate",
    "Partials",
    "QueryAnswer",
    "Rows",
    "Totals",
    "aggregated",
    "answer",
    "bounded",
    "choose_bounds",
    "counted",
]
