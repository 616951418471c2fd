"""What a workload's answers would cost: errors, floors and gaps, before any data is there."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpstream.accounting.arrays import Float64
from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.figures import exact, up
from dpstream.accounting.gaussian import mu_of
from dpstream.accounting.strategies.cells import fixed
from dpstream.accounting.strategies.cells.auto import Plan
from dpstream.accounting.strategies.cells.strategy import CellStrategy
from dpstream.accounting.strategies.cells.threads import one_thread
from dpstream.accounting.strength import weaknesses, weaknesses_of_mu
from dpstream.accounting.workloads.workload import Workload
from dpstream.pipelines.workload.cache import largest, made, solved
from dpstream.state.durable import replacing

#: Cells up to which every known strategy is made for the comparison, and products.
MAX_COMPARED_CELLS, MAX_COMPARED_PRODUCTS = 2048, 256
#: Queries whose errors are computed one by one.
MAX_LISTED = 1 << 22
_COMPARED = ("identity", "workload", "haar", "hierarchical", "fourier", "datacube", "eigen")


class Guarantee(NamedTuple):
    """What every unit is promised, and how often it counts.

    Attributes:
        mu: Gaussian-DP parameter; epsilon, delta: as asked for, ``None`` where mu was.
        contributions: C, records of a unit that count.
    """

    mu: float
    epsilon: float | None = None
    delta: float | None = None
    contributions: int = 1

    @property
    def warnings(self) -> list[str]:
        """Of what it promises."""
        if self.epsilon is None or self.delta is None:
            return weaknesses_of_mu(self.mu)
        return weaknesses(self.epsilon, self.delta)

    @property
    def scale(self) -> float:
        """Standard errors at this guarantee for one of 1 at mu = 1."""
        return self.contributions / self.mu


def guarantee_of(
    epsilon: float | None, delta: float | None, mu: float | None, contributions: int
) -> Guarantee:
    """The guarantee of the options of a command.

    Raises:
        UsageError: both forms or half of one.
        PolicyError: a budget that is not positive and finite.
    """
    if (mu is None) == (epsilon is None and delta is None):
        raise UsageError("--epsilon", "with --delta, or --mu, is required", "give one of the two")
    if contributions < 1:
        raise UsageError("--contributions", "is at least 1", "correct it")
    if mu is not None:
        if not 0 < mu < math.inf:
            raise PolicyError("--mu", "is a positive number", "give a budget")
        return Guarantee(mu, contributions=contributions)
    if epsilon is None or delta is None:
        raise UsageError("--epsilon", "and --delta belong together", "give both")
    if not (0 < epsilon < math.inf and 0 < delta < 1):
        raise PolicyError("--epsilon", "is positive, and --delta between 0 and 1", "give a budget")
    return Guarantee(mu_of(epsilon, delta), epsilon, delta, contributions)


class Planned(NamedTuple):
    """A workload with its strategy.

    Attributes:
        plan: the strategy and its proof; place: its file; cached: whether it was there before.
        compared: weighted mean of squared errors (or the largest) of other strategies, at mu = 1.
    """

    workload: Workload
    plan: Plan
    place: Path
    cached: bool
    compared: dict[str, float]

    def per_query(self, variance: float) -> float:
        """Standard error of a query, of a total or of the largest, at mu = 1."""
        return math.sqrt(variance / self.share)

    @property
    def share(self) -> float:
        """What the plan's error is a sum over."""
        return 1.0 if self.plan.objective == "worst" else self.workload.weight


def planned(
    workload: Workload, folder: Path, objective: str = "total", strategy: str = "auto"
) -> Planned:
    """Solve a workload, or read what was solved, and compare it with what is known.

    Raises:
        DpstreamError: see `cache.solved`.
    """
    plan, place, cached = solved(workload, folder, objective, strategy)
    asked = workload.relative() if objective == "relative" else workload
    compared = place.with_suffix(".json")
    try:
        known = json.loads(compared.read_bytes()) if cached else None
        found = {str(name): float(error) for name, error in known.items()} if known else None
    except (OSError, ValueError, AttributeError):
        found = None
    if found is None:
        found = _compared(asked, objective)
        if place.exists():
            with replacing(compared, 0o600) as draft:
                draft.write_text(json.dumps(found))
    return Planned(workload, plan, place, cached, found)


@one_thread()
def _compared(workload: Workload, objective: str) -> dict[str, float]:
    """Errors of known strategies that span the workload, of a domain small enough for all."""
    worst = objective == "worst"
    found = {} if worst else {"gaussian": fixed.gaussian_error(workload)}
    small = workload.cells <= MAX_COMPARED_CELLS
    if not small or len(workload.products) > MAX_COMPARED_PRODUCTS:
        return found
    for name in _COMPARED:
        strategy = made(workload, name)
        error = strategy.error(workload)
        if math.isfinite(error):
            listed = workload.queries <= MAX_LISTED
            if not worst or listed:
                found[name] = largest(workload, strategy) if worst else error
    return found


