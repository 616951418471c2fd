"""Pure epsilon: whole-number strategies with two-sided geometric noise, released as they are; and
whether that or Gaussian noise answers a workload, with the same epsilon and delta 0.

What is published is B x + noise, B of whole numbers (`cells.products`), one exact
discrete Laplace draw for each row.  A record moves B x by a column, L1 norm at most D (exact); C
records by at most C D, so that noise of scale b >= C D / epsilon has densities whose ratio is at
most e^epsilon anywhere.  Cells are estimated by least squares, axis by axis, which is
post-processing: an axis of which only the total is asked is estimated evenly.

Intervals hold for every sum of rows' noises.  A row's noise X is G - G' of two geometrics, which
are exponentials of mean b rounded down: X is off a Laplace L by less than 1, and sum a X is off
sum a L by at most |a|_1 <= rows^1/2 |a|.  L is b (2 E)^1/2 Z, E exponential and Z normal; with
u = a^2 / |a|^2 the sum over b |a| is normal of variance V = 2 sum u E, and P(|sum| > s) = E h(V),
h(v) = 2 Q(s / v^1/2).  h is convex below s^2 / 3 and concave above.  Let g be h up to v1 and from
there the tangent to h that begins at (v1, h(v1)): g is convex and at least h, and sum u E is a mean
of exponentials, so that E h(V) <= E g(V) <= E g(2 E).  With v1 and s of the line that touches h at
v1 + 2 (the best), E g(2 E) = .05 for s = 3.0501, 2.1568 sds; one Laplace alone has 2.1183.

Where b is below about 1 rows^1/2 would be most of that.  Chebyshev's inequality needs no law at
all: no sum is off by more than .05^-1/2 = 4.4722 of its own sds more often than that.  The
narrower of both is taken, by b and the rows alone.

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
C / mu (`planned_purely`).  Where this bound is already too large, the search is skipped.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import scipy.linalg

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.composition import Cost
from dpstream.accounting.errors import UsageError, required
from dpstream.accounting.gaussian import mu_of
from dpstream.accounting.geometric import geometric_sd
from dpstream.accounting.limits import MAX_HISTOGRAM_CELLS, MAX_REAL_SIGMA
from dpstream.accounting.periods import Room
from dpstream.accounting.query.plan import Family
from dpstream.accounting.strategies.cells.auto import Plan
from dpstream.accounting.strategies.cells.products import LatticeStrategy
from dpstream.accounting.workloads.workload import Workload
from dpstream.pipelines.workload.estimate import Estimate
from dpstream.pipelines.workload.planning import (
    Guarantee,
    Planned,
    figures,
    planned,
    queries_of,
    solved_purely,
)

if TYPE_CHECKING:
    from dpstream.dp_transforms.noise.prf import KeyRing

#: Half-width in sds of a 95% interval of any sum of Laplace noises, rounded up (see above).
LAPLACE_HALF_WIDTH = 2.15676
#: The same of any sum of any noise, by Chebyshev's inequality.
ANY_HALF_WIDTH = 4.47214


class Lattice(NamedTuple):
    """A strategy and its noise.

    Attributes:
        strategy: whole numbers on each axis; scale: b.
    """

    strategy: LatticeStrategy
    scale: float

    @property
    def sd(self) -> float:
        """The sd of a row's noise."""
        return geometric_sd(self.scale)

    @property
    def half_width(self) -> float:
        """The half-width of a 95% interval of any sum of rows' noises, in sds of the sum."""
        rows = math.prod(len(factor) for factor in self.strategy.factors)
        off = LAPLACE_HALF_WIDTH * math.sqrt(2) * self.scale + math.sqrt(rows)
        return min(off / self.sd, ANY_HALF_WIDTH)


def lattice_of(strategy: LatticeStrategy, epsilon: float, contributions: int) -> Lattice:
    """Return a strategy with the noise of a guarantee.

    Raises:
        UsageError: its noise is beyond the range of exact draws, or it has too many rows.
    """
    scale = math.nextafter(contributions * strategy.sensitivity1 / epsilon * (1 + 2e-16), math.inf)
    rows = math.prod(len(factor) for factor in strategy.factors)
    if not scale <= MAX_REAL_SIGMA or rows > MAX_HISTOGRAM_CELLS:
        raise UsageError(
            "budget.epsilon",
            "asks for noise, or for more rows, than are drawn exactly",
            "use fewer cells or a larger epsilon",
        )
    return Lattice(strategy, scale)


def better_lattice(
    name: str,
    strategy: LatticeStrategy,
    workload: Workload,
    epsilon: float,
    contributions: int,
) -> tuple[str, Lattice]:
    """Return a solved strategy at a guarantee, or the cells themselves if they have less error.

    A solved strategy is rounded to thousandths of its columns, so that its noise is as good as
    real.  Noise of whole cells is far smaller than that where epsilon / C is large, because most
    of it is 0: all ranges of 256 cells at (6, C = 1) have RMSE 0.65 in the place of 1.34.  The
    choice is by the guarantee and the queries alone.

    Raises:
        UsageError: see ``lattice_of``.
    """
    alone = LatticeStrategy(
        tuple(
            np.eye(factor.shape[1], dtype=np.int64)
            if len(factor) >= factor.shape[1]
            else np.ones((1, factor.shape[1]), np.int64)
            for factor in strategy.factors
        )
    )
    solved_one = lattice_of(strategy, epsilon, contributions)
    cell_lattice = lattice_of(alone, epsilon, contributions)
    if rmse_of(cell_lattice, workload) < rmse_of(solved_one, workload):
        return "identity", cell_lattice
    return name, solved_one


