"""Strategies by name, and what each would cost: the comparison beside a plan.

A comparison is optional: it never fails a plan.  Each strategy is made from the structure of the
workload (products of axes, residual spaces).  One that needs too many cells in one matrix is
absent, with the reason.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dpstream.accounting.errors import DpstreamError, PolicyError
from dpstream.accounting.limits import MAX_SOLVED_CELLS
from dpstream.accounting.strategies.cells import fixed
from dpstream.accounting.strategies.cells.eigen import eigen, spectrum
from dpstream.accounting.strategies.cells.optimum import optimum
from dpstream.accounting.strategies.cells.products import product_optimum
from dpstream.accounting.strategies.cells.strategy import CellStrategy
from dpstream.accounting.strategies.cells.threads import one_thread
from dpstream.accounting.workloads.workload import Workload

#: Up to which a comparison is made: cells of all attributes in one matrix, cells of an attribute,
#: products times attributes, products of which covering tables are searched (of few cells), and
#: attributes of a product whose residual spaces are numbered.
_CELLS, _AXIS, _TURNS, _TABLES, _PRODUCTS, _WAYS = 2048, 2048, 20_000, 64, 256, 14


_COMPARED = "comparison"


class Comparison(NamedTuple):
    """Other strategies of a workload.

    Attributes:
        errors: weighted total of the variances (or the largest) at mu = 1, by name.
        absent: why a strategy has no figure, by name.
    """

    errors: dict[str, float]
    absent: dict[str, str]


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


@one_thread()
def comparison(workload: Workload, worst: bool = False) -> Comparison:
    """Errors of the strategies that do not depend on a search."""
    errors, absent = dict[str, float](), dict[str, str]()
    for name in (*(() if worst else ("gaussian",)), *fixed.BY_NAME, "eigen"):
        try:
            error = _error(workload, name, worst)
        except DpstreamError as refused:
            # A fix of another field is none of this plan's.
            named = f"; {refused.fix}" if refused.field == _COMPARED else ""
            absent[name] = refused.rule + named
        except MemoryError:
            absent[name] = "needs more memory than there is"
        except (OverflowError, np.linalg.LinAlgError):
            absent[name] = "is beyond the range of floats"
        else:
            if math.isfinite(error):
                errors[name] = error
            else:
                absent[name] = "does not measure all queries"
    return Comparison(errors, absent)


def _error(workload: Workload, name: str, worst: bool) -> float:
    if name == "gaussian":
        return fixed.gaussian_error(workload)
    _check(workload, name)
    strategy = named(workload, name)
    return largest(workload, strategy) if worst else strategy.error(workload)


def _check(workload: Workload, name: str) -> None:
    """Refuse a comparison that would take longer than the plan itself.

    Raises:
        PolicyError: `comparison` gives its rule as the reason.
    """
    products, axes, cells = len(workload.products), max(workload.sizes), workload.cells
    by_axes = name in ("haar", "hierarchical") or (name == "workload" and products == 1)
    by_cells = name == "eigen" or (name == "workload" and products > 1 and not workload.marginal)
    if by_axes and axes > _AXIS:
        raise _beyond(name, f"is compared for attributes of at most {_AXIS:,} cells")
    if by_axes and products * len(workload.sizes) > _TURNS:
        raise _beyond(name, f"is compared for at most {_TURNS:,} products times attributes")
    if by_cells and cells > _CELLS:
        raise _beyond(name, f"needs one matrix and is compared for at most {_CELLS:,} cells")
    by_spaces = name in ("fourier", "datacube") or (name == "workload" and workload.marginal)
    if by_spaces and max(len(product.axes) for product in workload.products) > _WAYS:
        raise _beyond(name, f"is compared for products of at most {_WAYS} attributes")
    if name == "fourier" and products > _TURNS:
        raise _beyond(name, f"is compared for at most {_TURNS:,} products of queries")
    if name == "datacube" and (products > _PRODUCTS or (cells > _CELLS and products > _TABLES)):
        raise _beyond(name, f"is compared for at most {_TABLES:,} products of queries")


def _beyond(name: str, rule: str) -> PolicyError:
    return PolicyError(_COMPARED, rule, f"--strategy {name} computes it")


def _optimum(workload: Workload) -> CellStrategy:
    if len(workload.products) == 1 and max(workload.sizes) <= MAX_SOLVED_CELLS:
        return product_optimum(workload).strategy
    return optimum(workload).strategy


_MAKERS: dict[str, Callable[[Workload], CellStrategy]] = {
    "optimum": _optimum,
    "eigen": lambda workload: eigen(spectrum(workload)),
    **fixed.BY_NAME,
}
#: Names that ``--strategy`` accepts.
STRATEGIES = ("auto", *_MAKERS)