def errors(workload: Workload, strategy: CellStrategy) -> list[Float64] | None:
    """(queries of a product,) standard errors at mu = 1 for each product; ``None``: too many."""
    if workload.queries > MAX_LISTED:
        return None
    return [np.sqrt(found) for found in strategy.variances(workload)]


def figures(planned: Planned, guarantee: Guarantee) -> dict[str, Any]:
    """What is shown of a plan: public figures by name."""
    workload, plan, scale = planned.workload, planned.plan, guarantee.scale
    listed = errors(workload, plan.strategy)
    queries = [
        {
            "product": number,
            "queries": product.rows,
            "weight": product.weight,
            "attributes": {
                workload.attributes[axis].name: factor.kind
                for axis, factor in zip(product.axes, product.factors, strict=True)
            },
            **({} if listed is None else _spread(listed[number] * scale)),
        }
        for number, product in enumerate(workload.products)
    ]
    strategies = {
        name: planned.per_query(error) * scale for name, error in planned.compared.items()
    }
    return {
        "workload": workload.digest,
        "structure": workload.structure,
        "cells": workload.cells,
        "queries": workload.queries,
        "guarantee": guarantee._asdict(),
        "objective": plan.objective,
        "strategy": plan.strategy.name,
        "rmse": planned.per_query(plan.error) * scale,
        "floor": planned.per_query(plan.floor) * scale,
        "gap": plan.gap,
        "note": plan.note,
        "certificate": [len(array) for array in plan.certificate],
        "stored": str(planned.place) if planned.place.exists() else None,
        "cached": planned.cached,
        "strategies": strategies,
        "products": queries,
        "warnings": guarantee.warnings,
    }


def _spread(found: Float64) -> dict[str, float]:
    return {
        "rmse": float(np.sqrt(np.mean(found**2))),
        "least": float(found.min()),
        "most": float(found.max()),
    }


def words(shown: dict[str, Any], most: int = 12) -> str:
    """The same for a person at a terminal; of many products the first ones."""
    guarantee = shown["guarantee"]
    budget = f"mu {exact(guarantee['mu'])}"
    if guarantee["epsilon"] is not None:
        budget = f"({up(guarantee['epsilon'])}, {up(guarantee['delta'])}), mu {up(guarantee['mu'])}"
    what = {
        "worst": "largest standard error of a query (weighted)",
        "relative": "RMSE of a query divided by its norm",
    }.get(shown["objective"], "RMSE of a query (weighted)")
    lines = [
        f"Workload    {shown['queries']:,} queries of {shown['cells']:,} cells;"
        f" {shown['workload'][:16]}",
        f"Guarantee   {budget}; {guarantee['contributions']} record(s) of a unit",
        f"Strategy    {shown['strategy']}",
        f"Error       {shown['rmse']:.6g}: {what}",
        f"Floor       {shown['floor']:.6g}: no Gaussian mechanism on these cells has less"
        f" (gap {shown['gap']:.2g} of the squared error)",
    ]
    if shown["note"]:
        lines.append(f"            {shown['note']}")
    if shown["stored"] is not None:
        proof = "closed form" if not shown["certificate"] else "weights that prove the floor"
        lines.append(f"Certificate {proof}, with the strategy in {shown['stored']}")
    if shown["strategies"]:
        rated = sorted([*shown["strategies"].items(), (shown["strategy"] + " *", shown["rmse"])],
                       key=lambda one: one[1])  # fmt: skip
        lines += ["", f"{'Strategy':<14}{'error':>12}{'over the floor':>16}"]
        lines += [
            f"{name:<14}{error:>12.6g}{error / shown['floor']:>16.4f}" for name, error in rated
        ]
    if "rmse" in shown["products"][0]:
        lines += ["", f"{'Queries':<40}{'number':>10}{'RMSE':>12}{'least':>12}{'most':>12}"]
        for product in shown["products"][:most]:
            named = " x ".join(f"{a}: {k}" for a, k in product["attributes"].items()) or "total"
            lines.append(f"{named[:39]:<40}{product['queries']:>10,}{product['rmse']:>12.6g}"
                         f"{product['least']:>12.6g}{product['most']:>12.6g}")  # fmt: skip
        left = len(shown["products"]) - most
        lines += [f"... and {left:,} more products (--json)"] if left > 0 else []
    lines += [f"Warning     {warning}" for warning in shown["warnings"]]
    return "\n".join(lines) + "\n"
