"""The errors, floors and gaps of a workload's answers, before there is data.

They are from noisy cells or from residual tables (`way_of`).  The decision reads no record:
`dpstream workload plan` prints it, and `dpstream workload answer` follows it.
"""

import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from dpstream.accounting.arrays import Float64
from dpstream.accounting.errors import UsageError, required
from dpstream.accounting.gaussian import mu_of
from dpstream.accounting.limits import MAX_FACTOR, MAX_MIXED_CELLS, MAX_SOLVED_CELLS, MIN_DELTA
from dpstream.accounting.strategies.cells.auto import Plan
from dpstream.accounting.strategies.cells.fitted import fit
from dpstream.accounting.strategies.cells.products import MANY_CELLS
from dpstream.accounting.strategies.cells.residual import Tables, residual
from dpstream.accounting.strategies.cells.strategy import MAX_LISTED, CellStrategy, Kron, Spread
from dpstream.accounting.strength import weaknesses, weaknesses_of_mu
from dpstream.accounting.workloads.workload import Workload
from dpstream.pipelines.workload.files import solved

#: Rows of one table of answers.
MAX_ANSWERS = 1 << 25
#: Numbers that are published of all residual tables.
MAX_PUBLISHED = 1 << 24
#: Half-width of a 95% interval of a Gaussian, in sds.
HALF_WIDTH = 1.959963984540054


def way_of(workload: Workload, strategy: CellStrategy) -> Literal["cells", "tables"]:
    """Return which noise answers a workload.

    Raises:
        UsageError: neither is possible; the error names what is too large.
    """
    gram = strategy.gram
    if isinstance(gram, Tables) and workload.cells > MAX_SOLVED_CELLS:
        check_tables(gram)
        return "tables"
    largest = max(workload.sizes)
    if workload.cells > MAX_MIXED_CELLS or largest > MAX_FACTOR:
        raise UsageError(
            "domain",
            f"has {workload.cells:,} cells; noise is added to at most {MAX_MIXED_CELLS:,}, and to"
            f" {MAX_FACTOR:,} of an attribute",
            "use coarser cells, or ask tables of fewer attributes each",
        )
    if (
        not isinstance(gram, Kron)
        and strategy.name != "identity"
        and (workload.cells > MAX_SOLVED_CELLS)
    ):
        raise UsageError(
            "strategy",
            f"needs one matrix over all cells, of which it may have {MAX_SOLVED_CELLS:,}",
            "choose another --strategy",
        )
    return "cells"


def tables_of(workload: Workload, strategy: CellStrategy) -> CellStrategy:
    """Return the strategy if it is of residual tables, else one of residual tables for the
    workload.
    """
    if isinstance(strategy.gram, Tables):
        return strategy
    # Of tables of counts: the same errors.  Bases of very many cells take minutes.
    if workload.marginal or max(workload.sizes) > MANY_CELLS:
        return residual(workload.canonical)[0]
    return fit(workload.canonical).strategy


def check_tables(gram: Tables) -> None:
    """Refuse residual tables that are too large to publish or mix.

    Raises:
        UsageError: they are too large.
    """
    if sum(gram.dims.tolist()) > MAX_PUBLISHED:
        raise UsageError(
            "queries", f"at most {MAX_PUBLISHED:,} numbers are published", "ask fewer tables"
        )
    largest = max((gram.sizes[axis] - 1 for key in gram.keys for axis in key), default=0)
    if largest > MAX_FACTOR or gram.dims.max() > MAX_MIXED_CELLS:
        raise UsageError(
            "queries",
            f"a table has at most {MAX_MIXED_CELLS:,} cells, and {MAX_FACTOR:,} of an attribute",
            "ask smaller tables, or use coarser cells",
        )


class Guarantee(NamedTuple):
    """The guarantee of every unit, and its contribution bound.

    Attributes:
        mu: Gaussian-DP parameter; ``None`` for pure epsilon.
        epsilon, delta: the requested guarantee; ``None`` if mu was given.
        contributions: C, the most records of a unit that count.
    """

    mu: float | None
    epsilon: float | None = None
    delta: float | None = None
    contributions: int = 1

    @property
    def warnings(self) -> list[str]:
        """Return warnings about the guarantee."""
        if self.epsilon is None or self.delta is None:
            return weaknesses_of_mu(required(self.mu, "self.mu is there"))
        return weaknesses(self.epsilon, self.delta)

    @property
    def scale(self) -> float:
        """The standard error at this guarantee of an answer that has 1 at mu = 1."""
        return self.contributions / required(self.mu, "self.mu is there")


