"""The family of noise for a workload: Gaussian, or two-sided geometric with the same epsilon and
delta 0.

**Why the choice is private.**  Each family is a complete mechanism with the guarantee that its
charge states.  One is chosen before a row is read and before the charge, from the queries, the
guarantee and, with an account, its limit and its earlier charges: all of these are public.  The
choice must not use the rows: the better of two mechanisms by the data lacks their guarantee.

**What is compared** is the weighted RMSE of the queries at the guarantee.  With an account a
workload may be one question of many.  ``limit`` therefore compares both at an equal share of what
is left of the limit, as for questions (`accounting.query.families`).  ``answer`` compares this
answer alone.  A family that the limit does not allow is never taken if the other one is allowed
(`periods.Room`).

The search for a strategy with geometric noise is slow.  L1 norms of columns are not below their L2
norms, so that its error is at least the Gaussian floor with geometric noise instead of noise of sd
C / mu (`lattice.planned_purely`).  Where this bound is already too large, the search is skipped.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

from dpstream.accounting.errors import UsageError, required
from dpstream.accounting.gaussian import mu_of
from dpstream.accounting.geometric import geometric_sd
from dpstream.accounting.periods import Room
from dpstream.accounting.query.calibration import Cost
from dpstream.accounting.query.plan import Family
from dpstream.accounting.strategies.cells.auto import Plan
from dpstream.accounting.workloads.workload import Workload
from dpstream.pipelines.workload.files import solved_purely
from dpstream.pipelines.workload.lattice import (
    better_lattice,
    bits_of,
    planned_purely,
    rmse_of,
)
from dpstream.pipelines.workload.planning import Guarantee, Planned, figures


class Budget(NamedTuple):
    """The guarantee of a unit: epsilon, delta (0: Gaussian noise is impossible), and C."""

    epsilon: float
    delta: float
    contributions: int


class Families(NamedTuple):
    """The family that is used, and the errors of both.

    Attributes:
        taken: the family that is used.
        gaussian, geometric: RMSE of a query with each; ``None``: this family cannot answer.
        least: whether ``geometric`` is a lower bound, which decided the choice.
        refused: why geometric noise cannot answer; "": it can.
    """

    taken: Family
    gaussian: float | None
    geometric: float | None
    least: bool = False
    refused: str = ""

    def described(self) -> list[dict[str, Any]]:
        """Return both families as rows of a plan, as values for JSON.

        Returns:
            For each family ``mechanism``, whether it is ``taken``, its ``rmse`` (``None``: it
            cannot answer), whether that is a lower bound (``at_least``), and why it is ``refused``.
        """
        return [
            {
                "mechanism": "gaussian",
                "taken": self.taken == "gaussian",
                "rmse": self.gaussian,
                "at_least": False,
                "refused": "" if self.gaussian is not None else "delta is 0",
            },
            {
                "mechanism": "geometric",
                "taken": self.taken == "geometric",
                "rmse": self.geometric,
                "at_least": self.least,
                "refused": self.refused,
            },
        ]


def families_of(
    workload: Workload, plan: Plan, budget: Budget, folder: Path, room: Room | None = None
) -> Families:
    """Return the family with the smaller error for a workload.

    Args:
        plan: strategy of least total error with Gaussian noise.
        budget: guarantee of a unit.
        folder: folder of solved strategies.
        room: compare at an equal share of what is left of it; ``None``: this answer alone.

    Raises:
        UsageError: neither family can answer.
    """
    workload, (epsilon, delta, contributions) = workload.aligned, budget
    gaussian, most, part = None, 0.0, 1.0  # at most so large an error takes geometric noise
    if delta > 0:
        mu = mu_of(epsilon, delta)
        gaussian = most = math.sqrt(plan.error / workload.weight) * contributions / mu
        if room is not None:
            costs = Cost(epsilon, delta, mu, 0.0), Cost(epsilon, 0.0, None, 0.0)
            allowed = [room.further_charges(cost) > 0 for cost in costs]
            if allowed[0] != allowed[1]:
                most = 0.0 if allowed[0] else math.inf
            elif allowed[0]:
                part = room.equal_share(*costs)
    bound = math.sqrt(plan.floor / workload.weight)
    least = geometric_sd(contributions / (epsilon * part)) * bound if part else math.inf
    if gaussian is not None and least >= most:
        return Families(
            "gaussian", gaussian, geometric_sd(contributions / epsilon) * bound, least=True
        )
    try:
        bits = bits_of(len(workload.sizes))
        name, strategy, _ = solved_purely(workload, bits, folder)
        own, shared = (
            rmse_of(better_lattice(name, strategy, workload, each, contributions)[1], workload)
            for each in (epsilon, epsilon * part)
        )
    except UsageError as error:
        if gaussian is None:
            raise
        return Families("gaussian", gaussian, None, refused=f"{error.rule}; {error.fix}")
    taken: Family = "geometric" if gaussian is None or shared < most else "gaussian"
    return Families(taken, gaussian, own)


def compared(planned: Planned, guarantee: Guarantee, folder: Path) -> dict[str, Any]:
    """Return a plan's figures with the better family for this answer alone, and both ``families``.

    Args:
        planned: the workload with its Gaussian strategy.
        guarantee: the guarantee as (epsilon, delta).
        folder: folder of solved strategies.

    Returns:
        As `planning.figures`, with ``families`` as `Families.described` returns them.
    """
    epsilon = required(guarantee.epsilon, "the guarantee is in epsilon")
    delta = required(guarantee.delta, "the guarantee has a delta")
    budget = Budget(epsilon, delta, guarantee.contributions)
    families = families_of(planned.workload, planned.plan, budget, folder)
    if families.taken == "gaussian":
        result = figures(planned, guarantee)
    else:
        result = planned_purely(planned.workload, epsilon, guarantee.contributions, folder)
    return {**result, "families": families.described()}
