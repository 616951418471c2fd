"""Strategies by name."""

from collections.abc import Callable

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.limits import MAX_SOLVED_CELLS
from dpstream.accounting.strategies.cells.eigen import eigen, spectrum
from dpstream.accounting.strategies.cells.fixed import identity
from dpstream.accounting.strategies.cells.optimum import optimum
from dpstream.accounting.strategies.cells.products import alternating, product_optimum
from dpstream.accounting.strategies.cells.strategy import CellStrategy
from dpstream.accounting.workloads.workload import Workload


def named(workload: Workload, name: str) -> CellStrategy:
    """A strategy by its name.

    Raises:
        PolicyError: it needs a matrix over more cells than a limit.
    """
    return _MAKERS[name](workload)


def largest(workload: Workload, strategy: CellStrategy) -> float:
    """Largest weighted variance of a query at mu = 1.

    Raises:
        PolicyError: more queries than are computed one by one, of a strategy that is no product.
    """
    spreads = strategy.spreads(workload)
    if any(spread.most is None for spread in spreads):
        raise PolicyError("objective", "worst needs the error of each query", "ask fewer queries")
    return max(
        product.weight * (spread.most or 0.0)
        for product, spread in zip(workload.products, spreads, strict=True)
    )


def _optimum(workload: Workload) -> CellStrategy:
    if len(workload.products) == 1 and max(workload.sizes) <= MAX_SOLVED_CELLS:
        return product_optimum(workload).strategy
    return optimum(workload).strategy


_MAKERS: dict[str, Callable[[Workload], CellStrategy]] = {
    "optimum": _optimum,
    "eigen": lambda workload: eigen(spectrum(workload)),
    "identity": identity,
    "product": alternating,
}
#: Names that ``--strategy`` accepts.
STRATEGIES = ("auto", *_MAKERS)