def guarantee_of(
    epsilon: float | None, delta: float | None, mu: float | None, contributions: int
) -> Guarantee:
    """Return the guarantee of a command's options.

    Raises:
        UsageError: both forms are given, or half of one, or the budget is not positive and finite.
    """
    if (mu is None) == (epsilon is None and delta is None):
        raise UsageError("--epsilon", "with --delta, or --mu, is required", "give one of the two")
    if contributions < 1:
        raise UsageError("--contributions", "is at least 1", "correct it")
    if mu is not None:
        if not 0 < mu < math.inf:
            raise UsageError("--mu", "is a positive number", "give a budget")
        return Guarantee(mu, contributions=contributions)
    if epsilon is None or delta is None:
        raise UsageError("--epsilon", "and --delta belong together", "give both")
    if delta == 0:
        raise UsageError(
            "--delta",
            "is 0, and Gaussian noise needs a delta",
            "use --mechanism geometric, without options of strategies and pictures; or a --delta"
            " such as 1e-9",
        )
    if not (0 < epsilon < math.inf and MIN_DELTA <= delta < 1):
        raise UsageError(
            "--epsilon", f"must be positive, and --delta from {MIN_DELTA:g} to 1", "correct them"
        )
    return Guarantee(mu_of(epsilon, delta), epsilon, delta, contributions)


class Planned(NamedTuple):
    """A workload with its strategy.

    Attributes:
        workload: with aligned attributes, as the strategy has them.
        plan: the strategy and its proof.
        place: the file in which the strategy is stored.
        cached: whether the file existed before.
    """

    workload: Workload
    plan: Plan
    place: Path
    cached: bool

    def per_query(self, variance: float) -> float:
        """Return the standard error of a query, from a total or the largest variance, at mu = 1."""
        return math.sqrt(variance / self.share)

    @property
    def share(self) -> float:
        """The number or weight that the plan's error is a sum over."""
        return 1.0 if self.plan.objective == "worst" else self.workload.weight


def planned(
    workload: Workload, folder: Path, objective: str = "total", strategy: str = "auto"
) -> Planned:
    """Solve a workload, or read an earlier solution.

    Raises:
        DpstreamError: see `files.solved`.
    """
    return Planned(workload.aligned, *solved(workload, folder, objective, strategy))


def errors(workload: Workload, strategy: CellStrategy) -> list[Float64]:
    """Return (queries of a product,) standard errors at mu = 1 for each product.

    Raises:
        UsageError: too many queries to compute one by one.
    """
    if workload.queries > MAX_LISTED:
        raise UsageError(
            "--picture",
            f"is drawn of at most {MAX_LISTED:,} queries",
            "omit it, or plan a part of the workload",
        )
    return [np.sqrt(variances) for variances in strategy.variances(workload)]


def figures(planned: Planned, guarantee: Guarantee) -> dict[str, Any]:
    """Return the public figures of a plan by name."""
    workload, plan, scale = planned.workload, planned.plan, guarantee.scale
    return {
        **queries_of(workload, plan.strategy.spreads(workload), scale, HALF_WIDTH),
        "structure": workload.structure,
        "guarantee": guarantee._asdict(),
        "objective": plan.objective,
        "strategy": plan.strategy.name,
        "rmse": planned.per_query(plan.error) * scale,
        "floor": planned.per_query(plan.floor) * scale,
        "floor_of": "Gaussian mechanism on these cells",
        "gap": plan.gap,
        "note": plan.note,
        "certificate": [len(array) for array in plan.certificate],
        "stored": str(planned.place) if planned.place.exists() else None,
        "cached": planned.cached,
        **answered_by(workload, plan.strategy),
        "warnings": guarantee.warnings,
    }


def queries_of(
    workload: Workload, spreads: list[Spread], scale: float, half_width: float
) -> dict[str, Any]:
    """Return the queries, and the errors of each product's answers.

    Args:
        spreads: variances of each product's queries.
        scale: the sd of an answer that has sd 1 there.
        half_width: of a 95% interval, in sds.
    """
    return {
        "workload": workload.digest,
        "cells": workload.cells,
        "queries": workload.queries,
        "most_answers": MAX_ANSWERS,
        "half_width": half_width,
        "products": [
            {
                "product": number,
                "queries": rows,
                "weight": product.weight,
                "attributes": {
                    workload.attributes[axis].name: factor.kind
                    for axis, factor in zip(product.axes, product.factors, strict=True)
                },
                "rmse": math.sqrt(spread.mean) * scale,
                "least": None if spread.least is None else math.sqrt(spread.least) * scale,
                "most": None if spread.most is None else math.sqrt(spread.most) * scale,
            }
            for number, (product, rows, spread) in enumerate(
                zip(workload.products, workload.rows, spreads, strict=True)
            )
        ],
    }


def answered_by(workload: Workload, strategy: CellStrategy) -> dict[str, str | None]:
    """Return how `dpstream workload answer` answers the workload, or why it cannot."""
    try:
        return {"answered_by": way_of(workload, strategy), "refused": None}
    except UsageError as refused:
        return {"answered_by": None, "refused": f"{refused.rule}; {refused.fix}"}
