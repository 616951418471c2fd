"""Chooses a strategy for a workload, and says what it costs and how far that is from the least.

Tables of counts: closed form.  One product: axis by axis.  A union that one matrix is solved for:
the better of optimum and eigen-design.  A larger union: the best of residual tables with fitted
bases, residual tables with even bases, and a product of axes.  Its floor is that of smaller queries
(``floors``) or the sum of each product's floor alone, and the note says so.  A union with an
attribute of very many cells: the best of even bases, all cells, and a product of the optimum of the
attribute's ranges or prefixes.
"""

from typing import NamedTuple

from dpstream.accounting.arrays import Float64
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.limits import MAX_MIXED_CELLS, MAX_SOLVED_CELLS
from dpstream.accounting.strategies.cells import fixed
from dpstream.accounting.strategies.cells.eigen import eigen, spectrum
from dpstream.accounting.strategies.cells.fitting import fit
from dpstream.accounting.strategies.cells.floors import union_floor
from dpstream.accounting.strategies.cells.optimum import optimum
from dpstream.accounting.strategies.cells.products import (
    alternating,
    floor_of,
    product_optimum,
    tridiagonal_product,
)
from dpstream.accounting.strategies.cells.residual import residual, worst_table
from dpstream.accounting.strategies.cells.strategy import CellStrategy
from dpstream.accounting.strategies.cells.threads import one_thread
from dpstream.accounting.strategies.cells.tridiagonal import MANY_CELLS
from dpstream.accounting.strategies.cells.worst import worst
from dpstream.accounting.workloads.workload import Workload

#: Products times axes up to which axes take turns.
_TURNS = 20_000
OBJECTIVES = ("total", "relative", "worst")
#: Note of a union for which no floor of all cells is computed.
LARGE = "the union is too large for one matrix: the floor is a smaller one that is proven"
#: Note of a union with an attribute of very many cells.
LONG = (
    f"an attribute has more than {MANY_CELLS:,} cells: the strategy is the best that is found"
    " without a search over it, and the floor is a smaller one that is proven"
)


class Plan(NamedTuple):
    """A strategy and its proof.

    Attributes:
        objective: ``total`` (weighted), ``relative`` (each query divided by its norm) or ``worst``.
        error: weighted total of the variances at mu = 1, or the largest variance.
        floor: lower bound of it for every strategy of a Gaussian mechanism.
        certificate: the arrays from which the floor can be computed again; see ``optimum``,
            ``worst``.
        note: what a reader must know of the floor; "" otherwise.
    """

    strategy: CellStrategy
    objective: str
    error: float
    floor: float
    certificate: tuple[Float64, ...] = ()
    note: str = ""

    @property
    def gap(self) -> float:
        """error / floor - 1."""
        return self.error / self.floor - 1


def auto(workload: Workload, objective: str = "total", tolerance: float = 1e-3) -> Plan:
    """The best strategy known for an objective, to a relative gap where there is a floor.

    Raises:
        PolicyError: an objective that there is not, or a domain beyond what is solved.
    """
    if objective not in OBJECTIVES:
        raise PolicyError("objective", f"an objective is one of {', '.join(OBJECTIVES)}", "use one")
    with one_thread():
        if objective == "worst":
            return _worst(workload, tolerance)
        if objective == "relative":
            workload = workload.relative()
        return _total(workload, tolerance)._replace(objective=objective)


def _total(workload: Workload, tolerance: float) -> Plan:
    [product, *others] = workload.products
    if not others and workload.marginal and len(product.axes) == len(workload.sizes):
        error = product.weight * workload.queries
        return Plan(fixed.identity(workload), "total", error, error)
    if not others and max(workload.sizes) <= MAX_SOLVED_CELLS:
        solved = product_optimum(workload, tolerance)
        return Plan(solved.strategy, "total", solved.error, solved.floor, solved.certificate)
    if workload.marginal:
        strategy, error = residual(workload)
        # Closed form: the error is the singular value bound.
        return Plan(strategy, "total", error, error)
    if max(workload.sizes) > MANY_CELLS:
        return _long(workload, tolerance)
    if workload.cells <= MAX_SOLVED_CELLS:
        solved = optimum(workload, tolerance)
        best = Plan(solved.strategy, "total", solved.error, solved.floor, solved.certificate)
        if best.gap > tolerance:
            best = _better(best, workload, [eigen(spectrum(workload))])
        return best
    floor = floor_of(workload)  # first, as it refuses attributes too large to list their queries
    fitted = fit(workload)
    best = Plan(fitted.strategy, "total", fitted.error, floor, (), LARGE)
    proven = union_floor(workload, fitted.weights)
    if proven > floor:
        best = best._replace(floor=proven, certificate=fitted.weights)
    candidates = [residual(workload)[0]]
    # A product over more cells than are ever noised one by one answers nothing.
    few = workload.cells <= MAX_MIXED_CELLS
    if few and len(workload.products) * len(workload.sizes) <= _TURNS:
        candidates.append(alternating(workload, tolerance))
    return _better(best, workload, candidates)


def _long(workload: Workload, tolerance: float) -> Plan:
    """A union with an attribute of so many cells that matrices over them take minutes."""
    floor = floor_of(workload)  # first, as it refuses attributes too large to list their queries
    strategy, error = residual(workload)
    candidates = [fixed.identity(workload)]
    if workload.cells <= MAX_MIXED_CELLS:
        product = tridiagonal_product(workload, tolerance)
        candidates += [product] if product is not None else []
    return _better(Plan(strategy, "total", error, floor, (), LONG), workload, candidates)


def _better(plan: Plan, workload: Workload, others: list[CellStrategy]) -> Plan:
    for strategy in others:
        error = strategy.error(workload)
        if error < plan.error:
            plan = plan._replace(strategy=strategy, error=error)
    return plan


def _worst(workload: Workload, tolerance: float) -> Plan:
    if workload.marginal and len(workload.products) > 1:
        table = worst_table(workload, tolerance)
        return Plan(table.strategy, "worst", table.error, table.floor, (table.certificate,))
    solved = worst(workload, tolerance)
    flat = tuple(array for pair in solved.certificate for array in pair)
    return Plan(solved.strategy, "worst", solved.error, solved.floor, flat)
