"""Bounds that a query chooses for its columns: histograms of ``dpstream choose``, paid by it.

A column without bounds gets one histogram of its values over all groups together, on the public
grid of ``accounting.tuning.question`` (0 and +-(4 .. 7) 2^k grid units), as noisy nodes of a binary
tree.  It counts at most VALUES values of a unit, chosen by sampling keys of the unit's own rows,
so that A x moves by at most VALUES sqrt(levels) in L2 (VALUES levels in L1), in however many groups
the unit is.  Its share is half of what the column would have, were a count tested, of mu^2 (of
epsilon with Laplace noise); ``allocate_query`` divides what is left.  All is one mechanism of mu:
what is drawn later may adapt to what was released before (section 4).

The bounds are the edges that at most TAIL of the values lie beyond, read off noisy counts.  Where
units are few, that is less than the noise of a prefix, and any of the edges far beyond all values
would do (they grow by powers of two: answers a thousand times too wide).  So as many values may lie
beyond as noise hides, UNSEEN of the rank error.  A histogram whose noisy total is too small for its
noise says nothing, and the column is NULL.
"""

import math
from typing import NamedTuple

import msgspec
import numpy as np
from scipy.special import ndtri

from dpstream.accounting.arrays import Int64
from dpstream.accounting.query.calibration import COMBINED, mu_of_query
from dpstream.accounting.query.plan import QueryColumn, QueryPlan
from dpstream.accounting.tuning.quantiles import answers, clamp_of, prefixes
from dpstream.accounting.tuning.question import (
    Histogram,
    encoder_matrix,
    histogram,
    value_candidates,
    worst_factor,
)

#: Values of one unit in a histogram.
VALUES = 1
#: Part of the values that may lie beyond each bound.
TAIL = 0.01
#: Of the rank error that holds for all cells at once: 2.8 sds of a prefix.  Simulated errors of a
#: mean are the least, within a fifth, from 0.6 to 0.9 for 1,100 to 4,000 units; they are 10 times
#: as large at 0.5 and 1,000 times at 0.
UNSEEN = 0.75
#: Largest bounds, in grid units: of values, of values that are squared, of counts.
_MOST, _SQUARED, _COUNT = 1 << 28, 1 << 15, 1 << 20
_SLACK = 1e-12


class BoundsDesign(msgspec.Struct, frozen=True):
    """Histograms of a query's automatic columns, in the order of the columns; public.

    Attributes:
        law: of the noise of their nodes; ``sigma`` of a histogram is its sd or scale.
        histograms: named as the columns.
    """

    law: str
    histograms: tuple[Histogram, ...]

    @property
    def reserved(self) -> dict[str, float]:
        """What each costs: part of mu^2 or of epsilon; for ``allocate_query``."""
        return {of.name: of.share for of in self.histograms}


class Settled(NamedTuple):
    """A plan whose bounds are chosen.

    Attributes:
        plan: with bounds for every column.
        nulls: columns whose histogram said nothing: they are NULL, whatever their bounds.
    """

    plan: QueryPlan
    nulls: frozenset[str]


def design_bounds(plan: QueryPlan) -> BoundsDesign | None:
    """The histograms of a plan, ``None`` where all bounds are given.

    Raises:
        UsageError: the plan is refused, or the budget allows no answer at all.
    """
    plan.check()
    columns = [column for column in plan.columns if column.automatic]
    if not columns:
        return None
    total, free = math.fsum(c.share for c in plan.columns), 1.0
    if plan.selects and plan.mechanism == "gaussian":
        free = 1 - COMBINED
    mu = mu_of_query(plan)[0] if plan.mechanism == "gaussian" else 1.0
    made = []
    for column in columns:
        share = free * column.share / total / 2 * (1 - _SLACK)
        edges = candidates(column)
        ends = (TAIL, 1 - TAIL)
        found = histogram(column.name, edges, len(edges), ends, VALUES, share, mu)
        made.append(found if plan.mechanism == "gaussian" else _laplace(found, plan.epsilon))
    return BoundsDesign(plan.mechanism, tuple(made))


def candidates(column: QueryColumn) -> tuple[int, ...]:
    """Edges that a column's bounds are chosen from, in grid units."""
    if column.kind == "count":
        return value_candidates(0, _COUNT)
    most = _SQUARED if column.kind in ("var", "stddev") else _MOST // column.most_rows
    return value_candidates(-most, most)


def settled(plan: QueryPlan, design: BoundsDesign, noisy: list[Int64]) -> Settled:
    """Bounds from the noisy nodes of each histogram: post-processing."""
    chosen: dict[str, tuple[int, int]] = {}
    for of, nodes in zip(design.histograms, noisy, strict=True):
        estimate = prefixes(of, nodes)
        if answers(of, estimate):
            tail = max(TAIL, UNSEEN * of.rank_error / float(estimate[-1]))
            chosen[of.name] = clamp_of(of, estimate, tail)
    columns, nulls = [], set[str]()
    for column in plan.columns:
        if not column.automatic:
            columns.append(column)
            continue
        if column.name not in chosen:
            nulls.add(column.name)
        lo, hi = chosen.get(column.name, (0, 1))
        if lo >= hi:  # one edge: a range needs two
            lo, hi = min(lo, hi) - (column.kind != "count"), max(lo, hi)
        if column.kind == "count":
            lo = 0
        low, high = float(lo * column.grid), float(hi * column.grid)
        columns.append(msgspec.structs.replace(column, low=low, high=high))
    return Settled(msgspec.structs.replace(plan, columns=tuple(columns)), frozenset(nulls))


def _laplace(of: Histogram, epsilon: float) -> Histogram:
    """The same with two-sided geometric noise."""
    scale = VALUES * of.col2 / (of.share * epsilon) * (1 + _SLACK)
    sd = math.sqrt(2) * scale * worst_factor(encoder_matrix(of.cells), of.targets)
    far = float(-ndtri(0.05 / (2 * of.cells)))
    return msgspec.structs.replace(
        of, sensitivity=float(VALUES * of.col2), sigma=scale, rank_error=sd * far
    )


def cells_of_values(of: Histogram, values: Int64) -> Int64:
    """(n,) cell of each value, labelled by the edge away from 0; values beyond are clamped."""
    edges = np.array(of.candidates)
    values = np.clip(values, edges[0], edges[-1])
    up = np.searchsorted(edges, values, side="left")
    down = np.searchsorted(edges, values, side="right") - 1
    return np.asarray(np.where(values >= 0, up, down))