def rmse_of(lattice: Lattice, workload: Workload) -> float:
    """Return the weighted RMSE of a workload's queries: least squares adds the strategy's own
    factor
    to the sd of a row.
    """
    trace = lattice.strategy.floats().gram.trace(workload)
    return lattice.sd * math.sqrt(trace / workload.weight)


def planned_purely(
    workload: Workload, epsilon: float, contributions: int, folder: Path
) -> dict[str, Any]:
    """Return the cost of a workload in pure epsilon, as in `planning.figures`.

    The floor: a strategy of whole numbers, D its largest L1 norm of a column, has noise of variance
    v(C D / epsilon), v(b) = 2 q / (1 - q)^2 with q = e^(-1/b), and v(b) / b^2 grows with b.  As
    D >= 1, that is at least v(C / epsilon) D^2.  The L2 norm of a column is at most D, so that the
    total of the variances is at least v(C / epsilon) times the least of any Gaussian mechanism at
    mu = 1.

    Args:
        folder: folder of solved strategies.

    Raises:
        UsageError: the budget is not positive and finite, or no lattice is made for the workload.
    """
    if not (0 < epsilon < math.inf and contributions >= 1):
        raise UsageError("--epsilon", "is positive and finite, C at least 1", "give a budget")
    workload = workload.aligned
    name, strategy, cached = solved_purely(workload, folder)
    name, chosen = better_lattice(name, strategy, workload, epsilon, contributions)
    best = planned(workload, folder).plan
    floor = geometric_sd(contributions / epsilon) * math.sqrt(best.floor / workload.weight)
    rmse = rmse_of(chosen, workload)
    spreads = chosen.strategy.floats().gram.spreads(workload)
    guarantee = Guarantee(None, epsilon, 0.0, contributions)
    return {
        **queries_of(workload, spreads, chosen.sd, chosen.half_width),
        "structure": workload.structure,
        "guarantee": guarantee._asdict(),
        "objective": "total",
        "strategy": name,
        "rmse": rmse,
        "floor": floor,
        "floor_of": "strategy of whole numbers with geometric noise",
        "gap": (rmse / floor) ** 2 - 1,
        "note": "the floor is that of the Gaussian mechanism with this noise: none may reach it",
        "certificate": [len(array) for array in best.certificate],
        "stored": None,
        "cached": cached,
        "answered_by": "lattice",
        "refused": None,
        "warnings": guarantee.warnings,
    }


def published(
    lattice: Lattice, cells: Int64, ring: "KeyRing", run_name: tuple[bytes, ...]
) -> Int64:
    """Return (rows on each axis) B x + noise.

    Args:
        cells: exact counts, an axis for each attribute: PRIVATE.
        run_name: run id, committed before, and digest of the plan.
    """
    # What draws loads the compiler, which a plan does without.
    from dpstream.dp_transforms.noise.inputs import InputDigest
    from dpstream.dp_transforms.noise.oneshot import OneShot, numbered

    exact = cells
    for axis, factor in enumerate(lattice.strategy.factors):
        exact = np.moveaxis(np.tensordot(factor, exact, (1, axis)), 0, axis)
    digest = InputDigest(ring).add("lattice", numbered(exact.size), exact.reshape(-1))
    noise = OneShot(ring, (b"workload lattice", *run_name), digest.value)
    drawn = noise.discrete_laplace(numbered(exact.size), lattice.scale)
    return np.asarray(exact + drawn.reshape(exact.shape), np.int64)


def estimate_of(lattice: Lattice, counts: Int64) -> Estimate:
    """Return least-squares cells of released figures, and the mix of their noise.

    L L^T = (B^T B)^-1.
    """
    cells: Float64 = counts.astype(np.float64)
    mix, summed = [], []
    for axis, factor in enumerate(lattice.strategy.factors):
        matrix = factor.astype(np.float64)
        cells = np.moveaxis(np.tensordot(np.linalg.pinv(matrix), cells, (1, axis)), 0, axis)
        size = matrix.shape[1]
        if len(matrix) < size:  # the total alone
            summed.append(axis)
            root = np.zeros((size, size))
            root[:, 0] = np.linalg.pinv(matrix)[:, 0]
        else:
            lower = scipy.linalg.cholesky(matrix.T @ matrix, lower=True)
            root = np.asarray(scipy.linalg.solve_triangular(lower, np.eye(size), lower=True).T)
        mix.append(root)
    return Estimate(
        cells.reshape(1, -1), np.array([lattice.sd]), tuple(mix), lattice.half_width, tuple(summed)
    )


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
        name, strategy, _ = solved_purely(workload, folder)
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


def compared(solution: Planned, guarantee: Guarantee, folder: Path) -> dict[str, Any]:
    """Return a plan's figures with the better family for this answer alone, and both ``families``.

    Args:
        solution: the workload with its Gaussian strategy.
        guarantee: the guarantee as (epsilon, delta).
        folder: folder of solved strategies.

    Returns:
        As `planning.figures`, with ``families`` as `Families.described` returns them.
    """
    epsilon = required(guarantee.epsilon, "the guarantee is in epsilon")
    delta = required(guarantee.delta, "the guarantee has a delta")
    budget = Budget(epsilon, delta, guarantee.contributions)
    families = families_of(solution.workload, solution.plan, budget, folder)
    if families.taken == "gaussian":
        result = figures(solution, guarantee)
    else:
        result = planned_purely(solution.workload, epsilon, guarantee.contributions, folder)
    return {**result, "families": families.described()}
